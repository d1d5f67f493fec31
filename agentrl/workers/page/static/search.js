// @ts-check
// A prompt search: what it gained, the tree of what it tried, and how one candidate came about.

import { html, useEffect, useRef } from "./vendor/preact.js";
import { path } from "./data.js";
import { EvidenceTable } from "./evidence.js";
import { number, plural, seconds, visible } from "./format.js";
import { DiffLines } from "./prompts.js";
import { useChoice } from "./route.js";
import { Asked, Badge, Fold, Link, openable, Table, Text, useData } from "./ui.js";

const MAX_DEPTH = 12;

/** `children` stand below what was gained. */
export function SearchView({ run, version, children }) {
  const found = useData(path(`runs/${run}/search`), version);
  const [chosen] = useChoice("candidate");
  return html`<${Asked} of=${found} what="the results of the search">${(tree) => {
    const best = tree.candidates.find((row) => row.is_best) || tree.candidates[0];
    const at = tree.candidates.find((row) => String(row.number) === chosen) || best;
    return html`<p class="gained">${visible(tree.sentences)}</p>
      ${tree.gain && html`<${Gain} of=${tree.gain} />`}
      ${children}
      <h2>What it tried</h2>
      <${Tree} run=${run} rows=${tree.candidates} at=${at} />
      ${tree.left_out > 0 && html`<p class="quiet">${number(tree.left_out)} that were tried later are not shown.</p>`}
      ${at && html`<${Candidate} key=${at.number} run=${run} row=${at} rows=${tree.candidates} version=${version} isAsked=${String(at.number) === chosen} />`}`;
  }}<//>`;
}

function Gain({ of }) {
  const interval = of.low === null ? "" : `, 95 % ${visible(of.interval_by)} [${number(of.low, 3)}, ${number(of.high, 3)}]`;
  return html`<p class="quiet">Difference ${number(of.difference, 3)}${interval}, p ${number(of.p_value, 3)} (${visible(of.method)}); better on ${plural(of.won, "task")}, worse on ${number(of.lost)}, equal on ${number(of.tied)}.</p>`;
}

function Tree({ run, rows, at }) {
  const isAny = (key) => rows.some((row) => row[key] !== null && row[key] !== "");
  const byNumber = new Map(rows.map((row) => [row.number, row]));
  const change = (row) => (row.score === null || !byNumber.has(row.parent) || byNumber.get(row.parent).score === null || byNumber.get(row.parent).tasks !== row.tasks ? null : row.score - byNumber.get(row.parent).score);
  const columns = [
    { key: "label", label: "version", cell: ({ row, depth }) => html`<span class="node" style=${{ paddingLeft: `${12 * Math.min(depth, MAX_DEPTH)}px` }}><span class=${row.on_path ? "good" : "quiet"} title=${row.on_path ? "on the way to the best version" : ""}>${row.on_path ? "●" : "○"}</span> <${Link} to=${["run", run]} query=${{ candidate: row.number }} aria-current=${row === at ? "true" : undefined}>${visible(row.label)}<//></span>` },
    { key: "score", label: "score", number: true, title: "mean reward on the tasks for choosing; grey: on other tasks", cell: ({ row }) => (row.tasks === rows[0].tasks ? html`<b>${number(row.score, 3)}</b>` : html`<span class="quiet">${number(row.score, 3)}</span>`) },
    { key: "change", label: "change", number: true, title: "against the version from which it was made, where both have as many tasks", cell: ({ row }) => signed(change(row)) },
    { key: "tasks", label: "tasks", number: true, cell: ({ row }) => number(row.tasks) },
    ...(isAny("held_out") ? [{ key: "held_out", label: "held out", number: true, title: "mean reward on the held-out tasks", cell: ({ row }) => number(row.held_out, 3) }] : []),
    { key: "episodes", label: "episodes", number: true, cell: ({ row }) => number(row.episodes) },
    { key: "status", label: "status", cell: ({ row }) => html`<${Badge} is=${row.status} />${row.is_best && html` <b class="good">best</b>`}` },
    ...(isAny("note") ? [{ key: "note", label: "how", cell: ({ row }) => visible(row.note).slice(0, 120) }] : []),
    { key: "difference", label: "new text", wide: true, cell: ({ row }) => visible(row.difference) },
  ];
  return html`<${Table} caption="Versions that were tried" columns=${columns} rows=${inTreeOrder(rows)} rowKey=${({ row }) => row.number} to=${({ row }) => openable(["run", run], { candidate: row.number })} empty="Nothing was tried yet." />
    ${rows.length > 1 && html`<p class="quiet"><span class="good">●</span> on the way to the best version</p>`}`;
}

