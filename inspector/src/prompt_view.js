// One prompt: what of it stood in the last one, where it broke and why, what the engine had, and the request behind it.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { differenceAddress, go, sessionAddress, turnAddress } from "./address.js";
import { mark } from "./compare.js";
import { bytes, count, duration, percent, plural } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { follow } from "./live.js";
import { BreakCard, Chip, Empty, Fact, PromptLegend, awaited, laidOut } from "./pieces.js";
import { exported, useAnswer } from "./source.js";
import { DiffText } from "./text_diff.js";
import { TurnPages } from "./turn_pages.js";
import { useMedia } from "./watched.js";
import { MADE_BY, NO_DETAILS, NO_TEXTS, PROMPT_STATES, promptState } from "./words.js";

const CONTEXT_CHARS = 160; // of the text that both prompts have, before the place where they differ

export function PromptView({ session, id }) {
  const turnAnswer = useAnswer(`/inspect/api/turns/${id}`);
  const answer = useAnswer(`/inspect/api/turns/${id}/prompt`);
  useEffect(() => follow(session), [session]);
  if (!answer.data || !turnAnswer.data) {
    return html`<div class="page">${awaited(answer.error ? answer : turnAnswer)}</div>`;
  }
  return html`<${Prompt} key=${id} prompt=${answer.data} data=${turnAnswer.data} />`;
}

