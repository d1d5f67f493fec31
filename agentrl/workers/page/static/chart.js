// @ts-check
// Curves: lines with bands and marks over a common axis, whose hover is linked, drawn by uPlot.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import uPlot from "./vendor/uplot.js";
import { compact, minus, moment, number } from "./format.js";
import { useTheme } from "./theme.js";
import { useWidth } from "./ui.js";

const HEIGHT = 206;
const WIDE_HEIGHT = 420;
const COLORS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const WHOLE = Array.from({ length: 17 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();
const CLICK_PIXELS = 5;
const SECOND_CLICK_MS = 300;
const MARKS = { killed: "--bad", resumed: "--good", waiting: "--warn", checkpoint: "--line-2", eval: "--line-3", other: "--quiet" };

export function lineColor(index) {
  return COLORS[index % COLORS.length];
}

/** Exponential smoothing, its beginning not drawn towards 0; gaps stay gaps. `weight` in [0, 1): how much of the past is kept. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/**
 * One chart. `lines`: [{label, x, y, low, high, over, color, dots}], each with its own x, `over` being what its band is over; `marks`:
 * [{x, kind, text}] on the axis; `tools` stand beside the title.
 * `sync` is the name of the charts whose hover is linked; `onPick(x)` is called where the chart is clicked.
 */
export function Chart({ title, note, lines, marks = [], log = false, weight = 0, xLabel = "iteration", xIsTime = false, sync = "charts", onPick, range, bare = false, wide = false, height = wide ? WIDE_HEIGHT : HEIGHT, tools }) {
  const [holder, width] = useWidth();
  const near = useNear(holder);
  const told = useRef(null);
  const theme = useTheme();
  const drawn = useRef(null);
  const picked = useRef(onPick);
  picked.current = onPick;
  const shown = lines.filter((line) => line.y.some(Number.isFinite));
  const usesLog = log && shown.every((line) => line.y.every((value) => !Number.isFinite(value) || value > 0));
  const data = alignLines(shown, weight);
  const [wholeX, ...wholeLines] = data.columns.map((column) => column.every((value) => value === null || Number.isSafeInteger(value)));
  const whole = { x: wholeX && !xIsTime, y: wholeLines.every(Boolean) };
  const shape = JSON.stringify([shown.map((line) => [line.label, line.color, Boolean(line.low), line.dots]), usesLog, xLabel, xIsTime, whole, sync, height, weight > 0, range, theme]);
  const state = useRef({});
  state.current = { title, shown, marks, data, xLabel, xIsTime };

  useLayoutEffect(() => {
    if (!width || !shown.length || !near) return undefined;
    const plot = new /** @type {any} */ (uPlot)(chartOptions({ width, height, log: usesLog, xIsTime, whole, sync, range, weight, state, told, picked }), data.columns, holder.current);
    drawn.current = plot;
    tellValues(told.current, state.current, null);
    return () => {
      drawn.current = null;
      plot.destroy();
    };
  }, [shape, width > 0, shown.length > 0, near]);

  useLayoutEffect(() => {
    if (drawn.current && width) drawn.current.setSize({ width, height });
  }, [width]);

  const content = JSON.stringify([data.columns[0].length, data.columns.map((column) => column[column.length - 1]), marks.length, weight, data.sum]);
  useEffect(() => {
    if (!drawn.current) return;
    drawn.current.setData(data.columns);
    tellValues(told.current, state.current, null);
  }, [content]);

  const said = [note, log && !usesLog && shown.length > 0 && "not on a log axis: some are not above 0"].filter(Boolean).join("; ");
  const long = shown.length > 3 || (shown.length > 1 && shown.some((line) => line.low));
  return html`<figure class=${`chart ${bare ? "bare" : ""} ${wide ? "wide" : ""} ${long ? "long" : shown.length > 2 ? "several" : ""} ${onPick ? "opens" : ""}`}>
    <figcaption>${tools && html`<span class="chart-tools">${tools}</span>`}<h2>${title}</h2>${said && html` <span class="quiet">${said}</span>`} <span class="told" ref=${told}></span></figcaption>
    <div ref=${holder} class="plot" style=${{ minHeight: `${height}px` }} role="img" aria-label=${describe(title, shown, xLabel)}>
      ${!shown.length && html`<p class="quiet none">no numbers</p>`}
    </div>
  </figure>`;
}

/** Whether the element has been near what is looked at: a chart far below is drawn when somebody comes to it, or prints. */
function useNear(holder) {
  const [near, setNear] = useState(false);
  useEffect(() => {
    const look = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setNear(true), { rootMargin: "300px" });
    const print = () => setNear(true);
    look.observe(holder.current);
    addEventListener("beforeprint", print);
    return () => {
      look.disconnect();
      removeEventListener("beforeprint", print);
    };
  }, []);
  return near;
}

function describe(title, lines, xLabel) {
  if (!lines.length) return `${title}: no numbers`;
  return lines
    .slice(0, 8)
    .map((line) => {
      const values = line.y.filter(Number.isFinite);
      const least = values.reduce((a, b) => Math.min(a, b), Infinity);
      const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
      return `${title}, ${line.label}: ${number(values[0])} at first, ${number(values[values.length - 1])} at last, between ${number(least)} and ${number(most)}, by ${xLabel}`;
    })
    .join(". ");
}

/** All lines over one axis: columns of x, then of each line its value, and where it has them the ends of its band. Where a line
 * has several values at one x, their mean stands there. */
function alignLines(lines, weight) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].filter(Number.isFinite).sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const spread = (line, values) => {
    const column = new Array(xs.length).fill(null);
    const counts = new Array(xs.length).fill(0);
    line.x.forEach((x, index) => {
      const [value, at] = [values[index], place.get(x)];
      if (at === undefined || !Number.isFinite(value)) return;
      counts[at] += 1;
      column[at] = (column[at] ?? 0) + (value - (column[at] ?? 0)) / counts[at];
    });
    return column;
  };
  const columns = [xs];
  const roles = [];
  for (const line of lines) {
    if (line.low) {
      const kept = line.dots ? 0 : weight;
      columns.push(spread(line, smoothed(line.low, kept)), spread(line, smoothed(line.high, kept)));
      roles.push({ line, role: "low" }, { line, role: "high" });
    }
    if (weight && !line.dots && !line.low) {
      columns.push(spread(line, line.y));
      roles.push({ line, role: "raw" });
    }
    columns.push(spread(line, line.dots ? line.y : smoothed(line.y, weight)));
    roles.push({ line, role: "value" });
  }
  const sum = columns.reduce((total, column) => total + column.reduce((a, b) => a + (b || 0), 0), 0);
  return { columns, roles, sum };
}

