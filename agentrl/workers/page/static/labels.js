// @ts-check
// Tags and notes of a run.

import { html, useEffect, useState } from "./vendor/preact.js";
import { exported } from "./data.js";
import { visible } from "./format.js";
import { Command, Fold, Link, When } from "./ui.js";
import { act, useActions } from "./actions.js";

const NOTHING_NEW = { tags: {}, notes: [], pending: [] };
const KEPT_AWAY = { tag: "untag", untag: "tag" };

/** Tags and notes with what was just changed, which is shown before it is saved, and taken back if it cannot be. */
function useLabels(run, stored) {
  const [fresh, setFresh] = useState(NOTHING_NEW);
  const [problem, setProblem] = useState("");
  useEffect(() => setFresh((now) => (now.pending.length ? now : NOTHING_NEW)), [stored]);
  const tags = [...new Set([...(stored.tags || []), ...Object.keys(fresh.tags)])].filter((tag) => fresh.tags[tag] !== false);
  const save = async (kind, text) => {
    const change = `${kind} ${text}`;
    setProblem("");
    setFresh((now) => ({ ...withLabel(now, kind, text), pending: [...now.pending, change] }));
    const said = await act(kind, { run: Number(run), text });
    setFresh((now) => ({ ...(said.ok ? now : withoutLabel(now, kind, text)), pending: now.pending.filter((each) => each !== change) }));
    if (!said.ok) setProblem(said.output);
  };
  return { tags, notes: [...(stored.notes || []), ...fresh.notes], isPending: (kind, text) => fresh.pending.includes(`${kind} ${text}`), save, problem };
}

function withLabel(now, kind, text) {
  if (kind === "note") return { ...now, notes: [...now.notes, { id: `new ${now.notes.length}`, text, created_at: new Date().toISOString() }] };
  return { ...now, tags: { ...now.tags, [text]: kind === "tag" } };
}

function withoutLabel(now, kind, text) {
  if (kind === "note") return { ...now, notes: now.notes.filter((note) => note.text !== text) };
  return withLabel(now, KEPT_AWAY[kind], text);
}

/** The tags of a run, how to add one, `children`, and the notes. */
export function Labels({ run, told, children }) {
  const can = useActions();
  const labels = useLabels(run, told);
  return html`${labels.tags.map((tag) => html`<span key=${tag} class=${`tag ${labels.isPending("tag", tag) ? "pending" : ""}`}><${Link} to=${[]} query=${{ tag }}>${visible(tag)}<//>${can && html`<${RemoveTag} tag=${tag} labels=${labels} />`}</span> `)}
    ${!exported() && html`<${Fold} summary="add a tag or a note">
      ${can ? html`<${LabelField} labels=${labels} />` : html`<div class="commands"><${Command} line=${`agentrl tag ${told.typed} good`} /><${Command} line=${`agentrl note ${told.typed} "why it is"`} /></div>`}
    <//>`}
    ${children}
    <${Rest} labels=${labels} />`;
}

/** The tags of a run in the list, which choose runs; with actions they can be changed, and a note be added. */
export function ListedLabels({ row, setTag }) {
  const can = useActions();
  const [open, setOpen] = useState(false);
  const labels = useLabels(row.id, row);
  return html`${labels.tags.map((tag) => html`<button key=${tag} type="button" class=${`tag ${labels.isPending("tag", tag) ? "pending" : ""}`} onClick=${() => setTag(tag)}>${visible(tag)}</button>${open && html`<${RemoveTag} tag=${tag} labels=${labels} />`} `)}
    ${can && html`<button type="button" class="off" aria-expanded=${open} aria-label=${`Label ${visible(row.run)}`} onClick=${() => setOpen(!open)}>✎</button>`}
    ${open && html`<${LabelField} labels=${labels} />`}
    <${Rest} labels=${labels} />`;
}

function RemoveTag({ tag, labels }) {
  return html`<button type="button" class="off" onClick=${() => labels.save("untag", tag)} aria-label=${`Take off the tag ${visible(tag)}`}>×</button>`;
}

function LabelField({ labels }) {
  const [text, setText] = useState("");
  const button = (kind) => html`<button type="button" disabled=${!text.trim()} onClick=${() => (labels.save(kind, text.trim()), setText(""))}>${kind}</button>`;
  return html`<div class="row"><input aria-label="tag or note" value=${text} onInput=${(event) => setText(event.currentTarget.value)} />${button("tag")}${button("note")}</div>`;
}

function Rest({ labels }) {
  return html`${labels.problem && html`<p class="bad" role="status">${visible(labels.problem)}</p>`}
    ${labels.notes.length > 0 && html`<div class="notes">${labels.notes.map((note) => html`<p key=${note.id} class=${`note ${labels.isPending("note", note.text) ? "pending" : ""}`}><${When} at=${note.created_at} />: ${visible(note.text)}</p>`)}</div>`}`;
}
