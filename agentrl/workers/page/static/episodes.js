// Episodes of a run, or of an iteration, with filters.

import { html } from "./vendor/preact.js";
import { exported, path } from "./data.js";
import { number, seconds, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Badge, Link, More, openable, Search, Select, Table, useMore } from "./ui.js";

const STATUSES = ["", "done", "failed", "infra_error", "running", "planned", "cancelled"];

export function EpisodesView({ run, version, iteration, task }) {
  const [status, setStatus] = useChoice("status");
  const [text, setText] = useChoice("text");
  const [sort, setSort] = useChoice("sort");
  const [least, setLeast] = useChoice("min");
  const [most, setMost] = useChoice("max");
  const [errors, setErrors] = useChoice("errors");
  const found = useMore(path(`runs/${run}/episodes`, { iteration, task, status, text, sort, min_reward: asNumber(least), max_reward: asNumber(most), tool_errors: errors ? 1 : "", size: 50 }), version);
  return html`<div class="controls">
      ${!exported() && html`<${Search} value=${text} onChange=${setText} label="In the answer or the error" />
      <${Select} label="status" value=${status} onChange=${setStatus} options=${STATUSES.map((each) => [each, each.replace("_", " ") || "all"])} />
      <${Bound} label="reward from" value=${least} onChange=${setLeast} /><${Bound} label="to" value=${most} onChange=${setMost} />
      <label><input type="checkbox" checked=${Boolean(errors)} onChange=${(event) => setErrors(event.currentTarget.checked ? "1" : "")} /> failed calls</label>`}
    </div>
    <${Asked} of=${found} what="the episodes">${() => html`<${Table} caption="Episodes" columns=${episodeColumns(iteration)} rows=${found.rows} rowKey=${(row) => row.id} to=${(row) => openable(["episode", row.id])} sort=${sort || "id"} onSort=${exported() ? undefined : (next) => setSort(next === "id" ? "" : next)} empty="No episode is so." /><${More} of=${found} />`}<//>`;
}

function asNumber(text) {
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : "";
}

function Bound({ label, value, onChange }) {
  return html`<label class="select"><span>${label}</span><input class="bound" inputmode="decimal" size="5" value=${value} onChange=${(event) => onChange(event.currentTarget.value.trim())} /></label>`;
}

function episodeColumns(iteration) {
  return [
    { key: "id", label: "episode", number: true, sort: "id", cell: (row) => html`<${Link} to=${["episode", row.id]}>${row.id}<//>` },
    ...(iteration ? [] : [{ key: "iteration", label: "iteration", number: true, sort: "iteration", cell: (row) => row.iteration }]),
    { key: "task", label: "task", cell: (row) => visible(row.task).slice(0, 80) },
    { key: "status", label: "status", cell: (row) => html`<${Badge} is=${row.status} />${row.stop_reason && row.stop_reason !== "answered" ? html` <span class="warn">${visible(row.stop_reason).replaceAll("_", " ")}</span>` : ""}${row.tainted ? html` <span class="warn">tainted</span>` : ""}` },
    { key: "reward", label: "reward", number: true, sort: "reward", cell: (row) => number(row.reward, 3) },
    { key: "advantage", label: "advantage", number: true, cell: (row) => number(row.advantage, 3) },
    { key: "answer", label: "answer", wide: true, cell: (row) => html`${visible(row.final_answer).slice(0, 160)}${row.error ? html` <span class="bad">${visible(row.error).slice(0, 160)}</span>` : ""}` },
    { key: "reference", label: "reference", cell: (row) => visible(row.reference).slice(0, 60) },
    { key: "steps", label: "turns", number: true, sort: "steps", cell: (row) => number(row.steps) },
    { key: "tokens", label: "tokens", number: true, sort: "tokens", cell: (row) => number(row.sampled_tokens) },
    { key: "calls", label: "calls", number: true, sort: "calls", cell: (row) => `${number(row.tool_calls)}${row.tool_errors ? ` (${row.tool_errors} failed)` : ""}` },
    { key: "seconds", label: "took", number: true, cell: (row) => seconds(row.seconds) },
  ];
}