/** The numbers of lines as a table: x, then of each line its value and, where it has them, the ends of its band. */
export function lineTable(lines, xLabel, xIsTime) {
  const { columns, roles } = alignLines(lines, 0);
  const names = roles.map(({ line, role }) => (role === "value" ? line.label : `${line.label} ${role}`));
  const rows = columns[0].map((x, at) => [xIsTime ? new Date(x * 1000).toISOString() : x, ...columns.slice(1).map((column) => column[at])]);
  return { columns: [xLabel, ...names], rows };
}

function chartOptions({ width, height, log, xIsTime, whole, sync, range, weight, state, told, picked }) {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const { roles } = state.current.data;
  const bands = [];
  const series = [{}];
  roles.forEach(({ line, role }, index) => {
    const color = css(line.color);
    if (role === "high" && !line.dots) bands.push({ series: [index + 1, index], fill: `${color}26` });
    series.push(lineStyle(line, role, color));
  });
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--rule"), width: 1 }, ticks: { stroke: css("--rule"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
  const named = { label: state.current.xLabel, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" };
  const dense = (_, splits) => splits.map((value) => (value === null ? "" : tick(value)));
  return {
    width,
    height,
    legend: { show: false },
    padding: [8, xIsTime ? 34 : 10, 0, 0],
    scales: { x: { time: xIsTime, range: range || ends }, y: log ? { distr: 3, range: roomyLog } : { range: roomy } },
    axes: [
      { ...axis, ...named, ...(xIsTime ? { values: clock, space: 90, size: 42 } : { values: dense, size: 30, ...(whole.x ? { incrs: WHOLE } : {}) }) },
      { ...axis, size: 52, ...(log ? { splits: logPlaces, values: logTicks, filter: (_, places) => places } : { values: dense, ...(whole.y ? { incrs: WHOLE } : {}) }) },
    ],
    series,
    bands,
    cursor: {
      sync: { key: sync, scales: ["x", null], setSeries: false },
      points: { size: 6 },
      drag: { x: true, y: false, dist: CLICK_PIXELS + 1, click: () => {} },
    },
    hooks: { ready: [(plot) => pickWhere(plot, picked)], setCursor: [(plot) => tellValues(told.current, state.current, plot.cursor.idx)], draw: [(plot) => drawMarks(plot, state.current.marks, css), (plot) => drawWhiskers(plot, state.current.data.roles, css)] },
  };
}

/** The ends of the x axis; a single point stands in the middle. */
function ends(_, least, most) {
  if (least === null || most === null) return [0, 1];
  return least === most ? [least - 1, most + 1] : [least, most];
}

function roomyLog(_, least, most) {
  return least === null || most === null ? [0.1, 1] : [least / 1.2, Math.min(most * 1.2, Number.MAX_VALUE)];
}

/** Times of a day, with the day under the first of each; or days alone, where the steps are that wide. */
function clock(_, splits, __, ___, step) {
  let before = "";
  return splits.map((at) => {
    const [day, time] = moment(at * 1000).split(" ");
    const under = day === before ? "" : `\n${day}`;
    before = day;
    return step >= 86400 ? day : `${time.slice(0, step < 60 ? 8 : 5)}${under}`;
  });
}

/** The lines of a log axis: 1 to 9 of each power of 10; where too few of them are in sight, round numbers. */
function logPlaces(_, __, least, most) {
  const first = Math.floor(Math.log10(least));
  const powers = Array.from({ length: Math.ceil(Math.log10(most)) - first + 1 }, (_each, index) => first + index);
  const places = powers.flatMap((power) => Array.from({ length: 9 }, (_each, index) => Number(`${index + 1}e${power}`))).filter((value) => value >= least && value <= most);
  return places.length > 2 ? places : niceTicks([least, most]);
}

/** What stands at them: all where they are few, else so many of 1, 2, 3 and 5 of each power of 10 as there is room for. */
function logTicks(_, places) {
  const powers = Math.log10(places[places.length - 1] / places[0]);
  const firsts = powers <= 1 ? "1235" : powers <= 3 ? "125" : "1";
  return places.map((value) => {
    const [first, power] = value.toExponential().split("e");
    return places.length < 7 || (firsts.includes(first) && Number(power) % Math.ceil(powers / 6) === 0) ? tick(value) : "";
  });
}

/** Some four round numbers of a range, whole ones if `whole`. */
export function niceTicks([least, most], whole = false) {
  const raw = Math.max((most - least) / 4, whole ? 1 : 0);
  const scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * scale).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(least / step) * step; at <= most && found.length < 20; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function roomy(_, least, most) {
  if (least === null || most === null) return [0, 1];
  if (least === most) return [least - (Math.abs(least) || 1) * 0.1, most + (Math.abs(most) || 1) * 0.1];
  const room = (most - least) * 0.06;
  return [least - room, most + room];
}

function tick(value) {
  const exact = Number(value.toPrecision(6));
  if (Math.abs(value) >= 1e4 && Math.abs(value) < 1e12) return compact(exact, 6);
  return minus(exact !== 0 && (Math.abs(exact) < 1e-3 || Math.abs(exact) >= 1e12) ? exact.toExponential().replace("e+", "e") : exact);
}

function lineStyle(line, role, color) {
  if (role === "low" || role === "high") return { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
  if (role === "raw") return { stroke: `${color}55`, width: 1, points: { show: false }, spanGaps: true };
  if (line.dots) return { stroke: color, width: 0, paths: () => null, points: { show: true, size: 6, fill: color, stroke: color } };
  return { stroke: color, width: 1.75, spanGaps: !line.gaps, points: { show: (plot, index) => plot.data[index].filter((value) => value !== null).length < 3, size: 5, fill: color } };
}

/** A click, or a tap, is told by the x that is nearest; what ends a drag is none. Where the chart is zoomed, a click waits for a
 * second one, which shows all of it again. */
function pickWhere(plot, picked) {
  let begun = null;
  let waiting = 0;
  plot.over.addEventListener("pointerdown", (event) => {
    begun = event.clientX;
  });
  plot.over.addEventListener("click", (event) => {
    clearTimeout(waiting);
    if (!picked.current || event.detail > 1 || begun === null || Math.abs(event.clientX - begun) > CLICK_PIXELS) return;
    const [xs] = plot.data;
    const { min, max } = plot.scales.x;
    const x = xs[plot.posToIdx(event.clientX - plot.over.getBoundingClientRect().left)];
    if (max - min >= xs[xs.length - 1] - xs[0]) picked.current(x);
    else waiting = setTimeout(() => plot.over.isConnected && picked.current?.(x), SECOND_CLICK_MS);
  });
}

/** The interval of each dot that has one. */
function drawWhiskers(plot, roles, css) {
  const { ctx } = plot;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  roles.forEach(({ line, role }, index) => {
    if (role !== "value" || !line.dots || !line.low) return;
    ctx.strokeStyle = css(line.color);
    const [low, high] = [plot.data[index - 1], plot.data[index]];
    plot.data[0].forEach((x, at) => {
      if (low[at] === null || high[at] === null) return;
      const place = plot.valToPos(x, "x", true);
      ctx.beginPath();
      ctx.moveTo(place, plot.valToPos(low[at], "y", true));
      ctx.lineTo(place, plot.valToPos(high[at], "y", true));
      ctx.stroke();
    });
  });
  ctx.restore();
}

function drawMarks(plot, marks, css) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const mark of marks) {
    const x = plot.valToPos(mark.x, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    const color = css(MARKS[mark.kind] || MARKS.other);
    ctx.strokeStyle = `${color}88`;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillStyle = color;
    const size = 4 * devicePixelRatio;
    ctx.fillRect(x - size / 2, bbox.top + bbox.height - size, size, size);
  }
  ctx.restore();
}

/** The values under the cursor, or the last ones, beside the title. */
function tellValues(place, { title, shown, marks, data, xLabel, xIsTime }, index) {
  if (!place) return;
  const [xs] = data.columns;
  const at = index ?? xs.length - 1;
  const named = shown.length > 1 || (shown.length > 0 && shown[0].label !== title);
  const digits = shown.some((line) => line.low) ? 3 : 4;
  const parts = [];
  data.roles.forEach(({ line, role }, column) => {
    if (role !== "value") return;
    let found = at;
    const values = data.columns[column + 1];
    while (index === null && found > 0 && values[found] === null) found -= 1;
    const value = values[found];
    if (value === null || value === undefined) return;
    const [low, high] = line.low ? [data.columns[column - 1][found], data.columns[column][found]] : [null, null];
    const band = low === null ? "" : line.dots ? `, 95 %: ${number(low, 3)} to ${number(high, 3)}` : ` ± ${number((high - low) / 2, 3)} ${line.over}`;
    parts.push({ line, text: `${named ? `${line.label} ` : ""}${number(value, digits)}${band}` });
  });
  const near = index === null ? [] : marks.filter((mark) => mark.x === xs[at]).map((mark) => mark.text);
  const where = !xs.length || !parts.length ? "" : index === null ? "last " : xIsTime ? `${moment(xs[at] * 1000)}: ` : `${xLabel} ${number(xs[at])}: `;
  place.replaceChildren(
    where,
    ...parts.flatMap(({ line, text }) => {
      const [part, mark] = [document.createElement("span"), document.createElement("i")];
      mark.style.background = `var(${line.color})`;
      part.append(...(named ? [mark] : []), text);
      return [part, " "];
    }),
    near.length ? ` · ${near.join(", ").slice(0, 160)}` : "",
  );
}

/** A small line without axes. `within`: points that are not drawn, but for which the scales have room. */
export function Sparkline({ points, band = [], within = [], width = 120, height = 26, label }) {
  const known = points.filter(([, value]) => Number.isFinite(value));
  if (known.length < 2) return html`<span class="quiet">${known.length ? number(known[0][1]) : ""}</span>`;
  const xs = [...known, ...within].map(([x]) => x);
  const ys = known.map(([, y]) => y);
  const bounds = [...ys, ...within.map(([, y]) => y), ...band.flatMap(([, low, high]) => [low, high])];
  const [left, right, least, most] = [Math.min(...xs), Math.max(...xs), Math.min(...bounds), Math.max(...bounds)];
  const at = (x, y) => `${(((x - left) / (right - left || 1)) * (width - 6) + 3).toFixed(1)},${(height - 3 - ((y - least) / (most - least || 1)) * (height - 6)).toFixed(1)}`;
  const [lastX, lastY] = at(...known[known.length - 1]).split(",");
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${`${label}: from ${number(ys[0])} to ${number(ys[ys.length - 1])}`}>
    ${band.length > 1 && html`<polygon points=${[...band.map(([x, low]) => at(x, low)), ...[...band].reverse().map(([x, , high]) => at(x, high))].join(" ")} />`}
    <polyline points=${known.map(([x, y]) => at(x, y)).join(" ")} fill="none" />
    <circle cx=${lastX} cy=${lastY} r="2.5" />
  </svg>`;
}
