// @ts-check
// The runs: a table that is filtered and sorted, from which several are chosen to be seen together.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Sparkline } from "./chart.js";
import { exported, listen, path } from "./data.js";
import { compact, json, lastPart, number, plural, seconds, visible } from "./format.js";
import { ListedLabels } from "./labels.js";
import { Machine } from "./machine.js";
import { go, href, useChoice } from "./route.js";
import { Asked, Badge, Fold, Link, More, Search, Select, Table, useData, useMore, useTitle, When } from "./ui.js";

const STATES = ["", "running", "done", "paused", "failed", "cancelled"];
const KINDS = ["", "train", "eval", "fork", "serve", "search", "import"];

export function RunsPage() {
  const [text, setText] = useChoice("text");
  const [status, setStatus] = useChoice("status");
  const [kind, setKind] = useChoice("kind");
  const [tag, setTag] = useChoice("tag");
  const [sort, setSort] = useChoice("sort");
  const [version, setVersion] = useState(0);
  const [loads, setLoads] = useState(0);
  const [connected, setConnected] = useState(null);
  const [chosen, setChosen] = useState([]);
  useEffect(() => {
    const told = { change: () => setVersion((now) => now + 1), machine: () => setLoads((now) => now + 1) };
    return listen("", (kind) => told[kind]?.(), setConnected);
  }, []);
  useTitle("runs");
  const [cols, setCols] = useChoice("cols");
  const [group, setGroup] = useChoice("group");
  const names = cols.split(",").filter((name) => /^-?[\w.]+$/.test(name));
  const keys = names.filter((name) => !name.startsWith("-"));
  const found = useMore(path("runs", { text, status, kind, tag, sort, config: keys.join(","), size: 50 }), version);
  const filtered = Boolean(text || status || kind || tag);
  const toggle = (ids) => setChosen((now) => (ids.every((id) => now.includes(id)) ? now.filter((each) => !ids.includes(each)) : [...new Set([...now, ...ids])]));
  const all = runColumns(chosen, toggle, setTag);
  all.splice(all.findIndex(({ key }) => key === "eval") + 1, 0, ...keys.map(configColumn));
  return html`<div class="row base"><h1>Runs</h1><${Connection} is=${connected} /></div>
    <${Machine} version=${loads} hint=${filtered || found.rows?.length > 0} />
    ${!exported() && html`<div class="controls">
      <${Search} value=${text} onChange=${setText} label="Search by name" />
      <${Select} label="status" value=${status} onChange=${setStatus} options=${STATES.map((each) => [each, each || "all"])} />
      <${Select} label="kind" value=${kind} onChange=${setKind} options=${KINDS.map((each) => [each, each || "all"])} />
      ${tag && html`<button type="button" onClick=${() => setTag("")}>tag ${visible(tag)} ×</button>`}
      <label title="Runs that differ only in the seed become one row"><input type="checkbox" checked=${group === "seed"} onChange=${(event) => setGroup(event.currentTarget.checked ? "seed" : "")} /> group seeds</label>
      <button type="button" disabled=${chosen.length < 2} onClick=${() => go(href(["run", chosen[0]], { with: chosen.slice(1).join(",") }))}>
        ${chosen.length < 2 ? "compare: choose two or more runs" : `compare ${chosen.length} runs`}
      </button>
    </div>
    <${Fold} summary="columns" open=${Boolean(cols)}><${ColumnChooser} columns=${all} names=${names} set=${(next) => setCols(next.join(","))} /><//>`}
    <${Asked} of=${found} what="the runs">
      ${() => html`<${Table}
          caption="Runs"
          columns=${all.filter(({ key }) => !names.includes(`-${key}`))}
          rows=${group === "seed" ? groupSeeds(found.rows) : found.rows}
          rowKey=${(row) => row.id}
          to=${runAddress}
          sort=${sort || "-id"}
          onSort=${exported() ? undefined : (next) => setSort(next === "-id" ? "" : next)}
          empty=${filtered ? "No run matches." : "There is no run yet. Make one: agentrl submit --dataset arithmetic --model tiny"}
        /><${More} of=${found} />`}
    <//>`;
}

