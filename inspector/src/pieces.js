// Small pieces that several views show.
import { useState } from "preact/hooks";
import { UNKNOWN, count, duration, percent, short } from "./format.js";
import { html } from "./html.js";
import { barsOf, endOf, promptParts } from "./times.js";
import { CANONICALIZED, PHASES, PROMPT_STATES, VERDICTS } from "./words.js";

export const Empty = ({ title, children }) =>
  html`<div class="empty"><p class="empty-title">${title}</p>${children && html`<p>${children}</p>`}</div>`;

export const Problem = ({ error }) =>
  html`<div class="empty problem" role="alert"><p class="empty-title">${error.message}</p></div>`;

export const Loading = () => html`<div class="empty" role="status" aria-busy="true"><p>Loading …</p></div>`;

/** What stands in for an answer that is not there yet. */
export const awaited = ({ error }) => (error ? html`<${Problem} error=${error} />` : html`<${Loading} />`);

export const Chip = ({ tone = "plain", title, children }) =>
  html`<span class=${`chip tone-${tone}`} title=${title}>${children}</span>`;

export function Verdict({ verdict }) {
  const words = VERDICTS[verdict.kind] ?? VERDICTS.not_reported;
  return html`<${Chip} tone=${words.tone} title=${verdict.says}>
    <span aria-hidden="true">${words.mark}</span> ${words.label}
  <//>`;
}

export const Fact = ({ label, title, children }) =>
  html`<div class="fact" title=${title}><dt>${label}</dt><dd>${children}</dd></div>`;

/** A share as a number and a bar. */
export const Share = ({ part }) => html`<span class="share">
  <span class="share-bar" aria-hidden="true"><span style=${{ width: `${(part ?? 0) * 100}%` }}></span></span>
  <span>${percent(part)}</span>
</span>`;

/** One horizontal bar of several amounts: [kind, amount, label]. */
export function Stack({ parts, total, unit, label }) {
  const sum = total ?? parts.reduce((all, [, amount]) => all + amount, 0);
  const shown = parts.filter(([, amount]) => amount > 0);
  const words = shown.map(([, amount, name]) => `${name} ${unit(amount)}`).join(", ");
  return html`<div class="stack" role="img" aria-label=${`${label}: ${words || "nothing"}`}>
    ${shown.map(
      ([kind, amount, name]) => html`<span
        key=${kind}
        class=${`fill-${kind}`}
        title=${`${name}: ${unit(amount)}`}
        style=${{ width: `${(amount / (sum || 1)) * 100}%` }}
      ></span>`,
    )}
  </div>`;
}

export function PromptStack({ turn, total }) {
  const { cached, evicted, fresh, lost } = promptParts(turn);
  const known = turn.tokens.cached != null;
  return html`<${Stack}
    label="prompt tokens"
    unit=${count}
    total=${total ?? turn.tokens.prompt}
    parts=${[
      ["cached", cached, known ? "cached" : "in place"],
      ["evicted", evicted, "in place, but not in the engine's cache"],
      ["lost", lost, "lost"],
      ["fresh", fresh, "new"],
    ]}
  />`;
}

/** The bars of a turn on one line, `scale` milliseconds wide. */
export function TurnBars({ turn, scale, now }) {
  const place = (ms) => `${Math.min(100, (ms / scale) * 100)}%`;
  const bars = barsOf(turn, now).filter((bar) => bar.kind !== "gap" && bar.start < scale);
  const cut = bars.some((bar) => bar.end > scale);
  const end = endOf(turn, now);
  const words = bars.map((bar) => `${PHASES[bar.kind].label} ${duration(bar.end - bar.start)}`).join(", ");
  return html`<div class="bars" role="img" aria-label=${words || "nothing yet"}>
    ${bars.map(
      (bar, index) => html`<span
        key=${index}
        class=${`phase fill-${bar.kind} ${bar.open ? "is-open" : ""}`}
        title=${`${PHASES[bar.kind].label}${bar.label ? ` ${bar.label}` : ""}: ${duration(bar.end - bar.start)}`}
        style=${{ left: place(bar.start), width: `max(2px, calc(${place(bar.end)} - ${place(bar.start)}))` }}
      ></span>`,
    )}
    ${turn.calls.map(
      (call) =>
        call.dispatched_ms != null &&
        call.dispatched_ms < scale &&
        html`<span
          key=${`d${call.index}`}
          class="dispatch"
          title=${`${call.name} dispatched at ${duration(call.dispatched_ms)}`}
          style=${{ left: place(call.dispatched_ms) }}
        ></span>`,
    )}
    ${cut && html`<span class="bars-cut" title=${`goes on to ${duration(end)}`}>»</span>`}
  </div>`;
}

