// Two evaluations, task by task: is the difference more than chance?

import { html, useEffect } from "./vendor/preact.js";
import { path } from "./data.js";
import { lastPart, number, plural, visible } from "./format.js";
import { href, useChoice } from "./route.js";
import { Asked, Facts, Link, Select, Table, useData } from "./ui.js";

const SIDES = [["", "all"], ["worse", "worse in B"], ["better", "better in B"]];

export function ComparePage() {
  const [a, setA] = useChoice("a");
  const [b, setB] = useChoice("b");
  const evals = useData(path("evals", { size: 200 }));
  const found = useData(a && b ? path("compare", { a, b }) : null);
  useEffect(() => {
    document.title = "agentrl: compare";
  }, []);
  return html`<h1>Compare</h1>
    <${Asked} of=${evals} what="the evaluations">${({ rows }) => (rows.length < 2 ? html`<p class="quiet">There are fewer than two evaluations. Make one: agentrl eval --policy RUN</p>` : html`
      ${!(a && b) && html`<${Beginning} rows=${rows} />`}
      <div class="controls"><${EvalChoice} label="A" rows=${rows} value=${a} set=${setA} /><${EvalChoice} label="B" rows=${rows} value=${b} set=${setB} /></div>`)}<//>
    ${a && b && html`<${Asked} of=${found} what="both">${(data) => html`<${Comparison} data=${data} />`}<//>`}`;
}

/** What to choose, and the two newest evaluations on the same tasks. */
function Beginning({ rows }) {
  const pair = newestPair(rows);
  return html`<p>Choose two evaluations on the same tasks: as A what was there before, as B what is to be better. The difference is B − A, task by task.</p>
    ${pair && html`<p>The newest two of one dataset: <${Link} to=${["compare"]} query=${{ a: pair[0].id, b: pair[1].id }}>${evalName(pair[0])} with ${evalName(pair[1])}<//>, on ${lastPart(pair[0].dataset)} ${visible(pair[0].split)}.</p>`}`;
}

function newestPair(rows) {
  const done = rows.filter((row) => row.mean_reward !== null).sort((one, other) => other.id - one.id);
  for (const newest of done) {
    const alike = done.filter((row) => row.id < newest.id && row.dataset === newest.dataset && row.split === newest.split);
    const before = alike.find((row) => row.measures === newest.measures) || alike[0];
    if (before) return [before, newest];
  }
  return null;
}

/** The version that was measured, under its run's name where the answer has it; else the evaluation's own name. */
function evalName(row) {
  return row.measures ? `${visible(row.measures)} version ${row.policy_version}` : `${visible(row.run)}${row.policy ? ` (${lastPart(row.policy)})` : ""}`;
}

function EvalChoice({ label, rows, value, set }) {
  return html`<label class="select"><span>${label}</span><select value=${value} onChange=${(event) => set(event.currentTarget.value)}>
    <option value="">choose…</option>
    ${rows.map((row) => html`<option key=${row.id} value=${row.id} selected=${String(row.id) === value}>${`${evalName(row)} on ${lastPart(row.dataset)} ${visible(row.split)}: ${number(row.mean_reward, 3)}`}</option>`)}
  </select></label>`;
}

function Comparison({ data }) {
  const [side, setSide] = useChoice("show");
  const m = data.measures;
  const sign = { worse: -1, better: 1 }[side];
  const shown = sign ? data.tasks.filter((row) => row.difference * sign > 0) : data.tasks;
  return html`${m ? html`<p class="verdict">B − A = <b>${number(m.difference, 4)}</b> ${interval(m)}, p = <b>${number(m.p_value, 3)}</b> <span class="quiet">(${visible(m.method)}${m.interval_by ? `; interval by ${visible(m.interval_by)}` : ""}${isSame(m, data.right) ? "; what is right differs by the same" : ""})</span></p>` : html`<p class="verdict">Their rewards are not the same, so there is no difference of them.</p>`}
    <${Facts} of=${[
      ["A", sideOf(data.a)],
      ["B", sideOf(data.b)],
      ...(m ? [["better on", plural(m.won, "task")], ["worse on", plural(m.lost, "task")], ["the same on", plural(m.tied, "task")]] : []),
      ["right", data.right && !isSame(m, data.right) ? html`${number(data.right.difference, 3)} ${interval(data.right)}, p = ${number(data.right.p_value, 3)}` : null],
    ]} />
    ${(data.remarks || []).map((remark, index) => html`<p key=${index} class="warn">${visible(remark)}</p>`)}
    <div class="controls"><${Select} label="tasks" value=${side} onChange=${setSide} options=${SIDES} /><span class="quiet" role="status">${plural(shown.length, "task")}${sign ? ` of ${number(data.tasks.length)}` : ""}, the greatest difference first</span></div>
    <${Table} caption="Tasks, the greatest difference first" rows=${shown} rowKey=${(row) => row.task_id} to=${(row) => href(taskPlace(data, row))} columns=${taskColumnsOf(data)} empty=${`No task is ${side} in B.`} />
    ${data.left_out ? html`<p class="quiet">${plural(data.left_out, "more task")} differ less.</p>` : ""}`;
}

function taskColumnsOf(data) {
  const reward = (value, episode) => (episode ? html`<${Link} to=${["episode", episode]}>${number(value, 3)}<//>` : number(value, 3));
  const said = (key, other) => (row) => html`<span class=${row[key] === row[other] ? "quiet" : ""}>${visible(row[key] ?? "").slice(0, 160)}</span>`;
  return [
    { key: "task", label: "task", wide: true, cell: (row) => html`<${Link} to=${taskPlace(data, row)}>${visible(row.task).slice(0, 120)}<//> <span class="quiet">${visible(row.question).slice(0, 160)}</span>` },
    { key: "a", label: "A", number: true, cell: (row) => reward(row.a, row.a_episode) },
    { key: "b", label: "B", number: true, cell: (row) => reward(row.b, row.b_episode) },
    { key: "a_answer", label: "answer of A", title: "Of its first episode; quiet where both say the same", cell: said("a_answer", "b_answer") },
    { key: "b_answer", label: "answer of B", cell: said("b_answer", "a_answer") },
    { key: "difference", label: "B − A", number: true, cell: (row) => html`<span class=${row.difference > 0 ? "good" : row.difference < 0 ? "bad" : "quiet"}>${number(row.difference, 3)}</span>` },
  ];
}

/** The task's page: that of B's evaluation, or of A's where B has no episode of it. */
function taskPlace(data, row) {
  return ["run", row.b_episode || !row.a_episode ? data.b.id : data.a.id, "task", row.task_id];
}

function sideOf(side) {
  return html`<${Link} to=${["run", side.id]}>${visible(side.run)}<//> <span class="quiet">${number(side.mean, 3)} on ${plural(side.tasks, "task")}</span>`;
}

function interval({ low, high }) {
  return low === null || low === undefined ? "" : `[${number(low, 3)}, ${number(high, 3)}]`;
}

/** Whether what is right differs by the same number as the reward. */
function isSame(measures, right) {
  return Boolean(measures && right && ["difference", "low", "high", "p_value"].every((key) => measures[key] === right[key]));
}
