// @ts-check
// Evidence: the one table of episodes, of a run, of an iteration, of a task; and the way from one episode of it to the next.

import { html } from "./vendor/preact.js";
import { exported, path } from "./data.js";
import { number, plural, seconds, visible } from "./format.js";
import { href, useChoice, useRoute } from "./route.js";
import { Asked, Badge, Chips, KeyLink, Link, More, openable, Search, Select, Table, useData, useMore } from "./ui.js";

const CHIPS = [
  ["solved", "outcome=solved", "Episodes that are right"],
  ["never solved", "outcome=never_solved", "Episodes of tasks that no episode of the run solved"],
  ["no longer solved", "outcome=no_longer_solved", "Groups that are not solved, although the task's group before was"],
  ["failed call", "tool_errors=1", "Episodes with a failed tool call"],
  ["truncated", "truncated=true", "Episodes that were cut off at a limit"],
];
const STATUSES = ["", "done", "failed", "infra_error", "running", "planned", "cancelled"];
const FATES = ["", "trained", "no_variance", "strayed", "truncated", "too_few", "surplus", "skipped", "tainted", "no_reward", "failed", "infra_error", "cancelled", "waiting", "open"];
const FILTERS = ["outcome", "tool_errors", "truncated", "error_class", "fate", "status", "min_reward", "max_reward", "text", "texts_of", "sort"];
const CELLS = {
  id: { number: true, cell: (row, to) => html`<${Link} to=${["episode", row.id]} query=${to}>${row.id}<//>` },
  iteration: { number: true, cell: (row) => html`<${Link} to=${["group", row.group_id]} title=${`group ${row.group_id}`}>${row.iteration}<//>` },
  question: { wide: true, cell: (row) => html`${visible(row.question).slice(0, 200)} <span class="quiet">${visible(row.task).slice(0, 60)}</span>` },
  answer: { wide: true, cell: (row) => visible(row.final_answer).slice(0, 160) },
  reference: { cell: (row) => visible(row.reference).slice(0, 80) },
  reward: { number: true, always: true, cell: (row) => html`<b>${number(row.reward, 3)}</b>${partSums(row.parts).map(([part, value]) => html`<div key=${part} class="quiet">${part} ${number(value, 3)}</div>`)}` },
  advantage: { number: true, cell: (row) => (row.advantage === null ? "" : `${row.advantage > 0 ? "+" : ""}${number(row.advantage, 2)}`) },
  failed_call: { narrow: true, cell: errorOf },
  fate: { cell: fateOf },
  steps: { number: true, cell: (row) => number(row.steps) },
  calls: { number: true, cell: (row) => `${number(row.tool_calls)}${row.tool_errors ? `, ${row.tool_errors} failed` : ""}` },
  tokens: { number: true, cell: (row) => number(row.sampled_tokens) },
  seconds: { number: true, cell: (row) => seconds(row.seconds) },
};

/** The table. `fixed`: what the place fixes, an iteration or a task; `hidden`: the columns that the place says already. */
export function EvidenceTable({ run, version, fixed = {}, hidden = [] }) {
  const { query } = useRoute();
  const filter = Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));
  const found = useMore(path(`runs/${run}/episodes`, { ...fixed, ...filter, size: 50 }), version);
  const [sort, setSort] = useChoice("sort");
  const to = exported() ? {} : { list: new URLSearchParams({ run, ...fixed, ...filter }).toString() };
  const columnsOf = (data) => data.columns.filter(({ key }) => !hidden.includes(key)).map(({ key, title, meaning, sort: order }) => ({ key, label: title, title: meaning, sort: order, ...CELLS[key], cell: (row) => CELLS[key].cell(row, to) }));
  return html`${!exported() && html`<${Filters} run=${run} fixed=${fixed} />`}
    <${Asked} of=${found} what="the episodes">${(data) => html`<${Table} caption="Episodes" columns=${columnsOf(data)} rows=${found.rows} rowKey=${(row) => row.id} to=${(row) => openable(["episode", row.id], to)} sort=${sort || "id"} onSort=${exported() ? undefined : (next) => setSort(next === "id" ? "" : next)} empty=${html`<${NoEpisode} isFiltered=${Object.keys(filter).some((name) => name !== "sort")} more=${Boolean(found.next)} />`} /><${More} of=${found} />`}<//>`;
}

/** What is said where no episode is listed: how to see all of them, if a filter hides them. */
function NoEpisode({ isFiltered, more }) {
  const { parts, query } = useRoute();
  if (more) return "None so far.";
  if (!isFiltered) return "No episode was sampled yet.";
  const rest = Object.fromEntries(Object.entries(query).filter(([name]) => !FILTERS.includes(name)));
  return html`No episode matches the filters. <a href=${href(parts, rest)}>show all episodes</a>`;
}

