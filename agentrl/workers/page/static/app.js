// The page: its head, the view that the address names, the keyboard.

import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { ComparePage } from "./compare.js";
import { exported, path } from "./data.js";
import { EpisodePage } from "./episode.js";
import { visible } from "./format.js";
import { GroupPage } from "./group.js";
import { IterationPage } from "./iteration.js";
import { go, href, useRoute } from "./route.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { SqlPage } from "./sql.js";
import { TaskPage } from "./tasks.js";
import { applyTheme, toggleTheme, useTheme } from "./theme.js";
import { Link, useData } from "./ui.js";

const KEYS = [
  ["j / k", "next, previous row or part"],
  ["Enter", "open the row"],
  ["[ / ]", "the sibling before, after (of an episode); the iteration before, after"],
  ["n / p", "the next, the previous episode of the list that it was opened from"],
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
  const { parts, query } = useRoute();
  const [help, setHelp] = useState(false);
  useKeyboard(() => setHelp((now) => !now));
  const main = useRef(null);
  const where = parts.join("/");
  useEffect(() => main.current?.focus({ preventScroll: true }), [where]);
  return html`<a class="skip" href=${location.hash || "#/"} onClick=${(event) => (event.preventDefault(), main.current.focus())}>skip to the content</a>
    <${Head} help=${() => setHelp(true)} />
    <main id="main" tabindex="-1" ref=${main}>${viewOf(parts, query)}</main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function viewOf(parts, query) {
  const [kind, id, what, part] = parts;
  if (!kind && exported()?.run) return html`<${RunPage} key=${exported().run} run=${exported().run} />`;
  if (!kind || kind === "runs") return html`<${RunsPage} />`;
  if (kind === "run" && what === "iteration" && part) return html`<${IterationPage} key=${`${id}/${part}`} run=${id} iteration=${part} />`;
  if (kind === "run" && what === "task" && part) return html`<${TaskPage} key=${`${id}/${part}`} run=${id} task=${part} />`;
  if (kind === "run" && id) return html`<${RunPage} key=${id} run=${id} />`;
  if (kind === "group" && id) return html`<${GroupPage} key=${id} group=${id} />`;
  if (kind === "episode" && id) return html`<${EpisodePage} key=${id} episode=${id} />`;
  if (kind === "compare") return html`<${ComparePage} query=${query} />`;
  if (kind === "sql") return html`<${SqlPage} />`;
  return html`<div class="problem" role="alert"><strong>There is no such place: ${visible(parts.join("/")).slice(0, 100)}.</strong> <${Link} to=${[]}>All runs<//></div>`;
}

function Head({ help }) {
  const theme = useTheme();
  const file = exported();
  return html`<header class="head">
    <${Link} to=${[]} class="word">agentrl<//>
    <nav aria-label="Places">
      <${Link} to=${[]}>runs<//>
      ${!file && html`<${Link} to=${["compare"]}>compare<//><${Link} to=${["sql"]}>sql<//>`}
    </nav>
    ${file ? html`<span class="quiet grow">a file of ${visible(file.made_at).slice(0, 20)}${file.left_out ? `: ${visible(file.left_out)}` : ""}</span>` : html`<${Place} />`}
    <button type="button" onClick=${toggleTheme} aria-label=${theme === "dark" ? "Light colours" : "Dark colours"}>${theme === "dark" ? "☀" : "☾"}</button>
    <button type="button" onClick=${help} aria-label="Keys">?</button>
  </header>`;
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
    "[": () => follow("prev"),
    "]": () => follow("next"),
    n: () => follow("list-next"),
    p: () => follow("list-prev"),
    u: () => follow("up"),
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
  const link = document.querySelector(`a[rel="${rel}"]`);
  link?.click();
  return Boolean(link);
}

function moveRow(by) {
  const rows = [...document.querySelectorAll("main [data-row], main [data-part]")].filter((row) => row.offsetParent !== null);
  if (!rows.length) return false;
  const now = rows.findIndex((row) => row.classList.contains("at"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now + by))];
  rows[now]?.classList.remove("at");
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function openRow() {
  const row = document.querySelector("main [data-row].at");
  if (!row || document.activeElement?.matches("a, button, summary")) return false;
  go(row.dataset.row);
  return true;
}

document.addEventListener("click", (event) => {
  const row = event.target.closest?.("tr[data-row]");
  if (!row || event.target.closest("a, button, input, label, summary") || String(getSelection())) return;
  go(row.dataset.row);
});

applyTheme();
render(html`<${Page} />`, document.getElementById("page"));
