// @ts-check
// A run: what it is and what it waits for, its curves, iterations, episodes, tasks, ledger, workers, events, config.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { AnnotationsView } from "./annotations.js";
import { lineColor } from "./chart.js";
import { RunDifferences } from "./compare.js";
import { ConfigView } from "./config.js";
import { CurvesView, mergeFresh } from "./curves.js";
import { askCurves, exported, listen, path } from "./data.js";
import { EvidenceTable } from "./evidence.js";
import { iterationStatus, number, plural, seconds, visible } from "./format.js";
import { LanesView } from "./lanes.js";
import { LedgerView } from "./ledger.js";
import { Labels } from "./labels.js";
import { Overview } from "./overview.js";
import { PromptsView } from "./prompts.js";
import { go, href, readRoute, useChoice, useRoute } from "./route.js";
import { Connection, ShortName } from "./runs.js";
import { TasksView } from "./tasks.js";
import { Asked, Badge, Command, Fold, Link, More, openable, Problem, Table, Tabs, useData, useMore, useTitle, When } from "./ui.js";

const CURVE_CHOICES = ["with", "smooth", "x", "log", "charts", "wide", "unchanged"];
const MAX_FRESH = 5000;
const FEW_ITERATIONS = 100;
const MAX_TOGETHER = 8;

export function RunPage({ run }) {
  const live = useLiveRun(run);
  const found = useData(path(`runs/${run}`), live.version);
  if (live.gone && found.data) return html`<h1>Run ${visible(run)}</h1><${Problem} error=${{ message: "This run is not in the store any more.", hint: "It was removed while this page was open." }} />`;
  return html`<${Asked} of=${found} what="the run" title=${`Run ${visible(run)}`}>${(told) => html`<${RunView} run=${run} told=${told} live=${live} />`}<//>`;
}

/** What comes while the run is looked at. `version` changes with what is not sent along and must be asked for again. */
function useLiveRun(run) {
  const [live, setLive] = useState({ version: 0, loads: 0, fresh: [], connected: null, progress: null, gone: false });
  const timer = useRef(0);
  useEffect(() => {
    const told = (kind, data) => {
      if (kind === "gone") setLive((now) => ({ ...now, gone: true }));
      if (kind === "machine") setLive((now) => ({ ...now, loads: now.loads + 1 }));
      if (kind !== "change") return;
      setLive((now) => ({ ...now, fresh: joinFresh(now.fresh, data.iterations || []), progress: data.progress ?? now.progress, row: data.run_row ?? now.row }));
      clearTimeout(timer.current);
      timer.current = setTimeout(() => setLive((now) => ({ ...now, version: now.version + 1 })), 400);
    };
    const stop = listen(run, told, (connected) => setLive((now) => ({ ...now, connected })));
    return () => {
      clearTimeout(timer.current);
      stop();
    };
  }, [run]);
  return live;
}

/** The newest row of each iteration that came while the page was looked at. */
function joinFresh(before, rows) {
  const found = new Map([...before, ...rows].map((row) => [row[0], row]));
  return [...found.values()].slice(-MAX_FRESH);
}

