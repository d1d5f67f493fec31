// @ts-check
// The overview of a run: how it learns, whether it is healthy, what went wrong, and episodes that show it.

import { html } from "./vendor/preact.js";
import { RewardChart, columnsByName } from "./curves.js";
import { askCurves, exported, path } from "./data.js";
import { Examples } from "./evidence.js";
import { number, percent, plural, seconds, visible } from "./format.js";
import { Machine } from "./machine.js";
import { SearchView } from "./search.js";
import { Command, Link, Troubles, useData } from "./ui.js";

const SOME_FLAT = 0.5;
const SOME_FAILED = 0.25;

export function Overview(given) {
  return given.row.kind === "search" ? html`<${SearchOverview} ...${given} />` : html`<${LearningOverview} ...${given} />`;
}

/** A search is one iteration, so that its curves are dots. */
function SearchOverview({ run, told, live }) {
  const errors = useData(path(`runs/${run}/errors`), live.version);
  return html`<${SearchView} run=${run} version=${live.version}>
    <${Troubles} of=${told.troubles} />
    ${errors.data?.length > 0 && html`<h2>What went wrong</h2><${Errors} run=${run} typed=${told.typed} rows=${errors.data} />`}
  <//>`;
}

function LearningOverview({ run, told, row, live, events }) {
  const version = live.version;
  const curves = useData(path(`runs/${run}/curves`), told.evaluations, askCurves);
  const examples = useData(path(`runs/${run}/examples`), version);
  const errors = useData(path(`runs/${run}/errors`), version);
  return html`<${Troubles} of=${told.troubles} />
    <${RewardChart} run=${run} name=${row.run} version=${told.evaluations} fresh=${live.fresh} events=${events} />
    ${["planned", "running"].includes(row.status) && html`<${Machine} version=${live.loads} />`}
    ${curves.data && html`<${Health} run=${run} of=${columnsByName(curves.data, live.fresh)} />`}
    ${errors.data?.length > 0 && html`<h2>What went wrong</h2><${Errors} run=${run} typed=${told.typed} rows=${errors.data} />`}
    ${examples.data?.best.length > 0 && html`<h2>Episodes of the newest iteration</h2>
      <${Examples} rows=${[...examples.data.best.map((each, index) => [index ? `best ${index + 1}` : "best", each]), ...examples.data.worst.map((each, index) => [index ? `worst ${index + 1}` : "worst", each])]} />`}`;
}

/** One line about the newest iteration that ended. */
function Health({ run, of }) {
  const at = of.status.lastIndexOf("done");
  if (at < 0) return null;
  const now = (name) => of[name][at];
  /** @type {[string, boolean][]} */
  const facts = [
    [`${number(now("flat_groups"))} of ${plural(now("groups"), "group")} without variance`, now("flat_groups") / now("groups") > SOME_FLAT],
    [`${percent(now("tool_error_rate"))} of the tool calls failed`, now("tool_error_rate") > SOME_FAILED],
    [`${number(now("trainable"))} of ${plural(now("episodes"), "episode")} usable`, now("trainable") < now("episodes")],
    [`staleness ${number(now("staleness"))}`, now("staleness") > 1],
    [`rollout ${seconds(now("rollout_seconds"))}, update ${seconds(now("update_seconds"))}`, false],
    ...(now("skipped") ? [/** @type {[string, boolean]} */ ([`update skipped: ${visible(now("skipped"))}`, true])] : []),
  ];
  return html`<p class="health" role="status"><${Link} to=${["run", run, "iteration", now("iteration")]}>iteration ${now("iteration")}:<//> ${facts.filter(([text]) => !text.includes("–")).map(([text, off]) => html`<span key=${text} class=${off ? "warn" : "quiet"}>${text}</span>`)}</p>`;
}

function Errors({ run, typed, rows }) {
  const few = rows.slice(0, 5);
  return html`<ul class="errors">${few.map((row) => html`<li key=${`${row.error_class} ${row.tool}`}><${Link} to=${["run", run]} query=${{ tab: "episodes", error_class: row.error_class }}><b class="bad">${visible(row.error_class)}</b><//> ${row.tool === null ? "of an episode" : row.tool ? `of ${visible(row.tool)}` : "of an unreadable call"}: ${plural(row.errors, "time")} in ${plural(row.episodes, "episode")}</li>`)}</ul>
    ${!exported() && html`<${Command} line=${`agentrl episodes ${typed} --error ${visible(few[0].error_class).replace(/[^\w.-]/g, "")}`} />`}`;
}
