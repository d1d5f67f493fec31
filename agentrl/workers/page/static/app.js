// @ts-check
// The page: its head, the view that the address names, the keyboard.

import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { ComparePage } from "./compare.js";
import { exported, path } from "./data.js";
import { EPISODE_TABS, EpisodePage } from "./episode.js";
import { visible } from "./format.js";
import { GroupPage } from "./group.js";
import { IterationPage } from "./iteration.js";
import { go, href, LINK_KEYS, useRoute } from "./route.js";
import { RUN_TABS, RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { SqlPage } from "./sql.js";
import { TaskPage } from "./tasks.js";
import { applyTheme, toggleTheme, useTheme } from "./theme.js";
import { Command, Link, useData, useTitle } from "./ui.js";

/**
 * The places of the page. `path`: a word with a colon is a parameter of `view`. `tabs`: the views of it that `?tab=` chooses.
 * @type {{path: string, view: (of: Record<string, string>) => unknown, tabs?: string[]}[]}
 */
export const ROUTES = [
  { path: "", view: () => (exported()?.run ? html`<${RunPage} run=${exported().run} />` : html`<${RunsPage} />`) },
  { path: "runs", view: () => html`<${RunsPage} />` },
  { path: "run/:run", view: ({ run }) => html`<${RunPage} key=${run} run=${run} />`, tabs: Object.keys(RUN_TABS) },
  { path: "run/:run/iteration/:iteration", view: ({ run, iteration }) => html`<${IterationPage} key=${`${run}/${iteration}`} run=${run} iteration=${iteration} />` },
  { path: "run/:run/task/:task", view: ({ run, task }) => html`<${TaskPage} key=${`${run}/${task}`} run=${run} task=${task} />` },
  { path: "group/:group", view: ({ group }) => html`<${GroupPage} key=${group} group=${group} />` },
  { path: "episode/:episode", view: ({ episode }) => html`<${EpisodePage} key=${episode} episode=${episode} />`, tabs: Object.keys(EPISODE_TABS) },
  { path: "compare", view: () => html`<${ComparePage} />` },
  { path: "sql", view: () => html`<${SqlPage} />` },
];

const KEYS = [
  ["j / k", "next, previous row or part"],
  ["Enter", "open the row"],
  ["[ / ]", "the previous, the next sibling of an episode; the previous, the next iteration"],
  ["p / n", "the previous, the next episode of the list from which an episode was opened"],
  ["u", "up: from an episode to its group, its iteration, its run"],
  ["/", "search, where there is a search field"],
  ["g r", "the runs"],
  ["g s", "SQL"],
  ["g c", "compare evaluations"],
  ["d", "dark or light"],
  ["?", "this help"],
  ["Esc", "close, leave a field"],
];

function Page() {
  const { parts } = useRoute();
  const [help, setHelp] = useState(false);
  useKeyboard(() => setHelp((now) => !now));
  const main = useRef(null);
  const where = parts.join("/");
  useEffect(() => main.current?.focus({ preventScroll: true }), [where]);
  return html`<${Head} help=${() => setHelp(true)} toContent=${() => main.current.focus()} />
    <main id="main" tabindex="-1" ref=${main}>${viewOf(parts)}</main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

/** The view of the place that the address names. */
function viewOf(parts) {
  for (const { path, view } of ROUTES) {
    const words = path.split("/").filter(Boolean);
    const isIt = words.length === parts.length && words.every((word, index) => word.startsWith(":") || word === parts[index]);
    if (isIt) return view(Object.fromEntries(words.map((word, index) => [word.replace(":", ""), parts[index]])));
  }
  return html`<${NotFound} address=${parts.join("/")} />`;
}

function NotFound({ address }) {
  useTitle("not found");
  return html`<h1>Not found</h1><div class="problem" role="alert"><strong>This page has no address ${visible(address).slice(0, 100)}.</strong> <${Link} to=${[]}>all runs<//></div>`;
}

function Head({ help, toContent }) {
  const theme = useTheme();
  const [shares, setShares] = useState(false);
  const file = exported();
  return html`<header class="head">
    <a class="skip" href=${location.hash || "#/"} onClick=${(event) => (event.preventDefault(), toContent())}>skip to the content</a>
    <${Link} to=${[]} class="word">agentrl<//>
    <nav aria-label="Places">
      <${Link} to=${[]}>runs<//>
      ${!file && html`<${Link} to=${["compare"]}>compare<//><${Link} to=${["sql"]}>sql<//>`}
    </nav>
    ${file ? html`<span class="quiet grow">a file of ${visible(file.made_at).slice(0, 20)}${file.left_out ? `: ${visible(file.left_out)}` : ""}</span>` : html`<${Place} />`}
    <button type="button" onClick=${toggleTheme} aria-label=${theme === "dark" ? "Light colours" : "Dark colours"}>${theme === "dark" ? "☀" : "☾"}</button>
    ${!file && html`<button type="button" onClick=${() => setShares(true)}>share</button>`}
    <button type="button" onClick=${help} aria-label="Keys">?</button>
    ${shares && html`<${Share} close=${() => setShares(false)} />`}
  </header>`;
}

/** What can be sent to a colleague: the address of this view, and the commands that write its run or its episode into one file. */
function Share({ close }) {
  const box = useRef(null);
  useEffect(() => box.current.showModal(), []);
  const [kind, id] = useRoute().parts;
  const episode = useData(kind === "episode" ? path(`episodes/${id}`) : null).data?.episode;
  const group = useData(kind === "group" ? path(`groups/${id}`) : null).data?.group;
  const run = kind === "run" ? id : (episode || group)?.run_id;
  const typed = useData(run ? path(`runs/${run}`) : null).data?.typed;
  const file = `agentrl ui --export ${typed} --out run-${run}.html`;
  return html`<dialog ref=${box} onClose=${close} aria-label="Share">
    <h2>Share</h2>
    <h3>This view</h3>
    <p class="quiet">A link for a colleague who can reach this page.</p>
    <${Command} line=${`${location.origin}${location.pathname}${location.hash}`} />
    ${typed && episode && html`<h3>This episode</h3><p class="quiet">One file that needs no server: the episode, and as much of its run as 1 MB holds.</p><${Command} line=${`${file} --episode ${episode.id} --limit-mb 1`} />`}
    ${typed && html`<h3>This run</h3><p class="quiet">One file that needs no server, at most 5 MB.</p><${Command} line=${file} />`}
    <form method="dialog"><button autofocus>close</button></form>
  </dialog>`;
}

function Place() {
  const { data } = useData(path("store"));
  return html`<span class="quiet grow place" title=${data ? visible(data.place) : ""}>${data ? visible(data.place) : ""}</span>`;
}

function Help({ close }) {
  const box = useRef(null);
  useEffect(() => box.current.showModal(), []);
  return html`<dialog ref=${box} onClose=${close} aria-label="Keys">
    <h2>Keys</h2>
    <dl class="keys">${KEYS.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <form method="dialog"><button autofocus>close</button></form>
  </dialog>`;
}

function useKeyboard(toggleHelp) {
  useEffect(() => {
    let before = "";
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
      if (typing) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const done = pressKey(before === "g" ? `g ${event.key}` : event.key, toggleHelp);
      before = event.key === "g" && before !== "g" ? "g" : "";
      if (done) event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function pressKey(key, toggleHelp) {
  const actions = {
    j: () => moveRow(1),
    k: () => moveRow(-1),
    Enter: openRow,
    "/": () => focusOn("[data-search]"),
    "?": toggleHelp,
    d: toggleTheme,
    ...Object.fromEntries(Object.entries(LINK_KEYS).map(([rel, key]) => [key, () => follow(rel)])),
    "g r": () => go(href([])),
    "g s": () => go(href(["sql"])),
    "g c": () => go(href(["compare"])),
  };
  const act = actions[key];
  return act ? act() !== false : false;
}

function focusOn(selector) {
  const found = document.querySelector(selector);
  found?.focus();
  return Boolean(found);
}

function follow(rel) {
  /** @type {HTMLElement | null} */
  const link = document.querySelector(`a[rel="${rel}"]`);
  link?.click();
  return Boolean(link);
}

function moveRow(by) {
  /** @type {NodeListOf<HTMLElement>} */
  const found = document.querySelectorAll("main [data-row], main [data-part]");
  const rows = [...found].filter((row) => row.offsetParent !== null);
  if (!rows.length) return false;
  const now = rows.findIndex((row) => row.classList.contains("at"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now + by))];
  rows[now]?.classList.remove("at");
  next.classList.add("at");
  next.tabIndex = -1; // so that it can have the focus, and a screen reader reads it
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function openRow() {
  /** @type {HTMLElement | null} */
  const row = document.querySelector("main [data-row].at");
  if (!row || document.activeElement?.matches("a, button, summary")) return false;
  go(row.dataset.row);
  return true;
}

document.addEventListener("click", (event) => {
  if (!(event.target instanceof Element)) return;
  /** @type {HTMLElement | null} */
  const row = event.target.closest("tr[data-row]");
  if (!row || event.target.closest("a, button, input, label, summary") || String(getSelection())) return;
  go(row.dataset.row);
});

applyTheme();
render(html`<${Page} />`, document.getElementById("page"));
