// @ts-check
// What agents, tools and hooks said of the episodes of a run.

import { html } from "./vendor/preact.js";
import { exported, path } from "./data.js";
import { json, seconds, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Asked, Link, More, openable, Search, Select, Table, useMore, When } from "./ui.js";

const SAID_KINDS = ["", "reward", "message", "object", "annotation", "exception", "operation", "span"];
const MAX_HINTS = 50;

export function AnnotationsView({ run, version }) {
  const [kind, setKind] = useChoice("kind");
  const [name, setName] = useChoice("name");
  const [sort, setSort] = useChoice("sort");
  const found = useMore(path(`runs/${run}/annotations`, { kind, name, sort, size: 100 }), version);
  const names = [...new Set(found.rows.map((row) => row.name))].filter((each) => each && visible(each) === each).sort().slice(0, MAX_HINTS);
  const columns = [
    { key: "id", label: "number", number: true, sort: "id", cell: (row) => row.id },
    { key: "episode", label: "episode", number: true, cell: (row) => html`<${Link} to=${["episode", row.episode_id]}>${row.episode_id}<//>` },
    { key: "step", label: "turn", number: true, cell: (row) => row.step ?? "" },
    { key: "source", label: "by", cell: (row) => visible(row.source) },
    { key: "kind", label: "kind", cell: (row) => visible(row.kind) },
    { key: "name", label: "name", cell: (row) => visible(row.name) },
    { key: "data", label: "value", wide: true, cell: (row) => html`<code>${visible(json(row.data)).slice(0, 300)}</code>` },
    { key: "seconds", label: "took", number: true, cell: (row) => (row.seconds === null ? "" : seconds(row.seconds)) },
    { key: "at", label: "when", short: true, cell: (row) => html`<${When} at=${row.created_at} />` },
  ];
  const nothing = name ? `No annotation has the name ${visible(name)}. Type the whole name: a part of it finds nothing.` : "There is no such annotation.";
  return html`${!exported() && html`<div class="controls"><${Search} value=${name} onChange=${setName} label="Whole name" hints=${names} /><${Select} label="kind" value=${kind} onChange=${setKind} options=${SAID_KINDS.map((each) => [each, each || "all"])} /></div>`}
    <${Asked} of=${found} what="the annotations">${() => html`<${Table} caption="Annotations" columns=${columns} rows=${found.rows} rowKey=${(row) => row.id} to=${(row) => openable(["episode", row.episode_id])} sort=${sort || "id"} onSort=${exported() ? undefined : (next) => setSort(next === "id" ? "" : next)} empty=${nothing} /><${More} of=${found} />`}<//>`;
}
