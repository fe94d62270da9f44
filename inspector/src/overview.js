// The lanes of a session on one time axis, drawn on a canvas: a thousand turns are several thousand bars. The list of
// turns has the same facts as text.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { duration, timeOfDay } from "./format.js";
import { html } from "./html.js";
import { serverNow } from "./live.js";
import { layOut } from "./time_axis.js";
import { barsOf, reachOf } from "./times.js";
import { colours, shown } from "./theme.js";
import { COURSES, PHASES } from "./words.js";

const LANE_PX = 30;
const BAR_PX = 16;
const AXIS_PX = 18;
const REDRAW_MS = 250; // while a turn runs

/**
 * @param {object} given
 * @param {{name: string, title: string, turns: object[]}[]} given.lanes
 * @param {string|null} given.chosen id of a turn
 * @param {(turn: object) => void} given.onChoose
 */
export function Overview({ lanes, chosen, onChoose }) {
  const canvas = useRef(null);
  const drawing = useRef(null);
  const [width, setWidth] = useState(0);
  const [tip, setTip] = useState(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, []);
  const height = lanes.length * LANE_PX + AXIS_PX;
  const running = lanes.some((lane) => lane.turns.some((turn) => turn.status === "running"));
  const [drawn, setDrawn] = useState(0);
  // A choice draws nothing anew: it is an element above the canvas.
  useEffect(() => {
    if (width <= 0) return;
    drawing.current = draw(canvas.current, lanes, width, height);
    setDrawn((n) => n + 1);
  }, [lanes, width, shown.value, running && Math.floor(Date.now() / REDRAW_MS)]);
  const place = useMemo(() => placeOf(drawing.current, lanes, chosen), [drawn, lanes, chosen]);
  const find = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return drawing.current && hit(drawing.current, lanes, event.clientX - box.left, event.clientY - box.top, serverNow());
  };
  const move = (event) => {
    const found = find(event);
    setTip(found && { ...found, left: Math.min(event.nativeEvent?.offsetX ?? event.offsetX, width - 220) });
  };
  const turns = lanes.reduce((sum, lane) => sum + lane.turns.length, 0);
  return html`<div class="overview">
    <ul class="lane-names">
      ${lanes.map((lane) => html`<li key=${lane.name} title=${lane.title}>
        ${lane.href ? html`<a href=${lane.href}>${lane.name}</a>` : lane.name}
      </li>`)}
    </ul>
    <div class="overview-canvas">
      <canvas
        ref=${canvas}
        role="img"
        aria-label=${`Timeline of ${turns} turns in ${lanes.length} lanes. The list of turns has the same as text.`}
        style=${{ height: `${height}px` }}
        onMouseMove=${move}
        onMouseLeave=${() => setTip(null)}
        onClick=${(event) => {
          const found = find(event);
          if (found) onChoose(found.turn);
        }}
      ></canvas>
      ${place && html`<span class="overview-chosen" style=${place}></span>`}
      ${tip && html`<div class="tip" style=${{ left: `${Math.max(0, tip.left)}px`, top: `${(tip.lane + 1) * LANE_PX}px` }}>
        <strong>Turn ${tip.turn.number}</strong> ${COURSES[tip.turn.course]?.label}<br />
        ${tip.bar ? `${PHASES[tip.bar.kind].label}${tip.bar.label ? ` ${tip.bar.label}` : ""} ${duration(tip.bar.end - tip.bar.start)}` : ""}
      </div>`}
    </div>
  </div>`;
}

/** The frame around the chosen turn, as a style; null where it is not in a lane. */
function placeOf(axis, lanes, chosen) {
  const lane = axis && chosen ? lanes.findIndex((each) => each.turns.some((turn) => turn.id === chosen)) : -1;
  if (lane < 0) return null;
  const turn = lanes[lane].turns.find((each) => each.id === chosen);
  const began = turn.received_at * 1000;
  const left = axis.x(began);
  const width = Math.max(6, axis.x(began + reachOf(turn, serverNow())) - left + 4);
  return { left: `${left - 2}px`, top: `${lane * LANE_PX + 3}px`, width: `${width}px`, height: `${LANE_PX - 6}px` };
}

