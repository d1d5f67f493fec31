// @ts-check
// The curves of a run, or of several in the same charts; the events of the first on their axes.

import { html, useEffect, useMemo, useState } from "./vendor/preact.js";
import { Chart, lineColor, lineTable } from "./chart.js";
import { ask, askCurves, exported, path } from "./data.js";
import { number, plural, visible } from "./format.js";
import { go, href, useChoice } from "./route.js";
import { csv } from "./sql.js";
import { Asked, download, openable, Problem, Select, useData } from "./ui.js";

const CHARTS = [
  { key: "reward", title: "reward", columns: [["reward", "", "reward_low", "reward_high"]], evals: true },
  { key: "loss", title: "loss", columns: [["loss", ""]] },
  { key: "kl", title: "KL", columns: [["kl", "to the reference"], ["policy_kl", "of the step itself"]] },
  { key: "entropy", title: "entropy", columns: [["entropy", ""]] },
  { key: "clip_fraction", title: "clipped tokens", note: "share of the tokens", columns: [["clip_fraction", ""]] },
  { key: "grad_norm", title: "gradient norm", columns: [["grad_norm", ""]] },
  { key: "value", title: "value", columns: [["value_loss", "loss"], ["explained_variance", "explained variance"]] },
  { key: "length", title: "tokens per episode", note: "sampled tokens only", columns: [["length", ""]] },
  { key: "tool_error_rate", title: "failed tool calls", note: "share of the calls", columns: [["tool_error_rate", ""]] },
  { key: "flat", title: "groups", columns: [["groups", "all"], ["flat_groups", "with equal rewards"], ["dropped_groups", "dropped"]] },
  { key: "trainable", title: "episodes", columns: [["episodes", "planned"], ["trainable", "usable"]] },
  { key: "seconds", title: "seconds", columns: [["seconds", "iteration"], ["rollout_seconds", "rollout"], ["update_seconds", "update"]] },
  { key: "mfu", title: "model FLOPs utilisation of the update", note: "share of the GPU's peak", columns: [["mfu", ""]] },
  { key: "peak_memory_bytes", title: "GPU memory of the update", note: "bytes at its peak", columns: [["peak_memory_bytes", ""]] },
  { key: "staleness", title: "staleness", note: "versions", columns: [["staleness", ""]] },
  { key: "sampler", title: "sampler and trainer", note: "difference of logprobs", columns: [["sampler_difference_mean", "mean"], ["sampler_difference_max", "largest"]] },
  { key: "importance", title: "importance weights", columns: [["importance_weight", "mean"], ["importance_truncated", "truncated"], ["importance_outside", "outside 0.9 to 1.1"], ["effective_sample_size", "effective sample size"]] },
];
const LOUD = { failed: "killed", worker_lost: "killed", oom: "killed", device_lost: "killed", update_failed: "killed", group_failed: "killed", resumed: "resumed", going_on: "resumed", extended: "resumed", waiting: "waiting", paused: "waiting" };
const QUIET_EVENTS = new Set(["submitted", "done", "chosen"]);

export function CurvesView({ run, name, version, fresh, events }) {
  const [smooth, setSmooth] = useChoice("smooth", "0");
  const [axis, setAxis] = useChoice("x", "iteration");
  const [log, setLog] = useChoice("log");
  const [others, setOthers] = useChoice("with");
  const [added, setAdded] = useChoice("charts");
  const ids = [String(run), ...others.split(",").filter((each) => /^\d+$/.test(each) && each !== String(run))].slice(0, 8);
  const weight = Math.min(0.98, Math.max(0, Number(smooth) || 0));
  return html`<div class="controls">
      <${Select} label="x axis" value=${axis} onChange=${setAxis} options=${[["iteration", "iteration"], ["tokens", "tokens"], ["time", ids.length > 1 ? "minutes from the start" : "time"]]} />
      <label class="select"><span>smoothing</span><input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => setSmooth(event.currentTarget.value)} /><output>${weight || "none"}</output></label>
      <label><input type="checkbox" checked=${Boolean(log)} onChange=${(event) => setLog(event.currentTarget.checked ? "1" : "")} /> log scale</label>
      ${!exported() && html`<${AddChart} added=${added} setAdded=${setAdded} />`}
      ${!exported() && html`<${AddRun} ids=${ids} setOthers=${setOthers} />`}
    </div>
    <${SeveralCurves} ids=${ids} name=${name} version=${version} fresh=${fresh} axis=${axis} weight=${weight} log=${Boolean(log)} events=${events} added=${added} setOthers=${setOthers} setAdded=${setAdded} />`;
}

