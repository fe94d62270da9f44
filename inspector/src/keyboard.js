// Keys of the page. What has the highest rank is asked first; of equal ranks, what was opened last.
import { useLayoutEffect, useRef } from "preact/hooks";

const stack = [];

const TYPING = new Set(["INPUT", "SELECT", "TEXTAREA"]);

/** Handle keys while the component is there: {key: (event) => false for "not mine" | anything}. */
export function useKeys(keys, rank = 1) {
  const latest = useRef(keys);
  latest.current = keys;
  // Before the component is painted: who sees it can use its keys.
  useLayoutEffect(() => {
    const entry = { latest, rank };
    const at = stack.findIndex((each) => each.rank > rank);
    stack.splice(at < 0 ? stack.length : at, 0, entry);
    return () => stack.splice(stack.indexOf(entry), 1);
  }, []);
}

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (document.querySelector("dialog[open]")) return;
  const { target } = event;
  const field = TYPING.has(target.tagName) && target.type !== "checkbox" && target.type !== "range";
  if (field) {
    if (event.key === "Escape") target.blur();
    return;
  }
  // Enter and the space bar belong to the control that has the focus.
  if ((event.key === "Enter" || event.key === " ") && target.closest("a, button, summary, input")) return;
  for (const { latest } of [...stack].reverse()) {
    const act = latest.current[event.key];
    if (act && act(event) !== false) {
      event.preventDefault();
      return;
    }
  }
});
