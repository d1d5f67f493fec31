// @ts-check
// The config of a run, each value with where it came from; and the way to what differs from another run's.

import { html } from "./vendor/preact.js";
import { AddRun } from "./curves.js";
import { exported } from "./data.js";
import { json, visible } from "./format.js";
import { go, href, useChoice } from "./route.js";
import { Fold, Search, Table, Text } from "./ui.js";

export function ConfigView({ run, told }) {
  const [find, setFind] = useChoice("find");
  const [which, setWhich] = useChoice("which", "chosen");
  const rows = told.config.filter((row) => !find || row.key.includes(find));
  const columns = [
    { key: "key", label: "key", cell: (row) => html`<code>${visible(row.key)}</code>` },
    { key: "value", label: "value", wide: true, cell: (row) => html`<code>${visible(json(row.value))}</code>` },
    { key: "origin", label: "from", cell: (row) => html`<span class=${row.origin === "default" ? "quiet" : ""}>${visible(row.origin)}</span>` },
  ];
  return html`<div class="controls">
      <${Search} value=${find} onChange=${setFind} label="Search by key" />
      <label class="select"><span>show</span><select value=${which} onChange=${(event) => setWhich(event.currentTarget.value)}><option value="chosen">what was chosen</option><option value="all">everything</option></select></label>
      ${!exported() && html`<${AddRun} ids=${[String(run)]} label="compare with another run" setOthers=${(others) => go(href(["run", run], { with: others }))} />`}
    </div>
    <${Table} caption="Config" columns=${columns} rows=${which === "all" ? rows : rows.filter((row) => row.origin !== "default")} rowKey=${(row) => row.key} empty="Nothing but defaults." />
    <${Fold} summary="manifest: versions and hashes"><${Text} value=${json(told.manifest || {})} mono lines=${60} /><//>`;
}