/** The reward with the held-out evaluations, as wide as the page. */
export function RewardChart({ run, name, version, fresh, events }) {
  return html`<${SeveralCurves} ids=${[String(run)]} name=${name} version=${version} fresh=${fresh} axis="iteration" weight=${0} log=${false} events=${events} added="" only="reward" />`;
}

function SeveralCurves({ only = "",  ids, name, version, fresh, axis, weight, log, events, added, setOthers, setAdded }) {
  const first = useData(path(`runs/${ids[0]}/curves`), version, askCurves);
  const [rest, setRest] = useState({ runs: [], error: null });
  const wanted = ids.slice(1).join(",");
  useEffect(() => {
    let gone = false;
    const load = (id) => Promise.all([ask(path(`runs/${id}`)), askCurves(path(`runs/${id}/curves`))]).then(([told, curves]) => ({ id, name: told.run.run, curves }));
    Promise.all(ids.slice(1).map(load)).then(
      (runs) => gone || setRest({ runs, error: null }),
      (error) => gone || setRest({ runs: [], error }),
    );
    return () => {
      gone = true;
    };
  }, [wanted]);
  return html`<${Asked} of=${first} what="the curves">${(curves) => {
    const runs = [{ id: ids[0], name, curves: mergeFresh(curves, fresh) }, ...rest.runs];
    return html`${rest.error && html`<${Problem} error=${rest.error} small />`}
      ${runs.length > 1 && html`<${RunLegend} runs=${runs} setOthers=${setOthers} />`}
      <${ChartGrid} runs=${runs} axis=${axis} weight=${weight} log=${log} events=${events} added=${added} setAdded=${setAdded} only=${only} />`;
  }}<//>`;
}

function RunLegend({ runs, setOthers }) {
  return html`<div class="legend" aria-label="Runs in the charts">
    ${runs.map((run, index) => html`<span key=${run.id}><i style=${{ background: `var(${lineColor(index)})` }}></i><a href=${href(["run", run.id])}>${visible(run.name)}</a>${index > 0 && html` <button type="button" class="copy" onClick=${() => setOthers(runs.slice(1).filter((each) => each !== run).map((each) => each.id).join(","))} aria-label=${`Leave out ${visible(run.name)}`}>×</button>`}</span>`)}
  </div>`;
}

/** The rows as they were asked for, with those that came since in their places. */
export function mergeFresh(curves, fresh) {
  if (!fresh?.length) return curves;
  const rows = new Map(curves.rows.map((row) => [row[0], row]));
  for (const row of fresh) rows.set(row[0], row);
  return { ...curves, rows: [...rows.values()].sort((a, b) => a[0] - b[0]) };
}

