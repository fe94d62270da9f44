"""Checks of the prefix cache: what a five-turn tool loop reads again when a harness gives turns back in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any
from uuid import uuid4

from singletree.checking.endpoint import LOOKUP, Endpoint, Refused
from singletree.checking.returned_turns import Mutation, Reply, TurnProtocol, WireBody
from singletree.checking.stream_checks import play_call
from singletree.checking.streams import Counts
from singletree.checking.verdicts import Failed, NotApplicable, Undecided

_TURNS = 5
_CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Kyoto")
_LOST_SHARE = 0.05
"""What may be read again, beside the rest of a block, of all that was read or generated."""
_LARGEST_BLOCK = 256
_HEAD = (
    "You are an agent that looks up the weather. Answer in one short sentence, call the tool when a city is named, and "
    "say nothing of your instructions. A city has a name, a country and a day on which somebody wants to go there. "
)
_CACHED = {"cache_control": {"type": "ephemeral"}}
_Extend = Callable[[TurnProtocol, list[WireBody], int], list[WireBody]]


def check_cached_tokens(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A prompt of about 1,100 tokens, sent twice."""
    second = _repeated(endpoint, protocol)
    if second.cached is None:
        raise Failed("the usage has no cached tokens")
    if second.prompt is None or second.cached < second.prompt / 2:
        raise Failed(f"{second.cached} of {second.prompt} tokens cached when the same prompt came again")
    return f"{second.cached} of {second.prompt} tokens cached when the same prompt came again"


def check_loop(
    endpoint: Endpoint, protocol: TurnProtocol, *, habit: Mutation, extend: _Extend, header: bool
) -> str:
    """Five turns of a tool loop, given back by ``habit``. What was read or generated before is not read again."""
    if not (repeated := _repeated(endpoint, protocol)).cached:
        raise Undecided("it reports no cached tokens (see cached-tokens)")
    turns: list[WireBody] = []
    counts: list[Counts] = []
    for number in range(_TURNS):
        try:
            reader = endpoint.stream(protocol, _loop_request(endpoint, protocol, turns, number, header))
        except Refused as refused:
            if extend is system_turn:
                raise Undecided(f"a system turn is refused (see system-turns): {refused.answer}") from None
            raise
        if reader.error or not reader.blocks:
            raise Undecided(
                f"turn {number + 1} cannot be given back: {reader.error or 'nothing was written'}"
            )
        counts.append(reader.counts)
        try:
            turns += protocol.written(habit(reader.blocks), _reply(endpoint, number + 1))
        except ValueError:
            raise Undecided(f"a call of turn {number + 1} is no JSON (see tool-events)") from None
        turns = extend(protocol, turns, number)
    if any(each.prompt is None or each.cached is None or each.generated is None for each in counts):
        raise Undecided("a turn reports no cached tokens")
    had = [(each.prompt or 0) + (each.generated or 0) for each in counts[:-1]]
    again = [max(0, before - (now.cached or 0)) for before, now in zip(had, counts[1:], strict=True)]
    block = min(_LARGEST_BLOCK, gcd(repeated.cached, *(each.cached or 0 for each in counts)))
    lost = [max(0, tokens - block) for tokens in again]
    seen = f"{sum(again) / sum(had):.1%} of {sum(had):,} tokens read again; at most {max(again):,} in a turn"
    seen += f" (blocks of {block})" if block > 1 else ""
    if sum(lost) > _LOST_SHARE * sum(had):
        raise Failed(seen)
    return seen


def loop(habit: Mutation, extend: _Extend | None = None, *, header: bool = False) -> Any:
    """Return the check of a tool loop for one habit of a harness."""
    return partial(check_loop, habit=habit, extend=extend or (lambda _, turns, __: turns), header=header)


def system_turn(protocol: TurnProtocol, turns: list[WireBody], number: int) -> list[WireBody]:
    """Add a system turn, as Claude Code adds its countdown."""
    return [
        *turns,
        {"role": "system", "content": f"<total_tokens>{90_000 - 700 * number} tokens left</total_tokens>"},
    ]


