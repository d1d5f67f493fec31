// @ts-check
// Two evaluations, task by task: is the difference more than chance? And two runs: what differs in config, numbers, tasks, transcripts.

import { html } from "./vendor/preact.js";
import { path } from "./data.js";
import { TranscriptBeside } from "./episode.js";
import { json, lastPart, number, plural, seconds, visible } from "./format.js";
import { href, readRoute, useChoice } from "./route.js";
import { Asked, Badge, Facts, Link, Select, Table, useData, useTitle } from "./ui.js";

const SIDES = [["", "all"], ["worse", "worse in B"], ["better", "better in B"]];

export function ComparePage() {
  const [a, setA] = useChoice("a");
  const [b, setB] = useChoice("b");
  const evals = useData(path("evals", { size: 200 }));
  const found = useData(a && b ? path("compare", { a, b }) : null);
  useTitle("compare");
  return html`<h1>Compare two evaluations</h1>
    <p class="quiet">To compare runs, choose them in <a href=${href([])}>the list of runs</a>.</p>
    <${Asked} of=${evals} what="the evaluations">${({ rows }) => (rows.length < 2 ? html`<p class="quiet">There are fewer than two evaluations. Make one: agentrl eval --policy RUN</p>` : html`
      ${!(a && b) && html`<${Beginning} rows=${rows} />`}
      <div class="controls"><${EvalChoice} label="A" rows=${rows} value=${a} set=${setA} /><${EvalChoice} label="B" rows=${rows} value=${b} set=${setB} /></div>`)}<//>
    ${a && b && html`<${Asked} of=${found} what="both">${(data) => html`<${Comparison} data=${data} />`}<//>`}`;
}

/** What to choose, and the two newest evaluations on the same tasks. */
function Beginning({ rows }) {
  const pair = newestPair(rows);
  return html`<p>Choose two evaluations on the same tasks: A is the baseline, B the policy that should be better. The difference is B − A, task by task.</p>
    ${pair && html`<p>The two newest evaluations of one dataset: <${Link} to=${["compare"]} query=${{ a: pair[0].id, b: pair[1].id }}>${evalName(pair[0])} with ${evalName(pair[1])}<//>, on ${lastPart(pair[0].dataset)} ${visible(pair[0].split)}.</p>`}`;
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
  return html`${m ? html`<p class="verdict">Mean reward: B − A = <b>${number(m.difference, 4)}</b>${interval(m)}, p = <b>${number(m.p_value, 3)}</b> <span class="quiet">(${visible(m.method)} test${m.interval_by ? `; interval by ${visible(m.interval_by)}` : ""}${isSame(m, data.right) ? "; the share of right answers differs by the same number" : ""})</span></p>` : html`<p class="verdict">The evaluations use different rewards, so no difference is computed.</p>`}
    <${Facts} of=${[
      ["A", sideOf(data.a)],
      ["B", sideOf(data.b)],
      ...(m ? [["better on", plural(m.won, "task")], ["worse on", plural(m.lost, "task")], ["the same on", plural(m.tied, "task")]] : []),
      ["share of right answers", data.right && !isSame(m, data.right) ? html`${number(data.right.difference, 3)}${interval(data.right)}, p = ${number(data.right.p_value, 3)}` : null],
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
  return low === null || low === undefined ? "" : `, 95 % interval ${number(low, 3)} to ${number(high, 3)}`;
}

/** Whether what is right differs by the same number as the reward. */
function isSame(measures, right) {
  return Boolean(measures && right && ["difference", "low", "high", "p_value"].every((key) => measures[key] === right[key]));
}

// two runs

const FEW_TASKS = 8;

/** What differs between two runs. `children`: the curves, which stand between the numbers and the tasks. */
export function RunDifferences({ ids, children }) {
  const found = useData(path(`runs/${ids[0]}/against/${ids[1]}`));
  return html`<${Asked} of=${found} what="what differs">${(data) => html`<div class="two"><${Numbers} data=${data} /><${ConfigDifference} data=${data} /></div>`}<//>
    ${children}
    ${found.data && html`<${TaskDifferences} data=${found.data} />`}`;
}

function sideColumns(data, cell) {
  return [["one", data.runs[0]], ["other", data.runs[1]]].map(([key, run]) => ({ key, label: visible(run.run).slice(0, 40), number: true, cell: (row) => cell(row, key) }));
}

function Numbers({ data }) {
  const value = (row, key) => (typeof row[key] === "string" ? html`<${Badge} is=${row[key]} />` : row.name.endsWith("seconds") ? seconds(row[key]) : number(row[key], 4));
  const columns = [{ key: "name", label: "final number", cell: (row) => row.name }, ...sideColumns(data, value)];
  return html`<section><h2>Final numbers</h2><${Table} caption="Final numbers" columns=${columns} rows=${data.numbers} rowKey=${(row) => row.name} /></section>`;
}

function ConfigDifference({ data }) {
  const columns = [{ key: "key", label: "config key", cell: (row) => html`<code>${visible(row.key)}</code>` }, ...sideColumns(data, (row, key) => html`<code>${visible(json(row[key])).slice(0, 400)}</code>`)];
  return html`<section><h2>Config</h2><${Table} caption="Config values that differ" columns=${columns} rows=${data.config} rowKey=${(row) => row.key} empty="Their configs are the same." /></section>`;
}

function TaskDifferences({ data }) {
  const [all, setAll] = useChoice("tasks");
  const [pair, setPair] = useChoice("pair");
  const first = data.tasks.find((row) => row.one_episode && row.other_episode);
  const chosen = pair || (first ? pairOf(first) : "");
  const episodes = chosen.split("-").filter((each) => /^\d+$/.test(each));
  const { parts, query } = readRoute();
  const to = (row) => (row.one_episode && row.other_episode ? href(parts, { ...query, pair: pairOf(row) }) : undefined);
  const columns = [
    { key: "task", label: "task", wide: true, cell: (row) => html`${to(row) ? html`<a href=${to(row)} aria-current=${pairOf(row) === chosen ? "true" : undefined}>${visible(row.task).slice(0, 120)}</a>` : visible(row.task).slice(0, 120)} <span class="quiet">${visible(row.question).slice(0, 160)}</span>` },
    ...sideColumns(data, (row, key) => number(row[key], 3)),
    { key: "difference", label: "difference", number: true, cell: (row) => html`<span class=${row.other > row.one ? "good" : "bad"}>${number(row.other - row.one, 3)}</span>` },
  ];
  const rows = all ? data.tasks : data.tasks.slice(0, FEW_TASKS);
  return html`<h2>Tasks that differ</h2>
    <p class="quiet">${plural(data.tasks.length, "task")} of ${number(data.shared)} that both sampled, by the last group of each. A click shows two transcripts.</p>
    <${Table} caption="Tasks that differ" columns=${columns} rows=${rows} rowKey=${(row) => row.task_id} to=${to} empty=${data.shared ? "None differs." : "The runs have no task in common."} />
    ${rows.length < data.tasks.length && html`<button type="button" class="more" onClick=${() => setAll("all")}>show all ${number(data.tasks.length)} tasks</button>`}
    ${episodes.length === 2 && html`<h2>Transcripts side by side</h2>${pair && html`<button type="button" class="more" onClick=${() => setPair("")}>the task that differs most</button>`}
      <div class="siblings">${episodes.map((episode) => html`<${TranscriptBeside} key=${episode} episode=${episode} />`)}</div>`}`;
}

function pairOf(row) {
  return `${row.one_episode}-${row.other_episode}`;
}