function Filters({ run, fixed }) {
  const [text, setText] = useChoice("text");
  const [status, setStatus] = useChoice("status");
  const [fate, setFate] = useChoice("fate");
  const [least, setLeast] = useChoice("min_reward");
  const [most, setMost] = useChoice("max_reward");
  const [kind, setKind] = useChoice("error_class");
  const [group, setGroup] = useChoice("texts_of");
  const { data } = useData(path(`runs/${run}/errors`, { iteration: fixed.iteration }));
  const kinds = [...new Map((data || []).map((row) => [row.error_class, row.errors])).entries()];
  return html`<div class="controls">
    <${Chips} chips=${CHIPS} label="Filters" />
    ${group && html`<button type="button" class="chip" aria-pressed="true" title="Episodes with the same texts as this group" onClick=${() => setGroup("")}>texts of group ${visible(group)}</button>`}
    ${kinds.length > 0 && html`<${Select} label="error" value=${kind} onChange=${setKind} options=${[["", "any"], ...kinds.map(([name, count]) => [name, `${visible(name)} (${number(count)})`])]} />`}
    <${Select} label="fate" value=${fate} onChange=${setFate} options=${FATES.map((each) => [each, each.replaceAll("_", " ") || "all"])} />
    <${Select} label="status" value=${status} onChange=${setStatus} options=${STATUSES.map((each) => [each, each.replace("_", " ") || "all"])} />
    <span class="one-line"><${Bound} label="reward from" value=${least} onChange=${setLeast} /> <${Bound} label="to" value=${most} onChange=${setMost} /></span>
    <${Search} value=${text} onChange=${setText} label="Search messages, arguments, results" />
  </div>`;
}

function Bound({ label, value, onChange }) {
  const change = (event) => {
    const typed = event.currentTarget.value.trim();
    onChange(Number.isFinite(Number(typed)) ? typed : "");
  };
  return html`<label class="select"><span>${label}</span><input class="bound" inputmode="decimal" size="5" value=${value} onChange=${change} /></label>`;
}

/** The parts of a reward by name; those of single turns are summed. */
export function partSums(parts) {
  const sums = new Map();
  for (const { part, value } of parts || []) sums.set(visible(part), (sums.get(visible(part)) || 0) + (value || 0));
  return sums.size > 1 ? [...sums] : [];
}

/** What failed in an episode: its own error, or its first failed call; and how many more errors it has. */
export function errorOf(row) {
  const more = row.more_errors ? ` (+${number(row.more_errors)})` : "";
  if (row.error) return html`<span class="bad">${visible(row.error_class)}${more}: ${visible(row.error).slice(0, 200)}</span>`;
  if (!row.failed_call) return "";
  const { tool, error_class: kind, result } = row.failed_call;
  return html`<span class="bad">${visible(tool) || "(unreadable call)"}: ${visible(kind)}${more}</span> <span class="quiet">${visible(result).slice(-200)}</span>`;
}

function fateOf(row) {
  const stopped = row.stop_reason && row.stop_reason !== "answered";
  return html`<span class="one-line"><${Badge} is=${row.status === "done" && row.fate ? row.fate : row.status} /></span>${stopped && html` <span class="warn">${visible(row.stop_reason).replaceAll("_", " ")}</span>`}${row.tainted && html` <span class="warn">tainted</span>`}`;
}

/** The way to the next and the previous episode of the list from which an episode was opened. */
export function WithinList({ episode, list, keep }) {
  const { run, ...filter } = Object.fromEntries(new URLSearchParams(list));
  const known = /^\d+$/.test(run);
  const { data } = useData(known ? path(`runs/${run}/episodes/${episode}/beside`, filter) : null);
  if (!known) return null;
  const link = (id, rel, text) => (id ? html`<${KeyLink} to=${["episode", id]} query=${{ ...keep, list }} rel=${rel}>${text}<//>` : html`<span class="quiet">${text}</span>`);
  const { iteration, task_id: task, ...chosen } = filter;
  const place = iteration ? ["run", run, "iteration", iteration] : task ? ["run", run, "task", task] : ["run", run];
  const words = Object.entries(chosen).filter(([name]) => name !== "sort").map(([name, value]) => CHIPS.find(([, choice]) => choice === `${name}=${value}`)?.[0] || `${name} ${value}`.replaceAll("_", " "));
  return html`<span class="within">${link(data?.previous, "list-prev", "← previous")} <a href=${href(place, { ...(place.length === 2 ? { tab: "episodes" } : {}), ...chosen })} rel="list">in the list${words.length ? `: ${visible(words.join(", ")).slice(0, 60)}` : ""}</a> ${link(data?.next, "list-next", "next →")}</span>`;
}

/** A few episodes with their texts, for an overview: `rows` are pairs of a title and a row of evidence. An episode with several
 * titles is there once. */
export function Examples({ rows }) {
  const byEpisode = Map.groupBy(rows.filter(([, row]) => row), ([, row]) => row.id);
  const once = [...byEpisode.values()].map((its) => [its.map(([title]) => title).join(" and "), its[0][1]]);
  return html`<ul class="examples">${once.map(([title, row]) => html`<li key=${row.id} class="cell" data-row=${openable(["episode", row.id])}>
    <div><b>${title}</b> <${Link} to=${["episode", row.id]}>episode ${row.id}<//> <span class="quiet">reward ${number(row.reward, 3)}, ${plural(row.steps, "turn")}, ${plural(row.sampled_tokens, "token")}</span></div>
    <div>${visible(row.question).slice(0, 160)}</div>
    <div><span class="quiet">answer</span> ${visible(row.final_answer).slice(0, 120) || "–"} <span class="quiet">reference</span> ${visible(row.reference).slice(0, 80)}</div>
    <div>${errorOf(row)}</div>
  </li>`)}</ul>`;
}