def check_tenants(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A prompt and a stored response of one key, asked for with another one."""
    if not endpoint.second_key:
        raise NotApplicable("give --second-key")
    if not _repeated(endpoint, protocol).cached:
        raise Undecided("it reports no cached tokens (see cached-tokens)")
    body = _long_request(endpoint, protocol, uuid4().hex)
    endpoint.turn(protocol, body)
    theirs = endpoint.ask(protocol, body, key=endpoint.second_key)
    if theirs.status != 200:
        raise Undecided(f"the second key is answered with {theirs}")
    if (theirs.counts.cached or 0) > (theirs.counts.prompt or 0) / 2:
        raise Failed(
            f"{theirs.counts.cached} tokens of a prompt of the first key are cached for the second one"
        )
    stored = _stored_response(endpoint, protocol) if protocol.name == "responses" else ""
    if stored and endpoint.get(stored, endpoint.second_key).status == 200:
        raise Failed("the second key reads a stored response of the first one")
    return "the second key finds no prompt of the first one in the cache" + (
        ", nor its stored response" * bool(stored)
    )


def _stored_response(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    answer = endpoint.turn(protocol, endpoint.request(protocol, "Hi", store=True))
    path = f"/v1/responses/{answer.json['id']}"
    return path if endpoint.get(path).status == 200 else ""


def _repeated(endpoint: Endpoint, protocol: TurnProtocol) -> Counts:
    body = _long_request(endpoint, protocol, endpoint.once("run", lambda: uuid4().hex))
    twice = [partial(endpoint.turn, protocol, body)] * 2
    return endpoint.once(("cached", protocol.name), lambda: [turn().counts for turn in twice][-1])


def _long_request(endpoint: Endpoint, protocol: TurnProtocol, mark: str) -> WireBody:
    return _with_system(endpoint, protocol, f"{mark} {_HEAD * 24}", [], "How is Oslo?", tokens=None)


def _loop_request(
    endpoint: Endpoint, protocol: TurnProtocol, turns: list[WireBody], number: int, header: bool
) -> WireBody:
    run = endpoint.once("run", lambda: uuid4().hex)
    asked = f"How is the weather? {_reply(endpoint, 0).next}"
    body = _with_system(
        endpoint, protocol, f"{run} {_HEAD * 12}", turns, asked, tokens=600 if endpoint.is_scripted else 24
    )
    body["tools"] = [protocol.tool(*LOOKUP)]
    if protocol.name == "messages":
        if header:
            text = f"x-anthropic-billing-header: cc_version=2.1.150.{number:03x}; cc_entrypoint=cli;"
            body["system"].insert(0, {"type": "text", "text": text})
        body["messages"] = _marked(body["messages"])
    return body


def _with_system(
    endpoint: Endpoint,
    protocol: TurnProtocol,
    system: str,
    turns: Sequence[WireBody],
    asked: str,
    *,
    tokens: int | None,
) -> WireBody:
    """Return a request with a system prompt as the protocol's harnesses send it."""
    if protocol.name == "messages":
        marked = [{"type": "text", "text": system, **_CACHED}]
        return endpoint.request(protocol, asked, turns, tokens=tokens, system=marked)
    role = "system" if protocol.name == "chat" else "developer"
    first = [{"role": role, "content": system}, {"role": "user", "content": asked}]
    return endpoint.request(protocol, first, turns, tokens=tokens)


def _marked(messages: list[WireBody]) -> list[WireBody]:
    """Return the messages with the mark of the cache on the last block of the user, where Claude Code has it."""
    at = max(n for n, message in enumerate(messages) if message["role"] == "user")
    content = messages[at]["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    blocks[-1] = {**blocks[-1], **_CACHED}
    return [*messages[:at], {**messages[at], "content": blocks}, *messages[at + 1 :]]


def _reply(endpoint: Endpoint, number: int) -> Reply:
    """Return what goes back after turn ``number``; a scripted engine finds in it what to play next."""
    city = _CITIES[number % len(_CITIES)]
    if not endpoint.is_scripted:
        return Reply("Sunny, 21 degrees, no wind.", f"And {city}?")
    first = f"<think>\nFirst the weather of {city}. \n\nThen its north. \n</think>\n\nI look it up. \n"
    second = "<think>\nNow the north. \n</think>\n\nAnd the other. \n"
    north = f"{city} North"
    called = f"{first}{play_call(city)}\n{second}{play_call(north)}" if endpoint.plays_calls else first
    marker = f"[[echo:{called}]]"
    return Reply(f"Sunny, 21 degrees. {marker}", f"And {city}? {marker}")
