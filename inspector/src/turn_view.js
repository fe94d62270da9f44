// One turn as the model wrote it, beside what the client was sent.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { differenceAddress, go, promptAddress, sessionAddress, turnAddress } from "./address.js";
import { mark } from "./compare.js";
import { UNKNOWN, bytes, count, duration, plural, timeOfDay } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { follow, serverNow, useLive } from "./live.js";
import { BreakCard, Empty, Fact, PhaseLegend, Verdict, awaited, laidOut, sentence } from "./pieces.js";
import { exported, useAnswer } from "./source.js";
import { barsOf, endOf, reachOf } from "./times.js";
import { gist } from "./event_gist.js";
import { TurnPages } from "./turn_pages.js";
import { VirtualRows } from "./virtual_rows.js";
import { useTick } from "./watched.js";
import { NO_DETAILS, NO_TEXTS, PHASES, PROTOCOLS, STATUSES } from "./words.js";

const BLOCK = 250; // tokens that are rendered together: a choice changes one or two blocks
const EVENT_PX = 30;
const MOST_TICKS = 6;

export function TurnView({ session, id }) {
  const [version, setVersion] = useState(0);
  const answer = useAnswer(`/inspect/api/turns/${id}`, version);
  useEffect(() => follow(session), [session]);
  useLive((batch) => {
    // The turn may have ended between the answer and the start of the stream, whose first event has the session only.
    const mayHaveEnded = batch.sessions.has(session) && answer.data?.turn.status === "running";
    if (batch.turns.has(id) || mayHaveEnded) setVersion((n) => n + 1);
  });
  if (!answer.data) return html`<div class="page">${awaited(answer)}</div>`;
  return html`<${Turn} key=${id} data=${answer.data} />`;
}

