"""The turns of the inspector as JSON values, as the page gets them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

from singletree.inspector.turn_record import InspectedSession, InspectedTurn, TurnDetails
from singletree.inspector.wire_record import CallTimes, TurnSegment
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.sessions.session_report import encode_break
from singletree.server.sessions.step import CACHE_BLOCK, Break, Fault, Step

TokenizerOf = Callable[[str], "Tokenizer | None"]
"""Returns the tokenizer of a model by its name; None where it is not loaded."""

InspectedJson = dict[str, Any]

_MADE_BY = {
    "tools_dropped": "tool",
    "tools_added": "tool",
    "tools_removed": "tool",
    "tools_reordered": "tool",
    "tools_changed": "tool",
    "settings": "settings",
    "template": "template",
    "thinking_dropped": "template",
    "answer_dropped": "answer",
    "answer_respelled": "answer",
    "answer_rewritten": "answer",
    "answer_in_part": "answer",
    "answer_interrupted": "answer",
    "answer_in_pieces": "answer",
    "reasoning_as_text": "answer",
    "reasoning_left_out": "answer",
}
"""What made the first differing token, by the cause of a break; a message for all other causes."""

VERDICTS: Mapping[str, str] = {
    "running": "the turn is not over",
    "first": "there was no earlier prompt to continue",
    "hit": "the engine had all tokens that were in place",
    "prompt_broke": "the prompt does not continue the one before, so the cache could be used only up to the break",
    "engine_evicted": "the prompt was in place, and the engine no longer had all of it in its cache",
    "engine_restarted": "the prompt was in place, and the engine has begun since the last turn",
    "other_worker": "the prompt was in place, and another engine than that of the last turn generated this one",
    "not_reported": "the engine does not report how many tokens it had in its cache",
}
"""What became of the cache, in words."""

_MISSES: Mapping[Fault, str] = {
    "router": "other_worker",
    "restart": "engine_restarted",
    "eviction": "engine_evicted",
}
"""The verdicts on what the engine did not have, by fault."""


_PLAIN = ("id", "session", "number", "lane", "status", "repeats", "request_id", "answer_id", "protocol", "path",
          "stream", "process", "is_agent", "finish")  # fmt: skip
"""Fields of a turn that the page gets as they are."""


def summarize_turn(turn: InspectedTurn, *, with_texts: bool) -> InspectedJson:
    """Return what lists and events show of a turn, with or without excerpts of prompts and the messages of errors."""
    step, usage = turn.step, turn.usage
    calls = list(turn.timeline.calls.values())
    order = {call.index: number for number, call in enumerate(calls)}
    lost_ms = price_ms(turn, step.lost)
    return {
        **{name: getattr(turn, name) for name in _PLAIN},
        "details": turn.details is not None,
        "model": step.model,
        "worker": None if step.route is None else step.route.worker or None,
        "received_at": turn.received,
        "ended_at": turn.ended,
        "times": _times(turn),
        "segments": [_encode_segment(each, order) for each in turn.timeline.segments],
        "calls": [_encode_call(each) for each in calls],
        "tokens": {
            "prompt": step.prompt_tokens,
            "matched": step.matched,
            "new": step.new,
            "cached": step.cached,
            "predicted": None if step.route is None else step.route.predicted_cached_tokens,
            "generated": step.generated if usage is not None else len(turn.timeline.token_ms),
            "reasoning": 0 if usage is None else usage.reasoning_tokens,
            "lost": step.lost,
            "rerendered": min(step.lost, step.new),
            "pictures": turn.pictures,
            "replayed_turns": turn.replayed_turns,
        },
        "error": _encode_error(turn, with_texts=with_texts),
        "rules": list(turn.rules),
        "course": step.course,
        "verdict": _verdict(turn),
        "receipt": step.encode_receipt(),
        "break": None
        if step.broken is None
        else _encode_inspected_break(turn, step.broken, lost_ms, with_texts=with_texts),
    }


def _encode_error(turn: InspectedTurn, *, with_texts: bool) -> InspectedJson | None:
    if turn.error is None:
        return None
    kind, message = turn.error
    return {"type": kind, "message": message if with_texts else None}


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _queue(turn: InspectedTurn) -> float | None:
    route = turn.step.route
    return None if route is None else route.waited_seconds * 1000


def prefill_ms(turn: InspectedTurn) -> float | None:
    """Return how long the engine read the prompt, in milliseconds; None before the first token."""
    if not turn.timeline.token_ms:
        return None
    return max(0.0, turn.timeline.token_ms[0] - (turn.prepared or 0.0) - (_queue(turn) or 0.0))


def _times(turn: InspectedTurn) -> InspectedJson:
    token_ms = turn.timeline.token_ms
    first = token_ms[0] if token_ms else None
    return {
        "prepare_ms": _ms(turn.prepared),
        "queue_ms": _ms(_queue(turn)),
        "prefill_ms": _ms(prefill_ms(turn)),
        "first_token_ms": _ms(first),
        "first_event_ms": _ms(turn.first_event),
        "decode_ms": None if first is None else _ms(token_ms[-1] - first),
        "total_ms": _ms(turn.total),
        "gap_ms": _ms(turn.gap),
    }


def _encode_segment(segment: TurnSegment, order: Mapping[int, int]) -> InspectedJson:
    return {
        "kind": segment.kind,
        "start_ms": round(segment.start, 3),
        "end_ms": round(segment.end, 3),
        "tokens": segment.tokens,
        "chars": segment.chars,
        "call": None if segment.call is None else order.get(segment.call),
    }


def _encode_call(call: CallTimes) -> InspectedJson:
    tool = None if call.result is None or call.dispatched is None else max(0.0, call.result - call.dispatched)
    return {
        "index": call.index,
        "id": call.id,
        "name": call.name,
        "start_ms": _ms(call.start),
        "dispatched_ms": _ms(call.dispatched),
        "complete": call.is_complete,
        "result_ms": _ms(call.result),
        "tool_ms": _ms(tool),
        "is_error": call.is_error,
    }


def price_ms(turn: InspectedTurn, tokens: int) -> float:
    """Return about how long the engine needed to read ``tokens`` of the prompt, in milliseconds."""
    spent, step = prefill_ms(turn), turn.step
    if spent is None or tokens <= 0:
        return 0.0
    cached = step.matched if step.cached is None else step.cached
    return round(spent * min(1.0, tokens / max(1, step.prompt_tokens - cached)), 1)


def _verdict(turn: InspectedTurn) -> InspectedJson:
    step = turn.step
    missing = max(0, step.matched - (step.matched if step.cached is None else step.cached))
    kind = _verdict_kind(turn, step)
    if missing <= CACHE_BLOCK or kind == "first":
        missing = 0
    return {
        "kind": kind,
        "says": VERDICTS[kind],
        "missing_tokens": missing,
        "missing_ms": price_ms(turn, missing),
    }


def _verdict_kind(turn: InspectedTurn, step: Step) -> str:
    if turn.is_running:
        return "running"
    if step.broken is not None:
        return "prompt_broke"
    if step.course == "first":
        return "first"
    if step.cached is None:
        return "not_reported"
    again = {} if step.cost is None else step.cost.reread
    return next((verdict for fault, verdict in _MISSES.items() if fault in again), "hit")


def _encode_inspected_break(
    turn: InspectedTurn, broken: Break, lost_ms: float, *, with_texts: bool
) -> InspectedJson:
    lost = turn.lost
    tools = None
    if lost is not None and (lost.added or lost.removed or lost.changed or lost.reordered):
        tools = {
            "added": list(lost.added),
            "removed": list(lost.removed),
            "changed": list(lost.changed),
            "reordered": lost.reordered,
        }
    return {
        **encode_break(broken),
        "role": broken.role or None,
        "made_by": _MADE_BY.get(broken.cause, "message"),
        "token": turn.step.matched,
        "lost_tokens": broken.lost,
        "lost_ms": lost_ms,
        "tools": tools,
        **({} if with_texts else dict.fromkeys(("before", "was", "now"))),
    }


def encode_turn(
    session: InspectedSession, turn: InspectedTurn, tokenizer_of: TokenizerOf, *, with_texts: bool
) -> InspectedJson:
    """Return all that is known of how a turn was written and what the client was sent."""
    details = turn.details
    wire = None if details is None else list(details.wire.events())
    if wire is not None and not with_texts:
        wire = [{**event, "data": None} for event in wire]
    after = next((each.id for each in list(session.turns.values()) if each.before == turn.id), None)
    return {
        "turn": summarize_turn(turn, with_texts=with_texts),
        "tokens": None if details is None else _encode_tokens(turn, tokenizer_of, with_texts=with_texts),
        "wire": wire,
        "wire_dropped": 0 if details is None else details.wire.dropped,
        "neighbours": {"before": turn.before, "after": after},
    }


def _encode_tokens(turn: InspectedTurn, tokenizer_of: TokenizerOf, *, with_texts: bool) -> InspectedJson:
    details, timeline = turn.details, turn.timeline
    assert details is not None
    parts = timeline.parts()
    order = {call.index: number for number, call in enumerate(timeline.calls.values())}
    count = len(timeline.token_ms)
    part_of = [number for number, (_, start, end) in enumerate(parts) for _ in range(start, end)][:count]
    ids: list[int] | None = None
    texts: list[str] | None = None
    special: list[int] | None = None
    tokenizer = tokenizer_of(turn.step.model) if with_texts and details.token_ids is not None else None
    if tokenizer is not None and details.token_ids is not None:
        ids = details.token_ids[:count].tolist()
        texts, special = decode_tokens(tokenizer, ids)
    return {
        "count": count,
        "ms": [round(ms, 3) for ms in timeline.token_ms],
        "part": part_of,
        "parts": [
            {
                "kind": segment.kind,
                "call": None if segment.call is None else order.get(segment.call),
                "start": start,
                "end": end,
            }
            for segment, start, end in parts
        ],
        "id": ids,
        "text": texts,
        "special": special,
        "logprob": _logprobs_of(details, count) if with_texts else None,
    }


def decode_tokens(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], list[int]]:
    """Return the text that each token completes, and 1 for each special token."""
    detokenizer = tokenizer.new_detokenizer()
    texts, special = [], []
    for id in ids:
        pieces = detokenizer.feed((id,))
        texts.append("".join(text for text, _ in pieces))
        special.append(int(any(is_special for _, is_special in pieces)))
    if texts and (rest := "".join(text for text, _ in detokenizer.flush())):
        texts[-1] += rest
    return texts, special


def _logprobs_of(details: TurnDetails, count: int) -> list[float | None] | None:
    known: array[float] = details.logprobs[:count]
    if all(value != value for value in known):
        return None
    values = [None if value != value else round(value, 6) for value in known]
    return values + [None] * (count - len(values))
