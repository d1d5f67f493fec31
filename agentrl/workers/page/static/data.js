// @ts-check
// What is asked of the service, or of the file that the page was exported into; and what is told live.

const recorded = readRecorded();
const RETRY_MS = 1000;

function readRecorded() {
  const holder = document.getElementById("recorded");
  return holder ? JSON.parse(holder.textContent) : null;
}

/** The export that this page is, or null where a service is asked. */
export function exported() {
  return recorded;
}

/** A path of the service; its parameters in the order of their names, so that an export finds what it recorded. */
export function path(base, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)]).sort(([a], [b]) => (a < b ? -1 : 1)));
  return given.length ? `api/${base}?${query}` : `api/${base}`;
}

/** Whether a path can be asked: an export has what it recorded. */
export function isThere(asked) {
  return !recorded || Object.hasOwn(recorded.answers, asked);
}

export class Refused extends Error {
  constructor(status, message, hint) {
    super(message);
    this.status = status;
    this.hint = hint || "";
  }
}

/**
 * The answer to a path; asks again while the store is busy.
 * @param {string} asked
 * @param {{signal?: AbortSignal, body?: unknown}} [how]
 */
export async function ask(asked, { signal, body } = {}) {
  if (recorded) return fromRecorded(asked);
  for (let tries = 0; ; tries += 1) {
    const answer = await reach(asked, signal, body);
    if (answer.ok) return answer.json();
    if (answer.status === 503 && tries < 5) {
      await pause(RETRY_MS * (Number(answer.headers.get("Retry-After")) || 1), signal);
      continue;
    }
    throw await refusal(answer);
  }
}

/** All rows of a run's curves, page after page. */
export async function askCurves(asked, how) {
  const whole = await ask(asked, how);
  const rows = [...whole.rows];
  for (let page = whole; page.more; rows.push(...page.rows)) page = await ask(`${asked}?after=${rows[rows.length - 1][0]}`, how);
  return { ...whole, rows, more: false };
}

async function reach(asked, signal, body) {
  const how = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", "X-Agentrl": "1" } };
  try {
    return await fetch(asked, { signal, credentials: "same-origin", ...how });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The service does not answer.", "Is `agentrl ui` still running? The page asks again by itself.");
  }
}

async function refusal(answer) {
  const told = await answer.json().catch(() => ({}));
  const detail = Array.isArray(told.detail) ? told.detail.map((each) => `${(each.loc || []).join(".")}: ${each.msg}`).join("; ") : told.detail;
  return new Refused(answer.status, told.error || detail || `The service answered ${answer.status}.`, told.hint);
}

function fromRecorded(asked) {
  if (isThere(asked)) return recorded.answers[asked];
  throw new Refused(404, "This is not in the exported file.", recorded.left_out || "Open the store itself: agentrl ui");
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("", "AbortError"));
    });
  });
}

/** Calls `told` with what is new of a run, or of all runs; the browser connects again and says where it was. Returns how to stop. */
export function listen(run, told, connected) {
  if (recorded || !("EventSource" in window)) return () => {};
  const source = new EventSource(path("live", run ? { run } : {}));
  for (const kind of ["change", "machine", "gone", "busy"]) {
    source.addEventListener(kind, (event) => told(kind, event.data ? JSON.parse(event.data) : {}));
  }
  source.addEventListener("gone", () => source.close()); // or it would connect again for ever
  source.onopen = () => connected(true);
  source.onerror = () => connected(false);
  return () => source.close();
}