function RunView({ run, told, live }) {
  const { query } = useRoute();
  const [tab] = useChoice("tab", CURVE_CHOICES.some((name) => query[name]) ? "curves" : "overview");
  const [others] = useChoice("with");
  const ids = runsTogether(run, others);
  const row = { ...told.run, ...(live.row || {}) };
  const events = useData(path(`runs/${run}/events`, { size: 500, sort: "-id" }), live.version);
  useTitle(ids.length > 1 ? `${ids.length} runs together` : row.run);
  const open = row.status === "running" || row.status === "planned";
  const counts = { iterations: row.iterations_done || undefined, episodes: row.episodes_done || undefined };
  const tabs = Object.keys(RUN_TABS).filter((name) => isTabThere(name, row, told)).map((name) => [name, name, counts[name]]);
  if (tab === "curves" && ids.length > 1) {
    const charts = html`<div class="together-charts">${RUN_TABS.curves({ run, told, live, row, events })}</div>`;
    return html`<${Together} ids=${ids} />${ids.length === 2 ? html`<${RunDifferences} ids=${ids}>${charts}<//>` : html`<p class="quiet">Choose exactly two runs to compare their config, numbers, tasks and transcripts.</p>${charts}`}`;
  }
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]} rel="up">runs<//><span>${visible(row.run)}</span></nav>
    <div class="run-head"><h1>${visible(row.run)}</h1> <${Badge} is=${row.status} title=${visible(row.reason)} /> ${open && html`<${Connection} is=${live.connected} />`} <${ShortFacts} row=${row} /></div>
    ${row.reason && html`<p class=${row.status === "failed" ? "bad" : "warn"}>${visible(row.reason)}</p>`}
    ${told.waits_for && html`<p class="warn" role="status">waits for ${visible(told.waits_for)}</p>`}
    ${told.sources?.length > 0 && html`<p class="quiet">${row.kind === "eval" ? "evaluates" : "made from"} ${told.sources.map((each, index) => html`${index > 0 && ", "}<${Link} to=${["run", each.id]}>${visible(each.run)}<//> (${visible(each.what)})`)}</p>`}
    <div class="row labels"><${Labels} run=${run} told=${told}><${Fold} summary="facts and commands"><${RunFacts} row=${row} told=${told} /><//><//></div>
    ${open && html`<${Progress} of=${live.progress ?? told.progress} row=${row} />`}
    <${Tabs} name="tab" tabs=${tabs} chosen=${tab} />
    ${(RUN_TABS[tab] || RUN_TABS.overview)({ run, told, live, row, events })}`;
}

/** The numbers of the runs whose curves the address wants in the same charts, the page's own first. */
function runsTogether(run, others) {
  return [...new Set([String(run), ...others.split(",").filter((each) => /^\d+$/.test(each))])].slice(0, MAX_TOGETHER);
}

/** The head of several runs that are seen together: which they are, in the colours of their lines. */
function Together({ ids }) {
  const without = (id) => {
    const [first, ...rest] = ids.filter((each) => each !== id);
    go(href(["run", first], { ...readRoute().query, with: rest.join(",") }));
  };
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]} rel="up">runs<//><span>${ids.length} runs together</span></nav>
    <h1>${ids.length} runs together</h1>
    <ul class="together">${ids.map((id, index) => html`<${TogetherRun} key=${id} id=${id} color=${lineColor(index)} remove=${() => without(id)} />`)}</ul>`;
}

function TogetherRun({ id, color, remove }) {
  const { data } = useData(path(`runs/${id}`));
  const name = visible(data?.run.run || id);
  return html`<li class="tag"><i class="swatch" style=${{ background: `var(${color})` }}></i><${Link} to=${["run", id]}>${name}<//><button type="button" class="off" onClick=${remove} aria-label=${`Without ${name}`}>×</button></li>`;
}

/** The tabs of a run, in their order, and the view of each. */
export const RUN_TABS = {
  overview: ({ run, told, row, live, events }) => html`<${Overview} run=${run} told=${told} row=${row} live=${live} events=${events.data?.rows} />`,
  curves: ({ run, told, row, live, events }) => html`<${CurvesView} run=${run} name=${row.run} version=${told.evaluations} fresh=${live.fresh} events=${events.data?.rows} />`,
  iterations: ({ run, row, live }) => html`<${IterationsView} run=${run} row=${row} live=${live} />`,
  episodes: ({ run, live }) => html`<${EvidenceTable} run=${run} version=${live.version} />`,
  tasks: ({ run, live }) => html`<${TasksView} run=${run} version=${live.version} />`,
  ledger: ({ run, live }) => html`<${LedgerView} run=${run} version=${live.version} />`,
  workers: ({ run, row, live }) => html`<${LanesView} run=${run} version=${live.version} row=${row} />`,
  annotations: ({ run, live }) => html`<${AnnotationsView} run=${run} version=${live.version} />`,
  prompts: ({ run, live }) => html`<${PromptsView} run=${run} version=${live.version} />`,
  evals: ({ run, live }) => html`<${EvalsView} run=${run} version=${live.version} />`,
  events: ({ run, live }) => html`<${EventsView} run=${run} version=${live.version} />`,
  config: ({ run, told }) => html`<${ConfigView} run=${run} told=${told} />`,
};
const TABS_OF_ROWS = ["annotations", "prompts", "evals"];

/** Whether a run has the tab: a search has no curves, and other tabs are there if the run has such rows. */
function isTabThere(name, row, told) {
  return name === "curves" ? row.kind !== "search" : !TABS_OF_ROWS.includes(name) || Boolean(told.has?.[name]);
}

