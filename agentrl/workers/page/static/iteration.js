// @ts-check
// An iteration: its groups as a grid, its update, a scatter of any two columns of its episodes.

import { html, useMemo, useRef, useState } from "./vendor/preact.js";
import { niceTicks } from "./chart.js";
import { exported, path } from "./data.js";
import { EvidenceTable, Examples } from "./evidence.js";
import { iterationStatus, number, percent, plural, seconds, visible } from "./format.js";
import { go, href, useChoice } from "./route.js";
import { Asked, Badge, Facts, KeyLink, Link, openable, Table, Troubles, useData, useTitle, useWidth } from "./ui.js";

const UPDATE_COLUMNS = ["rows", "tokens", "loss", "kl", "policy_kl", "entropy", "clip_fraction", "log_ratio_clamped", "ratio", "grad_norm", "learning_rate", "value_loss", "explained_variance", "sampler_difference_mean", "sampler_difference_max", "importance_weight", "importance_outside", "effective_sample_size"];
const SCATTER = ["reward", "advantage", "sampled_tokens", "prompt_tokens", "steps", "tool_calls", "tool_errors", "seconds", "slot", "sample"];
const FAR = 26;

export function IterationPage({ run, iteration }) {
  const told = useData(path(`runs/${run}`));
  const found = useData(path(`runs/${run}/iterations/${iteration}`));
  const number_ = Number(iteration);
  const name = told.data?.run.run || run;
  useTitle(`${name}, iteration ${iteration}`);
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]}>runs<//><${Link} to=${["run", run]} rel="up">${visible(name)}<//><span>iteration ${iteration}</span></nav>
    <div class="row base"><h1>Iteration ${iteration}</h1>
      ${number_ > 1 && html`<${KeyLink} to=${["run", run, "iteration", number_ - 1]} rel="prev">← iteration ${number_ - 1}<//>`}
      ${told.data && number_ < told.data.run.iterations && html`<${KeyLink} to=${["run", run, "iteration", number_ + 1]} rel="next">iteration ${number_ + 1} →<//>`}
    </div>
    <${Asked} of=${found} what="the iteration">${(data) => html`<${IterationView} run=${run} iteration=${iteration} data=${data} runStatus=${told.data?.run.status} />`}<//>`;
}

function IterationView({ run, iteration, data, runStatus }) {
  const row = data.iteration;
  const trained = data.groups.flatMap((group) => group.episodes).filter((episode) => episode.fate === "trained").length;
  return html`<${Facts} of=${[
      ["status", html`<${Badge} is=${iterationStatus(row.status, runStatus)} />${row.skipped ? ` ${visible(row.skipped)}` : ""}`],
      ["reward", number(row.mean_reward, 3)],
      ["sampled by", `version ${number(row.policy_version)}${row.staleness ? `, ${number(row.staleness)} behind` : ""}`],
      ["held out", row.eval_reward === null ? null : number(row.eval_reward, 3)],
      ["trained on", data.left_out || !data.updates.length ? null : `${number(trained)} of ${plural(row.episodes, "episode")}`],
      ["usable", `${number(row.trainable)} of ${plural(row.episodes, "episode")}`, "Episodes that an update may use: done, and not tainted"],
      ["groups", data.counted],
      ["tokens", `${number(row.prompt_tokens)} read, ${number(row.sampled_tokens)} sampled`],
      ["tool calls", row.tool_calls ? `${number(row.tool_calls)}, ${number(row.tool_errors)} failed` : null],
      ["rollout", row.rollout_seconds === null ? null : seconds(row.rollout_seconds)],
      ["update", row.update_seconds ? seconds(row.update_seconds) : null],
      ["speed of the update", row.tflops === null ? null : `${number(row.tflops, 3)} TFLOP/s${row.mfu === null ? "" : `, ${percent(row.mfu)} of the peak`}`],
      ["GPU memory of the update", row.peak_memory_bytes === null ? null : `${number(row.peak_memory_bytes / 2 ** 30, 3)} GiB at its peak`],
    ]} />
    <${Troubles} of=${data.troubles} none=${data.updates.length ? "Nothing is off in the update: ratio, clipped tokens, mismatch of sampler and trainer, effective sample size and gradient are in their usual ranges." : ""} />
    ${!exported() && html`<${Changes} run=${run} iteration=${iteration} />`}
    <h2>Groups <span class="count">each dot is an episode: the higher, the more reward; ${"\u25cb"}: not trained on; striped: all rewards of the group are equal</span></h2>
    <${GroupGrid} groups=${data.groups} />
    ${data.left_out ? html`<p class="quiet">${plural(data.left_out, "more group")} not shown.</p>` : ""}
    ${!exported() && data.groups.some((group) => !group.borrowed) && html`<h2>Episodes</h2><${EvidenceTable} run=${run} fixed=${{ iteration }} hidden=${["iteration"]} />`}
    <h2>Update</h2>
    <${Updates} rows=${data.updates} iteration=${row} />
    <h2>Scatter plot of the episodes</h2>
    <${Scatter} groups=${data.groups} />`;
}

