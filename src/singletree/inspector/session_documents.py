"""Sessions as JSON values, put together from the turns that all processes have of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from singletree.inspector.turn_documents import InspectedJson, price_ms, summarize_turn
from singletree.inspector.turn_record import InspectedSession, InspectedTurn

_LIVE_SECONDS = 60.0
_PLAIN = ("id", "key", "parent", "harness", "client", "is_agent")
"""Fields of a session that the page gets as they are."""


def brief_turn(turn: InspectedTurn) -> Mapping[str, Any]:
    """Return what the sums of a session need of a turn; made once for a turn that is over."""
    if turn.brief is not None:
        return turn.brief
    step, times = turn.step, turn.timeline.token_ms
    made: Mapping[str, Any] = {
        "id": turn.id,
        "lane": turn.lane,
        "status": turn.status,
        "repeats": turn.repeats,
        "details": turn.details is not None,
        "protocol": turn.protocol,
        "model": step.model,
        "received_at": turn.received,
        "ended_at": turn.ended,
        "times": {"first_token_ms": round(times[0], 1) if times else None},
        "tokens": {
            "prompt": step.prompt_tokens,
            "cached": step.cached,
            "matched": step.matched,
            "generated": step.generated if turn.ended is not None else len(times),
            "lost": step.lost,
        },
        "break": None if step.broken is None else {"lost_ms": price_ms(turn, step.lost)},
    }
    if turn.ended is not None:
        turn.brief = made
    return made


def brief_part(session: InspectedSession) -> InspectedJson:
    """Return what this process has of a session, as far as its sums need it."""
    return {**_head(session), "turns": [brief_turn(turn) for turn in session.turns.values()]}


def session_part(session: InspectedSession, *, with_texts: bool) -> InspectedJson:
    """Return what this process has of a session, to be put together with the parts of other processes."""
    return {
        **_head(session),
        "turns": [
            {
                **summarize_turn(turn, with_texts=with_texts),
                "origin": turn.origin,
                "before": turn.before,
                "results": turn.results,
                "has_tools": bool(turn.details and turn.details.tools),
            }
            for turn in list(session.turns.values())
        ],
    }


def _head(session: InspectedSession) -> InspectedJson:
    return {name: getattr(session, name) for name in (*_PLAIN, "dropped")}


def join_parts(parts: Sequence[InspectedJson]) -> InspectedJson:
    """Return one part for what several processes have of a session."""
    turns = sorted((turn for part in parts for turn in part["turns"]), key=itemgetter("received_at"))
    joined = {**max(parts, key=lambda part: max((t["received_at"] for t in part["turns"]), default=0.0))}
    for name in ("parent", "harness", "client"):
        joined[name] = next((part[name] for part in parts if part[name]), None)
    joined["is_agent"] = any(part["is_agent"] for part in parts)
    joined["dropped"] = sum(part["dropped"] for part in parts)
    joined["turns"] = turns
    if len(parts) > 1 and all("calls" in turn for turn in turns):
        _add_relations(turns)
    return joined


def _add_relations(turns: Sequence[InspectedJson]) -> None:
    """Give turns of one process what turns of another brought: results of calls, and gaps."""
    by_id = {turn["id"]: turn for turn in turns}
    calls = {
        call["id"]: (turn, call) for turn in turns for call in turn["calls"] if call["result_ms"] is None
    }
    for turn in turns:
        earlier = by_id.get(turn["before"])
        if earlier is not None and earlier["times"]["gap_ms"] is None and earlier["ended_at"] is not None:
            earlier["times"]["gap_ms"] = round((turn["received_at"] - earlier["ended_at"]) * 1000, 1)
        for id, is_error in turn["results"]:
            if id in calls:
                asked, call = calls.pop(id)
                call["result_ms"] = round((turn["received_at"] - asked["received_at"]) * 1000, 1)
                call["is_error"] = is_error
                if call["dispatched_ms"] is not None:
                    call["tool_ms"] = max(0.0, round(call["result_ms"] - call["dispatched_ms"], 1))


def summarize_session(part: Mapping[str, Any]) -> InspectedJson:
    """Return what the list shows of a session, from all that the processes have of it."""
    turns: Sequence[InspectedJson] = part["turns"]
    counted = [turn for turn in turns if turn["repeats"] is None]
    last = turns[-1] if turns else None
    prompt, cached, matched, generated, lost = (_sum(counted, n) for n in _SUMS)
    reported = [turn for turn in counted if turn["tokens"]["cached"] is not None]
    of_reported = _sum(reported, "prompt")
    firsts = [ms for turn in counted if (ms := turn["times"]["first_token_ms"]) is not None]
    running = sum(turn["status"] == "running" for turn in turns)
    last_at = max((turn["ended_at"] or turn["received_at"] for turn in turns), default=0.0)
    moment = time.time()
    return {
        **{name: part[name] for name in _PLAIN},
        "protocol": None if last is None else last["protocol"],
        "model": None if last is None else last["model"],
        "models": list(dict.fromkeys(turn["model"] for turn in turns)),
        "is_live": running > 0 or moment - last_at < _LIVE_SECONDS,
        "running": running,
        "first_at": turns[0]["received_at"] if turns else None,
        "last_at": last_at,
        "turns": len(counted),
        "retries": len(turns) - len(counted),
        "errors": sum(turn["status"] == "error" for turn in turns),
        "lanes": len({turn["lane"] for turn in turns}),
        "prompt_tokens": prompt,
        "cached_tokens": cached if reported else None,
        "generated_tokens": generated,
        "matched_tokens": matched,
        "share_in_place": round(matched / prompt, 4) if prompt else None,
        "share_cached": round(cached / of_reported, 4) if of_reported else None,
        "breaks": sum(turn["break"] is not None for turn in counted),
        "lost_tokens": lost,
        "lost_ms": round(sum(turn["break"]["lost_ms"] for turn in counted if turn["break"]), 1),
        "first_token_ms": round(median(firsts), 1) if firsts else None,
        "details": any(turn["details"] for turn in turns),
    }


_SUMS = ("prompt", "cached", "matched", "generated", "lost")


def _sum(turns: Iterable[InspectedJson], name: str) -> int:
    return sum(turn["tokens"][name] or 0 for turn in turns)


def encode_session_turns(part: Mapping[str, Any]) -> InspectedJson:
    """Return a session with its lanes, its turns and the causes of its breaks."""
    lanes = _by_lane(part["turns"])
    turns = [{name: value for name, value in turn.items() if name not in _INNER} for turn in part["turns"]]
    return {
        "session": summarize_session(part),
        "lanes": [_lane(number, own, lanes) for number, own in sorted(lanes.items())],
        "turns": turns,
        "causes": _causes(turns),
        "dropped_turns": part["dropped"],
    }


_INNER = ("origin", "before", "results", "has_tools")
"""Fields of a turn's part that the page does not get."""


