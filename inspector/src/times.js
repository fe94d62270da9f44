// The time of a turn as bars, and sums of it over turns.
import { serverNow } from "./live.js";

/**
 * The bars of a turn, in milliseconds from its arrival.
 * @returns {{kind: string, start: number, end: number, label?: string, open?: boolean}[]}
 */
export function barsOf(turn, now = serverNow()) {
  const { times } = turn;
  const bars = [];
  const add = (kind, start, end, more) => end > start && bars.push({ kind, start, end, ...more });
  const end = endOf(turn, now);
  const prepared = times.prepare_ms ?? 0;
  add("prepare", 0, Math.min(prepared, end));
  const first = times.first_token_ms ?? end;
  const prefillStart = times.prefill_ms == null ? prepared + (times.queue_ms ?? 0) : first - times.prefill_ms;
  add("queue", prepared, Math.min(prefillStart, end));
  add("prefill", Math.max(prefillStart, prepared), first, { open: times.first_token_ms == null });
  for (const segment of turn.segments) {
    const label = segment.call == null ? undefined : turn.calls[segment.call]?.name;
    add(segment.kind, segment.start_ms, segment.end_ms ?? end, { label, tokens: segment.tokens });
  }
  for (const call of turn.calls) {
    if (call.dispatched_ms != null && call.tool_ms != null) {
      add("tool", call.dispatched_ms, call.dispatched_ms + call.tool_ms, { label: call.name });
    }
  }
  if (!turn.calls.length && times.gap_ms != null) add("gap", end, end + times.gap_ms);
  return bars;
}

export function endOf(turn, now = serverNow()) {
  return turn.times.total_ms ?? Math.max(0, (now - turn.received_at) * 1000);
}

/** The end of a turn's own time and that of its tools: what a row of the timeline shows. */
export function reachOf(turn, now) {
  const tools = turn.calls.map((call) => (call.tool_ms == null ? 0 : call.dispatched_ms + call.tool_ms));
  return Math.max(endOf(turn, now), ...tools);
}

/** Where the time of `turns` went, by phase, in milliseconds. Tools that run at once count once. */
export function sumTimes(turns) {
  const sums = { prepare: 0, queue: 0, prefill: 0, reasoning: 0, text: 0, call: 0, markup: 0, tool: 0, gap: 0 };
  for (const turn of turns) {
    const end = endOf(turn);
    let toolsEnd = 0;
    for (const bar of barsOf(turn)) {
      if (bar.kind === "tool") toolsEnd = Math.max(toolsEnd, bar.end);
      else if (bar.kind in sums) sums[bar.kind] += bar.end - bar.start;
    }
    sums.tool += Math.max(0, toolsEnd - end); // While the model still writes, a tool costs no time.
  }
  return sums;
}

export const median = (values) => {
  const known = values.filter((value) => value != null).sort((a, b) => a - b);
  return known.length ? known[Math.floor((known.length - 1) / 2)] : null;
};

/** How a prompt's tokens stand: {cached, evicted, fresh, lost}; cached and evicted are one where nothing is reported. */
export function promptParts(turn) {
  const { prompt, matched, cached, lost } = turn.tokens;
  if (turn.receipt && cached != null) {
    const { harness = 0, template = 0, unknown = 0 } = turn.receipt.reread_by_fault;
    const { cached_tokens, new_tokens, reread_tokens } = turn.receipt;
    const broken = harness + template + unknown;
    return { cached: cached_tokens, evicted: reread_tokens - broken, lost: broken, fresh: new_tokens };
  }
  const inPlace = matched ?? 0;
  const had = cached == null ? inPlace : Math.min(cached, prompt);
  const evicted = Math.max(0, inPlace - had);
  const again = Math.min(lost ?? 0, Math.max(0, prompt - had - evicted));
  return { cached: had, evicted, lost: again, fresh: Math.max(0, prompt - had - evicted - again) };
}