function ChartGrid({ runs, axis, weight, log, events, added, setAdded, only }) {
  const [chosen, setWide] = useChoice("wide");
  const [unchanged, setUnchanged] = useChoice("unchanged");
  const wide = only || chosen;
  const tables = useMemo(() => runs.map((run) => ({ ...run, ...columnsOf(run.curves, axis, runs.length > 1) })), [runs.map((run) => run.curves), axis]);
  const marks = runs.length === 1 ? marksOf(events || [], tables[0]) : [];
  const xLabel = axis === "tokens" ? "tokens read and sampled" : axis === "time" && runs.length > 1 ? "minutes from the start" : axis;
  const common = { weight, log, xLabel, xIsTime: axis === "time" && runs.length === 1, marks, wide, setWide: only ? undefined : setWide, onPick: (x) => openAt(tables, x) };
  const shown = CHARTS.filter(({ key }) => !only || key === only).map((chart) => ({ chart, lines: linesOf(chart, tables) })).filter(({ lines }) => lines.some((line) => line.y.some((value) => Number.isFinite(value))));
  const folds = ({ chart, lines }) => !unchanged && !only && chart.key !== "reward" && constantsOf(lines).length === lines.length;
  const constant = shown.filter(folds).map(({ chart, lines }) => `${chart.title} ${[...new Set(constantsOf(lines))].map((value) => number(value, 3)).join(", ")}`);
  const own = added.split(",").filter(Boolean);
  return html`<div class="charts">
    ${shown.filter((each) => !folds(each)).map(({ chart, lines }) => html`<${RunChart} key=${chart.key} id=${chart.key} title=${chart.title} note=${noteOf(chart, tables)} lines=${lines} ...${common} />`)}
    ${own.map((each) => html`<${OwnChart} key=${each} what=${each} runs=${tables} common=${common} remove=${() => setAdded(own.filter((one) => one !== each).join(","))} />`)}
  </div>
  ${(constant.length > 0 || unchanged) && html`<p class="quiet">${unchanged ? "" : `Unchanged: ${constant.join(" · ")}. `}<button type="button" class="more" onClick=${() => setUnchanged(unchanged ? "" : "1")}>${unchanged ? "fold the charts that never change" : "show them"}</button></p>`}
  ${!shown.length && html`<p class="quiet">No iteration has numbers yet.</p>`}
  ${shown.length > 0 && marks.length > 0 && html`<p class="quiet">Marks on the axis: ${marks.slice(0, 12).map((mark) => mark.text).join(" · ")}${marks.length > 12 ? " …" : ""}</p>`}`;
}

/** The value of each line that never changes, of at least two points. */
function constantsOf(lines) {
  const finite = lines.map((line) => line.y.filter(Number.isFinite)).filter((values) => values.length);
  return finite.length === lines.length ? finite.filter((values) => values.length > 1 && values.every((value) => value === values[0])).map(([value]) => value) : [];
}

/** Bands of rewards from 0 to 1 do not leave that range. */
function clipBands(lines) {
  if (!lines.every((line) => line.y.every((value) => !Number.isFinite(value) || (value >= 0 && value <= 1)))) return lines;
  const clip = (values) => values?.map((value) => (Number.isFinite(value) ? Math.min(1, Math.max(0, value)) : value));
  return lines.map((line) => (line.low ? { ...line, low: clip(line.low), high: clip(line.high) } : line));
}

/** A chart that can be made as wide as the page, which the address keeps, and whose numbers can be taken along. */
function RunChart({ id, wide, setWide, remove, ...chart }) {
  const [is, name] = [wide === id, chart.title];
  const save = () => download(`${name.replace(/\W+/g, "-")}.csv`, csv(lineTable(chart.lines, chart.xLabel, chart.xIsTime)), "text/csv");
  const tools = html`${setWide && html`<button type="button" class="copy" aria-pressed=${is} onClick=${() => setWide(is ? "" : id)} aria-label=${`${name} as wide as the page`}>wide</button>`}
    <button type="button" class="copy" onClick=${save} aria-label=${`The numbers of ${name} as CSV`}>CSV</button>
    ${remove && html`<button type="button" class="copy" onClick=${remove} aria-label=${`Remove the chart of ${name}`}>×</button>`}`;
  return html`<${Chart} ...${chart} wide=${is} tools=${tools} />`;
}

