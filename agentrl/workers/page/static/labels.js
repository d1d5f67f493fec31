// Tags and notes of a run.

import { html, useEffect, useState } from "./vendor/preact.js";
import { exported } from "./data.js";
import { visible } from "./format.js";
import { Command, Fold, Link, When } from "./ui.js";
import { act, useActions } from "./actions.js";

const NOTHING_NEW = { tags: {}, notes: [] };

export function Labels({ run, told }) {
  const can = useActions();
  const [fresh, setFresh] = useState(NOTHING_NEW);
  const [text, setText] = useState("");
  const [saving, setSaving] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => setFresh(NOTHING_NEW), [told]);
  const tags = [...new Set([...(told.tags || []), ...Object.keys(fresh.tags)])].filter((tag) => fresh.tags[tag] !== false);
  const notes = [...(told.notes || []), ...fresh.notes];
  const save = async (kind, words) => {
    setSaving(`${kind} ${words}`);
    const said = await act(kind, { run: Number(run), text: words });
    setSaving("");
    setProblem(said.ok ? "" : said.output);
    if (!said.ok) return;
    setFresh((now) => withLabel(now, kind, words));
    if (kind !== "untag") setText("");
  };
  const remove = (tag) => html`<button type="button" class="off" disabled=${Boolean(saving)} onClick=${() => save("untag", tag)} aria-label=${`Take off the tag ${visible(tag)}`}>${saving === `untag ${tag}` ? "…" : "×"}</button>`;
  const button = (kind) => html`<button type="button" disabled=${!text.trim() || saving} onClick=${() => save(kind, text.trim())}>${saving.startsWith(`${kind} `) ? "saving…" : kind}</button>`;
  return html`${tags.map((tag) => html`<span key=${tag} class="tag"><${Link} to=${[]} query=${{ tag }}>${visible(tag)}<//>${can && remove(tag)}</span> `)}
    ${!exported() && html`<${Fold} summary="label">
      ${can
        ? html`<div class="row"><input aria-label="tag or note" value=${text} disabled=${Boolean(saving)} onInput=${(event) => setText(event.currentTarget.value)} />${button("tag")}${button("note")}</div>`
        : html`<div class="commands"><${Command} line=${`agentrl tag ${told.typed} good`} /><${Command} line=${`agentrl note ${told.typed} "why it is"`} /></div>`}
    <//>`}
    ${problem && html`<p class="bad" role="status">${visible(problem)}</p>`}
    ${notes.length > 0 && html`<div class="notes">${notes.map((note) => html`<p key=${note.id} class="note"><${When} at=${note.created_at} /> ${visible(note.text)}</p>`)}</div>`}`;
}

/** What was saved since the run was asked for: tags that are on now or off, notes. */
function withLabel(now, kind, words) {
  if (kind === "note") return { ...now, notes: [...now.notes, { id: `new ${now.notes.length}`, text: words, created_at: new Date().toISOString() }] };
  return { ...now, tags: { ...now.tags, [words]: kind === "tag" } };
}
