// @ts-check
// The tasks of a run, each over the iterations: solved when, or never; its best and worst episodes.

import { html } from "./vendor/preact.js";
import { Chart, Sparkline } from "./chart.js";
import { exported, path } from "./data.js";
import { EvidenceTable } from "./evidence.js";
import { json, number, plural, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Chips, Facts, Fold, Link, More, openable, Search, Table, Text, useData, useMore, useTitle } from "./ui.js";

const TASK_CHIPS = [
  ["solved", "outcome=solved", "Tasks that were solved at least once"],
  ["never solved", "outcome=never_solved", "Tasks that no episode solved"],
  ["no longer solved", "outcome=no_longer_solved", "Tasks that were solved, and not when they were sampled last"],
];

export function TasksView({ run, version }) {
  const [text, setText] = useChoice("text");
  const [sort, setSort] = useChoice("sort");
  const [outcome] = useChoice("outcome");
  const found = useMore(path(`runs/${run}/tasks`, { text, sort, outcome, size: 25 }), version);
  return html`${!exported() && html`<div class="controls"><${Chips} chips=${TASK_CHIPS} label="Filters" /><${Search} value=${text} onChange=${setText} label="Search questions, keys, references" /></div>`}
    <${Asked} of=${found} what="the tasks">${(data) => html`<${SolvedMeans} words=${data.solved_means} />${exported() && html`<${TasksInFile} run=${run} rows=${found.rows} more=${Boolean(found.next)} />`}
      <${Table} caption="Tasks" columns=${taskColumns(run, data.solved_means)} rows=${found.rows} rowKey=${(row) => row.task_id} to=${(row) => openable(["run", run, "task", row.task_id])} sort=${sort} onSort=${exported() ? undefined : setSort} empty="No task matches." /><${More} of=${found} />`}<//>`;
}

/** When a task counts as solved: one good episode is enough, whatever the mean. */
function SolvedMeans({ words }) {
  return words && html`<p class="quiet">A task is solved at the first iteration in which ${visible(words)}; the mean reward of its episodes may be far less.</p>`;
}

/** How many tasks an exported file lists, and how many of them can be opened. */
function TasksInFile({ run, rows, more }) {
  const there = rows.filter((row) => openable(["run", run, "task", row.task_id]));
  return html`<p class="quiet">This file lists ${more ? "the first " : ""}${plural(rows.length, "task")}; ${number(there.length)} of them can be opened.</p>`;
}

function taskColumns(run, means) {
  return [
    { key: "task", label: "task", sort: "task", cell: (row) => html`<${Link} to=${["run", run, "task", row.task_id]}>${visible(row.task).slice(0, 100)}<//>` },
    { key: "question", label: "question", sort: "id", wide: true, cell: (row) => visible(row.question).slice(0, 200) },
    { key: "reference", label: "reference", sort: "reference", cell: (row) => visible(row.reference).slice(0, 60) },
    { key: "role", label: "role", sort: "role", cell: (row) => visible(row.role) },
    { key: "groups", label: "solved", sort: "solved", number: true, title: "In how many of its groups an episode is right", cell: (row) => `${number(row.solved_groups)} of ${number(row.judged_groups)}` },
    { key: "mean", label: "mean reward", sort: "reward", number: true, cell: (row) => number(row.mean_reward, 3) },
    { key: "points", label: "over iterations", name: "reward over iterations", sort: "change", title: "Sorted by the last reward less the first", cell: (row) => html`<${Sparkline} points=${row.points || []} label="reward" />` },
    { key: "last", label: "last reward", sort: "last", number: true, cell: (row) => number(row.last_reward, 3) },
    { key: "solved", label: "first solved", sort: "first_solved", short: true, title: visible(means), cell: solvedWhen },
    { key: "lost", label: "last solved", sort: "last_solved", short: true, cell: (row) => (row.last_solved ? html`at iteration ${row.last_solved}${row.no_longer_solved && html` <span class="bad">no longer</span>`}` : "") },
    { key: "best", label: "best episode", sort: "best", short: true, cell: (row) => episodeLink(row.best) },
    { key: "worst", label: "worst episode", sort: "worst", short: true, cell: (row) => episodeLink(row.worst) },
  ];
}

function solvedWhen(row) {
  if (row.first_solved) return `at iteration ${row.first_solved}`;
  return row.groups ? html`<span class="warn">never</span>` : "–";
}

function episodeLink(found) {
  return found ? html`<${Link} to=${["episode", found.episode]}>${found.episode}, reward ${number(found.reward, 3)}<//>` : "";
}

export function TaskPage({ run, task }) {
  const told = useData(path(`runs/${run}`));
  const found = useData(path(`runs/${run}/tasks/${task}`));
  useTitle(`${told.data?.run.run || run}, task ${found.data?.task || task}`);
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]}>runs<//><${Link} to=${["run", run]}>${visible(told.data?.run.run || run)}<//><${Link} to=${["run", run]} query=${{ tab: "tasks" }} rel="up">tasks<//></nav>
    <${Asked} of=${found} what="the task" title=${`Task ${visible(task)}`}>${(data) => html`<h1>${visible(data.task).slice(0, 200)}</h1>
      <${Facts} of=${[
        ["reference", visible(data.reference).slice(0, 400)],
        ["role", visible(data.role)],
        ["solved", html`<span title=${visible(data.solved_means)}>${data.first_solved ? `first at iteration ${data.first_solved}` : data.never_solved ? "never" : "not yet"}</span>`],
        ["best episode", episodeLink(data.best)],
        ["worst episode", episodeLink(data.worst)],
      ]} />
      ${(data.messages || []).map((message, index) => html`<div key=${index} class="message"><b>${visible(message.role)}</b> <${Text} value=${typeof message.content === "string" ? message.content : json(message.content)} cut=${message.cut?.content || 0} /></div>`)}
      ${data.metadata && Object.keys(data.metadata).length > 0 && html`<${Fold} summary="metadata"><${Text} value=${json(data.metadata)} mono /><//>`}
      <${SolvedMeans} words=${data.solved_means} />
      ${data.points?.length > 1 && html`<div class="charts"><${Chart} title="mean reward" lines=${[{ label: "reward", color: "--line-1", x: data.points.map(([x]) => x), y: data.points.map(([, y]) => y) }]} /></div>`}
      <h2>Its episodes</h2>
      ${exported() || (told.data && !told.data.run.episodes_done) ? html`<${TaskGroups} groups=${data.groups} />` : html`<${EvidenceTable} run=${run} fixed=${{ task_id: task }} hidden=${["question", "reference"]} />`}`}<//>`;
}

/** The groups of a task, where its episodes cannot be listed: in an exported file, and of stored groups. */
function TaskGroups({ groups }) {
  return html`<${Table} caption="Groups of the task" rows=${groups} rowKey=${(row) => row.id} to=${(row) => openable(["group", row.id])} empty="It was not sampled yet." columns=${[
        { key: "iteration", label: "iteration", number: true, cell: (row) => row.iteration },
        { key: "id", label: "group", number: true, cell: (row) => html`<${Link} to=${["group", row.id]}>${row.id}<//>` },
        { key: "mean", label: "mean reward", number: true, cell: (row) => number(row.mean_reward, 3) },
        { key: "episodes", label: "episodes", wide: true, cell: (row) => row.episodes.map((each) => html`<${Link} key=${each.id} to=${["episode", each.id]} class="tag">${number(each.reward, 3)}<//> `) },
      ]} />`;
}
