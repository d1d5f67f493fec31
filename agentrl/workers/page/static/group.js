// @ts-check
// A group: its siblings side by side, where they part, what each was worth.

import { html } from "./vendor/preact.js";
import { path } from "./data.js";
import { number, plural, visible } from "./format.js";
import { meanAndSpread } from "./iteration.js";
import { useChoice } from "./route.js";
import { Asked, Badge, Facts, Link, openable, Select, Table, Text, useData, useTitle } from "./ui.js";

export function GroupPage({ group }) {
  const found = useData(path(`groups/${group}`));
  useTitle(`group ${group}`);
  return html`<${Asked} of=${found} what="the group" title=${`Group ${visible(group)}`}>${(data) => html`<${GroupView} data=${data} />`}<//>`;
}

function GroupView({ data }) {
  const { group, siblings } = data;
  const isOne = siblings.length === 1;
  const [order, setOrder] = useChoice("order", "reward");
  const formula = commonFormula(siblings);
  const sorted = [...siblings].sort(order === "reward" ? (a, b) => (b.episode.reward ?? -Infinity) - (a.episode.reward ?? -Infinity) || a.episode.id - b.episode.id : (a, b) => a.episode.id - b.episode.id);
  return html`<nav class="crumbs" aria-label="Where this is"><${Link} to=${[]}>runs<//><${Link} to=${["run", group.run_id]}>${visible(group.run)}<//><${Link} to=${["run", group.run_id, "iteration", group.iteration]} rel="up">iteration ${group.iteration}<//><span>group ${group.id}</span></nav>
    <div class="row base"><h1>Group ${group.id}</h1> <${Badge} is=${group.status} />${group.dropped ? html` <span class="warn">dropped: ${visible(group.dropped).replaceAll("_", " ")}</span>` : ""}${group.std_reward === 0 ? html` <span class="quiet">${data.solved ? "an episode is right, and all rewards are equal" : "all rewards are equal"}</span>` : ""}</div>
    <${Facts} of=${[
      ["task", data.task?.id ? html`<${Link} to=${["run", group.run_id, "task", data.task.id]}>${visible(group.task).slice(0, 160)}<//>` : visible(group.task)],
      ["reference", visible(group.reference).slice(0, 200)],
      [isOne ? "reward" : "mean reward", meanAndSpread(group, 4), isOne ? "" : "With the standard deviation over the group's episodes"],
      ["siblings", isOne ? null : number(siblings.length + (data.left_out || 0)), "The episodes of the group: of one task, by one policy"],
      ["worker", visible(group.worker)],
      ["attempt", group.attempt > 1 ? number(group.attempt) : null],
    ]} />
    <${Siblings} rows=${sorted} />
    ${isOne ? html`<h2>Transcript</h2>` : html`<h2>Where they differ</h2>
      <${Parting} data=${data} sorted=${sorted} />
      <div class="controls"><${Select} label="order" value=${order} onChange=${setOrder} options=${[["reward", "best first"], ["id", "as sampled"]]} /><span class="quiet">${plural(sorted.length, "sibling")} side by side${sorted.length > 2 ? ": scroll sideways for those that do not fit" : ""}</span></div>`}
    ${formula && html`<p class="quiet">Each advantage is <span class="formula">${visible(formula)}</span>.</p>`}
    ${data.left_out > 0 && html`<p class="quiet">${plural(data.left_out, "more sibling")} not shown.</p>`}
    <div class="siblings">${sorted.map((sibling) => html`<${Sibling} key=${sibling.episode.id} sibling=${sibling} at=${data.parting.at.find((each) => each.episode === sibling.episode.id)} formula=${formula} />`)}</div>`;
}

/** The formula of all advantages; empty if the formulas differ, or one is not applied to numbers. */
function commonFormula(siblings) {
  const advantages = siblings.map((sibling) => sibling.advantage).filter(Boolean);
  const isCommon = advantages.length > 1 && advantages.every((each) => each.calculation && each.formula === advantages[0].formula);
  return isCommon ? advantages[0].formula : "";
}

function Siblings({ rows }) {
  const parts = [...new Set(rows.flatMap((row) => row.parts.map(partName)))].slice(0, 12);
  const columns = [
    { key: "id", label: "episode", number: true, cell: ({ episode }) => html`<${Link} to=${["episode", episode.id]}>${episode.id}<//>` },
    { key: "reward", label: "reward", number: true, cell: ({ episode }) => number(episode.reward, 4) },
    ...parts.map((part) => ({ key: `part ${part}`, label: visible(part), number: true, cell: (row) => number(sumOf(row.parts, part), 4) })),
    { key: "advantage", label: "advantage", number: true, cell: ({ episode }) => episode.advantage === null ? "" : html`<span class=${episode.advantage > 0 ? "good" : episode.advantage < 0 ? "bad" : ""}>${number(episode.advantage, 4)}</span>` },
    { key: "fate", label: "fate", cell: (row) => html`<${Badge} is=${row.fate || row.episode.status} />` },
    { key: "answer", label: "answer", wide: true, cell: ({ episode }) => visible(episode.final_answer).slice(0, 120) || html`<span class="bad">${visible(episode.error).slice(0, 120)}</span>` },
    { key: "turns", label: "turns", number: true, cell: ({ episode }) => number(episode.steps) },
    { key: "tokens", label: "tokens", number: true, cell: ({ episode }) => number(episode.sampled_tokens) },
    { key: "calls", label: "calls", number: true, cell: ({ episode }) => `${number(episode.tool_calls)}${episode.tool_errors ? `, ${episode.tool_errors} failed` : ""}` },
  ];
  return html`<${Table} caption="Siblings" columns=${columns} rows=${rows} rowKey=${(row) => row.episode.id} to=${(row) => openable(["episode", row.episode.id])} />`;
}

