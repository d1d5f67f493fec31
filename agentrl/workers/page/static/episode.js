// @ts-check
// An episode: its transcript, its tokens, why it has the reward and the advantage it has, where it came from and went.

import { html, useState } from "./vendor/preact.js";
import { CommandOrButton } from "./actions.js";
import { ask, exported, isThere, path } from "./data.js";
import { json, number, plural, seconds, visible } from "./format.js";
import { WithinList } from "./evidence.js";
import { readRoute, useChoice } from "./route.js";
import { TokensView, useTurnTokens } from "./tokens.js";
import { Asked, Badge, Facts, Fold, KeyLink, Link, Problem, SecondsBar, Tabs, Text, useData, useTitle } from "./ui.js";

const TEXT_PAGE = 200000;
const FIRST_TOKENS = 4096;
/** The commands of an episode, in their order, each with what it is for. */
const COMMANDS = {
  verify: "Verify that the recorded tokens, tool results and rewards can be computed again:",
  why: "Explain the advantage in the terminal:",
  whatif: "Compute the advantages by another algorithm:",
  rescore: "Score the run by another reward:",
  fork: "Sample again from a turn on:",
  export: "Write the episode into one file:",
};
const ACTED = ["verify", "fork", "rescore", "whatif"];

export function EpisodePage({ episode }) {
  const found = useData(path(`episodes/${episode}`));
  useTitle(`episode ${episode}`);
  return html`<${Asked} of=${found} what="the episode" title=${`Episode ${visible(episode)}`}>${(data) => html`<${EpisodeView} data=${data} />`}<//>`;
}

function EpisodeView({ data }) {
  const { episode: row } = data;
  const [tab] = useChoice("tab", "transcript");
  const [list] = useChoice("list");
  const counts = { transcript: lengthOf(data, row).turns, tokens: lengthOf(data, row).tokens, said: data.annotations?.length };
  const tabs = Object.entries(EPISODE_TABS).filter(([name]) => name !== "said" || counts.said).map(([name, { label }]) => [name, label, counts[name]]);
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]}>runs<//><${Link} to=${["run", row.run_id]}>${visible(row.run)}<//><${Link} to=${["run", row.run_id, "iteration", row.iteration]}>iteration ${row.iteration}<//><${Link} to=${["group", row.group_id]} rel="up">group ${row.group_id}<//><span>episode ${row.id}</span></nav>
    <div class="row base"><h1>Episode ${row.id}</h1> <${Badge} is=${row.status} />
      ${row.stop_reason && row.stop_reason !== "answered" ? html`<span class="warn">${visible(row.stop_reason).replaceAll("_", " ")}</span>` : ""}
      ${row.tainted && html`<span class="warn">tainted: not trained on</span>`}
      <${Beside} ...${data.beside} />
      ${list && html`<${WithinList} episode=${row.id} list=${list} keep=${keepTab()} />`}
    </div>
    ${row.error && html`<p class="bad">${visible(row.error_class)}: ${visible(row.error)}</p>`}
    <${EpisodeFacts} data=${data} row=${row} />
    <${EpisodeSeconds} data=${data} row=${row} />
    <${Waterfall} data=${data} row=${row} />
    <${Tabs} name="tab" tabs=${tabs} chosen=${tab} />
    ${(EPISODE_TABS[tab] || EPISODE_TABS.transcript).view(data, row)}`;
}

/** The tabs of an episode, in their order. */
export const EPISODE_TABS = {
  transcript: { label: "transcript", view: (data, row) => html`<${Transcript} data=${data} row=${row} />` },
  tokens: { label: "tokens", view: (data, row) => data.tokens_removed ? html`<p class="quiet">${visible(data.tokens_removed)}</p>` : html`<${TokensView} episode=${row.id} row=${row} />` },
  why: { label: "why this reward", view: (data, row) => html`<${WhyView} data=${data} row=${row} />` },
  said: { label: "annotations", view: (data) => html`<${Said} rows=${data.annotations || []} />` },
};

/** Its turns and tokens with those that it has from a parent, and each token that chains share counted in each. */
function lengthOf({ chains, turns }, row) {
  if (!chains?.length) return { turns: turns.length, tokens: row.prompt_tokens + row.sampled_tokens };
  return { turns: chains.reduce((sum, chain) => sum + chain.steps.length, 0), tokens: Math.max(...chains.map((chain) => chain.end)) };
}

/** Its siblings before and after it. */
function Beside({ previous, next }) {
  const link = (id, rel, text) => id !== null && isThere(path(`episodes/${id}`)) && html`<${KeyLink} to=${["episode", id]} query=${keepTab()} rel=${rel}>${text}<//>`;
  return html`${link(previous, "prev", "← previous sibling")} ${link(next, "next", "next sibling →")}`;
}

