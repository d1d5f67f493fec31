// What agents, tools and hooks said of the episodes of a run.

import { html } from "./vendor/preact.js";
import { exported, path } from "./data.js";
import { json, seconds, visible } from "./format.js";
import { href, useChoice } from "./route.js";
import { Asked, Link, More, Search, Select, Table, useMore, When } from "./ui.js";

const SAID_KINDS = ["", "reward", "message", "object", "annotation", "exception", "operation", "span"];

export function AnnotationsView({ run, version }) {
  const [kind, setKind] = useChoice("kind");
  const [name, setName] = useChoice("name");
  const found = useMore(path(`runs/${run}/annotations`, { kind, name, size: 100 }), version);
  const columns = [
    { key: "episode", label: "episode", number: true, cell: (row) => html`<${Link} to=${["episode", row.episode_id]}>${row.episode_id}<//>` },
    { key: "step", label: "turn", number: true, cell: (row) => row.step ?? "–" },
    { key: "source", label: "by", cell: (row) => visible(row.source) },
    { key: "kind", label: "kind", cell: (row) => visible(row.kind) },
    { key: "name", label: "name", cell: (row) => visible(row.name) },
    { key: "data", label: "said", wide: true, cell: (row) => html`<code>${visible(json(row.data)).slice(0, 300)}</code>` },
    { key: "seconds", label: "took", number: true, cell: (row) => seconds(row.seconds) },
    { key: "at", label: "when", cell: (row) => html`<${When} at=${row.created_at} />` },
  ];
  return html`${!exported() && html`<div class="controls"><${Search} value=${name} onChange=${setName} label="Exact name" /><${Select} label="kind" value=${kind} onChange=${setKind} options=${SAID_KINDS.map((each) => [each, each || "all"])} /></div>`}
    <${Asked} of=${found} what="the annotations">${() => html`<${Table} caption="Annotations" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} to=${(row) => href(["episode", row.episode_id])} empty="Nothing was said so." /><${More} of=${found} />`}<//>`;
}