export const PhaseLegend = ({ kinds, more }) => html`<ul class="legend" aria-label="Colours of the phases">
  ${kinds.map(
    (kind) => html`<li key=${kind} title=${PHASES[kind].says}>
      <span class=${`swatch fill-${kind}`} aria-hidden="true"></span>${PHASES[kind].label}
    </li>`,
  )}
  ${more}
</ul>`;

const CACHE_PARTS = [
  ["cached", "cached", "the engine had them"],
  ["evicted", "in place, not cached", "the prompt continues, but the engine had to read them again"],
  ["lost", "lost to a break", "were in the last prompt and have to be read again"],
  ["fresh", "new", "were not in the last prompt"],
];

export const CacheLegend = ({ more }) => html`<ul class="legend" aria-label="Colours of prompt tokens">
  ${CACHE_PARTS.map(
    ([kind, label, says]) => html`<li key=${kind} title=${says}>
      <span class=${`swatch fill-${kind}`} aria-hidden="true"></span>${label}
    </li>`,
  )}
  ${more}
</ul>`;

export const PromptLegend = ({ counts }) => html`<ul class="legend prompt-legend" aria-label="Colours of the prompt">
  ${Object.entries({ ...PROMPT_STATES, canonicalized: CANONICALIZED }).map(
    ([state, { label, says }]) =>
      (counts[state] ?? 0) > 0 &&
      html`<li key=${state} title=${says}>
        <span class=${`ink ink-${state}`}>${label}</span> ${short(counts[state])}
      </li>`,
  )}
</ul>`;

/** A break in words: cause, place, price and cure. */
export function BreakCard({ broken, children, level = 2 }) {
  const Heading = `h${level}`;
  return html`<section class="card break" aria-label="Why the prompt broke">
    <${Heading}><span aria-hidden="true">✕</span> ${sentence(broken.says)}<//>
    <dl class="facts">
      <${Fact} label="where">${broken.place}, token ${count(broken.token)}<//>
      <${Fact} label="price">
        ${count(broken.lost_tokens)} tokens read again${broken.lost_ms == null ? "" : `, about ${duration(broken.lost_ms)}`}
      <//>
      <${Fact} label="cause"><code>${broken.cause}</code><//>
    </dl>
    <p class="cure"><strong>Cure:</strong> ${sentence(broken.cure)}</p>
    ${children}
  </section>`;
}

export const sentence = (text) => {
  const first = text ? text[0].toUpperCase() + text.slice(1) : UNKNOWN;
  return /[.!?)]$/.test(first) ? first : `${first}.`;
};

/** A row of choices of which one holds. */
export function Choice({ label, options, value, onChoose }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(
      ([name, text]) => html`<button
        key=${name}
        type="button"
        aria-pressed=${String(name === value)}
        onClick=${() => onChoose(name)}
      >${text}</button>`,
    )}
  </div>`;
}

/** A button that shows that it works, and what went wrong. */
export function ActionButton({ act, children, ...rest }) {
  const [state, setState] = useState(null);
  const run = async () => {
    setState("busy");
    try {
      await act();
      setState(null);
    } catch (error) {
      setState(error.message);
    }
  };
  const failed = state && state !== "busy";
  return html`<span>
    <button type="button" ...${rest} disabled=${state === "busy"} onClick=${run}>${children}</button>
    ${failed && html`<span role="alert" class="problem-word"> ${state}</span>`}
  </span>`;
}

/** Text that may be JSON, laid out. */
export function laidOut(text) {
  if (text == null) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