/** The numbers that are shares of the episodes or of the calls. */
const SHARES = /^(truncated|failed) /;

/** What changed against the iteration before, and by task against its last time. */
function Changes({ run, iteration }) {
  const found = useData(path(`runs/${run}/iterations/${iteration}/changes`));
  return html`<${Asked} of=${found} what="what changed">${(data) => {
    const rows = [...data.numbers.map((row) => ({ ...row, what: row.name, text: SHARES.test(row.name) ? percent : undefined })), ...data.parts.map((row) => ({ ...row, what: `reward part ${visible(row.part)}` })), ...data.errors.map((row) => ({ ...row, what: `errors ${visible(row.tool ?? "episode")} ${visible(row.error_class)}`, error: row.error_class }))].filter((row) => row.now !== null || row.before !== null);
    return html`${data.before && html`<h2>What changed <span class="count">against iteration ${data.before}</span></h2><div class="beside-each"><${Table} caption="What changed" columns=${changeColumns(run, iteration)} rows=${rows} rowKey=${(row) => row.what} />
      <div>${data.tasks.length ? html`<${Table} caption="Tasks that changed" columns=${taskChangeColumns(run)} rows=${data.tasks} rowKey=${(row) => row.task_id} to=${(row) => openable(["group", row.group_id])} />` : html`<p class="quiet">${data.again ? `None of its ${plural(data.again, "task")} that were sampled before has another mean reward now.` : "None of its tasks was sampled before, so that no task can be compared."}</p>`}</div></div>`}
      <${Examples} rows=${[...(data.examples.best?.reward === data.examples.worst?.reward ? [["best and worst", data.examples.best]] : [["best", data.examples.best], ["worst", data.examples.worst]]), ["in the task that changed most", data.examples.changed]]} />`;
  }}<//>`;
}

function changeColumns(run, iteration) {
  return [
    { key: "what", label: "what", cell: (row) => (row.error ? html`<${Link} to=${["run", run, "iteration", iteration]} query=${{ error_class: row.error }}>${row.what}<//>` : row.what) },
    { key: "before", label: "before", number: true, cell: (row) => (row.text || number)(row.before, 3) },
    { key: "now", label: "now", number: true, cell: (row) => (row.text || number)(row.now, 3) },
    { key: "change", label: "change", number: true, cell: (row) => changeOf(row) },
  ];
}

function taskChangeColumns(run) {
  return [
    { key: "task", label: "task", wide: true, cell: (row) => html`${visible(row.question).slice(0, 120)} <${Link} to=${["run", run, "task", row.task_id]}>${visible(row.task).slice(0, 60)}<//>` },
    { key: "previous", label: "previous iteration", number: true, title: "The previous iteration that sampled the task", cell: (row) => html`<${Link} to=${["run", run, "iteration", row.previous]}>${row.previous}<//>` },
    { key: "before", label: "before", number: true, cell: (row) => number(row.before, 3) },
    { key: "now", label: "now", number: true, cell: (row) => number(row.now, 3) },
    { key: "change", label: "change", number: true, cell: (row) => changeOf(row) },
  ];
}