function keepTab() {
  const { tab, color, only } = readRoute().query;
  return { tab, color, only };
}

function EpisodeFacts({ data, row }) {
  const fate = data.fate?.fate;
  return html`<${Facts} of=${[
    ["task", html`<${Link} to=${["run", row.run_id, "task", data.task.id]}>${visible(row.task).slice(0, 120)}<//>`],
    ["reward", html`<b>${number(row.reward, 4)}</b>${data.rewards?.length > 1 ? html` <span class="quiet">${rewardParts(data.rewards)}</span>` : ""}`],
    ["advantage", row.advantage === null ? null : number(row.advantage, 4)],
    ["answer", visible(row.final_answer).slice(0, 200)],
    ["reference", visible(row.reference).slice(0, 200)],
    ["fate", typeof fate === "string" ? html`<${Badge} is=${fate} />` : null],
    ["sampled by", `version ${row.policy_version}${row.staleness ? `, ${number(row.staleness)} behind` : ""}`],
    ["turns", number(row.steps)],
    ["tokens", `${number(row.prompt_tokens)} read, ${number(row.sampled_tokens)} sampled`],
    ["calls", `${number(row.tool_calls)}${row.tool_errors ? `, ${number(row.tool_errors)} failed` : ""}`],
    ["sampling", seconds(row.generate_seconds)],
    ["tools", seconds(row.tool_seconds)],
    ["took", seconds(row.seconds)],
    ["attempt", row.attempt > 1 ? number(row.attempt) : null],
    ["from", data.parent ? html`<${Link} to=${["episode", data.parent.id]}>episode ${data.parent.id}<//>, turn ${data.parent.step}` : null],
  ]} />
  ${data.forks?.length > 0 && html`<p class="quiet">forks: ${data.forks.map((fork, index) => html`${index > 0 && ", "}<${Link} to=${["episode", fork.id]}>${fork.id}<//> at turn ${fork.step} (${number(fork.reward, 3)})`)}</p>`}`;
}

/** Where the seconds of an episode went; what no part explains is waiting. */
function EpisodeSeconds({ data, row }) {
  if (!row.seconds || data.next_turn !== null) return null;
  const calls = data.turns.flatMap((turn) => turn.calls);
  const sum = (rows, name) => rows.reduce((all, each) => all + (each[name] || 0), 0);
  const known = [
    ["sampling", row.generate_seconds || 0, "w-group"],
    ["tools", row.tool_seconds || 0, "w-call"],
    ["waiting for a tools worker", sum(calls, "queue_seconds"), "f-truncated"],
    ["judging", sum(data.grades || [], "seconds"), "w-agent"],
  ];
  const rest = row.seconds - known.reduce((all, [, value]) => all + value, 0);
  return html`<${SecondsBar} parts=${[...known, ["waiting for siblings, batches and messages", Math.max(0, rest), "f-open"]].filter(([, value]) => value > 0)} />`;
}

const MAX_SPANS = 500;

