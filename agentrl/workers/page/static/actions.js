// @ts-check
// What the page may do where it was started with --actions; elsewhere it shows what to type.

import { html, useState } from "./vendor/preact.js";
import { ask, exported, path } from "./data.js";
import { visible } from "./format.js";
import { Command, useData } from "./ui.js";

export function useActions() {
  const { data } = useData(exported() ? null : path("store"));
  return Boolean(data?.actions);
}

/** Runs an action: {ok, output}. */
export async function act(kind, body) {
  try {
    const said = await ask(path(`actions/${kind}`), { body });
    return { ok: said.exit_code === 0, output: said.output || "" };
  } catch (error) {
    return { ok: false, output: `${error.message} ${error.hint || ""}` };
  }
}

/** A command to type, and a button that runs it where there are actions. */
export function CommandOrButton({ line, kind, body, label }) {
  const can = useActions();
  const [state, setState] = useState(null);
  const [reward, setReward] = useState("");
  const named = kind === "rescore";
  const run = async () => {
    setState({ runs: true });
    setState(await act(kind, named ? { ...body, reward: [reward] } : body));
  };
  const field = named && html`<input size="14" aria-label="The reward to score by" placeholder="reward" value=${reward} onInput=${(event) => setReward(event.currentTarget.value.trim())} />`;
  const button = can && kind && html`${field}<button type="button" disabled=${state?.runs || (named && !reward)} onClick=${run}>${state?.runs ? "running…" : label || kind}</button>`;
  return html`<div class="acted"><${Command} line=${line} action=${button} />${state?.output && html`<pre class=${state.ok ? "said" : "said bad"} role="status">${visible(state.output)}</pre>`}</div>`;
}