function Turn({ data }) {
  const { turn, tokens, wire, neighbours } = data;
  const [event, setEvent] = useState(-1);
  const [shaded, setShaded] = useState(false);
  const hasLogprobs = Boolean(tokens?.logprob);
  useTick(turn.status === "running" && !exported ? 250 : 0);
  const moveEvent = (to) => wire?.length && setEvent(Math.max(0, Math.min(wire.length - 1, to)));
  useKeys({
    j: () => moveEvent(event + 1),
    ArrowDown: () => moveEvent(event + 1),
    k: () => moveEvent(event - 1),
    ArrowUp: () => moveEvent(event - 1),
    Home: () => moveEvent(0),
    End: () => moveEvent(wire.length - 1),
    "[": () => neighbours.before && go(turnAddress(turn.session, neighbours.before)),
    "]": () => neighbours.after && go(turnAddress(turn.session, neighbours.after)),
    p: () => go(promptAddress(turn.session, turn.id)),
    d: () => neighbours.before && !exported && go(differenceAddress(neighbours.before, turn.id)),
    s: () => hasLogprobs && setShaded(!shaded),
    x: () => mark(turn.id, `turn ${turn.number}`),
    Escape: () => go(`${sessionAddress(turn.session)}?turn=${turn.id}`),
  });
  const highlighted = event < 0 || !wire ? null : [event > 0 ? wire[event - 1].token : 0, wire[event].token];
  return html`<div class="page turn-page">
    <${TurnPages} turn=${turn} neighbours=${neighbours} page="turn" />
    <section class="card" aria-label="Time of the turn">
      <div class="card-head"><h2>Time</h2><${PhaseLegend} kinds=${kindsOf(turn)} /></div>
      <${TimeBar} turn=${turn} />
      <dl class="facts">
        <${Fact} label="status">${STATUSES[turn.status] ?? turn.status}${turn.finish && html`, <code>${turn.finish}</code>`}<//>
        <${Fact} label="arrived">${timeOfDay(turn.received_at)}<//>
        <${Fact} label="queue">${duration(turn.times.queue_ms)}<//>
        <${Fact} label="prefill">${duration(turn.times.prefill_ms)}<//>
        <${Fact} label="first token">${duration(turn.times.first_token_ms)}<//>
        <${Fact} label="first event" title="the first event that the client was sent">${duration(turn.times.first_event_ms)}<//>
        <${Fact} label="total">${duration(turn.times.total_ms)}<//>
        <${Fact} label="gap" title="from this turn's end to the arrival of the lane's next turn">${duration(turn.times.gap_ms)}<//>
        <${Fact} label="generated">${count(turn.tokens.generated)}${turn.tokens.reasoning > 0 && html` <span class="dim">${count(turn.tokens.reasoning)} reasoning</span>`}<//>
        ${turn.worker && html`<${Fact} label="engine"><span class="clip">${turn.worker}</span><//>`}
      </dl>
      ${turn.error && html`<p class="bad" role="alert">${turn.error.type}: ${turn.error.message ?? ""}</p>`}
      <${Calls} calls=${turn.calls} />
    </section>
    ${turn.break && html`<${BreakCard} broken=${turn.break}>
      <p class="links"><a class="button" href=${promptAddress(turn.session, turn.id)}>See the place in the prompt <kbd>p</kbd></a></p>
    <//>`}
    <div class="two-sides">
      <section class="card" aria-label="What the model wrote">
        <div class="card-head">
          <h2>What the model wrote</h2>
          <span class="dim">${plural(tokens?.count ?? turn.tokens.generated ?? 0, "token")}</span>
          ${hasLogprobs && html`<label class="switch"><input type="checkbox" checked=${shaded} onChange=${() => setShaded(!shaded)} /> shade by log-probability</label>`}
        </div>
        <${Written} turn=${turn} tokens=${tokens} shaded=${shaded} highlighted=${highlighted}
          onToken=${(token) => wire?.length && setEvent(wire.findIndex((each) => each.token > token))} />
      </section>
      <section class="card" aria-label="What the client was sent">
        <div class="card-head">
          <h2>What the client was sent</h2>
          <span class="dim">${wire ? `${plural(wire.length, "event")} · ${PROTOCOLS[turn.protocol] ?? turn.protocol}` : ""}</span>
        </div>
        <${Wire} data=${data} chosen=${event} choose=${setEvent} />
      </section>
    </div>
  </div>`;
}

const kindsOf = (turn) => Object.keys(PHASES).filter((kind) => barsOf(turn).some((bar) => bar.kind === kind));

function Calls({ calls }) {
  if (!calls.length) return null;
  return html`<ul class="calls" aria-label="Tool calls">
    ${calls.map((call) => html`<li key=${call.index}>
      <strong>${call.name}</strong> <code class="dim">${call.id}</code>
      <span> first token at ${duration(call.start_ms)}, dispatched at ${duration(call.dispatched_ms)}${call.complete ? "" : " (not complete)"}${call.tool_ms == null ? ", no result yet" : `, ran ${duration(call.tool_ms)} at the harness`}</span>
      ${call.is_error && html` <span class="bad">✕ failed</span>`}
    </li>`)}
  </ul>`;
}

/** The phases of the turn with an axis in time. */
function TimeBar({ turn }) {
  const now = serverNow();
  const bars = barsOf(turn, now).filter((bar) => bar.kind !== "gap");
  const reach = Math.max(1, reachOf(turn, now));
  const place = (ms) => `${(ms / reach) * 100}%`;
  const step = niceStep(reach / MOST_TICKS);
  const ticks = Array.from({ length: Math.floor(reach / step) + 1 }, (_, index) => index * step);
  const words = bars.map((bar) => `${PHASES[bar.kind].label} ${duration(bar.end - bar.start)}`).join(", ");
  return html`<div class="time-bar">
    <div class="bars" role="img" aria-label=${words || "nothing yet"}>
      ${bars.map((bar, index) => html`<span key=${index} class=${`phase fill-${bar.kind} ${bar.open ? "is-open" : ""}`}
        title=${`${PHASES[bar.kind].label} ${bar.label ?? ""}: ${duration(bar.start)} to ${duration(bar.end)}${bar.tokens ? `, ${count(bar.tokens)} tokens` : ""}`}
        style=${{ left: place(bar.start), width: `max(2px, ${place(bar.end - bar.start)})` }}></span>`)}
      ${turn.calls.map((call) => call.dispatched_ms != null && html`<span key=${call.index} class="dispatch" title=${`${call.name} dispatched`} style=${{ left: place(call.dispatched_ms) }}></span>`)}
      <span class="turn-end" title=${`the turn ends at ${duration(endOf(turn, now))}`} style=${{ left: place(endOf(turn, now)) }}></span>
    </div>
    <div class="ticks" aria-hidden="true">
      ${ticks.map((tick) => html`<span key=${tick} style=${{ left: place(tick) }}>${duration(tick)}</span>`)}
    </div>
  </div>`;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function Written({ turn, tokens, shaded, highlighted, onToken }) {
  if (!turn.details || !tokens) return html`<${Empty} title="No tokens">${NO_DETAILS}<//>`;
  if (!tokens.count) return html`<${Empty} title=${turn.status === "running" ? "No token yet" : "The model wrote nothing."} />`;
  if (!tokens.text) return html`<${PartsOnly} turn=${turn} tokens=${tokens} />`;
  const blocks = Array.from({ length: Math.ceil(tokens.count / BLOCK) }, (_, index) => index * BLOCK);
  return html`<div class="written" tabindex="0" role="group" aria-label="Tokens of the turn" onClick=${(event) => {
    const at = event.target.closest("[data-token]")?.dataset.token;
    if (at != null) onToken(Number(at));
  }}>
    <ul class="legend parts-legend">
      ${[...new Set(tokens.parts.map((part) => part.kind))].map((kind) => html`<li key=${kind} title=${PHASES[kind]?.says}><span class=${`token part-${kind}`}>${PHASES[kind]?.label ?? kind}</span></li>`)}
    </ul>
    <div class="tokens">
      ${blocks.map((start) => html`<${TokenBlock} key=${start} tokens=${tokens} start=${start} shaded=${shaded}
        highlighted=${highlighted && highlighted[1] > start && highlighted[0] < start + BLOCK ? highlighted : null}
        count=${Math.min(tokens.count, start + BLOCK)} />`)}
    </div>
  </div>`;
}

