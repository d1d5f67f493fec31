// @ts-check
// The token strip: each token in the colour of a number, what was only read dimmed, with a chart by position.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { Chart } from "./chart.js";
import { ask, path } from "./data.js";
import { number, plural, visible } from "./format.js";
import { useChoice } from "./route.js";
import { Problem, Select } from "./ui.js";

const PAGE = 4096;
const BLOCK = 128;
const SHADES = 9;
const MAX_CHART_POINTS = 8000;
const MAX_TOKENS = 65536;

export function TokensView({ episode, row }) {
  const strip = useStrip(episode);
  const [color, setColor] = useChoice("color", "logprob");
  const [only, setOnly] = useChoice("only");
  const [at, setAt] = useState(null);
  const words = useMemo(() => colouring(strip, color), [strip.ids.length, color]);
  const segments = useMemo(() => strip.segments, [strip.ids.length]);
  const reasons = [...new Set(segments.filter((segment) => segment.kind === "sampled" && segment.why_not).map((segment) => segment.why_not))];
  const pick = useHover(setAt, strip.ids.length);
  if (strip.error && !strip.ids.length) return html`<${Problem} error=${strip.error} />`;
  const metrics = strip.metrics || [];
  const chosen = metrics.find((each) => each.name === color);
  return html`<div class="controls">
      <${Select} label="colour" value=${color} onChange=${setColor} options=${metrics.length ? metrics.map((each) => [each.name, `${each.name}${each.source === "missing" ? " (not stored)" : ""}`]) : [["logprob", "logprob"]]} />
      <label><input type="checkbox" checked=${Boolean(only)} onChange=${(event) => setOnly(event.currentTarget.checked ? "1" : "")} /> only what was sampled</label>
      <${Scale} words=${words} />
      <span class="quiet" role="status">${strip.done ? plural(strip.total, "token") : strip.ids.length >= MAX_TOKENS ? `the first ${number(strip.ids.length)} of ${number(strip.total)} tokens` : `reading ${number(strip.ids.length)} of ${number(strip.total)}…`}</span>
    </div>
    ${chosen?.how && html`<p class="quiet">${visible(chosen.name)}: ${visible(chosen.source)}. ${visible(chosen.how)}</p>`}
    ${strip.why_no_texts && html`<p class="quiet">${visible(strip.why_no_texts)} Each token is shown by its number.</p>`}
    <${TokenChart} strip=${strip} color=${color} words=${words} />
    <div class="strip-tools"><${TokenFacts} strip=${strip} at=${at} color=${color} /></div>
    <div class=${`strip ${only ? "only-sampled" : ""}`} ...${pick} tabindex="0" role="group" aria-label="Tokens: left and right move, the line above tells of each">
      ${segments.map((segment, index) => html`<${Segment} key=${segment.start} segment=${segment} begins=${!goesOn(segments[index - 1], segment)} strip=${strip} words=${words} hidden=${Boolean(only) && segment.kind !== "sampled"} />`)}
    </div>
    <p class="quiet">${number(row.prompt_tokens)} tokens were read and ${number(row.sampled_tokens)} sampled. What was only read is dimmed; so is what no update trains on, with a line under it${reasons.length ? `: ${reasons.map(visible).join("; ")}` : ""}.</p>`;
}

/** The tokens of an episode, read page after page; nothing is read without an episode. */
function useStrip(episode) {
  const [strip, setStrip] = useState({ ids: [], texts: [], logprobs: [], segments: [], total: 0, done: false, error: null, metrics: [] });
  useEffect(() => {
    if (!episode) return undefined;
    const stop = new AbortController();
    readStrip(episode, stop.signal, setStrip).catch((error) => error.name !== "AbortError" && setStrip((now) => ({ ...now, error })));
    return () => stop.abort();
  }, [episode]);
  return strip;
}

/** A switch for token colours in a transcript, and `tokensOf(turn)`: the turn's tokens in their colours, null while they are off. */
export function useTurnTokens(episode) {
  const [color, setColor] = useChoice("tokens");
  const strip = useStrip(color ? episode : null);
  const words = useMemo(() => colouring(strip, color), [strip.ids.length, color]);
  const bySpan = useMemo(() => Map.groupBy(strip.segments.filter(({ kind }) => kind === "sampled"), ({ chain, step }) => `${chain} ${step}`), [strip.ids.length]);
  const switcher = html`<div class="controls"><${Select} label="token colours" value=${color} onChange=${setColor} options=${[["", "off"], ["logprob", "logprob"], ["advantage", "advantage"]]} />${color && html`<${Scale} words=${words} />`}${strip.error && html`<${Problem} error=${strip.error} small />`}</div>`;
  const tokensOf = (turn) => {
    const segments = color ? bySpan.get(`${turn.chain} ${turn.step}`) : null;
    return segments ? html`<div class="strip">${segments.map((segment) => html`<${Segment} key=${segment.start} segment=${segment} begins=${false} strip=${strip} words=${words} />`)}</div>` : null;
  };
  return [switcher, tokensOf];
}

