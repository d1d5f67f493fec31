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
import { number, plural, seconds, visible } from "./format.js";
import { LanesView } from "./lanes.js";
import { LedgerView } from "./ledger.js";
import { Labels } from "./labels.js";
import { Overview } from "./overview.js";
import { PromptsView } from "./prompts.js";
import { go, href, readRoute, useChoice, useRoute } from "./route.js";
import { Connection, ShortName } from "./runs.js";
import { TasksView } from "./tasks.js";
import { Asked, Badge, Command, Fold, Link, More, openable, Problem, Table, Tabs, useData, useMore, When } from "./ui.js";

const CURVE_CHOICES = ["with", "smooth", "x", "log", "charts", "wide", "unchanged"];
const MAX_FRESH = 5000;
const FEW_ITERATIONS = 100;
const MAX_TOGETHER = 8;

export function RunPage({ run }) {
  const live = useLiveRun(run);
  const found = useData(path(`runs/${run}`), live.version);
  if (live.gone && found.data) return html`<${Problem} error=${{ message: "This run is not in the store any more.", hint: "Somebody removed it while it was looked at." }} />`;
  return html`<${Asked} of=${found} what="the run">${(told) => html`<${RunView} run=${run} told=${told} live=${live} />`}<//>`;
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
  useEffect(() => {
    document.title = `agentrl: ${ids.length > 1 ? `${ids.length} runs together` : row.run}`;
  }, [row.run, ids.length]);
  const open = row.status === "running" || row.status === "planned";
  const tabs = [
    ["overview", "overview"],
    ...(row.kind === "search" ? [] : [["curves", "curves"]]),
    ["iterations", "iterations", row.iterations_done],
    ["episodes", "episodes", row.episodes_done || undefined],
    ["tasks", "tasks"],
    ["ledger", "ledger"],
    ["workers", "workers"],
    ...(told.has?.annotations ? [["annotations", "annotations"]] : []),
    ...(told.has?.prompts ? [["prompts", "prompts"]] : []),
    ...(told.has?.evals ? [["evals", "evals"]] : []),
    ["events", "events"],
    ["config", "config"],
  ];
  if (tab === "curves" && ids.length > 1) {
    const charts = html`<div class="together-charts"><${RunTab} tab=${tab} run=${run} told=${told} live=${live} row=${row} events=${events} /></div>`;
    return html`<${Together} ids=${ids} />${ids.length === 2 ? html`<${RunDifferences} ids=${ids}>${charts}<//>` : html`<p class="quiet">Choose two runs to see what differs in config, numbers, tasks and transcripts.</p>${charts}`}`;
  }
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]} rel="up">runs<//><span>${visible(row.run)}</span></nav>
    <div class="run-head"><h1>${visible(row.run)}</h1> <${Badge} is=${row.status} title=${visible(row.reason)} /> ${open && html`<${Connection} is=${live.connected} />`} <${ShortFacts} row=${row} /></div>
    <div class="row labels"><${Labels} run=${run} told=${told} /><${Fold} summary="facts and commands"><${RunFacts} row=${row} told=${told} /><//></div>
    ${row.reason && html`<p class=${row.status === "failed" ? "bad" : "quiet"}>${visible(row.reason)}</p>`}
    ${told.waits_for && html`<p class="warn" role="status">waits for ${visible(told.waits_for)}</p>`}
    ${open && html`<${Progress} of=${live.progress ?? told.progress} row=${row} />`}
    <${Tabs} name="tab" tabs=${tabs} chosen=${tab} />
    <${RunTab} tab=${tab} run=${run} told=${told} live=${live} row=${row} events=${events} />`;
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

function RunTab({ tab, run, told, live, row, events }) {
  const version = live.version;
  if (tab === "overview") return html`<${Overview} run=${run} told=${told} row=${row} live=${live} events=${events.data?.rows} />`;
  if (tab === "iterations") return html`<${IterationsView} run=${run} live=${live} />`;
  if (tab === "episodes") return html`<${EvidenceTable} run=${run} version=${version} />`;
  if (tab === "tasks") return html`<${TasksView} run=${run} version=${version} />`;
  if (tab === "ledger") return html`<${LedgerView} run=${run} version=${version} />`;
  if (tab === "workers") return html`<${LanesView} run=${run} version=${version} row=${row} />`;
  if (tab === "annotations") return html`<${AnnotationsView} run=${run} version=${version} />`;
  if (tab === "prompts") return html`<${PromptsView} run=${run} version=${version} />`;
  if (tab === "evals") return html`<${EvalsView} run=${run} version=${version} />`;
  if (tab === "events") return html`<${EventsView} run=${run} version=${version} />`;
  if (tab === "config") return html`<${ConfigView} run=${run} told=${told} />`;
  return html`<${CurvesView} run=${run} name=${row.run} version=${told.evaluations} fresh=${live.fresh} events=${events.data?.rows} />`;
}

/** What is seen of a run while its page is scrolled. */
function ShortFacts({ row }) {
  const left = secondsLeft(row);
  const isSearch = row.kind === "search";
  return html`<span class="short-facts">${[
    isSearch ? `search, ${plural(row.episodes_done, "episode")}` : `iteration ${number(row.iterations_done)} of ${number(row.iterations)}`,
    isSearch ? "" : `reward ${number(row.last_reward, 3)}`,
    row.best_reward === null || row.best_reward === undefined ? "" : `held out ${number(row.eval_reward, 3)}, best ${number(row.best_reward, 3)} @${row.best_version}`,
    row.seconds === null ? "" : `took ${seconds(row.seconds)}`,
    left ? `about ${seconds(left)} left` : "",
  ].filter(Boolean).map((text) => html`<span key=${text}>${text}</span>`)}</span>`;
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
  ${told.sources?.length > 0 && html`<p class="quiet">from ${told.sources.map((each, index) => html`${index > 0 && ", "}<${Link} to=${["run", each.id]}>${visible(each.run)}<//> (${visible(each.what)})`)}</p>`}
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
    <span>iteration ${of.iteration}${of.through > of.iteration ? ` to ${of.through}` : ""} of ${row.iterations}: ${number(of.finished)} of ${plural(of.episodes, "episode")}, ${number(of.sampled_tokens)} tokens, ${plural(of.tool_calls, "call")}</span>
  </div>`;
}