function changeOf({ before, now, text = number }) {
  if (before === null || now === null) return "–";
  const change = now - before;
  return change === 0 ? html`<span class="quiet">0</span>` : html`<b>${change > 0 ? "+" : ""}${text(change, 2)}</b>`;
}

function GroupGrid({ groups }) {
  const rewards = groups.flatMap((group) => group.episodes.map((episode) => episode.reward)).filter(Number.isFinite);
  const least = rewards.reduce((a, b) => Math.min(a, b), Infinity);
  const most = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!groups.length) return html`<p class="quiet">It has no groups yet.</p>`;
  return html`<ul class="grid">
    ${groups.map((group) => html`<li key=${group.id} class=${`cell ${group.flat ? "flat" : ""}`} data-row=${openable(["group", group.id])}>
      <${Link} to=${["group", group.id]} title=${visible(group.task)}>${visible(group.task).slice(0, 40)}<//>
      <div class="dots" style=${{ height: "34px" }}>${group.episodes.map((episode, index) => html`<${Dot} key=${episode.id} episode=${episode} index=${index} of=${group.episodes.length} least=${least} most=${most} />`)}</div>
      <span class="quiet">${group.mean_reward === null ? visible(group.status) : meanAndSpread(group)}</span>
      ${group.dropped ? html` <span class="warn">${visible(group.dropped).replaceAll("_", " ")}</span>` : group.flat ? html` <span class=${group.solved ? "good" : "quiet"}>${group.solved ? "solved" : "equal rewards"}</span>` : ""}
      ${group.borrowed ? html` <span class="quiet">stored</span>` : ""}
    </li>`)}
  </ul>`;
}

/** The mean reward of a group and its standard deviation; of one episode its reward. */
export function meanAndSpread(group, digits = 3) {
  return `${number(group.mean_reward, digits)}${group.std_reward === null ? "" : ` ± ${number(group.std_reward, digits - 1)}`}`;
}

function Dot({ episode, index, of, least, most }) {
  const share = episode.reward === null ? 0 : most > least ? (episode.reward - least) / (most - least) : 0.5;
  const what = `episode ${episode.id}: ${episode.reward === null ? episode.status : `reward ${number(episode.reward, 3)}`}${episode.advantage === null ? "" : `, advantage ${number(episode.advantage, 3)}`}${episode.fate ? `, ${episode.fate.replaceAll("_", " ")}` : ""}`;
  const kind = episode.status === "failed" || episode.status === "infra_error" ? "failed" : episode.advantage === null || episode.advantage === 0 ? "unread" : episode.advantage > 0 ? "better" : "worse";
  return html`<a class=${`dot ${kind}`} href=${openable(["episode", episode.id])} title=${what} aria-label=${what} style=${{ left: `${(100 * (index + 0.5)) / of}%`, bottom: `${share * 24}px` }}></a>`;
}

function Updates({ rows, iteration }) {
  if (!rows.length && iteration.skipped) return html`<p class="quiet">The update was skipped: ${visible(iteration.skipped)}.</p>`;
  if (!rows.length) return html`<p class="quiet">${iteration.status === "done" ? "This iteration updates nothing." : iteration.status === "cancelled" ? "The iteration was cancelled before its update." : "No update yet."}</p>`;
  const known = UPDATE_COLUMNS.filter((key) => rows.some((row) => row[key] !== null && row[key] !== undefined));
  const columns = [{ key: "minibatch", label: "step", number: true, cell: (row) => row.minibatch + 1 }, ...known.map((key) => ({ key, label: key.replaceAll("_", " "), number: true, cell: (row) => number(row[key], 4) }))];
  return html`<${Table} caption="Optimizer steps" columns=${columns} rows=${rows} rowKey=${(row) => row.id} />`;
}