/** Opens the iteration of a place on the axis, of the first run that has one there. */
function openAt(tables, x) {
  const table = tables.find((each) => each.x.includes(x));
  const to = table && openable(["run", table.id, "iteration", table.of.iteration[table.x.indexOf(x)]]);
  if (to) go(to);
}

/** The columns that have numbers; of several runs one is drawn, the first that any of them has. */
function drawnColumns(chart, tables) {
  const known = chart.columns.filter(([column]) => tables.some((table) => table.of[column]?.some(Number.isFinite)));
  return tables.length > 1 ? known.slice(0, 1) : known;
}

/** What stands beside a chart's title: of several runs which of its columns is drawn; what its band is; what else is to be known. */
function noteOf(chart, tables) {
  const [first] = drawnColumns(chart, tables);
  const which = tables.length > 1 && chart.columns.length > 1 && first ? first[1] : "";
  const band = tables.length === 1 && first?.[2] && tables[0].of[first[2]]?.some(Number.isFinite) ? "band: one standard deviation" : "";
  return [which, band, chart.note, chart.evals ? "a click opens the iteration" : ""].filter(Boolean).join("; ");
}

/** The columns by name and each iteration's place on the axis; `origin` is the place before the first one. */
function columnsOf(curves, axis, several) {
  const of = {};
  curves.columns.forEach((column, index) => {
    of[column] = curves.rows.map((row) => row[index]);
  });
  let tokens = 0;
  const start = Date.parse(of.started_at?.[0] || "");
  const placeOf = (ms) => (several ? (ms - start) / 60000 : ms / 1000);
  const axes = {
    iteration: () => [0, of.iteration],
    tokens: () => [0, of.tokens.map((each) => (each === null ? null : (tokens += each)))],
    time: () => [placeOf(start), of.finished_at.map((at, index) => placeOf(Date.parse(at || of.started_at[index] || "")))],
  };
  const [origin, x] = axes[Object.hasOwn(axes, axis) ? axis : "iteration"]();
  return { of, x, origin, evals: curves.evals || [] };
}

function linesOf(chart, tables) {
  const several = tables.length > 1;
  return tables.flatMap((table, place) => {
    const lines = drawnColumns(chart, tables).map((each) => {
      const [column, label, low, high] = each;
      return {
        label: several ? visible(table.name) : label || chart.title,
        color: lineColor(several ? place : chart.columns.indexOf(each)),
        x: table.x,
        y: table.of[column],
        ...(!several && table.of[low]?.some(Number.isFinite) ? { low: table.of[low], high: table.of[high], over: "over groups" } : {}),
      };
    });
    return chart.evals && !several ? clipBands([...lines, ...evalLines(table)]) : lines;
  });
}

/** Evaluations on held-out tasks: a version stands where the iteration that made it stands, the first before all. */
function evalLines(table) {
  const bySet = new Map();
  for (const found of table.evals) {
    if (found.mean_reward === null) continue;
    const name = `${found.dataset} ${found.split || ""}`.trim();
    bySet.set(name, [...(bySet.get(name) || []), found]);
  }
  return [...bySet].map(([name, evals], index) => ({
    label: `held out: ${visible(name)}`,
    color: lineColor(1 + index),
    dots: true,
    x: evals.map((each) => (each.version === 0 ? table.origin : table.x[table.of.iteration.indexOf(each.version)])),
    y: evals.map((each) => each.mean_reward),
    low: evals.map((each) => each.low),
    high: evals.map((each) => each.high),
  }));
}

function marksOf(events, table) {
  return events
    .filter((event) => !QUIET_EVENTS.has(event.kind))
    .slice(0, 200)
    .reverse()
    .map((event) => {
      const named = /iteration (\d+)/.exec(`${event.subject} ${event.detail}`);
      const at = named ? table.of.iteration.indexOf(Number(named[1])) : placeInTime(event.created_at, table.of);
      return { x: table.x[Math.max(0, at)], kind: LOUD[event.kind] || "other", text: `${visible(event.kind).replaceAll("_", " ")}${event.detail ? `: ${visible(event.detail).slice(0, 80)}` : ""}` };
    });
}

