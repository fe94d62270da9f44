// Two sessions side by side: the words, calls, tokens and times of each turn. A fork begins at the turn that it answers anew.
import { useEffect } from "preact/hooks";
import { sessionAddress, turnAddress } from "./address.js";
import { count, duration, harnessName, plural, sessionName } from "./format.js";
import { html } from "./html.js";
import { follow } from "./live.js";
import { Empty, awaited } from "./pieces.js";
import { exported, useAnswer } from "./source.js";
import { sumTimes } from "./times.js";

export function SidesView({ a, b }) {
  useEffect(() => follow(null), []);
  const sides = [useSide(a), useSide(b)];
  if (exported || !a || !b) return html`<div class="page"><${Empty} title="Nothing to compare" /></div>`;
  const missing = sides.find((side) => !side.session);
  if (missing) return html`<div class="page">${awaited(missing.answer)}</div>`;
  const last = Math.max(...sides.map((side) => side.first + side.turns.length), ...sides.map((side) => side.kept.length));
  return html`<div class="page">
    <header class="page-head"><div><h1>Two sessions</h1></div></header>
    <div class="two-sides">${sides.map((side, index) => html`<${Sums} key=${index} name=${"AB"[index]} side=${side} />`)}</div>
    ${Array.from({ length: last }, (_, number) => html`<section key=${number} class="card" aria-label=${`Turn ${number + 1}`}>
      <h2>Turn ${number + 1}</h2>
      <div class="two-sides">${sides.map((side, index) => html`<${Turn} key=${index} side=${side} number=${number} />`)}</div>
    </section>`)}
  </div>`;
}

/** A session, the turns of its longest conversation, and what the server still has of their words. */
function useSide(id) {
  const answer = useAnswer(id && !exported ? `/inspect/api/sessions/${id}` : null);
  const key = answer.data?.session.key;
  const words = useAnswer(key ? `/v1/singletree/sessions/${encodeURIComponent(key)}/turns` : null);
  if (!answer.data) return { answer, kept: [], turns: [], first: 0 };
  const lanes = new Map();
  for (const turn of answer.data.turns) if (!turn.repeats) lanes.set(turn.lane, [...(lanes.get(turn.lane) ?? []), turn]);
  const turns = lanes.get(words.data?.line) ?? [...lanes.values()].sort((a, b) => b.length - a.length)[0] ?? [];
  const kept = words.data?.data ?? [];
  return { answer, session: answer.data.session, kept, turns, first: Math.max(0, kept.length - turns.length) };
}

function Sums({ name, side }) {
  const sum = (token) => side.turns.reduce((all, turn) => all + (turn.tokens[token] ?? 0), 0);
  const fact = (label, value) => html`<div class="fact"><dt>${label}</dt><dd>${value}</dd></div>`;
  return html`<section class="card" aria-label=${`Side ${name}`}>
    <h2><span class="side-name">${name}</span> <a href=${sessionAddress(side.session.id)}>${harnessName(side.session)} <span class="key">${sessionName(side.session)}</span></a></h2>
    <dl class="facts">
      ${fact("model", side.turns.at(-1)?.model)}
      ${fact("turns", count(side.first + side.turns.length))}
      ${fact("prefill", plural(sum("new"), "token"))}
      ${fact("cached", count(sum("cached")))}
      ${fact("generated", count(sum("generated")))}
      ${fact("time of the model", duration(side.turns.reduce((all, turn) => all + (turn.times.total_ms ?? 0), 0)))}
      ${fact("reading prompts", duration(sumTimes(side.turns).prefill))}
    </dl>
  </section>`;
}

function Turn({ side, number }) {
  const turn = side.turns[number - side.first];
  const words = side.kept[number];
  const calls = words?.calls ?? turn?.calls ?? [];
  return html`<div>
    ${turn && html`<p class="dim"><a href=${turnAddress(side.session.id, turn.id)}>${turn.model}</a>: ${count(turn.tokens.new)} of ${plural(turn.tokens.prompt, "token")} of prefill, ${count(turn.tokens.generated)} generated, ${duration(turn.times.total_ms)}</p>`}
    ${words?.reasoning && html`<p class="dim sides-words">${words.reasoning}</p>`}
    ${words?.text && html`<p class="sides-words">${words.text}</p>`}
    ${calls.map((call, index) => html`<p key=${index} class="sides-words"><code>${call.name} ${call.arguments ?? ""}</code></p>`)}
  </div>`;
}