function Scatter({ groups }) {
  const [x, setX] = useChoice("sx", "sampled_tokens");
  const [y, setY] = useChoice("sy", "reward");
  const [holder, width] = useWidth();
  const [over, setOver] = useState(null);
  const canvas = useRef(null);
  const points = useMemo(() => groups.flatMap((group) => group.episodes.map((episode) => ({ ...episode, slot: group.slot, group }))).filter((each) => Number.isFinite(each[x]) && Number.isFinite(each[y])), [groups, x, y]);
  const placeCount = (one) => points.filter((each) => each[x] === one[x] && each[y] === one[y]).length;
  const height = 300;
  const [xs, ys] = [rangeOf(points, x), rangeOf(points, y)];
  const placeX = (value) => 50 + ((value - xs[0]) / (xs[1] - xs[0])) * Math.max(10, width - 70);
  const placeY = (value) => height - 30 - ((value - ys[0]) / (ys[1] - ys[0])) * (height - 45);
  const pickAxis = (label, value, set) => html`<label class="select"><span>${label}</span><select value=${value} onChange=${(event) => set(event.currentTarget.value)}>${SCATTER.map((key) => html`<option key=${key} value=${key} selected=${key === value}>${key.replaceAll("_", " ")}</option>`)}</select></label>`;
  return html`<div class="controls">${pickAxis("x axis", x, setX)}${pickAxis("y axis", y, setY)}<span class="quiet" role="status">${over ? `episode ${over.id}: ${number(over[x])}, ${number(over[y])}, ${visible(over.group.task).slice(0, 60)}${placeCount(over) > 1 ? `, one of ${number(placeCount(over))} there` : ""}` : plural(points.length, "episode")}</span></div>
    <div ref=${holder} class="scatter">
      ${!points.length && html`<p class="quiet">No episode has both numbers.</p>`}
      ${width > 0 && points.length > 0 && html`<svg ref=${canvas} width=${width} height=${height} role="img" aria-label=${`${y} by ${x} of ${plural(points.length, "episode")}`}>
        <g class="axes"><line x1="50" x2=${width - 20} y1=${height - 30} y2=${height - 30} /><line x1="50" x2="50" y1="15" y2=${height - 30} />
          ${niceTicks(xs, points.every((each) => Number.isInteger(each[x]))).map((value) => html`<text key=${`x${value}`} x=${placeX(value)} y=${height - 14} text-anchor="middle">${number(value, 3)}</text>`)}
          ${niceTicks(ys, points.every((each) => Number.isInteger(each[y]))).map((value) => html`<text key=${`y${value}`} x="44" y=${placeY(value) + 4} text-anchor="end">${number(value, 3)}</text>`)}
          <text x=${width / 2} y=${height - 2} text-anchor="middle">${x.replaceAll("_", " ")}</text></g>
        ${apart(points, x, y).map(([each, [dx, dy]]) => html`<circle key=${each.id} class=${each.advantage > 0 ? "better" : each.advantage < 0 ? "worse" : "unread"} cx=${placeX(each[x]) + dx} cy=${placeY(each[y]) + dy} r="4" onMouseEnter=${() => setOver(each)} onClick=${() => openable(["episode", each.id]) && go(href(["episode", each.id]))}><title>${`episode ${each.id}`}</title></circle>`)}
      </svg>`}
    </div>
    ${points.length > 0 && html`<p class="legend"><span><i class="swatch better"></i>better than its group</span><span><i class="swatch worse"></i>worse</span><span><i class="swatch unread"></i>not trained on, or no variance</span><span>episodes with the same two numbers are drawn side by side</span></p>`}`;
}

/** The points, each with how many pixels it is drawn away from its place, so that none hides another: along a spiral, closer
 * together where there are many. */
function apart(points, x, y) {
  const places = new Map();
  for (const each of points) {
    const place = `${each[x]} ${each[y]}`;
    places.set(place, [...(places.get(place) || []), each]);
  }
  return [...places.values()].flatMap((there) => {
    const step = Math.min(4, FAR / Math.sqrt(there.length));
    return there.map((each, index) => [each, [step * Math.sqrt(index) * Math.cos(2.4 * index), step * Math.sqrt(index) * Math.sin(2.4 * index)]]);
  });
}

/** @returns {[number, number]} */
function rangeOf(points, key) {
  const values = points.map((each) => each[key]);
  const least = values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length) return [0, 1];
  const room = least === most ? 0.5 : 0.05 * (most - least);
  return [least - room, most + room];
}