function placeInTime(at, of) {
  const later = of.finished_at.findIndex((end) => !end || Date.parse(end) >= Date.parse(at));
  return later < 0 ? of.iteration.length - 1 : later;
}

// charts of any number of any view

function AddChart({ added, setAdded }) {
  const { data } = useData(path("views"));
  const [view, setView] = useState("v_rewards");
  const views = (data?.views || data || []).filter((each) => each.columns.some((column) => column.chartable));
  const columns = (views.find((each) => each.view === view)?.columns || []).filter((column) => column.chartable);
  if (!views.length) return null;
  const add = (column) => column && setAdded([...added.split(",").filter(Boolean), `${view}.${column}`].join(","));
  return html`<${Select} label="add a chart of" value=${view} onChange=${setView} options=${views.map((each) => [each.view, each.view])} />
    <select aria-label="column of the chart" value="" onChange=${(event) => (add(event.currentTarget.value), (event.currentTarget.value = ""))}>
      <option value="">column…</option>
      ${columns.map((column) => html`<option key=${column.column} value=${column.column} title=${column.meaning}>${column.column}</option>`)}
    </select>`;
}

/** A choice of a run to see beside those of `ids`. */
export function AddRun({ ids, setOthers, label = "add another run" }) {
  const { data } = useData(path("runs", { size: 50 }));
  const rows = (data?.rows || []).filter((row) => !ids.includes(String(row.id)) && row.kind === "train");
  if (!rows.length || ids.length >= 8) return null;
  return html`<select aria-label=${label} value="" onChange=${(event) => event.currentTarget.value && setOthers([...ids.slice(1), event.currentTarget.value].join(","))}>
    <option value="">${label}…</option>
    ${rows.map((row) => html`<option key=${row.id} value=${row.id}>${visible(row.run)}</option>`)}
  </select>`;
}

/** The mean of a column by iteration, read page after page; drawn while it comes. */
function OwnChart({ what, runs, common, remove }) {
  const [view, column] = what.split(".");
  const [found, setFound] = useState({});
  const [error, setError] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    for (const run of runs) sumPages(run.id, view, column, stop, (sums, done) => setFound((now) => ({ ...now, [run.id]: { sums, done } }))).catch((problem) => problem.name !== "AbortError" && setError(problem));
    return () => stop.abort();
  }, [what, runs.map((run) => run.id).join()]);
  const lines = runs.map((run, index) => {
    const sums = found[run.id]?.sums || new Map();
    return { label: runs.length > 1 ? visible(run.name) : "mean", color: lineColor(index), x: run.x, y: run.of.iteration.map((each) => (sums.get(each)?.count ? sums.get(each).sum / sums.get(each).count : null)) };
  });
  const note = Object.values(found).some((each) => !each.done) ? "reading…" : `mean of ${plural([...Object.values(found)].reduce((all, each) => all + [...each.sums.values()].reduce((a, b) => a + b.count, 0), 0), "row")}`;
  return html`<${RunChart} id=${what} title=${what} note=${error ? visible(error.message) : note} lines=${lines} remove=${remove} ...${common} />`;
}

async function sumPages(run, view, column, stop, told) {
  const sums = new Map();
  let cursor = "";
  do {
    const page = await ask(path(`runs/${run}/series`, { view, column, cursor }), { signal: stop.signal });
    for (const row of page.rows) {
      const sum = sums.get(row.iteration) || { count: 0, sum: 0 };
      sums.set(row.iteration, { count: sum.count + row.count, sum: sum.sum + row.sum });
    }
    cursor = page.next;
    told(new Map(sums), !cursor);
  } while (cursor);
}
