// @ts-check
// Numbers, times and texts as they are shown.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return grouped(value);
  const size = Math.abs(value);
  if (size >= 1e6 && digits <= 4) return compact(value);
  if (size >= 1000) return grouped(digits <= 4 ? Math.round(value) : Number(value.toPrecision(digits)));
  if (size !== 0 && size < 1e-3) return minus(value.toExponential(2));
  return minus(Number(value.toPrecision(digits)));
}

/** A number's text with the sign that is as wide as a plus. */
export function minus(value) {
  return String(value).replaceAll("-", "−");
}

function grouped(value) {
  const [whole, ...rest] = minus(value).split(".");
  return [whole.replace(/\B(?=(\d{3})+(?!\d))/g, " "), ...rest].join(".");
}

export function compact(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, scale] of /** @type {[string, number][]} */ ([["G", 1e9], ["M", 1e6], ["k", 1e3]])) {
    if (size >= scale) return `${minus(Number((value / scale).toPrecision(digits)))}${unit}`;
  }
  return number(value, digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return minus(`-${seconds(-value)}`);
  if (value < 0.0995) return `${Number((value * 1000).toPrecision(2))} ms`;
  if (value < 99.5) return `${Number(value.toPrecision(3))} s`;
  const [whole, minutes] = [Math.round(value), Math.round(value / 60)];
  if (value < 5970) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (value < 172800) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Number((value / 86400).toPrecision(3))} days`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${minus(Number((100 * value).toPrecision(3)))} %`;
}

const CLOCK = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });

export function moment(text) {
  return text ? CLOCK.format(new Date(text)) : "–";
}

export function ago(text, now = Date.now()) {
  if (!text) return "–";
  const passed = Math.max(0, (now - Date.parse(text)) / 1000);
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 172800) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\u3164\ufeff\uffa0\u{e0000}-\u{e007f}]/gu;

/** What a model or a tool wrote, with each character that would not be seen, or would turn the text about, as a sign. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (char) =>
    char < " " ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

export function json(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

/** A name, or the last part of a path. */
export function lastPart(name) {
  const text = visible(name);
  return /^(\/|\.|[a-z0-9]+:\/\/)/i.test(text) ? text.split("/").filter(Boolean).pop() || text : text;
}

/** The status of an iteration: one that is open runs only while its run does. */
export function iterationStatus(status, runStatus) {
  return status === "running" && ["paused", "failed", "cancelled"].includes(runStatus) ? runStatus : status;
}