async function readStrip(episode, signal, told) {
  const found = { ids: [], texts: [], logprobs: [], segments: [], metrics: [], total: 0, advantages: [] };
  do {
    const page = await ask(path(`episodes/${episode}/tokens`, { start: found.ids.length, size: PAGE }), { signal });
    if (!page.ids.length) {
      told({ ...found, metrics: page.metrics, why_no_texts: page.why_no_texts, total: found.ids.length, done: true, error: null });
      break;
    }
    found.ids.push(...page.ids);
    found.texts.push(...(page.texts || page.ids.map((id) => ` ${id}`)));
    found.logprobs.push(...page.logprobs);
    if (page.advantages) found.advantages.push(...page.advantages);
    addSegments(found.segments, page.segments);
    Object.assign(found, { total: page.total, metrics: page.metrics, why_no_texts: page.why_no_texts });
    told({ ...found, segments: [...found.segments], done: found.ids.length >= page.total, error: null });
  } while (found.ids.length < Math.min(found.total, MAX_TOKENS));
}

/** Adds a page's pieces; one that began on the page before goes on. */
function addSegments(all, pieces) {
  for (const piece of pieces) {
    const last = all[all.length - 1];
    if (last && last.step === piece.step && last.kind === piece.kind && last.chain === piece.chain && last.trains === piece.trains && last.end === piece.start) all[all.length - 1] = { ...last, end: piece.end };
    else all.push(piece);
  }
}

/** The value of a token under a colouring; null where it has none. */
function valueAt(strip, segment, index, color) {
  if (color === "advantage") return strip.advantages[index] ?? segment.advantage ?? null;
  if (segment.kind !== "sampled") return null;
  return color === "logprob" ? strip.logprobs[index] : null;
}

/** How values become shades: of logprobs from likely to surprising, of advantages from worse over 0 to better. */
function colouring(strip, color) {
  const values = strip.segments.flatMap((segment) => (segment.kind === "sampled" ? Array.from({ length: segment.end - segment.start }, (_, index) => valueAt(strip, segment, segment.start + index, color)) : [])).filter(Number.isFinite);
  const most = values.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  if (color === "advantage") return { kind: "diverging", most: most || 1, shade: (value) => (value === null ? "" : value >= 0 ? `up-${shadeOf(value / (most || 1))}` : `down-${shadeOf(-value / (most || 1))}`) };
  const limit = Math.min(Math.max(most, 1), 8);
  return { kind: "surprise", most: limit, shade: (value) => (value === null || value === undefined ? "" : `odd-${shadeOf(-value / limit)}`) };
}

function shadeOf(share) {
  return Math.max(0, Math.min(SHADES - 1, Math.round(share * (SHADES - 1))));
}

function Scale({ words }) {
  const shades = Array.from({ length: SHADES }, (_, index) => index);
  if (words.kind === "diverging") return html`<span class="scale">${number(-words.most, 3)} ${[...shades].reverse().map((each) => html`<i key=${`d${each}`} class=${`down-${each}`}></i>`)}${shades.map((each) => html`<i key=${`u${each}`} class=${`up-${each}`}></i>`)} ${number(words.most, 3)}</span>`;
  return html`<span class="scale">likely ${shades.map((each) => html`<i key=${each} class=${`odd-${each}`}></i>`)} surprising (${number(-words.most, 3)} or less)</span>`;
}

/** Whether a piece is in the turn of the piece before it. */
function goesOn(before, segment) {
  return before?.kind === "sampled" && before.step === segment.step && before.chain === segment.chain;
}

function Segment({ segment, begins, strip, words, hidden }) {
  if (hidden) return null;
  const blocks = [];
  for (let start = segment.start; start < segment.end; start += BLOCK) blocks.push([start, Math.min(segment.end, start + BLOCK)]);
  const kind = segment.kind === "sampled" ? (segment.trains ? "sampled" : "untrained") : "read";
  return html`<span class=${`segment ${kind}`} title=${!segment.trains && segment.kind === "sampled" && segment.why_not ? `not trained on: ${visible(segment.why_not)}` : undefined}>
    ${segment.kind === "sampled" && begins && html`<span class="turn-mark" aria-hidden="true">turn ${segment.step}</span>`}
    ${blocks.map(([start, end]) => html`<${Block} key=${start} start=${start} end=${end} segment=${segment} strip=${strip} words=${words} />`)}
  </span>`;
}