/** What is seen of a run while its page is scrolled. */
function ShortFacts({ row }) {
  const left = secondsLeft(row);
  const isSearch = row.kind === "search";
  return html`<span class="short-facts">${[
    isSearch || row.last_reward === null ? "" : html`reward <b>${number(row.last_reward, 3)}</b>`,
    isSearch ? `search, ${plural(row.episodes_done, "episode")}` : `iteration ${number(row.iterations_done)} of ${number(row.iterations)}`,
    row.best_reward === null || row.best_reward === undefined ? "" : `held out ${number(row.eval_reward, 3)}, best ${number(row.best_reward, 3)} at version ${row.best_version}`,
    row.seconds === null ? "" : `took ${seconds(row.seconds)}`,
    left ? `about ${seconds(left)} left` : "",
  ].map((fact, index) => fact && html`<span key=${index}>${fact}</span>`)}</span>`;
}

function secondsLeft(row) {
  const since = row.status === "running" && row.started_at ? (Date.now() - Date.parse(row.started_at)) / 1000 : null;
  return since && row.iterations_done ? ((row.iterations - row.iterations_done) * since) / row.iterations_done : null;
}

function RunFacts({ row, told }) {
  const word = told.typed;
  const left = secondsLeft(row);
  return html`<dl class="facts">
    ${[
      ["algorithm", visible(row.algorithm || row.kind)],
      ["model", html`<${ShortName} of=${row.model} />`],
      ["dataset", html`<${ShortName} of=${row.dataset} />`],
      ["iterations", `${number(row.iterations_done)} of ${number(row.iterations)}`],
      ["episodes", number(row.episodes_done)],
      ["reward", number(row.last_reward, 3)],
      ...(row.best_reward !== null && row.best_reward !== undefined ? [["held out", `${number(row.eval_reward, 3)}, best ${number(row.best_reward, 3)} at version ${row.best_version}`]] : []),
      ["policy version", number(row.policy_version)],
      ["took", seconds(row.seconds)],
      ...(left ? [["about left", seconds(left)]] : []),
      ["submitted", html`<${When} at=${row.created_at} />`],
      ["seed", String(row.seed)],
    ].map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>
  ${told.children?.length > 0 && html`<${Fold} summary=${`${plural(told.children.length, "run")} came from it`}>
    <ul>${told.children.map((each) => html`<li key=${`${each.id}${each.what}`}><${Link} to=${["run", each.id]}>${visible(each.run)}<//> <span class="quiet">${visible(each.kind)}, ${visible(each.what)}</span></li>`)}</ul>
  <//>`}
  ${!exported() && html`<div class="commands">
    ${[`agentrl watch ${word}`, ...(row.status === "running" ? [`agentrl pause ${word}`] : ["paused", "failed"].includes(row.status) ? [`agentrl resume ${word}`] : []), `agentrl eval --policy ${word}`, `agentrl ui --export ${word} --out run-${row.id}.html`].map((line) => html`<${Command} key=${line} line=${line} />`)}
  </div>`}`;
}

function Progress({ of, row }) {
  if (!of?.episodes) return null;
  const share = (of.finished || 0) / of.episodes;
  return html`<div class="row" role="status">
    <progress value=${share} max="1" aria-label="Episodes of this iteration"></progress>
    <span>iteration ${of.iteration}${of.through > of.iteration ? ` to ${of.through}` : ""} of ${row.iterations}: ${number(of.finished)} of ${plural(of.episodes, "episode")}, ${plural(of.sampled_tokens, "token")}, ${plural(of.tool_calls, "call")}</span>
  </div>`;
}

function IterationsView({ run, row: runRow, live }) {
  const [all, setAll] = useState(false);
  const curves = useData(path(`runs/${run}/curves`), 0, askCurves);
  return html`<${Asked} of=${curves} what="the iterations">${(asked) => {
    const found = mergeFresh(asked, live.fresh);
    const rows = found.rows.map((row) => Object.fromEntries(found.columns.map((column, index) => [column, row[index]]))).reverse();
    const shownIf = (value, text) => (value ? text : "");
    const cell = (key) => (row) => (row[key] === null ? "" : number(row[key], 3));
    const columns = [
      { key: "iteration", label: "iteration", number: true, cell: (row) => html`<${Link} to=${["run", run, "iteration", row.iteration]}>${row.iteration}<//>` },
      { key: "status", label: "status", cell: (row) => html`<${Badge} is=${iterationStatus(row.status, runRow.status)} />${row.skipped && html` <span class="warn">${visible(row.skipped)}</span>`}` },
      { key: "reward", label: "reward", number: true, always: true, cell: cell("reward") },
      { key: "spread", label: "± over groups", number: true, title: "One standard deviation of the groups' mean rewards", cell: (row) => (row.reward_high === null ? "" : number((row.reward_high - row.reward_low) / 2, 2)) },
      { key: "groups", label: "groups", number: true, cell: (row) => number(row.groups) },
      { key: "flat", label: "with equal rewards", number: true, title: "Groups whose rewards are all equal: they have no advantages", cell: (row) => shownIf(row.flat_groups, number(row.flat_groups)) },
      { key: "dropped", label: "dropped", number: true, title: "Groups that no update trained on", cell: (row) => shownIf(row.dropped_groups, number(row.dropped_groups)) },
      { key: "episodes", label: "usable episodes", number: true, title: "Done and not tainted", cell: (row) => `${number(row.trainable)} of ${number(row.episodes)}` },
      ...["loss", "kl", "entropy", "clip_fraction", "grad_norm"].map((key) => ({ key, label: key.replace("_", " "), number: true, cell: cell(key) })),
      { key: "length", label: "tokens per episode", number: true, cell: cell("length") },
      { key: "tools", label: "failed calls", number: true, cell: (row) => shownIf(row.tool_calls, `${number(row.tool_errors)} of ${number(row.tool_calls)}`) },
      { key: "rollout", label: "rollout", number: true, cell: (row) => shownIf(row.rollout_seconds, seconds(row.rollout_seconds)) },
      { key: "update", label: "update", number: true, cell: (row) => shownIf(row.update_seconds, seconds(row.update_seconds)) },
    ];
    const shown = all ? rows : rows.slice(0, FEW_ITERATIONS);
    return html`<${Table} caption="Iterations" columns=${columns} rows=${shown} rowKey=${(row) => row.iteration} to=${(row) => openable(["run", run, "iteration", row.iteration])} empty="No iteration yet." />
      ${shown.length < rows.length && html`<button type="button" class="more" onClick=${() => setAll(true)}>show all ${number(rows.length)} iterations</button>`}`;
  }}<//>`;
}

