// @ts-check
// The overview of a run: how it learns, whether it is healthy, its errors, and episodes that show it.

import { html } from "./vendor/preact.js";
import { RewardChart } from "./curves.js";
import { exported, path } from "./data.js";
import { Examples } from "./evidence.js";
import { number, plural, visible } from "./format.js";
import { Machine } from "./machine.js";
import { SearchView } from "./search.js";
import { Asked, Command, Link, SecondsBar, Troubles, useData } from "./ui.js";

const PART_COLORS = { rollout: "w-group", "rollout and update": "w-agent", update: "w-update", stopped: "f-truncated" };

export function Overview(given) {
  return given.row.kind === "search" ? html`<${SearchOverview} ...${given} />` : html`<${LearningOverview} ...${given} />`;
}

/** A search is one iteration, so that its curves are dots. */
function SearchOverview({ run, told, live }) {
  const verdict = useData(path(`runs/${run}/verdict`), live.version);
  return html`<${SearchView} run=${run} version=${live.version}><${Verdict} of=${verdict} /><${Errors} run=${run} typed=${told.typed} rows=${verdict.data?.errors} /><//>`;
}

function LearningOverview({ run, told, row, live, events }) {
  const version = live.version;
  const examples = useData(path(`runs/${run}/examples`), version);
  const verdict = useData(path(`runs/${run}/verdict`), version);
  const titled = (rows, word) => rows.map((each, index) => [index ? `${word} ${index + 1}` : word, each]);
  return html`<${Verdict} of=${verdict} />
    ${row.iterations > 1 && html`<${RewardChart} run=${run} name=${row.run} version=${told.evaluations} fresh=${live.fresh} events=${events} />`}
    ${["planned", "running"].includes(row.status) && html`<${Machine} version=${live.loads} />`}
    ${verdict.data?.health && html`<${Health} run=${run} of=${verdict.data.health} />`}
    ${told.seconds.length > 0 && html`<h2>Where the seconds went</h2><${SecondsBar} parts=${told.seconds.map(({ part, seconds }) => [part, seconds, PART_COLORS[part] || "f-open"])} />`}
    <${Errors} run=${run} typed=${told.typed} rows=${verdict.data?.errors} />
    ${examples.data?.best.length > 0 && html`<h2>Episodes of ${row.iterations > 1 ? "the newest iteration" : "this run"}</h2>
      <${Examples} rows=${[...titled(examples.data.best, "best"), ...titled(examples.data.worst, "worst")]} />`}`;
}

/** Whether something is wrong in the run, as `agentrl changes` says it. */
function Verdict({ of }) {
  return html`<${Asked} of=${of} what="what is unusual">${({ sentence, troubles }) => html`<p>${visible(sentence)}</p><${Troubles} of=${troubles} />`}<//>`;
}

/** One line about the newest iteration that ended. */
function Health({ run, of }) {
  return html`<p class="health" role="status"><${Link} to=${["run", run, "iteration", of.iteration]}>iteration ${number(of.iteration)}:<//> ${of.facts.map(({ text, is_off: isOff }) => html`<span key=${text} class=${isOff ? "warn" : "quiet"}>${visible(text)}</span>`)}</p>`;
}

function Errors({ run, typed, rows }) {
  if (!rows?.length) return null;
  const few = rows.slice(0, 5);
  return html`<h2>Errors</h2><ul class="errors">${few.map((row) => html`<li key=${`${row.error_class} ${row.tool}`}><${Link} to=${["run", run]} query=${{ tab: "episodes", error_class: row.error_class }}><b class="bad">${visible(row.error_class)}</b><//> ${row.tool === null ? "ended" : row.tool ? `of ${visible(row.tool)}: ${plural(row.errors, "time")} in` : `of a call that could not be read: ${plural(row.errors, "time")} in`} ${plural(row.episodes, "episode")}</li>`)}</ul>
    ${!exported() && html`<${Command} line=${`agentrl episodes ${typed} --error ${visible(few[0].error_class).replace(/[^\w.-]/g, "")}`} />`}`;
}