export function Connection({ is }) {
  if (is === null) return null;
  return is ? html`<span class="live" role="status">● live</span>` : html`<span class="away" role="status">the service does not answer; trying again</span>`;
}

/** The run's address; of several seeds that of their curves in one chart. */
function runAddress({ id, seeds }) {
  return href(["run", id], seeds ? { with: seeds.slice(1).map((seed) => seed.id).join(",") } : {});
}

/** Which columns the table has. `names`: a config key for each column that was added, `-key` for each that was taken off. */
function ColumnChooser({ columns, names, set }) {
  const { data } = useData(path("store"));
  const toggle = (name) => set(names.includes(name) ? names.filter((each) => each !== name) : [...names, name]);
  const fixed = columns.filter(({ key, config }) => !config && !["choose", "run"].includes(key));
  const free = (data?.config_keys || []).filter((key) => !names.includes(key));
  return html`<div class="columns">
    ${fixed.map(({ key, label }) => html`<label key=${key}><input type="checkbox" checked=${!names.includes(`-${key}`)} onChange=${() => toggle(`-${key}`)} />${label}</label>`)}
    ${columns.filter(({ config }) => config).map(({ key }) => html`<span key=${key} class="tag"><code>${visible(key)}</code><button type="button" class="off" onClick=${() => toggle(key)} aria-label=${`Without ${visible(key)}`}>×</button></span> `)}
    <select aria-label="add a config column" value="" onChange=${(event) => (event.currentTarget.value && toggle(event.currentTarget.value), (event.currentTarget.value = ""))}>
      <option value="">config column…</option>${free.map((key) => html`<option key=${key} value=${key}>${key}</option>`)}
    </select>
  </div>`;
}

function configColumn(key) {
  return { key, config: true, label: html`<code>${visible(key)}</code>`, cell: (row) => html`<code>${visible(json(row.config[key] ?? null)).slice(0, 80)}</code>` };
}

/** Runs whose configs differ in the seed alone become one row, in the place of the first: `seeds` are its runs. */
function groupSeeds(rows) {
  const groups = Map.groupBy(rows, (row) => row.alike);
  return [...groups.values()].map((seeds) => (seeds.length < 2 ? seeds[0] : { ...seeds[0], seeds }));
}

/** Each state of a row's runs; of several runs with their number. */
function StatesOf({ row }) {
  if (!row.seeds) return html`<${Badge} is=${row.status} title=${visible(row.reason)} />`;
  const byStatus = Map.groupBy(row.seeds, (seed) => seed.status);
  return html`${[...byStatus].map(([status, seeds]) => html`<div key=${status}><${Badge} is=${status} /> <span class="quiet">${plural(seeds.length, "run")}</span></div>`)}`;
}

/** A number of a run; of several runs the sum of those that have it. */
function overRuns(row, key, text = number) {
  const values = (row.seeds || [row]).map((run) => run[key]).filter(Number.isFinite);
  return values.length ? text(values.reduce((sum, value) => sum + value, 0)) : "";
}

/** The mean over seeds with the least and the greatest value; of one run its value. */
function overSeeds(row, key) {
  const values = (row.seeds || [row]).map((seed) => seed[key]).filter(Number.isFinite);
  if (!values.length) return "";
  if (values.length < 2) return number(values[0], 3);
  return html`${number(values.reduce((sum, value) => sum + value, 0) / values.length, 3)} <div class="quiet">${number(Math.min(...values), 3)} to ${number(Math.max(...values), 3)}</div>`;
}

/** The mean curve of several seeds, and its band from the least to the greatest. */
function SeedsSpark({ seeds }) {
  const byX = Map.groupBy(seeds.flatMap((seed) => seed.spark || []), ([x]) => x);
  const points = [...byX].sort(([a], [b]) => a - b).map(([x, its]) => [x, its.map(([, y]) => y).filter(Number.isFinite)]).filter(([, ys]) => ys.length);
  return html`<${Sparkline} label="mean reward of the seeds" points=${points.map(([x, ys]) => [x, ys.reduce((sum, y) => sum + y, 0) / ys.length])} band=${points.map(([x, ys]) => [x, Math.min(...ys), Math.max(...ys)])} />`;
}