/** A part's name; that of another reward set than the first has the set beside it. */
function partName({ part, reward_set: set }) {
  return set === "default" ? part : `${part} (${set})`;
}

function sumOf(parts, name) {
  const values = parts.filter((part) => partName(part) === name).map((part) => part.value);
  return values.length && values.every((value) => value !== null) ? values.reduce((sum, value) => sum + value, 0) : null;
}

/** A tree of what they share: each row a sibling, each box a stretch of tokens, as wide as it is long. */
function Parting({ data, sorted }) {
  const { tree, common_tokens: common, common_text: text, tokens_removed: removed } = data.parting;
  const end = tree.reduce((most, piece) => Math.max(most, piece.to_token), 0);
  const isSame = tree.length === 1 && tree[0].episodes.length === sorted.length;
  const tail = text ? visible(text).slice(-160) : "";
  if (!end) return html`<p class="quiet">${removed ? visible(removed) : "They have no tokens yet."}</p>`;
  return html`<p>${isSame ? `They do not differ: all have the same ${plural(common, "token")}.` : common ? html`They share the first ${plural(common, "token")}${tail ? html`, which end with <code>${tail.length < visible(text).length ? "…" : ""}${tail}</code>` : "."}` : "They share no token."}</p>
    <div class="tree">${sorted.map(({ episode }) => html`<div key=${episode.id} class="tree-row"><${Link} to=${["episode", episode.id]}>${episode.id}<//><div class="tree-line">
      ${tree.filter((piece) => piece.episodes.includes(episode.id)).map((piece) => html`<span key=${piece.from_token} class=${`shared-${Math.min(8, piece.episodes.length)}`} style=${{ left: `${(100 * piece.from_token) / end}%`, width: `${(100 * (piece.to_token - piece.from_token)) / end}%` }} title=${`${piece.episodes.length > 1 ? `shared by ${piece.episodes.length}` : "its own"}, tokens ${piece.from_token} to ${piece.to_token}: ${visible(piece.text || "").slice(0, 300)}`}></span>`)}
    </div><span class=${episode.advantage > 0 ? "good" : episode.advantage < 0 ? "bad" : "quiet"}>${number(episode.reward, 3)}</span></div>`)}</div>
    <p class="quiet">Each row is an episode; its reward is at the end. Each box is a range of tokens; the darker the box, the more siblings share it. The full width is ${plural(end, "token")}.</p>`;
}

function Sibling({ sibling, at, formula }) {
  const { episode } = sibling;
  return html`<section class="sibling" data-part="" aria-label=${`Episode ${episode.id}`}>
    <header><${Link} to=${["episode", episode.id]}><b>${episode.id}</b><//> <span class=${episode.advantage > 0 ? "good" : episode.advantage < 0 ? "bad" : "quiet"}>reward ${number(episode.reward, 3)}${episode.advantage === null ? "" : `, advantage ${number(episode.advantage, 3)}`}</span></header>
    ${at && at.step !== null && html`<p class="parts"><span class="quiet">differs from token ${number(at.token_index)} on, in turn ${at.step}: </span><code><mark>${at.token_text === null ? at.token : visible(at.token_text) || "(nothing)"}</mark>${visible(at.next || "").slice(0, 90)}</code></p>`}
    ${sibling.text.map((piece, index) => html`<div key=${index} class=${`piece ${piece.kind}`}>${piece.kind !== "sampled" && html`<span class="quiet">${visible(piece.name || piece.role || piece.kind)}</span>`}<${Text} value=${piece.text} cut=${piece.cut?.text || 0} lines=${14} mono=${piece.kind !== "message"} /></div>`)}
    ${sibling.text_left_out > 0 && html`<p class="quiet">${plural(sibling.text_left_out, "more part")}: open the episode.</p>`}
    ${sibling.advantage?.how && html`<p class="formula quiet">${visible(formula ? sibling.advantage.calculation : sibling.advantage.how)}</p>`}
  </section>`;
}
