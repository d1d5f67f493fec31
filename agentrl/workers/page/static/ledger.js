// @ts-check
// The ledger: what became of each planned episode, iteration by iteration, as bars.

import { html, useEffect, useState } from "./vendor/preact.js";
import { ask, path } from "./data.js";
import { number, plural, percent } from "./format.js";
import { Link, openable, Problem } from "./ui.js";

const MAX_BARS = 400;

export function LedgerView({ run, version }) {
  const [found, setFound] = useState({ rows: [], done: false, error: null });
  useEffect(() => {
    const stop = new AbortController();
    readWhole(run, stop.signal, (rows, done) => setFound({ rows, done, error: null })).catch((error) => error.name !== "AbortError" && setFound((now) => ({ ...now, error })));
    return () => stop.abort();
  }, [run, version]);
  const fates = [...new Set(found.rows.flatMap((row) => Object.keys(row).filter((key) => key !== "iteration" && key !== "planned" && row[key])))];
  const sums = Object.fromEntries(fates.map((fate) => [fate, found.rows.reduce((sum, row) => sum + (row[fate] || 0), 0)]));
  const all = Object.values(sums).reduce((a, b) => a + b, 0);
  const order = fates.sort((a, b) => (a === "trained" ? -1 : b === "trained" ? 1 : sums[b] - sums[a]));
  return html`${found.error && html`<${Problem} error=${found.error} small />`}
    <p>${plural(all, "episode")} planned${found.done ? "" : ", reading on…"}</p>
    <${FateBar} parts=${order.map((fate) => [fate, sums[fate]])} all=${all} />
    <div class="legend">${order.map((fate) => html`<span key=${fate}><i class=${`f-${fate}`}></i>${fate.replaceAll("_", " ")} ${number(sums[fate])} <span class="quiet">${percent(sums[fate] / all)}</span></span>`)}</div>
    <h2>By iteration</h2>
    <div class="ledger">${found.rows.slice(-MAX_BARS).map((row) => html`<div key=${row.iteration} class="ledger-row" data-row=${openable(["run", run, "iteration", row.iteration])}>
      <${Link} to=${["run", run, "iteration", row.iteration]}>${row.iteration}<//>
      <${FateBar} parts=${order.map((fate) => [fate, row[fate] || 0])} all=${row.planned} small />
    </div>`)}</div>
    ${found.rows.length > MAX_BARS && html`<p class="quiet">The newest ${MAX_BARS} of ${number(found.rows.length)} iterations; the sum above is of all.</p>`}
    ${sums.no_variance > 0 && html`<p class="quiet">no variance: all rewards of the group are equal, so its episodes have no advantage. This includes groups in which all episodes are right.</p>`}
    <p class="quiet">Why an episode did not train: <code>agentrl why EPISODE</code>. All episodes, in SQL: <code>v_ledger</code>.</p>`;
}

async function readWhole(run, signal, told) {
  let rows = [];
  let after = "";
  do {
    const page = await ask(path(`runs/${run}/ledger`, { after }), { signal });
    rows = [...rows, ...page.rows];
    after = page.next;
    told(rows, !after);
  } while (after);
}

export function FateBar({ parts, all, small = false }) {
  const said = parts.filter(([, count]) => count).map(([fate, count]) => `${fate.replaceAll("_", " ")} ${count}`).join(", ");
  return html`<div class="bar" style=${{ height: small ? "13px" : "24px" }} role="img" aria-label=${said || "nothing yet"} title=${said}>
    ${parts.map(([fate, count]) => count > 0 && html`<span key=${fate} class=${`f-${fate}`} style=${{ flex: `${count} 0 0` }}></span>`)}
    ${all === 0 && html`<span></span>`}
  </div>`;
}