/** When an episode sampled, waited for a tools worker, ran its tools and was judged: a line for each, over its time. */
function Waterfall({ data, row }) {
  const [start, end] = [Date.parse(row.started_at), Date.parse(row.finished_at)];
  if (!(end > start) || data.next_turn !== null) return null;
  const turns = data.turns.filter((turn) => !turn.inherited && turn.generate_seconds);
  const calls = turns.flatMap((turn) => turn.calls.map((call) => ({ ...call, step: turn.step })));
  const timeOf = (at) => Date.parse(at || "");
  const lanes = [
    ["sampling", "w-group", turns.map((turn) => [timeOf(turn.sampled_at) - 1000 * turn.generate_seconds, timeOf(turn.sampled_at), `turn ${turn.step}`])],
    ["waiting for a tools worker", "f-truncated", calls.map((call) => [timeOf(call.created_at), timeOf(call.started_at), `${visible(call.tool)}, turn ${call.step}`])],
    ["tools", "w-call", calls.map((call) => [timeOf(call.started_at), timeOf(call.finished_at), `${visible(call.tool)}, turn ${call.step}`])],
    ["judging", "w-agent", (data.grades || []).map((call) => [timeOf(call.started_at), timeOf(call.finished_at), visible(call.tool)])],
  ].map(([name, kind, spans]) => [name, kind, spans.filter(([from, to]) => to >= from && to > start && from < end).slice(0, MAX_SPANS)]).filter(([, , spans]) => spans.length);
  const percentOf = (at) => (100 * (Math.min(end, Math.max(start, at)) - start)) / (end - start);
  if (!lanes.length) return null;
  return html`<div class="waterfall" role="img" aria-label=${`Over ${seconds((end - start) / 1000)}: ${lanes.map(([name, , spans]) => `${name} ${plural(spans.length, "time")}`).join(", ")}`}>${lanes.map(([name, kind, spans]) => html`<div key=${name} class="waterfall-row"><span class="quiet">${name}</span><div class="waterfall-line">${spans.map(([from, to, what], index) => html`<span key=${index} class=${kind} style=${{ left: `${percentOf(from)}%`, width: `${percentOf(to) - percentOf(from)}%` }} title=${`${what.slice(0, 100)}: ${name} ${seconds((to - from) / 1000)}, after ${seconds(Math.max(0, from - start) / 1000)}`}></span>`)}</div></div>`)}</div>`;
}

function rewardParts(rewards) {
  return rewards.filter((each) => each.reward_set === "default").slice(0, 8).map((each) => `${visible(each.part)} ${number(each.value, 3)}${each.weight === 1 ? "" : ` × ${number(each.weight)}`}`).join(" + ");
}

// the transcript

/** The transcript of an episode, for a place beside another one. */
export function TranscriptBeside({ episode }) {
  const found = useData(path(`episodes/${episode}`));
  return html`<${Asked} of=${found} what="the episode">${(data) => html`<section class="sibling" aria-label=${`Episode ${episode}`}>
    <header><${Link} to=${["episode", episode]}><b>episode ${episode}</b><//> <span class="quiet">of ${visible(data.episode.run)}, reward ${number(data.episode.reward, 3)}, answer ${visible(data.episode.final_answer).slice(0, 120) || "–"}</span></header>
    <${Transcript} data=${data} row=${data.episode} />
  </section>`}<//>`;
}

const ROLES = { system: "system", user: "user", assistant: "model", tool: "tool" };

