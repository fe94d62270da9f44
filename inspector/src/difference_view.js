// Two turns side by side: their requests by message, their tools by schema.
import { useEffect, useState } from "preact/hooks";
import { go, promptAddress, sessionAddress, sidesAddress, turnAddress } from "./address.js";
import { count, duration, harnessName, percent, plural, sessionName } from "./format.js";
import { html } from "./html.js";
import { useKeys } from "./keyboard.js";
import { follow } from "./live.js";
import { Chip, Empty, awaited, laidOut } from "./pieces.js";
import { exported, useAnswer } from "./source.js";
import { DiffText } from "./text_diff.js";
import { NO_TEXTS } from "./words.js";

const STATES = {
  same: ["plain", "same"],
  changed: ["bad", "✕ changed"],
  added: ["good", "+ added"],
  removed: ["warn", "− removed"],
  moved: ["plain", "⇅ moved"],
  reordered: ["plain", "⇅ in another place"],
};

export function DifferenceView({ a, b }) {
  const known = a && b && !exported;
  useEffect(() => follow(null), []);
  const answer = useAnswer(known ? `/inspect/api/difference?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}` : null);
  if (exported) return html`<div class="page"><${Empty} title="Comparisons need the server; an exported file has one session." /></div>`;
  if (!known) return html`<div class="page"><${Empty} title="Nothing to compare">Choose a turn or a session, press <kbd>x</kbd>, then <kbd>x</kbd> on another one.<//></div>`;
  if (!answer.data) return html`<div class="page">${awaited(answer)}</div>`;
  return html`<${Difference} data=${answer.data} />`;
}

function Difference({ data }) {
  const [all, setAll] = useState(false);
  useKeys({ Escape: () => go(`${sessionAddress(data.b.session.id)}?turn=${data.b.turn.id}`) });
  const differing = data.messages.filter((message) => message.state !== "same").length;
  const tools = data.tools.filter((tool) => tool.state !== "same");
  return html`<div class="page difference-page">
    <header class="page-head"><div>
      <h1>Difference</h1>
      <p class="dim">${data.same_tokens == null ? "How many tokens the prompts have in common is not known, since texts are not kept." : `The prompts have the first ${plural(data.same_tokens, "token")} in common.`}
        ${" "}${differing ? `${plural(differing, "message")} ${differing === 1 ? "differs" : "differ"}` : "All messages are the same"}; ${tools.length ? `${plural(tools.length, "tool")} ${tools.length === 1 ? "differs" : "differ"}` : "the tools are the same"}.</p>
    </div>
    ${data.a.session.id !== data.b.session.id && html`<a class="button" href=${sidesAddress(data.a.session.id, data.b.session.id)}>The two sessions side by side</a>`}
    </header>
    <div class="two-sides">
      <${Side} name="A" side=${data.a} other=${data.b} />
      <${Side} name="B" side=${data.b} other=${data.a} />
    </div>
    <section class="card" aria-label="Messages">
      <div class="card-head"><h2>Messages</h2>
        <label class="switch"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} /> also those that are the same</label></div>
      ${!differing && html`<p class="good-word">✓ All messages are the same.</p>`}
      ${folded(data.messages, all).map((entry, index) =>
        Array.isArray(entry)
          ? html`<p key=${index} class="dim same-run">${plural(entry.length, "message")} the same</p>`
          : html`<${Message} key=${index} message=${entry} />`)}
    </section>
    <section class="card" aria-label="Tools">
      <h2>Tools</h2>
      ${!tools.length && html`<p class="good-word">✓ ${data.tools.length ? `All ${count(data.tools.length)} tools are the same.` : "Neither has tools."}</p>`}
      ${tools.map((tool) => html`<${Tool} key=${tool.name} tool=${tool} />`)}
    </section>
    ${(data.settings.length > 0 || differs(data.rules.a, data.rules.b)) && html`<section class="card" aria-label="Settings">
      <h2>Settings and rules</h2>
      <table class="plain-table"><thead><tr><th scope="col">Setting</th><th scope="col">A</th><th scope="col">B</th></tr></thead>
        <tbody>${data.settings.map((setting) => html`<tr key=${setting.name}><th scope="row"><code>${setting.name}</code></th><td>${setting.a ?? "not set"}</td><td>${setting.b ?? "not set"}</td></tr>`)}
          <tr><th scope="row">rules</th><td>${data.rules.a.join(", ") || "none"}</td><td>${data.rules.b.join(", ") || "none"}</td></tr></tbody></table>
    </section>`}
  </div>`;
}

