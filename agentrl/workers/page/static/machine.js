// @ts-check
// The load of the hosts over the last ten minutes: processors, memory, GPUs, waiting work, tokens per second.

import { html } from "./vendor/preact.js";
import { Sparkline } from "./chart.js";
import { exported, path } from "./data.js";
import { moment, number, percent, visible } from "./format.js";
import { Command, useData } from "./ui.js";

const WINDOW_MS = 600_000;
/** The longest time between two rows of a host that works, in ms. Lines begin after the last gap. */
const GAP_MS = 30_000;
const MAX_HOSTS = 8;
const GIB = 2 ** 30;
const QUEUES = [["waiting_rollout", "groups"], ["waiting_train", "updates"], ["waiting_tools", "tool calls"]];

/**
 * The load, as `/api/machine` tells it; nothing in an export.
 * @param {{version: number, hint?: boolean}} props `version` changes when there are new rows; `hint`: whether to say how to start a run
 */
export function Machine({ version, hint = true }) {
  const { data } = useData(exported() ? null : path("machine"), version);
  if (exported()) return null;
  return html`<section class="machine" aria-label="Load of the machine">${data && html`<${Loads} of=${data} hint=${hint} />`}</section>`;
}

function Loads({ of, hint }) {
  const hosts = [...Map.groupBy(of.rows, (row) => row.host)].map(([host, rows]) => [host, sinceGap(rows)]);
  const until = Date.parse(of.clock);
  return html`${!of.fresh && (of.running || hint) && html`<p class="quiet" role="status">${of.running ? "No worker reports. Start the workers: " : "No run is running, so no worker reports. Start a run: "}<${Command} line=${of.running ? of.start : "agentrl submit --dataset arithmetic --model tiny"} /></p>`}
    ${hosts.slice(0, MAX_HOSTS).map(([host, rows]) => html`<${HostLoads} key=${host} host=${host} rows=${rows} until=${until} named=${hosts.length > 1} />`)}
    ${hosts.length > MAX_HOSTS && html`<p class="quiet">${number(hosts.length - MAX_HOSTS)} more hosts: <code>SELECT * FROM v_machine</code></p>`}`;
}

function HostLoads({ host, rows, until, named }) {
  const last = rows.at(-1).created_at;
  const silent = until - Date.parse(last) > GAP_MS;
  return html`<dl class=${`loads${silent ? " silent" : ""}`}>
    ${(named || silent) && html`<div class="quiet"><dt>${silent ? `until ${moment(last).slice(-8)}` : "host"}</dt><dd title=${visible(host)}>${visible(host).slice(0, 24)}</dd></div>`}
    ${loadsOf(rows).map((load) => html`<${Load} key=${load.label} ...${load} until=${until} />`)}
  </dl>`;
}

/** The rows after the last time in which the host was silent. */
function sinceGap(rows) {
  const isFirst = (row, index) => index === 0 || Date.parse(row.created_at) - Date.parse(rows[index - 1].created_at) > GAP_MS;
  return rows.slice(rows.findLastIndex(isFirst));
}

/**
 * The lines of a host that have a value.
 * @returns {{label: string, points: [number, number|null][], most: number, text: string}[]} `most`: the top of the scale, unless a value is higher
 */
function loadsOf(rows) {
  const line = (label, valueOf, show, most = 0) => {
    const points = rows.map((row) => [Date.parse(row.created_at), valueOf(row)]);
    const last = points.findLast(([, value]) => Number.isFinite(value));
    return last && { label, points, most, text: show(last[1]) };
  };
  const gib = (bytes) => (Number.isFinite(bytes) ? bytes / GIB : null);
  const memory = (label, used, total) => line(label, (row) => gib(used(row)), (value) => `${number(value, 3)} of ${number(gib(total), 3)} GiB`, gib(total));
  const newest = rows.at(-1);
  const gpus = (row) => (Array.isArray(row.gpus) ? row.gpus : []);
  const sum = (row, key) => gpus(row).reduce((total, gpu) => total + (gpu?.[key] ?? NaN), 0);
  const count = gpus(newest).length;
  return [
    line("processors", (row) => row.cpu_share, percent, 1),
    memory("memory", (row) => row.memory_used, newest.memory_total),
    count && line(count > 1 ? `${count} GPUs` : "GPU", (row) => sum(row, "share") / gpus(row).length, percent, 1),
    count && memory("GPU memory", (row) => sum(row, "memory_used"), sum(newest, "memory_total")),
    line("tokens/s", (row) => row.tokens_per_second, (value) => number(Math.round(value))),
    ...QUEUES.map(([key, word]) => line(`waiting ${word}`, (row) => row[key], number)),
  ].filter(Boolean);
}

function Load({ label, points, most, text, until }) {
  return html`<div><dt>${label}</dt><dd>${text}${points.length > 1 && html`<${Sparkline} label=${label} points=${points} within=${[[until - WINDOW_MS, 0], [until, most]]} />`}</dd></div>`;
}