function Transcript({ data, row }) {
  const [later, setLater] = useState({ turns: [], next: data.next_turn, error: null });
  const turns = [...data.turns, ...later.turns];
  const branches = data.chains?.length > 1;
  const hasTokens = !data.tokens_removed && isThere(path(`episodes/${row.id}/tokens`, { start: 0, size: FIRST_TOKENS }));
  const [switcher, tokensOf] = useTurnTokens(hasTokens ? row.id : null);
  const fetchLater = () =>
    ask(path(`episodes/${row.id}`, { turn: later.next })).then(
      (page) => setLater((now) => ({ turns: [...now.turns, ...page.turns], next: page.next_turn, error: null })),
      (error) => setLater((now) => ({ ...now, error })),
    );
  return html`${turns.length > 0 && hasTokens && switcher}
    ${branches && html`<${ChainTree} chains=${data.chains} turns=${turns} episode=${row.id} />`}
    <ol class="transcript">
      ${turns.length > 0 && html`<${Opening} messages=${missingSystem(data)} episode=${row.id} hasTokens=${hasTokens} />`}
      ${!turns.length && (data.task.messages || []).map((message, index) => html`<li key=${`task${index}`}><${Message} message=${message} episode=${row.id} /></li>`)}
      ${turns.map((turn) => html`<${Turn} key=${turn.step} turn=${turn} branches=${branches} row=${row} tokens=${tokensOf(turn)} />`)}
    </ol>
    ${later.next !== null && later.next !== undefined && html`<button type="button" class="more" onClick=${fetchLater}>show the turns from ${later.next} on</button>`}
    ${later.error && html`<${Problem} error=${later.error} small />`}
    ${data.agent?.error && html`<h2>The agent ended so</h2><${Part} of=${data.agent} name="error" episode=${row.id} mono />`}
    ${data.agent?.output && html`<${Fold} summary="what the agent printed"><${Part} of=${data.agent} name="output" episode=${row.id} mono /><//>`}
    ${data.grades?.length > 0 && html`<h2>How it was judged</h2>${data.grades.map((call) => html`<${Call} key=${call.id} call=${call} row=${row} />`)}`}`;
}

/** The task's system messages where the first turn does not tell of one. */
function missingSystem({ task, turns }) {
  const isSystem = (message) => message.role === "system" || message.role === "developer";
  return turns[0].messages.some(isSystem) || turns[0].shared_messages ? [] : (task.messages || []).filter(isSystem);
}

/** What stands before the first message: a chat template may add a system text and the tools, which only the tokens have. */
function Opening({ messages, episode, hasTokens }) {
  const asked = path(`episodes/${episode}/tokens`, { start: 0, size: FIRST_TOKENS });
  return html`${messages.map((message, index) => html`<li key=${index}><${Message} message=${message} episode=${episode} /></li>`)}
    ${hasTokens && html`<li><${Fold} summary="the first prompt as the model read it, with what the chat template added (system text, tools)"><${FirstPrompt} asked=${asked} /><//></li>`}`;
}

function FirstPrompt({ asked }) {
  const found = useData(asked);
  return html`<${Asked} of=${found} what="the tokens">${(page) => {
    const [first] = page.segments;
    if (!page.texts || first?.kind !== "prompt") return html`<p class="quiet">${visible(page.why_no_texts) || "It begins with nothing that was read."}</p>`;
    return html`<div class="message"><${Text} value=${page.texts.slice(0, first.end).join("")} mono /></div>${first.end < page.total && first.end >= page.ids.length && html`<p class="quiet">It goes on: see the tokens.</p>`}`;
  }}<//>`;
}

/** A text of an answer; where it was cut, the rest can be asked for. */
function Part({ of, name, episode, ...how }) {
  const where = of.of?.[name];
  const rest = where ? (start) => path(`episodes/${episode}/text`, { of: where, size: TEXT_PAGE, start }) : undefined;
  const value = of[name];
  return html`<${Text} value=${typeof value === "string" ? value : json(value)} cut=${of.cut?.[name] || 0} rest=${rest} ...${how} />`;
}

/** Which turns continue one another: an outside agent may open several chains. */
function ChainTree({ chains, turns, episode }) {
  const byStep = new Map(turns.map((turn) => [turn.step, turn]));
  const known = new Set(chains.flatMap((chain) => chain.steps));
  const roots = chains.filter((chain) => chain.from_step === null || !known.has(chain.from_step));
  const draw = (chain, depth) => {
    const under = depth < 50 ? chains.filter((each) => each !== chain && chain.steps.includes(each.from_step)) : [];
    const why = byStep.get(chain.steps[0])?.new_row;
    return html`<li key=${`${chain.chain} ${chain.steps[0]}`}><b>chain ${chain.chain}</b>${chain.from_step === null ? "" : ` after turn ${chain.from_step}${chain.shared_tokens === null ? "" : `, sharing ${plural(chain.shared_tokens, "token")}`}`}: ${chain.steps.slice(0, 60).map((step) => html`<a href=${`#turn-${episode}-${step}`} onClick=${(event) => (event.preventDefault(), document.getElementById(`turn-${episode}-${step}`)?.scrollIntoView())}>turn ${step}</a> `)}${chain.steps.length > 60 ? "…" : ""}${why ? html`<span class="quiet">${visible(why)}</span>` : ""}
      ${under.length > 0 && html`<ul>${under.map((each) => draw(each, depth + 1))}</ul>`}</li>`;
  };
  return html`<nav class="chains" aria-label="Chains of turns"><ul>${roots.slice(0, 200).map((chain) => draw(chain, 0))}</ul></nav>`;
}