function TokenBlock({ tokens, start, count: end, shaded, highlighted }) {
  const place = useRef(null);
  const from = highlighted?.[0];
  useEffect(() => {
    if (highlighted && from >= start) place.current.querySelector(".is-lit")?.scrollIntoView({ block: "nearest" });
  }, [from]);
  return useMemo(() => {
    const shown = [];
    for (let index = start; index < end; index += 1) {
      const part = tokens.parts[tokens.part[index]];
      const logprob = tokens.logprob?.[index];
      const lit = highlighted && index >= highlighted[0] && index < highlighted[1];
      const name = `token part-${part?.kind ?? "text"}${tokens.special[index] ? " is-special" : ""}${lit ? " is-lit" : ""}${shaded && logprob != null ? ` shade-${shadeOf(logprob)}` : ""}`;
      const title = `${duration(tokens.ms[index])} · id ${tokens.id[index]}${logprob == null ? "" : ` · p ${Math.exp(logprob).toFixed(3)}`}`;
      shown.push(html`<span key=${index} class=${name} title=${title} data-token=${index}>${visible(tokens.text[index])}</span>`);
    }
    return html`<span class="token-block" ref=${place}>${shown}</span>`;
  }, [tokens, start, end, shaded, highlighted?.[0], highlighted?.[1]]);
}

/** Characters that show nothing, or that turn the direction of the text. */
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\n])/;

/** Line breaks are shown and kept, hidden characters have their number; a token that completes no character is a dot. */
function visible(text) {
  if (text === "") return html`<span class="invisible">·</span>`;
  if (!HIDDEN.test(text)) return text;
  return text.split(HIDDEN).map((part) => {
    if (part === "\n") return [html`<span class="invisible">⏎</span>`, part];
    if (!HIDDEN.test(part)) return part;
    return html`<span class="code-point">U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}</span>`;
  });
}

/** 0 (certain) to 4 (unlikely). */
function shadeOf(logprob) {
  const probability = Math.exp(logprob);
  return probability > 0.9 ? 0 : probability > 0.6 ? 1 : probability > 0.3 ? 2 : probability > 0.1 ? 3 : 4;
}

/** What is known of the answer without its text. */
function PartsOnly({ turn, tokens }) {
  return html`<p class="dim">${NO_TEXTS}</p>
    <table class="plain-table">
      <thead><tr><th scope="col">Part</th><th scope="col">Tokens</th><th scope="col">From</th><th scope="col">To</th></tr></thead>
      <tbody>${tokens.parts.map((part, index) => html`<tr key=${index}>
        <td><span class=${`token part-${part.kind}`}>${PHASES[part.kind]?.label ?? part.kind}</span> ${part.call == null ? "" : turn.calls[part.call]?.name}</td>
        <td>${count(part.end - part.start)}</td><td>${duration(tokens.ms[part.start])}</td><td>${duration(tokens.ms[part.end - 1])}</td>
      </tr>`)}</tbody>
    </table>`;
}

function Wire({ data, chosen, choose }) {
  const { turn, wire, wire_dropped: dropped } = data;
  if (!turn.details || !wire) return html`<${Empty} title="No events">${NO_DETAILS}<//>`;
  if (!wire.length) return html`<${Empty} title="Nothing was sent yet." />`;
  const shown = wire[chosen];
  return html`
    ${dropped > 0 && html`<p class="dim">${plural(dropped, "event")} more were sent than are kept.</p>`}
    <div class="table wire" role="table" aria-label="Events" aria-rowcount=${wire.length}>
      <${VirtualRows}
        own
        role="rowgroup"
        class="wire-rows"
        tabindex="0"
        aria-label="Events, choose with j and k"
        count=${wire.length}
        height=${EVENT_PX}
        chosen=${chosen}
        rowKey=${(index) => index}
        rowProps=${(index) => ({
          role: "row", class: `row ${index === chosen ? "is-chosen" : ""}`, "aria-rowindex": index + 1,
          "aria-current": index === chosen ? "true" : undefined, onClick: () => choose(index),
        })}
        row=${(index) => {
          const event = wire[index];
          return html`<div role="cell" class="col-ms">${duration(event.ms)}</div>
            <div role="cell" class="col-event">${event.event || "chunk"}${event.choice > 0 ? html` <span class="tag">choice ${event.choice}</span>` : ""}</div>
            <div role="cell" class="col-data clip">${event.data == null ? bytes(event.bytes) : gist(event.data)}</div>`;
        }}
      />
    </div>
    ${shown
      ? html`<div class="event-detail" aria-live="polite">
          <p class="dim">${shown.event || "chunk"} at ${duration(shown.ms)}, ${bytes(shown.bytes)}, after ${plural(shown.token, "token")}</p>
          ${shown.data != null && html`<pre tabindex="0">${laidOut(shown.data)}</pre>`}
        </div>`
      : html`<p class="dim">Choose an event to see it whole, and the tokens behind it.</p>`}`;
}
