// Two evaluations, task by task: is the difference more than chance?

import { html, useEffect, useMemo } from "./vendor/preact.js";
import { path } from "./data.js";
import { lastPart, number, plural, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Facts, Link, Table, useData } from "./ui.js";

export function ComparePage() {
  const [a, setA] = useChoice("a");
  const [b, setB] = useChoice("b");
  const evals = useData(path("evals", { size: 200 }));
  const found = useData(a && b ? path("compare", { a, b }) : null);
  useEffect(() => {
    document.title = "agentrl: compare";
  }, []);
  return html`<h1>Compare</h1>
    <${Asked} of=${evals} what="the evaluations">${({ rows }) => (rows.length < 2 ? html`<p class="quiet">There are fewer than two evaluations. Make one: agentrl eval --policy RUN</p>` : html`<div class="controls"><${EvalChoice} label="A" rows=${rows} value=${a} set=${setA} /><${EvalChoice} label="B" rows=${rows} value=${b} set=${setB} /></div>`)}<//>
    ${a && b && html`<${Asked} of=${found} what="both">${(data) => html`<${Comparison} data=${data} />`}<//>`}`;
}

function EvalChoice({ label, rows, value, set }) {
  return html`<label class="select"><span>${label}</span><select value=${value} onChange=${(event) => set(event.currentTarget.value)}>
    <option value="">choose…</option>
    ${rows.map((row) => html`<option key=${row.id} value=${row.id} selected=${String(row.id) === value}>${`${lastPart(row.policy || row.run)} on ${lastPart(row.dataset)} ${visible(row.split)}: ${number(row.mean_reward, 3)}`}</option>`)}
  </select></label>`;
}

function Comparison({ data }) {
  const m = data.measures;
  const ranked = useMemo(() => data.tasks, [data]);
  return html`<p class="verdict">B − A = <b>${number(m.difference, 4)}</b> ${m.low === null || m.low === undefined ? "" : html`[${number(m.low, 3)}, ${number(m.high, 3)}]`}, p = <b>${number(m.p_value, 3)}</b> <span class="quiet">(${visible(m.method)}${m.interval_by ? `; interval by ${visible(m.interval_by)}` : ""})</span></p>
    <${Facts} of=${[["better on", plural(m.won, "task")], ["worse on", plural(m.lost, "task")], ["the same on", plural(m.tied, "task")], ["right", data.right ? `${number(data.right.difference, 3)} [${number(data.right.low, 3)}, ${number(data.right.high, 3)}], p = ${number(data.right.p_value, 3)}` : null]]} />
    ${(data.remarks || []).map((remark, index) => html`<p key=${index} class="warn">${visible(remark)}</p>`)}
    <${Table} caption="Tasks, the greatest difference first" rows=${ranked} rowKey=${(row) => row.task_id} columns=${[
      { key: "task", label: "task", wide: true, cell: (row) => visible(row.task).slice(0, 120) },
      { key: "a", label: "A", number: true, cell: (row) => (row.a_episode ? html`<${Link} to=${["episode", row.a_episode]}>${number(row.a, 3)}<//>` : number(row.a, 3)) },
      { key: "b", label: "B", number: true, cell: (row) => (row.b_episode ? html`<${Link} to=${["episode", row.b_episode]}>${number(row.b, 3)}<//>` : number(row.b, 3)) },
      { key: "difference", label: "B − A", number: true, cell: (row) => html`<span class=${row.difference > 0 ? "good" : row.difference < 0 ? "bad" : "quiet"}>${number(row.difference, 3)}</span>` },
    ]} />
    ${data.left_out ? html`<p class="quiet">${plural(data.left_out, "more task")} differ less.</p>` : ""}`;
}