function Prompt({ prompt, data }) {
  const { turn, neighbours } = data;
  const wide = useMedia("(min-width: 1100px)");
  const [raw, setRaw] = useState(false);
  const breakMark = useRef(null);
  const toBreak = () => {
    breakMark.current?.scrollIntoView({ block: "center" });
    breakMark.current?.focus({ preventScroll: true });
    return Boolean(breakMark.current);
  };
  useKeys({
    "[": () => neighbours.before && go(`${turnAddress(turn.session, neighbours.before)}/prompt`),
    "]": () => neighbours.after && go(`${turnAddress(turn.session, neighbours.after)}/prompt`),
    p: () => go(turnAddress(turn.session, turn.id)),
    d: () => prompt.compared_with && !exported && go(differenceAddress(prompt.compared_with, turn.id)),
    b: toBreak,
    r: () => setRaw(!raw),
    x: () => mark(turn.id, `turn ${turn.number}`),
    Escape: () => go(`${sessionAddress(turn.session)}?turn=${turn.id}`),
  });
  const counts = useMemo(() => countStates(prompt), [prompt]);
  const text = html`<${Rendered} prompt=${prompt} turn=${turn} counts=${counts} breakMark=${breakMark} />`;
  const request = html`<${RawRequest} request=${prompt.request} />`;
  return html`<div class="page prompt-page">
    <${TurnPages} turn=${turn} neighbours=${neighbours} page="prompt" verdict=${prompt.verdict} />
    ${prompt.break && html`<${BreakCard} broken=${prompt.break}><${BreakDetail} prompt=${prompt} toBreak=${toBreak} /><//>`}
    <${Standing} prompt=${prompt} turn=${turn} />
    <div class=${`prompt-columns ${raw ? "with-raw" : ""}`}>
      <${Outline} prompt=${prompt} />
      <section class="card prompt-text" aria-label="Rendered prompt">
        <div class="card-head">
          <h2>${raw && !wide ? "Raw request" : "Rendered prompt"}</h2>
          <button type="button" aria-pressed=${String(raw)} onClick=${() => setRaw(!raw)}>Raw request <kbd>r</kbd></button>
        </div>
        ${raw && !wide ? request : text}
      </section>
      ${raw && wide && html`<section class="card raw" aria-label="Raw request"><div class="card-head"><h2>Raw request</h2></div>${request}</section>`}
    </div>
  </div>`;
}

function countStates(prompt) {
  const counts = {};
  for (const span of prompt.spans ?? []) {
    const state = promptState(span);
    counts[state] = (counts[state] ?? 0) + span.end - span.start;
    if (span.rule) counts.canonicalized = (counts.canonicalized ?? 0) + span.end - span.start;
  }
  return counts;
}

function BreakDetail({ prompt, toBreak }) {
  const broken = prompt.break;
  const first = prompt.first_difference;
  return html`
    <p>It comes from ${MADE_BY[broken.made_by] ?? broken.made_by}.
      ${first?.was != null && first?.now != null && html`${" "}The first token that differs was <code class="tok">${JSON.stringify(first.was.text)}</code> (id ${first.was.id}) and is now <code class="tok">${JSON.stringify(first.now.text)}</code> (id ${first.now.id}).`}</p>
    ${broken.tools && html`<${ToolsChanged} tools=${broken.tools} />`}
    ${broken.was != null && html`<div class="was-now">
      <${DiffText} before=${(broken.before ?? "").slice(-CONTEXT_CHARS)} a=${broken.was} b=${broken.now ?? ""} titles=${["last prompt", "this prompt"]} />
    </div>`}
    <p class="links">
      ${prompt.spans?.length > 0 && html`<button type="button" onClick=${toBreak}>To the place in the prompt <kbd>b</kbd></button>`}
      ${prompt.compared_with && !exported && html` <a class="button" href=${differenceAddress(prompt.compared_with, prompt.turn)}>Compare the two requests <kbd>d</kbd></a>`}
    </p>`;
}

function ToolsChanged({ tools }) {
  const parts = ["added", "removed", "changed"].filter((state) => tools[state]?.length);
  return html`<p>Tools: ${parts.map((state) => html`<span key=${state}>${state} ${tools[state].map((name) => html`<code key=${name}>${name}</code> `)}</span>`)}${tools.reordered ? "in another order" : ""}</p>`;
}

/** What singletree predicts, what the router predicted and what the engine reports, one bar under the other. */
function Standing({ prompt, turn }) {
  const { tokens, verdict } = turn;
  const rows = [
    ["in place: what an engine could have", "tokens with which the prompt continues the last one: what any engine could have", prompt.matched],
    ...(tokens.predicted == null ? [] : [["predicted by the router", "tokens that the router expected in the engine's cache", tokens.predicted]]),
    ["reported by the engine", "tokens that the engine reports from its cache", tokens.cached],
  ];
  return html`<section class="card standing" aria-label="Cache of this prompt">
    <dl>
      ${rows.map(([label, title, value]) => html`<div key=${label} title=${title}>
        <dt>${label}</dt>
        <dd>
          <span class="meter" aria-hidden="true"><span class=${`fill-${label.startsWith("reported") ? "cached" : "place"}`} style=${{ width: `${((value ?? 0) / (prompt.count || 1)) * 100}%` }}></span></span>
          <span class="amount">${value == null ? "no count" : html`${count(value)} <span class="dim">${percent(value / (prompt.count || 1))}</span>`}</span>
        </dd>
      </div>`)}
    </dl>
    <p class="dim">of ${count(prompt.count)} prompt tokens${prompt.worker ? html` on <code>${prompt.worker}</code>` : ""}.
      ${verdict.missing_tokens > 0 && html`${" "}<strong class="warn">${count(verdict.missing_tokens)} were in place and not cached${verdict.missing_ms ? `, about ${duration(verdict.missing_ms)}` : ""}.</strong>`}</p>
  </section>`;
}

const MESSAGE_STATES = { same: ["plain", "same"], changed: ["bad", "✕ changed"], new: ["good", "+ new"] };
const TOOL_STATES = { same: ["plain", "same"], changed: ["bad", "✕ changed"], added: ["good", "+ added"] };

function Outline({ prompt }) {
  const show = (index) => {
    const span = document.querySelector(`[data-message="${index}"]`);
    span?.scrollIntoView({ block: "start" });
  };
  return html`<nav class="card outline" aria-label="Messages and tools of the prompt">
    <h2>Messages</h2>
    ${!prompt.messages?.length && html`<p class="dim">Not kept.</p>`}
    <ol>
      ${prompt.messages?.map((message) => {
        const [tone, words] = MESSAGE_STATES[message.state] ?? ["plain", message.state];
        const size = message.start == null ? `${count(message.chars)} characters` : plural(message.end - message.start, "token");
        return html`<li key=${message.index}>
          <button type="button" class="outline-row" onClick=${() => show(message.index)}>
            <span class="num">${message.index}</span> <strong>${message.role}</strong>
            <span class="dim">${message.parts.map((part) => part.name ?? part.kind).join(", ")}</span>
            <span class="outline-size dim">${size}</span>
            ${message.state !== "same" && html`<${Chip} tone=${tone}>${words}<//>`}
            ${message.rules?.map((rule) => html`<span key=${rule} class="ink ink-canonicalized">${rule}</span>`)}
          </button>
        </li>`;
      })}
    </ol>
    ${prompt.tools?.length > 0 && html`<h2>Tools</h2>
      <ul>${prompt.tools.map((tool) => {
        const [tone, words] = TOOL_STATES[tool.state] ?? ["plain", tool.state];
        return html`<li key=${tool.name} class="outline-tool"><code>${tool.name}</code> <span class="dim">${bytes(tool.bytes)}</span> ${tool.state !== "same" && html`<${Chip} tone=${tone}>${words}<//>`}</li>`;
      })}</ul>`}
    ${prompt.rules?.length > 0 && html`<h2>Rules</h2>
      <ul>${prompt.rules.map((rule) => html`<li key=${rule.name}><code>${rule.name}</code> <span class="dim">${rule.reason}</span></li>`)}</ul>`}
    ${Object.keys(prompt.settings ?? {}).length > 0 && html`<h2>Settings</h2>
      <dl class="facts">${Object.entries(prompt.settings).map(([name, value]) => html`<${Fact} key=${name} label=${name}>${String(value)}<//>`)}</dl>`}
  </nav>`;
}

function Rendered({ prompt, turn, counts, breakMark }) {
  if (!prompt.spans) return html`<${Empty} title="No prompt">${turn.details ? NO_TEXTS : NO_DETAILS}<//>`;
  const withText = prompt.spans.some((span) => span.text != null);
  return html`
    <${PromptLegend} counts=${counts} />
    ${!prompt.exact && html`<p class="dim">Counts are exact; places behind a break are not, since texts are not kept.</p>`}
    ${withText ? html`<${Spans} prompt=${prompt} breakMark=${breakMark} />` : html`<${SpansOnly} prompt=${prompt} />`}`;
}

function Spans({ prompt, breakMark }) {
  const at = prompt.break?.token ?? null;
  return useMemo(() => {
    const shown = [];
    let role = null;
    let marked = false;
    const messages = new Map(prompt.messages?.map((message) => [message.index, message]));
    for (const span of prompt.spans) {
      if (!marked && at != null && span.end > at) {
        marked = true;
        shown.push(html`<div key="break" class="break-mark" ref=${breakMark} tabindex="-1" role="note">
          <span aria-hidden="true">✕</span> The prompt broke here, at token ${count(at)}. Everything below is read again.
        </div>`);
      }
      const message = messages.get(span.message);
      if (span.message !== role) {
        role = span.message;
        shown.push(html`<div key=${`m${span.start}`} class="message-mark" data-message=${span.message ?? ""}>
          <span>${message ? html`${message.index} <strong>${message.role}</strong>` : "template"}</span> <span>token ${count(span.start)}</span>
        </div>`);
      }
      const state = promptState(span);
      const name = `ink ink-${state}${span.rule ? " ink-canonicalized" : ""}`;
      const title = `${PROMPT_STATES[state].label}, tokens ${count(span.start)} to ${count(span.end)}${span.rule ? `, rule ${span.rule}` : ""}`;
      if (span.text == null) {
        shown.push(html`<p key=${span.start} class="same-text">${plural(span.end - span.start, "token")} as in <a href=${turnAddress(prompt.session, span.same_as ?? prompt.compared_with)}>an earlier turn</a></p>`);
        continue;
      }
      shown.push(html`<span key=${span.start} class=${name} title=${title}>${span.text}</span>`);
    }
    return html`<div class="prompt" tabindex="0" role="group" aria-label="Text of the prompt">${shown}</div>`;
  }, [prompt]);
}

function SpansOnly({ prompt }) {
  return html`<p class="dim">${NO_TEXTS}</p>
    <table class="plain-table">
      <thead><tr><th scope="col">State</th><th scope="col">Made by</th><th scope="col">Tokens</th><th scope="col">From</th></tr></thead>
      <tbody>${prompt.spans.map((span) => html`<tr key=${span.start} class=${prompt.break?.token === span.start ? "is-broken" : ""}>
        <td><span class=${`ink ink-${promptState(span)}`}>${PROMPT_STATES[promptState(span)].label}</span></td>
        <td>${span.from}${span.rule ? html`, rule <code>${span.rule}</code>` : ""}</td><td>${count(span.end - span.start)}</td><td>${count(span.start)}</td>
      </tr>`)}</tbody>
    </table>`;
}

function RawRequest({ request }) {
  if (request?.body == null) {
    return html`<${Empty} title="The request is not kept.">${request ? `It had ${bytes(request.bytes)}. ` : ""}${request?.kept === false ? NO_TEXTS : ""}<//>`;
  }
  return html`<p class="dim">${bytes(request.bytes)}, laid out</p>
    <pre class="raw-body" tabindex="0">${laidOut(request.body)}</pre>`;
}