function EventsView({ run, version }) {
  const found = useMore(path(`runs/${run}/events`, { size: 500, sort: "-id" }), version);
  const columns = [
    { key: "at", label: "when", short: true, cell: (row) => html`<${When} at=${row.created_at} />` },
    { key: "kind", label: "event", cell: (row) => html`<${Badge} is=${row.kind} />` },
    { key: "subject", label: "about", cell: (row) => visible(row.subject) },
    { key: "detail", label: "detail", wide: true, cell: (row) => visible(row.detail) },
  ];
  return html`<${Asked} of=${found} what="the events">${() => html`<${Table} caption="Events" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} /><${More} of=${found} />`}<//>`;
}

function EvalsView({ run, version }) {
  const found = useMore(path("evals", { measures: run, size: 200 }), version);
  const columns = [
    { key: "version", label: "version", number: true, cell: (row) => html`<${Link} to=${["run", row.id]}>${number(row.policy_version)}<//>` },
    { key: "dataset", label: "dataset", cell: (row) => html`<${ShortName} of=${row.dataset} /> ${visible(row.split)}` },
    { key: "status", label: "status", cell: (row) => html`<${Badge} is=${row.status} />` },
    { key: "mean", label: "mean reward", number: true, cell: (row) => number(row.mean_reward, 4) },
    { key: "interval", label: "95 % interval", cell: (row) => (row.low === null ? "" : html`${number(row.low, 3)} to ${number(row.high, 3)} <span class="quiet">${visible(row.interval_by)}</span>`) },
    { key: "accuracy", label: "accuracy", number: true, cell: (row) => number(row.accuracy, 3) },
    { key: "n", label: "episodes", number: true, cell: (row) => `${number(row.episodes)}${row.errors ? `, ${plural(row.errors, "error")}` : ""}` },
    { key: "compare", label: "compare", cell: (row) => (found.rows[0] && row !== found.rows[0] ? html`<${Link} to=${["compare"]} query=${{ a: found.rows[0].id, b: row.id }}>with version ${found.rows[0].policy_version}<//>` : "") },
  ];
  return html`<${Asked} of=${found} what="the evaluations">${() => html`<${Table} caption="Evaluations of its policies" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} empty="None of its policies was evaluated." /><${More} of=${found} />`}<//>`;
}