def _by_lane(turns: Iterable[InspectedJson]) -> dict[int, list[InspectedJson]]:
    lanes: dict[int, list[InspectedJson]] = {}
    for turn in turns:
        lanes.setdefault(turn["lane"], []).append(turn)
    return lanes


def _lane(
    number: int, own: Sequence[InspectedJson], lanes: Mapping[int, Sequence[InspectedJson]]
) -> InspectedJson:
    origin = own[0]["origin"]
    return {
        "number": number,
        "kind": _lane_kind(number, own, lanes),
        "from": None if origin is None else {"lane": origin[0], "turn": origin[1], "tokens": origin[2]},
        "turns": [turn["id"] for turn in own],
        "is_live": any(turn["status"] == "running" for turn in own),
    }


def _lane_kind(
    number: int, own: Sequence[InspectedJson], lanes: Mapping[int, Sequence[InspectedJson]]
) -> str:
    first, begun = own[0], own[0]["received_at"]
    if first["is_agent"]:
        return "agent"
    if first["origin"] is not None:
        left = lanes.get(first["origin"][0], ())
        goes_on = any(turn["received_at"] > begun for turn in left)
        return "fork" if goes_on else "rewind"
    main = _main_lane(lanes)
    if number == main:
        return "main"
    if len(own) == 1 and not first["has_tools"]:
        return "side"
    earlier = lanes[main]
    ended_before = all(turn["received_at"] < begun for turn in earlier)
    return "compaction" if ended_before and first["has_tools"] == earlier[-1]["has_tools"] else "conversation"


def _main_lane(lanes: Mapping[int, Sequence[InspectedJson]]) -> int:
    """Return the first lane with tools or several turns; the first one where there is none."""
    roots = [n for n, own in sorted(lanes.items()) if own[0]["origin"] is None and not own[0]["is_agent"]]
    likely = (n for n in roots if lanes[n][0]["has_tools"] or len(lanes[n]) > 1)
    return next(likely, roots[0] if roots else min(lanes))


def main_turn(part: Mapping[str, Any]) -> str | None:
    """Return the id of the last turn of the main lane; None for a session without turns."""
    lanes = _by_lane(part["turns"])
    return str(lanes[_main_lane(lanes)][-1]["id"]) if lanes else None


def _causes(turns: Iterable[InspectedJson]) -> list[InspectedJson]:
    found: dict[str, InspectedJson] = {}
    for turn in turns:
        broken = turn["break"]
        if broken is None or turn["repeats"] is not None:
            continue
        known = {name: broken[name] for name in ("cause", "says", "cure")}
        new = {**known, "count": 0, "lost_tokens": 0, "lost_ms": 0.0, "turns": []}
        cause = found.setdefault(broken["cause"], new)
        cause["count"] += 1
        cause["lost_tokens"] += broken["lost_tokens"]
        cause["lost_ms"] = round(cause["lost_ms"] + broken["lost_ms"], 1)
        cause["turns"].append(turn["id"])
    return sorted(found.values(), key=lambda each: -int(each["lost_tokens"]))