function IterationsView({ run, live }) {
  const [all, setAll] = useState(false);
  const curves = useData(path(`runs/${run}/curves`), 0, askCurves);
  return html`<${Asked} of=${curves} what="the iterations">${(asked) => {
    const found = mergeFresh(asked, live.fresh);
    const rows = found.rows.map((row) => Object.fromEntries(found.columns.map((column, index) => [column, row[index]]))).reverse();
    const cell = (key, digits = 3) => (row) => number(row[key], digits);
    const columns = [
      { key: "iteration", label: "iteration", number: true, cell: (row) => html`<${Link} to=${["run", run, "iteration", row.iteration]}>${row.iteration}<//>` },
      { key: "status", label: "status", cell: (row) => html`<${Badge} is=${row.status} />${row.skipped && html` <span class="warn">${visible(row.skipped)}</span>`}` },
      { key: "reward", label: "reward", number: true, cell: cell("reward") },
      { key: "spread", label: "± over groups", number: true, cell: (row) => (row.reward_high === null ? "–" : number((row.reward_high - row.reward_low) / 2, 2)) },
      { key: "groups", label: "groups", number: true, title: "all / without variance / dropped", cell: (row) => `${number(row.groups)} / ${number(row.flat_groups)} / ${number(row.dropped_groups)}` },
      { key: "episodes", label: "usable", number: true, cell: (row) => `${number(row.trainable)} of ${number(row.episodes)}` },
      ...["loss", "kl", "entropy", "clip_fraction", "grad_norm"].map((key) => ({ key, label: key.replace("_", " "), number: true, cell: cell(key) })),
      { key: "length", label: "tokens / episode", number: true, cell: cell("length") },
      { key: "tools", label: "tool errors", number: true, cell: (row) => `${number(row.tool_errors)} of ${number(row.tool_calls)}` },
      { key: "seconds", label: "rollout + update", number: true, cell: (row) => `${seconds(row.rollout_seconds)} + ${seconds(row.update_seconds)}` },
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
    { key: "subject", label: "of", cell: (row) => visible(row.subject) },
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
    { key: "interval", label: "95 %", cell: (row) => (row.low === null ? "–" : `[${number(row.low, 3)}, ${number(row.high, 3)}] ${visible(row.interval_by)}`) },
    { key: "accuracy", label: "accuracy", number: true, cell: (row) => number(row.accuracy, 3) },
    { key: "n", label: "episodes", number: true, cell: (row) => `${number(row.episodes)}${row.errors ? `, ${plural(row.errors, "error")}` : ""}` },
    { key: "compare", label: "compare", cell: (row) => (found.rows[0] && row !== found.rows[0] ? html`<${Link} to=${["compare"]} query=${{ a: found.rows[0].id, b: row.id }}>with version ${found.rows[0].policy_version}<//>` : "") },
  ];
  return html`<${Asked} of=${found} what="the evaluations">${() => html`<${Table} caption="Evaluations of its policies" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} empty="None of its policies was evaluated." /><${More} of=${found} />`}<//>`;
}
