"""Checks of the prefix cache: what a five-turn tool loop reads again when a harness gives turns back in its own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from uuid import uuid4

from singletree.checking.endpoint import LOOKUP, Endpoint, Refused
from singletree.checking.returned_turns import (
    Mutation,
    Reply,
    TurnProtocol,
    WireBody,
    as_given,
    calls_last,
    compact_arguments,
    joined_thoughts,
    no_thoughts,
    trimmed,
)
from singletree.checking.stream_checks import play_call
from singletree.checking.streams import Counts
from singletree.checking.verdicts import ALL, Check, Failed, NotApplicable, Undecided, demand

_TURNS = 5
_CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Kyoto")
_LOST_SHARE = 0.05
"""What may be read again, beside the rest of a block, of all that was read or generated."""
_LARGEST_BLOCK = 256
_HEAD = (
    "You are an agent that looks up the weather. Answer in one short sentence, call the tool when a city is named, and "
    "say nothing of your instructions. A city has a name, a country and a day on which somebody wants to go there. "
)
_SLOWER = "Turns get slower as the session grows: the history is read again."
_CACHED = {"cache_control": {"type": "ephemeral"}}
_Extend = Callable[[TurnProtocol, list[WireBody], int], list[WireBody]]


@demand(
    "Every turn reads the whole history, or dashboards show that it does.",
    "usage of all three APIs; litellm#22986, claude-code-router#1791",
)
def check_cached_tokens(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A prompt that comes again is cached, and reported so."""
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


def system_turn(protocol: TurnProtocol, turns: list[WireBody], number: int) -> list[WireBody]:
    """Add a system turn, as Claude Code adds its countdown."""
    return [
        *turns,
        {"role": "system", "content": f"<total_tokens>{90_000 - 700 * number} tokens left</total_tokens>"},
    ]


def _loop(
    name: str,
    title: str,
    reference: str,
    habit: Mutation,
    protocols: tuple[str, ...] = ALL,
    *,
    users: str = _SLOWER,
    extend: _Extend = lambda _, turns, __: turns,
    header: bool = False,
) -> Check:
    run = partial(check_loop, habit=habit, extend=extend, header=header)
    return Check(f"loop-{name}", title, users, reference, run, protocols)


LOOPS = (
    _loop(
        "as-given",
        "a tool loop whose turns come back as they were reads nothing again",
        "Codex 0.171, OpenCode 1.18; sglang#36877",
        as_given,
    ),
    _loop(
        "calls-last",
        "… with the calls of a turn moved behind its text",
        "Claude Code 2.1.332",
        calls_last,
        ("messages",),
    ),
    _loop(
        "arguments", "… with the JSON of arguments written anew", "every harness but Codex", compact_arguments
    ),
    _loop(
        "no-reasoning",
        "… with the reasoning left out",
        "OpenCode 1.18 on Responses; opencode#19081, llama.cpp#21903",
        no_thoughts,
        ("chat", "responses"),
        users=f"{_SLOWER} On hybrid models from the beginning.",
    ),
    _loop(
        "trimmed", "… with white space trimmed from reasoning and text", "qwen-code 0.24", trimmed, ("chat",)
    ),
    _loop(
        "joined",
        "… with all reasoning of a turn joined into one",
        "qwen-code 0.24, OpenClaw 2026.9.6 on Chat",
        joined_thoughts,
        ("chat",),
    ),
    _loop(
        "header",
        "… with a billing header that changes at the front of the system prompt",
        "Claude Code before 2.1.181; vllm#36829, sglang#21064, ollama#14918",
        as_given,
        ("messages",),
        users="The whole prompt is read again at each turn.",
        header=True,
    ),
    _loop(
        "system-turn",
        "… with a system turn after each result",
        "Claude Code from 2.1.233; vllm#53393, ollama#18431, omlx#3316, bifrost#4592",
        as_given,
        ("messages", "chat"),
        users="The whole history is read again at each turn: the system turn was moved to the head.",
        extend=system_turn,
    ),
)


@demand(
    "A tenant learns what another one asked, by time or in full.",
    "cache_salt of vLLM (RFC vllm#16016); needs --second-key",
)
def check_two_tenants(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A second key sees neither the cache nor the stored responses of the first."""
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