function signed(value) {
  return value === null ? "–" : html`<span class=${value > 0 ? "good" : value < 0 ? "bad" : "quiet"}>${value > 0 ? "+" : ""}${number(value, 3)}</span>`;
}

/** Each candidate below the one from which it was made, with its depth. */
function inTreeOrder(rows) {
  const known = new Set(rows.map((row) => row.number));
  const below = new Map();
  for (const row of rows) {
    const parent = known.has(row.parent) ? row.parent : null;
    below.set(parent, [...(below.get(parent) || []), row]);
  }
  const found = [];
  const left = (below.get(null) || []).map((row) => ({ row, depth: 0 })).reverse();
  while (left.length) {
    const { row, depth } = left.pop();
    found.push({ row, depth });
    left.push(...(below.get(row.number) || []).map((child) => ({ row: child, depth: depth + 1 })).reverse());
  }
  return found;
}

/** A candidate: what differs from its parent, its texts, what the critic said, its episodes. */
function Candidate({ run, row, rows, version, isAsked }) {
  const found = useData(path(`runs/${run}/search/${row.number}`), version);
  const parent = rows.find((each) => each.number === row.parent);
  const head = useRef(null);
  useEffect(() => {
    if (isAsked) head.current.scrollIntoView({ block: "nearest" });
  }, [isAsked]);
  return html`<section class="candidate" aria-label=${`Version ${visible(row.label)}`}>
    <h2 ref=${head}>${visible(row.label)} ${parent && html`<span class="quiet">made from ${visible(parent.label)}</span>`}</h2>
    <${Asked} of=${found} what="the version">${(told) => html`
      ${told.texts.map((each) => html`<${CandidateText} key=${each.name} of=${each} isOnly=${told.texts.length === 1} />`)}
      ${told.critic.length > 0 && html`<${Fold} summary="what the critic said">${told.critic.map((call, index) => html`<${CriticCall} key=${call.id} of=${call} title=${index ? "the critique" : "the edit"} />`)}<//>`}`}<//>
    ${row.group !== null && html`<h2>Its episodes</h2><${EvidenceTable} run=${run} version=${version} fixed=${{ texts_of: row.group }} hidden=${["iteration"]} />`}
  </section>`;
}

function CandidateText({ of, isOnly }) {
  const text = html`<${Text} value=${of.text} cut=${of.cut?.text} mono />`;
  return html`${!isOnly && html`<h3>${visible(of.name)} @${of.version}</h3>`}
    ${of.diff === null ? text : html`<${DiffLines} lines=${of.diff.split("\n")} />${of.cut?.diff && html`<p class="quiet">${number(of.cut.diff)} characters differ; these are the first.</p>`}<${Fold} summary="the whole text">${text}<//>`}`;
}

function CriticCall({ of, title }) {
  return html`<div class="message"><b>${title}</b> <span class="quiet">${visible(of.model)}, ${seconds(of.seconds)}</span>
    <${Text} value=${of.answer} cut=${of.cut?.answer} />
    <${Fold} summary="what it was asked"><${Text} value=${of.messages} cut=${of.cut?.messages} /><//></div>`;
}
