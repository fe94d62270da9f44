// A time axis on which long idle stretches are cut short: sessions wait for hours for their users.

const CUT_PX = 22;
const SHORTEST_CUT_MS = 8_000;
const CUT_SHARE = 0.12;

/**
 * Lay intervals on `width` pixels.
 * @param {[number, number][]} intervals unix milliseconds, in any order
 * @returns {{x: (ms: number) => number, at: (x: number) => number, cuts: {x: number, ms: number}[]}}
 */
export function layOut(intervals, width) {
  const busy = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = busy.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else busy.push([start, Math.max(end, start + 1)]);
  }
  if (!busy.length) return { x: () => 0, at: () => 0, cuts: [] };
  const working = busy.reduce((sum, [start, end]) => sum + end - start, 0);
  const longest = Math.max(SHORTEST_CUT_MS, working * CUT_SHARE);
  // Pieces of the axis: those with their own length in time, and cuts with a fixed width.
  const pieces = [];
  busy.forEach(([start, end], index) => {
    const before = busy[index - 1]?.[1];
    const open = pieces.at(-1);
    if (open && start - before <= longest) open.end = end;
    else {
      if (open) pieces.push({ start: before, end: start, cut: true });
      pieces.push({ start, end, cut: false });
    }
  });
  const cuts = pieces.filter((piece) => piece.cut).length;
  const cutPx = Math.min(CUT_PX, cuts ? (width * 0.3) / cuts : CUT_PX);
  const shown = pieces.reduce((sum, piece) => sum + (piece.cut ? 0 : piece.end - piece.start), 0);
  const scale = (width - cuts * cutPx) / shown;
  let left = 0;
  for (const piece of pieces) {
    piece.left = left;
    piece.width = piece.cut ? cutPx : (piece.end - piece.start) * scale;
    left += piece.width;
  }
  const find = (test) => {
    let low = 0;
    let high = pieces.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(pieces[middle])) high = middle;
      else low = middle + 1;
    }
    return pieces[low];
  };
  return {
    x(ms) {
      const piece = find((each) => ms <= each.end);
      const part = (ms - piece.start) / (piece.end - piece.start);
      return piece.left + Math.max(0, Math.min(1, part)) * piece.width;
    },
    at(x) {
      const piece = find((each) => x <= each.left + each.width);
      return piece.start + ((x - piece.left) / piece.width) * (piece.end - piece.start);
    },
    cuts: pieces.filter((piece) => piece.cut).map((piece) => ({ x: piece.left, width: piece.width, ms: piece.end - piece.start })),
  };
}