const differs = (a, b) => a.join() !== b.join();

/** Runs of equal messages as one entry, unless all are wanted. */
function folded(messages, all) {
  if (all) return messages;
  const entries = [];
  for (const message of messages) {
    if (message.state !== "same") entries.push(message);
    else if (Array.isArray(entries.at(-1))) entries.at(-1).push(message);
    else entries.push([message]);
  }
  return entries;
}

function Side({ name, side, other }) {
  const { turn, session } = side;
  const number = (label, mine, theirs, unit = count) => html`<div class="fact"><dt>${label}</dt><dd class=${mine === theirs ? "is-same" : ""}>${unit(mine)}</dd></div>`;
  return html`<section class="card" aria-label=${`Side ${name}`}>
    <h2><span class="side-name">${name}</span> <a href=${turnAddress(session.id, turn.id)}>Turn ${turn.number}</a> of${" "}
      <a href=${sessionAddress(session.id)}>${harnessName(session)} <span class="key">${sessionName(session)}</span></a></h2>
    <dl class="facts">
      ${number("prompt", turn.tokens.prompt, other.turn.tokens.prompt)}
      ${number("cached", turn.tokens.cached, other.turn.tokens.cached)}
      ${number("generated", turn.tokens.generated, other.turn.tokens.generated)}
      ${number("first token", turn.times.first_token_ms, other.turn.times.first_token_ms, duration)}
      ${number("total", turn.times.total_ms, other.turn.times.total_ms, duration)}
      ${number("in place, whole session", session.share_in_place, other.session.share_in_place, percent)}
    </dl>
    <p class="links"><a class="button" href=${promptAddress(session.id, turn.id)}>Its prompt</a></p>
  </section>`;
}

function Message({ message }) {
  const [tone, words] = STATES[message.state] ?? ["plain", message.state];
  const place = message.a == null ? `B ${message.b}` : message.b == null ? `A ${message.a}` : message.a === message.b ? message.a : `A ${message.a} → B ${message.b}`;
  const chars = message.a_chars === message.b_chars || message.b == null ? message.a_chars : message.a == null ? message.b_chars : null;
  return html`<article class="difference">
    <h3><span class="num">${place}</span> ${message.role} <${Chip} tone=${tone}>${words}<//>
      <span class="dim">${chars == null ? `${count(message.a_chars)} → ${count(message.b_chars)}` : count(chars)} characters</span></h3>
    ${message.state === "changed" && (message.a_text != null || message.b_text != null) && html`<div class="was-now"><${DiffText} a=${message.a_text} b=${message.b_text} titles=${["A", "B"]} /></div>`}
    ${["added", "removed"].includes(message.state) && (message.a_text ?? message.b_text) != null && html`<pre tabindex="0">${message.a_text ?? message.b_text}</pre>`}
    ${message.state === "changed" && message.a_text == null && message.b_text == null && html`<p class="dim">${NO_TEXTS}</p>`}
  </article>`;
}

function Tool({ tool }) {
  const [tone, words] = STATES[tool.state] ?? ["plain", tool.state];
  return html`<article class="difference">
    <h3><code>${tool.name}</code> <${Chip} tone=${tone}>${words}<//></h3>
    ${tool.changes?.length > 0 && html`<table class="plain-table">
      <thead><tr><th scope="col">Place in the schema</th><th scope="col">A</th><th scope="col">B</th></tr></thead>
      <tbody>${tool.changes.map((change) => html`<tr key=${change.path}><th scope="row"><code>${change.path}</code></th>
        <td><pre>${change.a ?? "absent"}</pre></td><td><pre>${change.b ?? "absent"}</pre></td></tr>`)}</tbody></table>`}
    ${tool.state === "changed" && !tool.changes?.length && tool.a != null && html`<div class="was-now"><${DiffText} a=${laidOut(tool.a)} b=${laidOut(tool.b)} titles=${["A", "B"]} /></div>`}
  </article>`;
}
