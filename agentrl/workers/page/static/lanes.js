// @ts-check
// Workers and queues over time: what each held when; where a lane is empty it idled.

import { html, useState } from "./vendor/preact.js";
import { isThere, path } from "./data.js";
import { number, plural, seconds, visible } from "./format.js";
import { go, useChoice } from "./route.js";
import { Asked, openable, useData, useWidth } from "./ui.js";

const LANE = 26;
const MAX_LEFT = 190;
const LETTER = 6.5;

export function LanesView({ run, version, row }) {
  const [from, setFrom] = useChoice("from");
  const [to, setTo] = useChoice("to");
  const found = useData(path(`runs/${run}/lanes`, { from, to }), version);
  const earlier = (data) => ({ from: Math.max(1, data.from - 5), to: Math.max(1, data.from - 1) });
  const hasEarlier = (data) => data.from > 1 && isThere(path(`runs/${run}/lanes`, earlier(data)));
  return html`<${Asked} of=${found} what="the workers">${(data) => html`
    <div class="controls">
      <span>iterations ${data.from} to ${data.to}</span>
      <button type="button" disabled=${!hasEarlier(data)} title=${data.from > 1 && !hasEarlier(data) ? "not in this file" : undefined} onClick=${() => (setFrom(String(earlier(data).from)), setTo(String(earlier(data).to)))}>← earlier</button>
      <button type="button" disabled=${!from && !to} onClick=${() => (setFrom(""), setTo(""))}>newest</button>
    </div>
    ${data.spans.some((span) => span.start) ? html`<${Lanes} data=${data} run=${run} />` : html`<p class="quiet">Nothing was worked on in these iterations.</p>`}
    ${data.left_out ? html`<p class="quiet">${plural(data.left_out, "more piece")} of work not shown: choose fewer iterations.</p>` : ""}`}<//>`;
}

function Lanes({ data, run }) {
  const [holder, width] = useWidth();
  const [over, setOver] = useState(null);
  const now = Date.now();
  const spans = data.spans.filter((span) => span.start).map((span) => ({ ...span, a: Date.parse(span.start), b: span.end ? Date.parse(span.end) : now }));
  const start = Math.min(...spans.map((span) => span.a));
  const end = Math.max(...spans.map((span) => span.b), start + 1);
  const names = data.lanes.map((lane) => `${lane.queue} ${visible(lane.worker).slice(0, 22)}`);
  const left = Math.min(MAX_LEFT, 10 + LETTER * Math.max(...names.map((name) => name.length)));
  const place = (at) => left + ((at - start) / (end - start)) * Math.max(50, width - left - 10);
  const height = data.lanes.length * LANE + 30;
  return html`<div ref=${holder} class="lanes">
      ${width > 0 && html`<svg width=${width} height=${height} role="img" aria-label=${`${plural(data.lanes.length, "worker")} over ${seconds((end - start) / 1000)}`}>
        ${data.lanes.map((lane, index) => html`<g key=${`${lane.queue} ${lane.worker}`}>
          <text x="0" y=${index * LANE + 17}>${names[index]}</text>
          <rect class="idle" x=${left} y=${index * LANE + 3} width=${Math.max(0, width - left - 10)} height=${LANE - 6} />
        </g>`)}
        ${spans.map((span, index) => html`<rect key=${index} class=${`work w-${span.kind} is-${span.status}`} x=${place(span.a)} y=${span.lane * LANE + 4} width=${Math.max(1, place(span.b) - place(span.a))} height=${LANE - 8} onMouseEnter=${() => setOver(span)} onClick=${() => openSpan(span, run)} />`)}
        ${(width < 700 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1]).map((share) => html`<text key=${share} class="tick" x=${place(start + share * (end - start))} y=${height - 8} text-anchor=${share === 1 ? "end" : share ? "middle" : "start"}>${seconds((share * (end - start)) / 1000)}</text>`)}
      </svg>`}
    </div>
    <p class="legend"><span><i class="swatch w-group"></i>rollout of a group</span><span><i class="swatch w-update"></i>update</span><span><i class="swatch w-call"></i>tool call</span><span><i class="swatch w-agent"></i>agent</span><span><i class="swatch idle"></i>idle</span></p>
    <p class="quiet" role="status">${over ? `${over.kind} ${over.id} of iteration ${over.iteration}: ${seconds((over.b - over.a) / 1000)}, ${over.end ? over.status : "still"}` : busyShares(data.lanes, spans, start, end)}</p>`;
}

function openSpan(span, run) {
  const address = openable(span.kind === "group" ? ["group", span.id] : ["run", run, "iteration", span.iteration]);
  if (address) go(address);
}

/** How much of the time each queue had something to do, on the mean over its lanes. */
function busyShares(lanes, spans, start, end) {
  const queues = new Map();
  lanes.forEach((lane, index) => {
    const busy = coveredMs(spans.filter((span) => span.lane === index));
    const sum = queues.get(lane.queue) || { busy: 0, lanes: 0 };
    queues.set(lane.queue, { busy: sum.busy + busy, lanes: sum.lanes + 1 });
  });
  return [...queues].map(([queue, { busy, lanes: count }]) => `${queue}: ${plural(count, "worker")}, busy ${number(Math.round((100 * busy) / count / (end - start)))} %`).join(" · ");
}

function coveredMs(spans) {
  let covered = 0;
  let reached = -Infinity;
  for (const span of [...spans].sort((one, other) => one.a - other.a)) {
    covered += Math.max(0, span.b - Math.max(span.a, reached));
    reached = Math.max(reached, span.b);
  }
  return covered;
}
