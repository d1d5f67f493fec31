// Tags and notes of a run.

import { html, useState } from "./vendor/preact.js";
import { exported } from "./data.js";
import { visible } from "./format.js";
import { Command, Fold, Link, When } from "./ui.js";
import { act, useActions } from "./actions.js";

export function Labels({ run, told }) {
  const can = useActions();
  const [extra, setExtra] = useState({ tags: [], notes: [] });
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const tags = [...new Set([...(told.tags || []), ...extra.tags])];
  const notes = [...(told.notes || []), ...extra.notes];
  const add = async (kind) => {
    const said = await act(kind, { run: Number(run), text });
    if (said.ok) {
      setExtra((now) => (kind === "tag" ? { ...now, tags: [...now.tags, text] } : { ...now, notes: [...now.notes, { id: `new ${now.notes.length}`, text, created_at: new Date().toISOString() }] }));
      setText("");
    }
    setProblem(said.ok ? "" : said.output);
  };
  return html`${tags.map((tag) => html`<${Link} key=${tag} to=${[]} query=${{ tag }} class="tag">${visible(tag)}<//> `)}
    ${!exported() && html`<${Fold} summary="label">
      ${can
        ? html`<div class="row"><input aria-label="tag or note" value=${text} onInput=${(event) => setText(event.currentTarget.value)} /><button type="button" disabled=${!text} onClick=${() => add("tag")}>tag</button><button type="button" disabled=${!text} onClick=${() => add("note")}>note</button></div>${problem && html`<p class="bad">${visible(problem)}</p>`}`
        : html`<div class="commands"><${Command} line=${`agentrl tag ${run} good`} /><${Command} line=${`agentrl note ${run} "why it is"`} /></div>`}
    <//>`}
    ${notes.length > 0 && html`<div class="notes">${notes.map((note) => html`<p key=${note.id} class="note"><${When} at=${note.created_at} /> ${visible(note.text)}</p>`)}</div>`}`;
}
