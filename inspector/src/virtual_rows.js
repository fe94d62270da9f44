// A long list of which only the visible rows exist. All rows have one height, so that no row has to be measured.
// It scrolls with the window, or in an element of its own.
import { useEffect, useLayoutEffect, useReducer, useRef } from "preact/hooks";
import { html } from "./html.js";

const OVERSCAN = 12; // rows beyond the edges
const HEAD_PX = 84; // the page's bar and the head of a table, which cover rows that scroll with the window
const FOOT_PX = 24;

/** The part of the list that can be seen, in pixels from its top: {top, bottom}. */
function visiblePart(element, own) {
  if (!element) return { top: 0, bottom: 1000 };
  if (own) return { top: element.scrollTop, bottom: element.scrollTop + element.clientHeight };
  const { top } = element.getBoundingClientRect();
  return { top: -top, bottom: window.innerHeight - top };
}

/**
 * @param {object} given
 * @param {number} given.count number of rows
 * @param {number} given.height height of a row in pixels
 * @param {(index: number) => any} given.row renders the content of a row
 * @param {(index: number) => string|number} given.rowKey
 * @param {(index: number) => object} [given.rowProps] attributes of a row: role, aria-…, class, handlers
 * @param {number} [given.chosen] is scrolled into view when it changes
 * @param {boolean} [given.own] scrolls in its own element rather than with the window
 */
export function VirtualRows({ count, height, row, rowKey, rowProps, chosen = -1, own, class: className, ...rest }) {
  const element = useRef(null);
  const drawn = useRef("");
  const [, redraw] = useReducer((n) => n + 1, 0);
  const { top, bottom } = visiblePart(element.current, own);
  const first = Math.max(0, Math.min(count, Math.floor(top / height)) - OVERSCAN);
  const last = Math.min(count, Math.ceil(Math.max(bottom, 0) / height) + OVERSCAN);
  drawn.current = `${first} ${last}`;
  useLayoutEffect(() => {
    const check = () => {
      const part = visiblePart(element.current, own);
      // Half of the rows beyond the edges may be used up before new ones are made.
      const [from, to] = drawn.current.split(" ").map(Number);
      const slack = (OVERSCAN / 2) * height;
      if ((part.top - slack < from * height && from > 0) || (part.bottom + slack > to * height && to < count)) redraw();
    };
    const scrolled = own ? element.current : window;
    const observer = new ResizeObserver(check); // What stands above the list may move it.
    observer.observe(own ? element.current : document.body);
    scrolled.addEventListener("scroll", check, { passive: true });
    check();
    return () => {
      observer.disconnect();
      scrolled.removeEventListener("scroll", check);
    };
  }, [count, height, own]);
  useEffect(() => {
    if (chosen < 0 || chosen >= count) return;
    const part = visiblePart(element.current, own);
    const [head, foot] = own ? [0, 0] : [HEAD_PX, FOOT_PX];
    const above = part.top + head - chosen * height;
    const below = (chosen + 1) * height - (part.bottom - foot);
    if (above > 0) (own ? element.current : window).scrollBy(0, -above);
    else if (below > 0) (own ? element.current : window).scrollBy(0, below);
    redraw();
  }, [chosen >= 0 && chosen < count ? rowKey(chosen) : null]); // not where other rows move it
  const rows = [];
  for (let index = first; index < last; index += 1) {
    rows.push(html`<div
      key=${rowKey(index)}
      ...${rowProps?.(index)}
      style=${{ transform: `translateY(${index * height}px)`, height: `${height}px` }}
    >${row(index)}</div>`);
  }
  return html`<div ref=${element} class=${`rows ${className ?? ""}`} ...${rest}>
    <div class="rows-space" role="presentation" style=${{ height: `${count * height}px` }}>${rows}</div>
  </div>`;
}
