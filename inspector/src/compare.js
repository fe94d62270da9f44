// What is marked for a comparison.
import { signal } from "@preact/signals";
import { differenceAddress, go } from "./address.js";
import { exported } from "./source.js";
import { html } from "./html.js";

/** {id, title} or null. */
export const marked = signal(null);

export function mark(id, title) {
  if (exported || !id) return;
  const first = marked.value;
  if (!first) marked.value = { id, title };
  else {
    marked.value = null;
    if (first.id !== id) go(differenceAddress(first.id, id));
  }
}

export const MarkedBar = () =>
  marked.value &&
  html`<div class="marked" role="status">
    <span>Comparing <strong>${marked.value.title}</strong>. Choose another turn or session and press <kbd>x</kbd>.</span>
    <button type="button" onClick=${() => (marked.value = null)}>Cancel</button>
  </div>`;
