// The config of a run, each value with where it came from; and what differs from another run's.

import { html } from "./vendor/preact.js";
import { exported, path } from "./data.js";
import { json, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Fold, Search, Table, Text, useData } from "./ui.js";

export function ConfigView({ run, told }) {
  const [other, setOther] = useChoice("other");
  const [find, setFind] = useChoice("find");
  const [which, setWhich] = useChoice("which", "chosen");
  const compared = useData(other ? path(`runs/${run}/config`, { other }) : null);
  const runs = useData(exported() ? null : path("runs", { size: 50 }));
  const rows = (other ? compared.data?.rows || [] : told.config).filter((row) => !find || row.key.includes(find));
  const shown = rows.filter((row) => (other ? which === "all" || row.differs : which === "all" || row.origin !== "default"));
  const columns = [
    { key: "key", label: "key", cell: (row) => html`<code>${visible(row.key)}</code>` },
    { key: "value", label: "value", wide: true, cell: (row) => html`<code>${visible(json(row.value))}</code>` },
    { key: "origin", label: "from", cell: (row) => html`<span class=${row.origin === "default" ? "quiet" : ""}>${visible(row.origin)}</span>` },
    ...(other ? [{ key: "other", label: "the other's", wide: true, cell: (row) => html`<code class=${row.differs ? "warn" : ""}>${visible(json(row.other))}</code>` }] : []),
  ];
  return html`<div class="controls">
      <${Search} value=${find} onChange=${setFind} label="Key" />
      <label class="select"><span>show</span><select value=${which} onChange=${(event) => setWhich(event.currentTarget.value)}><option value="chosen">${other ? "what differs" : "what was chosen"}</option><option value="all">everything</option></select></label>
      ${runs.data && html`<label class="select"><span>against</span><select value=${other} onChange=${(event) => setOther(event.currentTarget.value)}><option value="">no other run</option>${runs.data.rows.filter((row) => String(row.id) !== String(run)).map((row) => html`<option key=${row.id} value=${row.id} selected=${String(row.id) === other}>${visible(row.run)}</option>`)}</select></label>`}
    </div>
    ${other && !compared.data ? html`<${Asked} of=${compared} what="the other's config">${() => ""}<//>` : html`<${Table} caption="Config" columns=${columns} rows=${shown} rowKey=${(row) => row.key} empty=${other ? "Nothing differs." : "Nothing but defaults."} />`}
    <${Fold} summary="manifest: versions and hashes"><${Text} value=${json(told.manifest || {})} mono lines=${60} /><//>`;
}
