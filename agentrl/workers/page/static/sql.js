// @ts-check
// One SELECT over the views: a table or a chart, and an address that holds the question.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Chart, lineColor } from "./chart.js";
import { ask, path } from "./data.js";
import { json, number, plural, seconds, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Copy, download, Fold, Problem, Table, useData, useTitle } from "./ui.js";

const USUAL = "SELECT run, iteration, mean_reward, kl, entropy FROM v_iterations ORDER BY id DESC LIMIT 50";

export function SqlPage() {
  const [query, setQuery] = useChoice("q", USUAL);
  const [as, setAs] = useChoice("as", "table");
  const [text, setText] = useState(query);
  const [state, setState] = useState({ found: null, error: null, runs: false });
  useTitle("sql");
  useEffect(() => {
    setText(query);
    const stop = new AbortController();
    setState((now) => ({ ...now, runs: true }));
    ask(path("sql"), { body: { query }, signal: stop.signal }).then(
      (found) => setState({ found, error: null, runs: false }),
      (error) => error.name !== "AbortError" && setState({ found: null, error, runs: false }),
    );
    return () => stop.abort();
  }, [query]);
  const run = () => setQuery(text.trim() || USUAL, { replace: false });
  return html`<h1>SQL</h1>
    <div class="sql">
      <div class="sql-main">
        <textarea rows="5" spellcheck="false" aria-label="One SELECT" value=${text} onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${(event) => (event.ctrlKey || event.metaKey) && event.key === "Enter" && run()} data-search=""></textarea>
        <div class="controls"><button type="button" onClick=${run} disabled=${state.runs}>${state.runs ? "running…" : "run"}</button> <span class="quiet">or Ctrl-Enter. Read-only; at most 5 s and 1 000 rows.</span> <${Copy} text=${location.href} label="copy link" /></div>
        ${!state.found && !state.error && html`<p class="waits" role="status">Reading the rows…</p>`}
        ${state.error && html`<${Problem} error=${state.error} />`}
        ${state.found && html`<${Result} found=${state.found} as=${as} setAs=${setAs} />`}
      </div>
      <${Schema} insert=${(words) => setText((now) => `${now}${/\s$/.test(now) || !now ? "" : " "}${words}`)} />
    </div>`;
}

function Result({ found, as, setAs }) {
  const columns = found.columns.map((column, index) => ({ key: `${index}`, label: visible(column), number: found.rows.some((row) => typeof row[index] === "number"), cell: (row) => (typeof row[index] === "number" ? number(row[index], 6) : row[index] === null ? html`<span class="quiet">NULL</span>` : visible(json(row[index])).slice(0, 500)) }));
  return html`<div class="controls"><span>${plural(found.rows.length, "row")}${found.cut ? ", and more" : ""}${found.cells_cut ? `, ${plural(found.cells_cut, "value")} cut: agentrl sql has them whole` : ""}, ${seconds(found.seconds)}</span>
      <label class="select"><span>as</span><select value=${as} onChange=${(event) => setAs(event.currentTarget.value)}><option value="table">table</option><option value="chart">chart</option></select></label>
      <button type="button" onClick=${() => download("agentrl.csv", csv(found), "text/csv")}>CSV</button>
    </div>
    ${as === "chart" ? html`<${ResultChart} found=${found} />` : html`<${Table} caption="Result" columns=${columns} rows=${found.rows.map((row, index) => Object.assign([...row], { at: index }))} rowKey=${(row) => row.at} empty="No rows." />`}`;
}

/** Rows as comma-separated values; what a spreadsheet would take for a formula stands behind an apostrophe. Whatever else it may
 * take for the end of a cell is quoted, so that nothing behind it becomes a formula either. */
export function csv({ columns, rows }) {
  const cell = (value) => {
    const text = value === null ? "" : String(json(value));
    const safe = typeof value === "string" && !/^-?\d+$/.test(text) && /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text) ? `'${text}` : text;
    return /[",;\t\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
}

/** The first column of numbers is x, the others are lines; a column of words before them tells lines apart. */
function ResultChart({ found }) {
  const numeric = found.columns.map((_, index) => index).filter((index) => found.rows.some((row) => typeof row[index] === "number"));
  const word = found.columns.map((_, index) => index).find((index) => found.rows.some((row) => typeof row[index] === "string") && !numeric.includes(index));
  if (numeric.length < 2) return html`<p class="quiet">A chart needs two columns of numbers: the first is x.</p>`;
  const [x, ...ys] = numeric;
  const names = word === undefined ? [undefined] : [...new Set(found.rows.map((row) => row[word]))].slice(0, 8);
  const places = new Set(found.rows.map((row) => json([word === undefined ? null : row[word], row[x]])));
  const note = places.size < found.rows.length ? "means: several rows have one x" : "";
  return html`<div class="charts">${ys.slice(0, 12).map((y) => html`<${Chart} key=${y} title=${visible(found.columns[y])} note=${note} xLabel=${visible(found.columns[x])} lines=${names.map((name, index) => {
    const rows = found.rows.filter((row) => (name === undefined || row[word] === name) && typeof row[x] === "number").sort((one, other) => one[x] - other[x]);
    return { label: name === undefined ? visible(found.columns[y]) : visible(name ?? "NULL"), color: lineColor(index), x: rows.map((row) => row[x]), y: rows.map((row) => row[y]) };
  })} />`)}</div>`;
}

function Schema({ insert }) {
  const found = useData(path("views"));
  return html`<aside class="schema" aria-label="Views and columns"><${Asked} of=${found} what="the views">${(data) => (data.views || data).map((view) => html`<${Fold} key=${view.view} summary=${html`<code>${view.view}</code> <span class="quiet">${view.meaning}</span>`}>
    <ul>${view.columns.map((column) => html`<li key=${column.column}><button type="button" class="copy" onClick=${() => insert(column.column)} aria-label=${`Insert ${column.column}`}>${column.column}</button> <span class="quiet">${column.meaning}</span></li>`)}</ul>
  <//>`)}<//></aside>`;
}