/** Draw the lanes and return their axis. */
function draw(canvas, lanes, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const now = serverNow();
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const ink = colours(canvas);
  const intervals = lanes.flatMap((lane) =>
    lane.turns.map((turn) => [turn.received_at * 1000, turn.received_at * 1000 + reachOf(turn, now)]),
  );
  const axis = layOut(intervals, width);
  pen.font = `11px ${ink.font}`;
  for (const cut of axis.cuts) {
    pen.fillStyle = ink.cut;
    pen.fillRect(cut.x, 0, cut.width, height - AXIS_PX);
  }
  lanes.forEach((lane, index) => {
    const top = index * LANE_PX + (LANE_PX - BAR_PX) / 2;
    pen.fillStyle = ink.line;
    pen.fillRect(0, top + BAR_PX / 2, width, 1);
    for (const turn of lane.turns) drawTurn(pen, ink, axis, turn, top, now);
  });
  let free = 0;
  pen.fillStyle = ink.dim;
  for (const cut of axis.cuts) {
    const words = `${duration(cut.ms)} idle`;
    const size = pen.measureText(words).width;
    const left = Math.min(width - size, Math.max(0, cut.x + cut.width / 2 - size / 2));
    if (left < free) continue;
    pen.fillText(words, left, height - 5);
    free = left + size + 12;
  }
  // The times at both ends, where no idle stretch has its words.
  if (intervals.length) {
    const ends = intervals.map(([, end]) => end);
    const start = timeOfDay(Math.min(...intervals.map(([from]) => from)) / 1000);
    const end = timeOfDay(Math.max(...ends) / 1000);
    const endLeft = width - pen.measureText(end).width;
    if (!axis.cuts.some((cut) => cut.x < pen.measureText(start).width + 40)) pen.fillText(start, 0, height - 5);
    if (free < endLeft) pen.fillText(end, endLeft, height - 5);
  }
  return axis;
}

function drawTurn(pen, ink, axis, turn, top, now) {
  const began = turn.received_at * 1000;
  const left = axis.x(began);
  for (const bar of barsOf(turn, now)) {
    if (bar.kind === "gap") continue;
    const from = axis.x(began + bar.start);
    const size = Math.max(1, axis.x(began + bar.end) - from);
    const isTool = bar.kind === "tool";
    pen.fillStyle = ink[bar.kind] ?? ink.markup;
    pen.fillRect(from, isTool ? top + BAR_PX - 5 : top, size, isTool ? 5 : BAR_PX - (turn.calls.length ? 6 : 0));
  }
  if (turn.course === "broken" || turn.status === "error") {
    pen.fillStyle = ink.lost;
    pen.beginPath();
    pen.moveTo(left - 5, top - 6);
    pen.lineTo(left + 5, top - 6);
    pen.lineTo(left, top + 1);
    pen.fill();
  }
}

function hit(axis, lanes, x, y, now) {
  const lane = Math.floor(y / LANE_PX);
  if (!lanes[lane]) return null;
  let best = null;
  let nearest = 8; // pixels
  for (const turn of lanes[lane].turns) {
    const began = turn.received_at * 1000;
    const left = axis.x(began);
    const right = axis.x(began + reachOf(turn, now));
    const away = x < left ? left - x : x > right ? x - right : 0;
    if (away < nearest || (away === 0 && nearest === 0)) {
      nearest = away;
      best = turn;
    }
  }
  if (!best) return null;
  const at = axis.at(x) - best.received_at * 1000;
  return { turn: best, lane, bar: barsOf(best, now).findLast((bar) => bar.start <= at && at <= bar.end) };
}