function Turn({ turn, branches, row, tokens }) {
  const odd = turn.finish_reason && turn.finish_reason !== "stop" && turn.finish_reason !== "tool_calls";
  return html`${turn.shared_messages > 0 && html`<li class="quiet">begins with the first ${plural(turn.shared_messages, "message")} of turn ${turn.parent_step}</li>`}
    ${turn.messages.map((message, index) => html`<li key=${`m${turn.step}.${index}`}><${Message} message=${message} episode=${row.id} /></li>`)}
    ${turn.messages_left_out > 0 && html`<li class="quiet">${plural(turn.messages_left_out, "more message")}</li>`}
    <li class="turn" id=${`turn-${row.id}-${turn.step}`} data-part="">
      <div class="said-by"><b>model</b> <span class="quiet">turn ${turn.step}${branches ? `, chain ${turn.chain}` : ""}, version ${turn.policy_version}, ${plural(turn.sampled_tokens, "token")}, ${seconds(turn.generate_seconds)}${turn.mean_logprob === null ? "" : `, mean logprob ${number(turn.mean_logprob, 3)}`}</span>
        ${turn.inherited && html` <span class="tag">from its parent</span>`}
        ${odd && html` <span class="warn">${visible(turn.finish_reason)}</span>`}
        ${turn.new_row && html` <span class="warn">a new chain: ${visible(turn.new_row)}</span>`}
        ${turn.why_not && html` <span class="warn">not trained on: ${visible(turn.why_not)}</span>`}
        ${turn.rewards.map((each) => html` <span class="tag" key=${`${each.reward_set}${each.part}`}>${visible(each.part)} ${number(each.value, 3)}</span>`)}
      </div>
      ${tokens}
      ${!tokens && turn.thought && html`<${Fold} summary=${`thought, ${plural(turn.cut?.thought || turn.thought.length, "character")}`}><${Part} of=${turn} name="thought" episode=${row.id} /><//>`}
      ${tokens ? "" : turn.content ? html`<${Part} of=${turn} name="content" episode=${row.id} />` : !turn.calls.length && html`<${Part} of=${turn} name="text" episode=${row.id} />`}
      ${!tokens && turn.text && turn.text !== turn.content && html`<${Fold} summary="as it was sampled"><${Part} of=${turn} name="text" episode=${row.id} mono /><//>`}
      ${turn.calls.map((call) => html`<${Call} key=${call.id} call=${call} row=${row} />`)}
      ${turn.calls_left_out > 0 && html`<p class="quiet">${plural(turn.calls_left_out, "more call")}</p>`}
      ${turn.annotations.length > 0 && html`<${Said} rows=${turn.annotations} />`}
    </li>`;
}

function Message({ message, episode }) {
  const role = ROLES[message.role] || message.role || "message";
  return html`<div class="message"><b>${visible(role)}${message.name ? ` ${visible(message.name)}` : ""}${message.edited ? " (edited)" : ""}</b> <${Part} of=${message} name="content" episode=${episode} lines=${16} />
    ${message.thought && html`<${Fold} summary="thought"><${Part} of=${message} name="thought" episode=${episode} /><//>`}
    ${message.tool_calls && html`<${Part} of=${message} name="tool_calls" episode=${episode} mono lines=${12} />`}</div>`;
}

function Call({ call, row }) {
  const code = !call.cut?.arguments && typeof call.arguments?.code === "string" && Object.keys(call.arguments).length === 1;
  const facts = [call.loose ? "bare JSON" : "", call.status, seconds(call.seconds), call.cpu_seconds ? `${seconds(call.cpu_seconds)} of processor` : "", call.queue_seconds ? `waited ${seconds(call.queue_seconds)}` : "", call.sandbox, call.exit_code ? `exit ${call.exit_code}` : "", call.starts > 1 ? `started ${call.starts} times` : ""];
  return html`<div class=${`call ${call.error_class ? "failed" : ""}`}>
    <div class="said-by"><b>${visible(call.tool) || "(unreadable)"}</b> <span class="quiet">${visible(facts.filter(Boolean).join(", "))}</span>${call.error_class && html` <span class="bad">${visible(call.error_class)}</span>`}</div>
    ${code ? html`<${Text} value=${call.arguments.code} mono />` : html`<${Part} of=${call} name="arguments" episode=${row.id} mono lines=${12} />`}
    ${call.result !== null && call.result !== undefined ? html`<div class="result"><${Part} of=${call} name="result" episode=${row.id} mono lines=${16} /></div>` : html`<p class="quiet">${call.kind === "agent" ? "no later request told what came of it" : "no result yet"}</p>`}
  </div>`;
}

function Said({ rows }) {
  return html`<ul class="said-list">${rows.map((each) => html`<li key=${each.id}><span class="tag">${visible(each.source)} ${visible(each.kind)}</span> <b>${visible(each.name)}</b> <code>${visible(json(each.data)).slice(0, 2000)}</code>${each.seconds !== null && each.seconds !== undefined ? html` <span class="quiet">${seconds(each.seconds)}</span>` : ""}</li>`)}</ul>`;
}

// why

function WhyView({ data, row }) {
  const { fate, advantage } = data;
  const untrained = data.turns.filter((turn) => turn.why_not);
  const isOwn = (each) => fate.fate === "trained" && !each.skipped && each.run_id === row.run_id && each.iteration === row.iteration;
  return html`<h2>Its reward</h2>
    ${data.rewards.length ? html`<div class="scrolls"><table><thead><tr><th scope="col">part</th><th scope="col">turn</th><th scope="col" class="number">value</th><th scope="col" class="number">weight</th><th scope="col">set</th></tr></thead><tbody>${data.rewards.map((each) => html`<tr key=${each.id}><td>${visible(each.part)}</td><td>${each.step ?? "the whole episode"}</td><td class="number">${number(each.value, 5)}</td><td class="number">${number(each.weight)}</td><td class="quiet">${visible(each.reward_set)}</td></tr>`)}</tbody></table></div>` : html`<p class="quiet">It has none.</p>`}
    ${data.rewards_left_out > 0 && html`<p class="quiet">${plural(data.rewards_left_out, "more part")}</p>`}
    <h2>Its advantage</h2>
    <p>${advantage.value === null ? "It has none. " : html`<b>${number(advantage.value, 5)}</b> by ${visible(advantage.algorithm)} `}<span class="formula">${visible(advantage.how)}</span></p>
    ${advantage.agrees === false && html`<p class="warn">Computed again from the rows it is ${number(advantage.computed, 5)}: not what the update recorded.</p>`}
    <h2>The update that read it</h2>
    <p><${Badge} is=${fate.fate} /> ${visible(fate.sentence).replace(/^trained: /, "")}${data.read_by.some(isOwn) && html` <${Link} to=${["run", row.run_id, "iteration", row.iteration]}>see that iteration<//>`}</p>
    ${data.read_by.filter((each) => !isOwn(each)).map((each) => html`<p key=${`${each.run_id} ${each.iteration}`}>The update of <${Link} to=${["run", each.run_id, "iteration", each.iteration]}>iteration ${each.iteration} of ${visible(each.run)}<//>, with advantage ${number(each.advantage, 4)}${each.skipped ? ` (it took no step: ${visible(each.skipped)})` : ""}.</p>`)}
    ${untrained.length > 0 && html`<h2>Turns that no update trains on</h2><ul>${untrained.map((turn) => html`<li key=${turn.step}>turn ${turn.step}: ${visible(turn.why_not)}</li>`)}</ul>`}
    ${data.resources.length > 0 && html`<h2>Texts it worked with</h2><p>${data.resources.map((each) => `${visible(each.name)}@${each.version}`).join(", ")} <${Link} to=${["run", row.run_id]} query=${{ tab: "prompts" }}>all versions<//></p>`}
    ${!exported() && html`<h2>What to do next</h2>${Object.keys(COMMANDS).filter((kind) => data.commands[kind]).map((kind) => html`<p class="quiet">${COMMANDS[kind]}</p><${CommandOrButton} key=${kind} line=${data.commands[kind]} kind=${ACTED.includes(kind) ? kind : null} body=${{ episode: row.id }} />`)}`}`;
}