function runColumns(chosen, toggle, setTag) {
  return [
    { key: "choose", label: html`<span class="unseen">Choose</span>`, name: "", cell: (row) => html`<input type="checkbox" checked=${idsOf(row).every((id) => chosen.includes(id))} onChange=${() => toggle(idsOf(row))} aria-label=${`Choose ${visible(row.run)}`} />` },
    { key: "run", label: "run", sort: "run", wide: true, cell: (row) => html`<a href=${runAddress(row)}>${visible(row.run)}</a> ${row.seeds ? html`<span class="quiet">${row.seeds.length} seeds: ${row.seeds.slice(0, 8).map((seed) => seed.seed).join(", ")}</span>` : html`<${ListedLabels} row=${row} setTag=${setTag} />`}` },
    { key: "status", label: "status", sort: "status", cell: (row) => html`<${StatesOf} row=${row} />${(row.waits_for || (["paused", "failed"].includes(row.status) && row.reason)) && html`<div class="quiet reason">${visible(row.waits_for || row.reason).slice(0, 200)}</div>`}` },
    { key: "reward", label: "reward", number: true, always: true, sort: "reward", title: "Mean reward of the last iteration", cell: (row) => overSeeds(row, "last_reward") },
    { key: "spark", label: "over iterations", name: "reward over iterations", cell: (row) => (row.seeds ? html`<${SeedsSpark} seeds=${row.seeds} />` : html`<${Sparkline} points=${row.spark || []} label="reward" />`) },
    { key: "eval", label: "held out", number: true, always: true, sort: "best", title: "Reward on held-out tasks: of the newest version, and of the best one; else the newest evaluation made by hand", cell: evalOf },
    { key: "algorithm", label: "algorithm", cell: (row) => (row.kind === "train" || row.kind === "search" ? visible(row.algorithm) : row.kind) },
    { key: "model", label: "model", short: true, cell: (row) => html`<${ShortName} of=${row.model} />` },
    { key: "dataset", label: "dataset", short: true, cell: (row) => html`<${ShortName} of=${row.dataset} />` },
    { key: "iterations", label: "iterations", number: true, cell: (row) => `${overRuns(row, "iterations_done")} of ${overRuns(row, "iterations")}` },
    { key: "episodes", label: "episodes", number: true, sort: "episodes", cell: (row) => overRuns(row, "episodes_done") },
    { key: "tokens", label: "tokens", number: true, cell: (row) => overRuns(row, "tokens", compact) },
    { key: "seconds", label: "took", number: true, sort: "seconds", title: "Of several seeds the sum", cell: (row) => overRuns(row, "seconds", seconds) },
    { key: "created", label: "submitted", sort: "id", short: true, cell: (row) => html`<${When} at=${row.created_at} />` },
  ];
}

function idsOf(row) {
  return (row.seeds || [row]).map(({ id }) => id);
}

/** The held-out evaluations of a run, else the newest one that somebody made by hand. An evaluation is its own. */
function evalOf(row) {
  if (row.seeds) return overSeeds(row, "eval_reward");
  if (row.kind === "eval") return number(row.last_reward, 3);
  if (row.eval_reward !== null) return html`${number(row.eval_reward, 3)}${row.best_reward !== null && row.best_reward !== row.eval_reward ? html`<div class="quiet">best ${number(row.best_reward, 3)}, version ${row.best_version}</div>` : ""}`;
  return row.measured ? html`<${Link} to=${["run", row.measured.run_id]} title="An evaluation that was made by hand">${number(row.measured.reward, 3)}, version ${row.measured.version}<//>` : "";
}

/** A name, or the last part of a path, which is whole under the pointer. */
export function ShortName({ of }) {
  const short = lastPart(of);
  return html`<span title=${visible(of)}>${short.length > 60 ? `${short.slice(0, 60)}…` : short}</span>`;
}
