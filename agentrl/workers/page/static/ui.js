// @ts-check
// What all views are made of: asked data, links, tables, tabs, folded texts, words for states.

import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { ask, exported, isThere, path } from "./data.js";
import { ago, moment, number, percent, seconds, visible } from "./format.js";
import { go, href, LINK_KEYS, readRoute, useRoute } from "./route.js";

const AGAIN_MS = 3000;
const kept = new Map();
const MAX_KEPT = 60;
const SOME_HITS = 25;
const PAPER_WIDTH = 700;
const PAPER_COLUMN = 325;

/** What is asked: {data, error, loading}. While `version` changes the last answer stays; after a failure it is asked again. */
export function useData(asked, version = 0, how = ask) {
  const [state, setState] = useState(() => ({ asked, data: asked ? kept.get(asked) : undefined, error: null, loading: true }));
  const [again, setAgain] = useState(0);
  useEffect(() => {
    if (!asked) return undefined;
    const stop = new AbortController();
    let timer = 0;
    setState((now) => (now.asked === asked ? { ...now, loading: true } : { asked, data: kept.get(asked), error: null, loading: true }));
    how(asked, { signal: stop.signal }).then(
      (data) => {
        keep(asked, data);
        setState({ asked, data, error: null, loading: false });
      },
      (error) => {
        if (error.name === "AbortError") return;
        setState((now) => ({ asked, data: now.asked === asked ? now.data : undefined, error, loading: false }));
        if (error.status === 0 || error.status === 503) timer = setTimeout(() => setAgain((count) => count + 1), AGAIN_MS);
      },
    );
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [asked, version, again]);
  return state.asked === asked ? state : { data: asked ? kept.get(asked) : undefined, error: null, loading: true };
}

function keep(asked, data) {
  kept.delete(asked);
  kept.set(asked, data);
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
}

/** Shows `children(data)` once there is an answer; before it a place that keeps its height, after a failure what is so.
 * `title`: the heading of the page if nothing else of it can be shown. */
export function Asked({ of, what = "", title = "", children }) {
  if (of.data === undefined && of.error) return title ? html`<${Missing} title=${title} error=${of.error} />` : html`<${Problem} error=${of.error} />`;
  if (of.data === undefined) return html`<p class="waits" role="status">Reading ${what}…</p>`;
  return html`${of.error && html`<${Problem} error=${of.error} small />`}${children(of.data)}`;
}

/** A page that cannot be shown. */
function Missing({ title, error }) {
  useTitle(title);
  return html`<h1>${title}</h1><${Problem} error=${error} /><p><${Link} to=${[]}>all runs<//></p>`;
}

export function Problem({ error, small = false }) {
  return html`<div class=${`problem ${small ? "small" : ""}`} role="alert">
    <strong>${visible(error.message)}</strong> ${error.hint && html`<span><${WithCode} text=${error.hint} /></span>`}
  </div>`;
}

/** A text in which commands stand between backticks. */
function WithCode({ text }) {
  return visible(text).split("`").map((part, index) => (index % 2 ? html`<code key=${index}>${part}</code>` : part));
}

/** Gives the window its title. */
export function useTitle(title) {
  useEffect(() => {
    document.title = `agentrl: ${visible(title).slice(0, 200)}`;
  }, [title]);
}

/** A link inside of the page; where the exported file does not have what it leads to, its words alone. */
export function Link({ to, query, children, ...rest }) {
  const address = openable(to, query);
  if (!address) return html`<span class=${rest.class} title=${rest.title ? `${rest.title}: not in this file` : "not in this file"}>${children}</span>`;
  return html`<a href=${address} ...${rest}>${children}</a>`;
}

/** A link to a neighbour, with the key that follows it: the first of the page with this `rel`. */
export function KeyLink({ rel, children, ...rest }) {
  return html`<${Link} rel=${rel} ...${rest}>${children} <kbd>${LINK_KEYS[rel]}</kbd><//>`;
}

/** The address of a place, or undefined where an exported file does not have it. */
export function openable(parts, query) {
  return isThere(askedAt(parts, query)) ? href(parts, query) : undefined;
}

/**
 * What a place asks for first. A list with filters asks for the filtered list.
 * @param {any[]} parts
 * @param {Record<string, any>} [query]
 */
function askedAt([kind, id, what, part], { tab, candidate, ...filter } = {}) {
  if (kind === "group" || kind === "episode") return path(`${kind}s/${id}`);
  if (kind === "compare" || kind === "sql") return path(kind);
  const isFiltered = Object.keys(filter).length > 0;
  if (kind !== "run") return isFiltered ? path("runs", { ...filter, size: 50 }) : path("store");
  if (part !== undefined) return path(`runs/${id}/${what}s/${part}`);
  if (candidate !== undefined) return path(`runs/${id}/search/${candidate}`);
  return isFiltered ? path(`runs/${id}/${tab}`, { ...filter, size: 50 }) : path(`runs/${id}`);
}

/** Tabs whose choice stands in the address. */
export function Tabs({ name, tabs, chosen }) {
  const { parts, query } = readRoute();
  return html`<nav class="tabs" aria-label=${name}>
    ${tabs.map(
      ([key, label, count]) => html`<a
        key=${key}
        href=${href(parts, { ...pickKept(query), [name]: key === tabs[0][0] && !query.with ? undefined : key })}
        aria-current=${key === chosen ? "page" : undefined}
        >${label}${count !== undefined && html` <span class="count">${number(count)}</span>`}</a
      >`,
    )}
  </nav>`;
}

function pickKept(query) {
  return query.with ? { with: query.with } : {};
}

export function Badge({ is, title }) {
  return html`<span class=${`badge is-${String(is).replace(/[^a-z_]/g, "")}`} title=${title}>${visible(is).replaceAll("_", " ")}</span>`;
}

/** Where seconds went, as a bar with a legend. `parts`: [name, seconds, class of the colour]. */
export function SecondsBar({ parts }) {
  const whole = parts.reduce((all, [, value]) => all + value, 0);
  const words = parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ");
  return html`<div class="bar seconds-bar" role="img" aria-label=${`Of ${seconds(whole)}: ${words}`}>${parts.map(([name, value, kind]) => html`<span key=${name} class=${kind} style=${{ width: `${(100 * value) / whole}%` }} title=${`${name}: ${seconds(value)}, ${percent(value / whole)}`}></span>`)}</div>
    <p class="legend">${parts.map(([name, value, kind]) => html`<span key=${name}><i class=${`swatch ${kind}`}></i>${name} ${seconds(value)} <span class="quiet">${percent(value / whole)}</span></span>`)}</p>`;
}

export function When({ at }) {
  return html`<time datetime=${at} title=${moment(at)}>${ago(at)}</time>`;
}

export function Copy({ text, label = "copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await writeClipboard(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="copy" type="button" onClick=${copy} aria-label=${`Copy: ${text.slice(0, 100)}`}>${done ? "copied" : label}</button>`;
}

async function writeClipboard(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const holder = document.createElement("textarea");
  holder.value = text;
  document.body.append(holder);
  holder.select();
  document.execCommand("copy"); // eslint: the only way where the page is not served over TLS or from this machine
  holder.remove();
  return undefined;
}

/** A command to type. One that holds characters which are not seen is not to be pasted into a terminal. */
export function Command({ line, action }) {
  const plain = visible(line) === line && !/[\t\n]/.test(line);
  return html`<div class="command"><code>${visible(line)}</code>${plain ? html`<${Copy} text=${line} />` : html`<span class="warn">it holds hidden characters: not to be copied</span>`}${action}</div>`;
}

/** What is off, each with the command to type; `none`: what is said where nothing is. Notes about a healthy run follow. */
export function Troubles({ of, none = "" }) {
  const [faults, notes] = [false, true].map((isNote) => (of || []).filter((each) => each.is_note === isNote));
  const list = (rows, kind) => rows.length > 0 && html`<ul class=${`troubles ${kind}`}>${rows.map((each) => html`<li key=${each.text}>${visible(each.text)} ${each.command && !exported() && html`<${Command} line=${each.command} />`}</li>`)}</ul>`;
  return html`${!faults.length && none && html`<p class="good">${none}</p>`}${list(faults, "")}${list(notes, "notes-only")}`;
}

/** A text as somebody wrote it: characters that would not be seen are shown, a long one is folded. */
export function Text({ value, cut = 0, rest, lines = 24, mono = false }) {
  const [open, setOpen] = useState(false);
  const [more, setMore] = useState("");
  const [error, setError] = useState(null);
  const text = visible(value) + visible(more);
  const folds = !open && (text.length > 90 * lines || text.split("\n", lines + 1).length > lines);
  const fetchRest = async () => {
    try {
      const found = await ask(rest(String(value).length + more.length));
      setMore(more + found.text);
    } catch (problem) {
      setError(problem);
    }
  };
  const left = cut ? cut - String(value).length - more.length : 0;
  return html`<div class=${`text ${mono ? "mono" : ""} ${folds ? "folded" : ""}`}>
    <pre>${folds ? text.slice(0, 120 * lines) : text}</pre>
    ${folds && html`<button type="button" class="more" onClick=${() => setOpen(true)}>show all ${number(cut || text.length)} characters</button>`}
    ${!folds && left > 0 && rest && html`<button type="button" class="more" onClick=${fetchRest}>next ${number(Math.min(left, 200000))} of ${number(left)} characters</button>`}
    ${!folds && left > 0 && !rest && html`<p class="quiet">${number(left)} more characters.</p>`}
    ${error && html`<${Problem} error=${error} small />`}
  </div>`;
}

export function Fold({ summary, open = false, children }) {
  const [shown, setShown] = useState(open);
  return html`<details open=${open} onToggle=${(event) => setShown(event.currentTarget.open)}>
    <summary>${summary}</summary>
    ${shown && children}
  </details>`;
}

/** The most columns that a narrow window shows side by side. With more, each row is a card there. */
const FEW_COLUMNS = 4;

/**
 * A table whose rows are found with j and k. `columns`: [{key, label, name, title, cell(row), number, short, narrow, wide, sort, always}].
 * A column is left out if no row has anything in it, unless the rows are sorted by it or it is `always` there. `name`: its label
 * in words, where the label is none.
 */
export function Table({ columns: all, rows, rowKey, to, sort, onSort, caption, empty = "Nothing here." }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  const isSorted = (column) => column.sort && column.sort === (sort || "").replace(/^-/, "");
  const columns = all.filter((column) => column.always || isSorted(column) || rows.some((row) => column.cell(row) !== ""));
  const nameOf = ({ name, label }) => name ?? (typeof label === "string" ? label : "");
  return html`<div class=${`scrolls ${columns.length > FEW_COLUMNS ? "cards" : ""}`} tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="unseen">${caption}</caption>
      <thead>
        <tr>
          ${columns.map((column) => html`<${ColumnHead} key=${column.key} column=${column} sort=${sort} onSort=${onSort} />`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${rowKey(row)} data-row=${to ? to(row) : undefined}>${columns.map((column) => html`<td key=${column.key} data-label=${nameOf(column)} class=${column.number ? "number" : column.wide ? "wide" : column.narrow ? "narrow" : column.short ? "short" : ""}>${column.cell(row)}</td>`)}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

function ColumnHead({ column, sort, onSort }) {
  const kind = column.number ? "number" : "";
  if (!column.sort || !onSort) return html`<th scope="col" class=${kind} title=${column.title}>${column.label}</th>`;
  const word = (sort || "").replace(/^-/, "");
  const is = word !== column.sort ? undefined : sort.startsWith("-") ? "descending" : "ascending";
  const next = is === "descending" ? column.sort : `-${column.sort}`;
  return html`<th scope="col" class=${kind} title=${column.title} aria-sort=${is}>
    <button type="button" onClick=${() => onSort(next)}>${column.label}<span aria-hidden="true">${is === "ascending" ? " ↑" : is ? " ↓" : ""}</span></button>
  </th>`;
}

/** A list that is read page after page. */
export function useMore(asked, version = 0) {
  const first = useData(asked, version);
  const [more, setMore] = useState({ asked: "", rows: [], next: "", pages: 1, error: null });
  const grown = more.asked === asked && more.pages > 1;
  const list = grown ? more : { asked, rows: first.data?.rows || [], next: first.data?.next, searched: first.data?.searched, pages: 1, error: more.asked === asked ? more.error : null };
  useEffect(() => {
    if (!grown || !first.data) return undefined;
    const stop = new AbortController();
    readPages(asked, first.data, more.pages, stop.signal).then(setMore, () => {}); // else what is shown stays
    return () => stop.abort();
  }, [first.data]);
  const fetchMore = useCallback(() => readPages(asked, list, 2).then((page) => setMore({ ...page, pages: list.pages + 1 }), (error) => setMore({ ...list, error })), [asked, list.next, list.rows.length]);
  return { ...first, asked, rows: list.rows, next: list.next, searched: grown ? list.searched : first.data?.searched, fetchMore, moreError: list.error };
}

/** A list that begins with a page, and has so many of them where there are. */
async function readPages(asked, first, pages, signal) {
  let { rows, next, searched } = first;
  for (let page = 1; page < pages && next; page += 1) {
    const told = await ask(`${asked}${asked.includes("?") ? "&" : "?"}cursor=${encodeURIComponent(next)}`, { signal });
    rows = [...rows, ...told.rows];
    next = told.next;
    searched = (searched || 0) + (told.searched || 0);
  }
  return { asked, rows, next, searched, pages, error: null };
}

export function More({ of }) {
  if (of.moreError) return html`<${Problem} error=${of.moreError} small />`;
  const total = of.data?.total;
  const searched = total === null || total === undefined ? "" : `searched ${number(of.searched)} of ${number(total)}`;
  if (!of.next) return searched && html`<p class="quiet" role="status">${searched}</p>`;
  if (exported()) return html`<p class="quiet">The rest is not in this file.</p>`;
  if (searched) return html`<${Searching} key=${of.asked} of=${of} words=${searched} />`;
  return html`<button type="button" class="more" onClick=${of.fetchMore}>show more</button>`;
}

/** A search goes on by itself until it has some hits more, or is at the end; it can be stopped, and told to go on. */
function Searching({ of, words }) {
  const [wanted, setWanted] = useState(SOME_HITS);
  const [stopped, setStopped] = useState(false);
  const goes = !stopped && of.rows.length < wanted;
  useEffect(() => {
    if (goes) of.fetchMore();
  }, [goes, of.next]);
  const goOn = () => {
    setWanted(of.rows.length + SOME_HITS);
    setStopped(false);
  };
  return html`<p><span class="quiet" role="status">${words}${goes ? "…" : ""}</span> <button type="button" class="more" onClick=${goes ? () => setStopped(true) : goOn}>${goes ? "stop" : "go on"}</button></p>`;
}

/** Filters that are chosen one by one, each a [label, name=value, title]; those of one name exclude one another. */
export function Chips({ chips, label }) {
  const { parts, query } = useRoute();
  return html`<span class="chips" role="group" aria-label=${label}>${chips.map(([text, choice, title]) => {
    const [name, value] = choice.split("=");
    const is = query[name] === value;
    return html`<button key=${choice} type="button" class="chip" aria-pressed=${is} title=${title} onClick=${() => go(href(parts, { ...query, [name]: is ? undefined : value }), { replace: true })}>${text}</button>`;
  })}</span>`;
}

/** A text field whose content is told a moment after the last key. `hints`: words that are offered. */
export function Search({ value, onChange, label, id, hints = [] }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => setText(value), [value]);
  const change = (event) => {
    const typed = event.currentTarget.value;
    setText(typed);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => onChange(typed), 300);
  };
  const list = hints.length ? `hints of ${label}`.replace(/\W+/g, "-") : undefined;
  return html`<input type="search" class="search" id=${id} size=${Math.max(18, label.length + 2)} value=${text} onInput=${change} placeholder=${label} aria-label=${label} data-search="" list=${list} />${list && html`<datalist id=${list}>${hints.map((hint) => html`<option key=${hint} value=${hint}></option>`)}</datalist>`}`;
}

export function Select({ value, options, onChange, label }) {
  return html`<label class="select"><span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.currentTarget.value)}>
      ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}
    </select></label>`;
}

export function Facts({ of }) {
  const given = of.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return html`<dl class="facts">${given.map(([name, value, title]) => html`<div key=${name} title=${title}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** The width that an element has now, for what is drawn in pixels; while the page is printed, at most that of a sheet, or of its column. */
export function useWidth() {
  const holder = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const measure = () => holder.current && setWidth(Math.floor(holder.current.getBoundingClientRect().width));
    const look = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    const forPaper = () => setWidth((now) => Math.min(now, holder.current.closest(".charts") ? PAPER_COLUMN : PAPER_WIDTH));
    look.observe(holder.current);
    measure();
    addEventListener("beforeprint", forPaper);
    addEventListener("afterprint", measure);
    return () => {
      look.disconnect();
      removeEventListener("beforeprint", forPaper);
      removeEventListener("afterprint", measure);
    };
  }, []);
  return [holder, width];
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