/** Some tokens, drawn only near what is looked at; elsewhere a place of about the same height. Plain elements: thousands of them. */
function Block({ start, end, segment, strip, words }) {
  const holder = useRef(null);
  const draw = useRef(null);
  draw.current = () => {
    const tokens = [];
    for (let index = start; index < end; index += 1) tokens.push(tokenElement(strip, segment, index, words));
    holder.current.replaceChildren(...tokens);
  };
  useEffect(() => {
    const element = holder.current;
    watchBlock(element, (near) => {
      if (near) draw.current();
      else {
        element.style.minHeight = `${element.offsetHeight}px`;
        element.replaceChildren();
      }
    });
    return () => unwatchBlock(element);
  }, []);
  useEffect(() => {
    if (holder.current.childElementCount) draw.current();
  }, [words, end]);
  return html`<span ref=${holder} class="block" style=${{ minHeight: `${22 * Math.max(1, Math.round((end - start) / 40))}px` }}></span>`;
}

function tokenElement(strip, segment, index, words) {
  const element = document.createElement("span");
  element.className = `t ${words.shade(valueAt(strip, segment, index, words.kind === "diverging" ? "advantage" : "logprob"))}`;
  element.dataset.i = index;
  element.textContent = tokenText(strip.texts[index]);
  return element;
}

const blockWatchers = new Map();
let blockObserver = null;

/** Calls `told` with whether the element is near what is looked at, whenever that changes; one observer for all. */
function watchBlock(element, told) {
  blockObserver ??= new IntersectionObserver((entries) => {
    for (const entry of entries) blockWatchers.get(entry.target)?.(entry.isIntersecting);
  }, { rootMargin: "900px" });
  blockWatchers.set(element, told);
  blockObserver.observe(element);
}

/** Paper has no place that is looked at: before it is printed everything is drawn, and after it only what is near again. */
addEventListener("beforeprint", () => {
  for (const told of blockWatchers.values()) told(true);
});
addEventListener("afterprint", () => {
  for (const element of blockWatchers.keys()) {
    blockObserver.unobserve(element);
    blockObserver.observe(element);
  }
});

function unwatchBlock(element) {
  blockWatchers.delete(element);
  blockObserver?.unobserve(element);
}

function tokenText(text) {
  return text === "" ? "" : visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function useHover(setAt, count) {
  const mark = (index, move = false) => {
    if (index === null || index < 0 || index >= count) return;
    document.querySelector(".strip .t.here")?.classList.remove("here");
    const token = document.querySelector(`.strip .t[data-i="${index}"]`);
    token?.classList.add("here");
    if (move) token?.scrollIntoView({ block: "nearest" });
    setAt(index);
  };
  const now = useRef(0);
  const over = (event) => {
    const index = event.target.dataset?.i;
    if (index !== undefined) mark((now.current = Number(index)));
  };
  const press = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (!by) return;
    event.preventDefault();
    now.current = Math.max(0, Math.min(count - 1, now.current + by));
    mark(now.current, true);
  };
  return { onMouseOver: over, onClick: over, onKeyDown: press };
}

function TokenFacts({ strip, at }) {
  if (at === null) return html`<p class="token-facts quiet" aria-live="polite">Point at a token, or walk with the arrow keys.</p>`;
  const segment = strip.segments.find((each) => each.start <= at && at < each.end) || {};
  const logprob = strip.logprobs[at];
  const advantage = strip.advantages[at] ?? segment.advantage;
  return html`<p class="token-facts" aria-live="polite"><b>${number(at)}</b> id ${strip.ids[at]} <code>${JSON.stringify(visible(strip.texts[at]))}</code>
    ${segment.kind === "sampled" ? html` turn ${segment.step}${logprob === null || logprob === undefined ? "" : html`, logprob ${number(logprob, 4)}, probability ${number(Math.exp(logprob), 3)}`}${advantage === null || advantage === undefined ? "" : `, advantage ${number(advantage, 4)}`}${segment.why_not ? html`, <span class="warn">not trained on: ${visible(segment.why_not)}</span>` : ""}` : html` <span class="quiet">read, not sampled: masked in the loss</span>`}</p>`;
}

/** The chosen number by position; of a long strip each piece's least. */
function TokenChart({ strip, color }) {
  const line = useMemo(() => chartLine(strip, color), [strip.ids.length, color]);
  if (!line.y.some(Number.isFinite)) return null;
  return html`<${Chart} title=${color} note="by position" lines=${[{ label: color, color: "--line-1", gaps: true, ...line }]} xLabel="position of the token" sync="tokens" height=${128} bare />`;
}

function chartLine(strip, color) {
  const step = Math.max(1, Math.ceil(strip.ids.length / MAX_CHART_POINTS));
  const x = [];
  const y = [];
  for (const segment of strip.segments) {
    for (let start = segment.start; start < segment.end; start += step) {
      let least = null;
      for (let index = start; index < Math.min(segment.end, start + step); index += 1) {
        const value = valueAt(strip, segment, index, color);
        if (Number.isFinite(value) && (least === null || value < least)) least = value;
      }
      x.push(start);
      y.push(least);
    }
  }
  return { x, y };
}
