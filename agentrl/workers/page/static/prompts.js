// @ts-check
// The texts that a run works with, version by version, what they earned, and what two versions differ in.

import { html, useEffect, useRef } from "./vendor/preact.js";
import { path } from "./data.js";
import { number, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Fold, More, Table, Text, useMore } from "./ui.js";

const MAX_LINES = 1500;

export function PromptsView({ run, version }) {
  const found = useMore(path(`runs/${run}/prompts`), version);
  const [a, setA] = useChoice("a");
  const [b, setB] = useChoice("b");
  return html`<${Asked} of=${found} what="the prompts">${(data) => {
    const byId = new Map(found.rows.map((row) => [String(row.id), row]));
    const pick = (row) => (String(row.id) === a ? setA("") : !a ? setA(String(row.id)) : setB(String(row.id)));
    const columns = [
      { key: "name", label: "text", cell: (row) => `${visible(row.name)} @${row.version}` },
      { key: "from", label: "from", number: true, cell: (row) => (row.parent_version === null ? "–" : `@${row.parent_version}`) },
      { key: "chosen", label: "chosen", cell: (row) => (row.chosen ? html`<span class="good">yes</span>` : "") },
      { key: "choose", label: "on what chooses", number: true, cell: (row) => number(row.choose_reward, 4) },
      { key: "mean", label: "mean reward", number: true, cell: (row) => number(row.mean_reward, 4) },
      { key: "episodes", label: "episodes", number: true, cell: (row) => number(row.episodes_done) },
      { key: "note", label: "note", cell: (row) => visible(row.note).slice(0, 120) },
      { key: "text", label: "begins", wide: true, cell: (row) => html`<${Fold} summary=${visible(row.text).slice(0, 100)}><${Text} value=${row.text} mono /><//>` },
      { key: "diff", label: "difference", cell: (row) => html`<button type="button" aria-pressed=${String(row.id) === a || String(row.id) === b} onClick=${() => pick(row)}>${String(row.id) === a ? "A" : String(row.id) === b ? "B" : a ? "as B" : "as A"}</button>` },
    ];
    return html`<${Difference} many=${found.rows.length > 1} a=${byId.get(a)} b=${byId.get(b)} clear=${() => (setA(""), setB(""))} />
      <${Table} caption="Versions of its texts" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} /><${More} of=${found} />
      ${data.left_out > 0 && html`<p class="quiet">Of ${number(data.left_out)} of these versions the groups are too many to count here: SELECT * FROM v_resources.</p>`}
      <${Critic} run=${run} version=${version} />`;
  }}<//>`;
}

/** What the two chosen versions differ in, above the table in which they are chosen; it is brought into sight when both are. */
function Difference({ many, a, b, clear }) {
  const place = useRef(null);
  const both = Boolean(a && b);
  useEffect(() => {
    if (both) place.current.scrollIntoView({ block: "nearest" });
  }, [a?.id, b?.id]);
  const name = (row) => `${visible(row.name)} @${row.version}`;
  if (!a && !b) return many && html`<p class="quiet">Choose two versions in the column “difference” to see what was changed from A to B.</p>`;
  return html`<section class="difference" ref=${place} aria-live="polite">
    <h2>${both ? `From ${name(a)} to ${name(b)}` : `${a ? "A" : "B"} is ${name(a || b)}: choose the other`} <button type="button" class="copy" onClick=${clear}>choose anew</button></h2>
    ${both && html`<${LineDiff} one=${a.text} other=${b.text} />`}
  </section>`;
}

const SIGNS = { "+": "added", "-": "removed" };

function LineDiff({ one, other }) {
  const lines = (text) => visible(text).split("\n").slice(0, MAX_LINES);
  const found = diffLines(lines(one), lines(other));
  if (found.every(([sign]) => sign === " ")) return html`<p class="quiet">They are the same, line by line.</p>`;
  return html`<${DiffLines} lines=${found.map(([sign, line]) => `${sign} ${line}`)} />`;
}

/** Lines of a difference, each with its sign before it. */
export function DiffLines({ lines }) {
  return html`<div class="diff mono">${lines.map((line, index) => html`<div key=${index} class=${SIGNS[line[0]] || (line.startsWith("@@") ? "quiet" : "")}>${visible(line)}</div>`)}</div>`;
}

/** Lines of both, by their longest common subsequence: [" " | "-" | "+", line]. */
export function diffLines(one, other) {
  const longest = Array.from({ length: one.length + 1 }, () => new Uint32Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i -= 1) for (let j = other.length - 1; j >= 0; j -= 1) longest[i][j] = one[i] === other[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const found = [];
  let [i, j] = [0, 0];
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && one[i] === other[j]) found.push([" ", one[(i += 1) - 1]]), (j += 1);
    else if (i < one.length && (j >= other.length || longest[i + 1][j] >= longest[i][j + 1])) found.push(["-", one[(i += 1) - 1]]);
    else found.push(["+", other[(j += 1) - 1]]);
  }
  return found;
}

/** The requests to the critic, those with the same answer once. */
function Critic({ run, version }) {
  const found = useMore(path(`runs/${run}/critic-calls`, { size: 20 }), version);
  if (!found.rows.length) return null;
  const byAnswer = new Map();
  for (const row of found.rows) byAnswer.set(row.answer, [...(byAnswer.get(row.answer) || []), row]);
  return html`<${Fold} summary="what the critic was asked, and said">
    ${[...byAnswer.values()].map(([row, ...again]) => html`<${Fold} key=${row.id} summary=${`${visible(row.model)}${again.length ? `, ${again.length + 1} times` : ""}: ${visible(row.answer).slice(0, 140)}`}>
      ${(row.messages || []).map((message, index) => html`<div key=${index} class="message"><b>${visible(message.role)}</b><${Text} value=${message.content} lines=${12} /></div>`)}
      <div class="message"><b>answer</b><${Text} value=${row.answer} /></div>
    <//>`)}<${More} of=${found} /><//>`;
}
