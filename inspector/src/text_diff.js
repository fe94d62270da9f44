// Two texts side by side, with what differs marked by words.
import { diff } from "fast-myers-diff";
import { useMemo } from "preact/hooks";
import { html } from "./html.js";

const MOST_PIECES = 4_000; // The time grows with their square where nothing agrees.

const CUTS = [/\s+|[\p{L}\p{N}_]+|[^\s]/gu, /[^\n]*\n|[^\n]+$/g];

/** Both texts as words, spaces and single signs; as lines where they are too long for that; else whole. */
function pieces(texts) {
  for (const cut of CUTS) {
    const found = texts.map((text) => text.match(cut) ?? []);
    if (found.every((each) => each.length <= MOST_PIECES)) return found;
  }
  return texts.map((text) => [text]);
}

/** @returns {[boolean, string][][]} for each text its pieces, and whether they differ */
export function compareTexts(a, b) {
  const [left, right] = pieces([a, b]);
  const sides = [[], []];
  let [doneLeft, doneRight] = [0, 0];
  const put = (side, differs, text) => text && sides[side].push([differs, text]);
  for (const [fromLeft, toLeft, fromRight, toRight] of diff(left, right)) {
    put(0, false, left.slice(doneLeft, fromLeft).join(""));
    put(1, false, right.slice(doneRight, fromRight).join(""));
    put(0, true, left.slice(fromLeft, toLeft).join(""));
    put(1, true, right.slice(fromRight, toRight).join(""));
    [doneLeft, doneRight] = [toLeft, toRight];
  }
  put(0, false, left.slice(doneLeft).join(""));
  put(1, false, right.slice(doneRight).join(""));
  return sides;
}

/** `before` is text that both have, which is shown in front. */
export function DiffText({ a, b, titles, before = "" }) {
  const sides = useMemo(() => compareTexts(a ?? "", b ?? ""), [a, b]);
  return sides.map(
    (side, index) => html`<div key=${index}>
      <h3>${titles[index]}</h3>
      <pre tabindex="0" class=${index ? "diff-now" : "diff-was"}><span class="dim">${before}</span>${side.map(([differs, text], at) =>
        differs ? html`<${index ? "ins" : "del"} key=${at}>${text}<//>` : text,
      )}</pre>
    </div>`,
  );
}
