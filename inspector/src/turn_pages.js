// The head of the pages about one turn: its place among the others, and ways to go on.
import { differenceAddress, promptAddress, turnAddress } from "./address.js";
import { html } from "./html.js";
import { Verdict, sentence } from "./pieces.js";
import { exported } from "./source.js";
import { COURSES } from "./words.js";

export function TurnPages({ turn, neighbours, page, verdict = turn.verdict }) {
  const at = page === "prompt" ? promptAddress : turnAddress;
  const course = COURSES[turn.course];
  const step = (to, mark, words, key) => to
    ? html`<a class="button" href=${at(turn.session, to)} aria-label=${words} title=${`${words} (${key})`}>${mark}</a>`
    : html`<span class="button is-off" aria-hidden="true">${mark}</span>`;
  const tab = (name, words, href) => html`<a href=${href} aria-current=${page === name ? "page" : undefined}>${words}</a>`;
  return html`<header class="page-head">
    <div>
      <h1>Turn ${turn.number} <${Verdict} verdict=${verdict} /></h1>
      <p class="dim">${course && html`<span title=${course.says}>${course.mark} ${course.label}</span> · `}${sentence(verdict.says)}</p>
    </div>
    <nav class="turn-nav" aria-label="Turn">
      <span class="tabs">
        ${tab("turn", "Tokens and events", turnAddress(turn.session, turn.id))}
        ${tab("prompt", "Prompt", promptAddress(turn.session, turn.id))}
      </span>
      ${!exported && neighbours?.before && html`<a class="button" href=${differenceAddress(neighbours.before, turn.id)}>Compare with the turn before <kbd>d</kbd></a>`}
      ${step(neighbours?.before, "←", "Turn before", "[")} ${step(neighbours?.after, "→", "Turn after", "]")}
    </nav>
  </header>`;
}
