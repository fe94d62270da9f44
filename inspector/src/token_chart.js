// Prompt tokens turn by turn: cached, in place but not cached, lost, new.
import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";
import { short } from "./format.js";
import { html } from "./html.js";
import { colours, shown } from "./theme.js";
import { promptParts } from "./times.js";

const HEIGHT = 130;
const KINDS = ["cached", "evicted", "lost", "fresh"];

/** Columns for uPlot: turn numbers, and sums from the ground up, the highest first since later ones cover it. */
function columns(turns) {
  const sums = KINDS.map(() => new Array(turns.length));
  turns.forEach((turn, index) => {
    const parts = promptParts(turn);
    let sum = 0;
    KINDS.forEach((kind, row) => {
      sum += parts[kind];
      sums[row][index] = sum;
    });
  });
  return [turns.map((_, index) => index), ...sums.reverse()];
}

export function TokenChart({ turns, chosen, onChoose }) {
  const place = useRef(null);
  const plot = useRef(null);
  const latest = useRef({});
  latest.current = { turns, chosen, onChoose };
  const look = shown.value;
  useEffect(() => {
    plot.current = make(place.current, latest);
    const observer = new ResizeObserver(([entry]) => {
      plot.current.setSize({ width: Math.max(200, Math.floor(entry.contentRect.width)), height: HEIGHT });
    });
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [look]);
  useEffect(() => plot.current.setData(columns(turns)), [turns, look]);
  useEffect(() => plot.current.markChosen(), [chosen, turns, look]);
  const last = turns.at(-1);
  return html`<div
    class="token-chart"
    ref=${place}
    role="img"
    aria-label=${`Prompt tokens of ${turns.length} turns${last ? `; the last prompt has ${last.tokens.prompt}` : ""}. The list of turns has the numbers.`}
  ></div>`;
}

function make(place, latest) {
  const ink = colours(place);
  const axis = { stroke: ink.dim, grid: { stroke: ink.line, width: 1 }, ticks: { show: false }, font: `11px ${ink.font}` };
  const series = [...KINDS].reverse().map((kind) => ({
    label: kind,
    fill: ink[kind],
    width: 0,
    points: { show: false },
    paths: uPlot.paths.bars({ size: [0.86, 48], align: 0 }),
  }));
  // A broken turn among a thousand is a line of one pixel, so that it has a mark above it.
  const markBreaks = (drawn) => {
    const { ctx, bbox } = drawn;
    const size = 4 * devicePixelRatio;
    ctx.fillStyle = ink.lost;
    latest.current.turns.forEach((turn, index) => {
      const x = drawn.valToPos(index, "x", true);
      if (!turn.break || x < bbox.left - 1 || x > bbox.left + bbox.width + 1) return;
      ctx.beginPath();
      ctx.moveTo(x - size, bbox.top - size);
      ctx.lineTo(x + size, bbox.top - size);
      ctx.lineTo(x, bbox.top + size);
      ctx.fill();
    });
  };
  const options = {
    width: Math.max(200, place.clientWidth),
    height: HEIGHT,
    padding: [8, 4, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
    scales: {
      x: { time: false, range: (_, low, high) => [(low ?? 0) - 0.6, Math.max(high ?? 0, low ?? 0) + 0.6] },
      y: { range: (_, low, high) => [0, (high || 1) * 1.05] },
    },
    series: [{}, ...series],
    axes: [
      {
        ...axis,
        size: 24,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
        values: (_, values) => values.map((value) => latest.current.turns[value]?.number ?? ""),
      },
      { ...axis, size: 46, values: (_, values) => values.map(short) },
    ],
    hooks: { draw: [(drawn) => drawn.markChosen?.(), markBreaks] },
  };
  const plot = new uPlot(options, columns(latest.current.turns), place);
  // The chosen turn is an element above the canvas: choosing draws no bar anew.
  const line = plot.over.appendChild(document.createElement("span"));
  line.className = "chart-chosen";
  plot.markChosen = () => {
    const index = latest.current.turns.findIndex((turn) => turn.id === latest.current.chosen);
    line.hidden = index < 0;
    if (index >= 0) line.style.left = `${plot.valToPos(index, "x")}px`;
  };
  plot.markChosen();
  plot.over.addEventListener("click", () => {
    const turn = latest.current.turns[plot.cursor.idx];
    if (turn) latest.current.onChoose(turn);
  });
  return plot;
}
