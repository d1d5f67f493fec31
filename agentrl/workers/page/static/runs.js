// The runs: a table that is filtered and sorted, from which several are chosen to be seen together.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Sparkline } from "./chart.js";
import { listen, path } from "./data.js";
import { compact, lastPart, number, seconds, visible } from "./format.js";
import { go, href, useChoice } from "./route.js";
import { Asked, Badge, Link, More, Search, Select, Table, useMore, When } from "./ui.js";

const STATES = ["", "running", "done", "paused", "failed", "cancelled"];
const KINDS = ["", "train", "eval", "fork", "serve", "search", "import"];

export function RunsPage() {
  const [text, setText] = useChoice("text");
  const [status, setStatus] = useChoice("status");
  const [kind, setKind] = useChoice("kind");
  const [tag, setTag] = useChoice("tag");
  const [sort, setSort] = useChoice("sort");
  const [version, setVersion] = useState(0);
  const [connected, setConnected] = useState(null);
  const [chosen, setChosen] = useState([]);
  useEffect(() => {
    document.title = "agentrl: runs";
    return listen("", (what) => what === "change" && setVersion((now) => now + 1), setConnected);
  }, []);
  const found = useMore(path("runs", { text, status, kind, tag, sort, size: 50 }), version);
  const toggle = (id) => setChosen((now) => (now.includes(id) ? now.filter((each) => each !== id) : [...now, id]));
  return html`<div class="row base"><h1>Runs</h1><${Connection} is=${connected} /></div>
    <div class="controls">
      <${Search} value=${text} onChange=${setText} label="Name" />
      <${Select} label="status" value=${status} onChange=${setStatus} options=${STATES.map((each) => [each, each || "all"])} />
      <${Select} label="kind" value=${kind} onChange=${setKind} options=${KINDS.map((each) => [each, each || "all"])} />
      ${tag && html`<button type="button" onClick=${() => setTag("")}>tag ${visible(tag)} ×</button>`}
      <button type="button" disabled=${chosen.length < 2} onClick=${() => go(href(["run", chosen[0]], { with: chosen.slice(1).join(",") }))}>
        ${chosen.length < 2 ? "choose two or more to see them together" : `see ${chosen.length} together`}
      </button>
    </div>
    <${Asked} of=${found} what="the runs">
      ${() => html`<${Table}
          caption="Runs"
          columns=${runColumns(chosen, toggle, setTag)}
          rows=${found.rows}
          rowKey=${(row) => row.id}
          to=${(row) => href(["run", row.id])}
          sort=${sort || "-id"}
          onSort=${(next) => setSort(next === "-id" ? "" : next)}
          empty=${text || status || kind || tag ? "No run matches." : "There is no run yet. Make one: agentrl submit --dataset arithmetic --model tiny"}
        /><${More} of=${found} />`}
    <//>`;
}

export function Connection({ is }) {
  if (is === null) return null;
  return is ? html`<span class="live" role="status">● live</span>` : html`<span class="away" role="status">the service does not answer; trying again</span>`;
}

function runColumns(chosen, toggle, setTag) {
  return [
    { key: "choose", label: html`<span class="unseen">Choose</span>`, cell: (row) => html`<input type="checkbox" checked=${chosen.includes(row.id)} onChange=${() => toggle(row.id)} aria-label=${`Choose ${visible(row.run)}`} />` },
    { key: "run", label: "run", sort: "run", wide: true, cell: (row) => html`<${Link} to=${["run", row.id]}>${visible(row.run)}<//> ${(row.tags || []).map((tag) => html`<button key=${tag} type="button" class="tag" onClick=${() => setTag(tag)}>${visible(tag)}</button> `)}` },
    { key: "status", label: "status", sort: "status", cell: (row) => html`<${Badge} is=${row.status} title=${visible(row.reason)} />${(row.waits_for || (["paused", "failed"].includes(row.status) && row.reason)) && html`<div class="quiet reason">${visible(row.waits_for || row.reason).slice(0, 200)}</div>`}` },
    { key: "reward", label: "reward", number: true, sort: "reward", title: "Mean reward of the last iteration", cell: (row) => number(row.last_reward, 3) },
    { key: "spark", label: "over iterations", cell: (row) => html`<${Sparkline} points=${row.spark || []} label="reward" />` },
    { key: "eval", label: "eval", number: true, sort: "best", title: "Held out: the newest, and the best version; else the newest evaluation made by hand", cell: evalOf },
    { key: "algorithm", label: "algorithm", cell: (row) => (row.kind === "train" || row.kind === "search" ? visible(row.algorithm) : row.kind) },
    { key: "model", label: "model", short: true, cell: (row) => html`<${ShortName} of=${row.model} />` },
    { key: "dataset", label: "dataset", short: true, cell: (row) => html`<${ShortName} of=${row.dataset} />` },
    { key: "iterations", label: "iterations", number: true, cell: (row) => `${number(row.iterations_done)} / ${number(row.iterations)}` },
    { key: "episodes", label: "episodes", number: true, sort: "episodes", cell: (row) => number(row.episodes_done) },
    { key: "tokens", label: "tokens", number: true, cell: (row) => compact(row.tokens) },
    { key: "seconds", label: "took", number: true, sort: "seconds", cell: (row) => seconds(row.seconds) },
    { key: "created", label: "submitted", sort: "id", short: true, cell: (row) => html`<${When} at=${row.created_at} />` },
  ];
}

/** The held-out evaluations of a run, else the newest one that somebody made by hand. An evaluation is its own. */
function evalOf(row) {
  if (row.kind === "eval") return number(row.last_reward, 3);
  if (row.eval_reward !== null) return html`${number(row.eval_reward, 3)}${row.best_reward !== null && row.best_reward !== row.eval_reward ? html`<div class="quiet">best ${number(row.best_reward, 3)} @${row.best_version}</div>` : ""}`;
  return row.measured ? html`<${Link} to=${["run", row.measured.run_id]} title="An evaluation that was made by hand">${number(row.measured.reward, 3)} @${row.measured.version}<//>` : "–";
}

/** A name, or the last part of a path, which is whole under the pointer. */
export function ShortName({ of }) {
  const short = lastPart(of);
  return html`<span title=${visible(of)}>${short.length > 60 ? `${short.slice(0, 60)}…` : short}</span>`;
}
