"""Checks of streams: their events, the order and the delay of parts, how they end, what they count."""

from __future__ import annotations

import json
import re
import time

from singletree.checking.endpoint import LOOKUP, Endpoint, Refused
from singletree.checking.returned_turns import TurnProtocol
from singletree.checking.streams import TurnReader
from singletree.checking.verdicts import Failed, NotApplicable, Undecided, demand

_STREAMING = (
    "https://platform.claude.com/docs/en/build-with-claude/streaming, platform.openai.com/docs/api-reference"
)
PACE = 0.003
"""Seconds between the tokens of a turn whose delay is measured."""
_LATE_SHARE, _LATE_SECONDS = 0.25, 0.1
_FREE_SECONDS = 4
"""After this time the generations of clients that hung up must have ended."""
_TRIES = 3
"""A machine that does other work delays a call now and then; a server that holds it back does so each time."""
_ASIDE = "The harbour was quiet in the rain, and nobody was in a hurry to leave it. " * 5
_IN_FLIGHT = re.compile(
    r"^(?:singletree_generations_in_flight|vllm:num_requests_running|sglang:num_running_reqs"
    r"|llamacpp:requests_processing)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_CUT = ("max_tokens", "length", "incomplete")


def play_call(city: str) -> str:
    """Return a call as the scripted engine's model writes it, with spaces that no client writes."""
    return f'<tool_call>\n{{"name": "lookup",  "arguments": {{"days":3.0,  "city": "{city}"}}}}\n</tool_call>'


@demand("OpenCode ends the turn with a validation error; SDKs raise or lose text.", _STREAMING)
def check_events(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A streamed turn of text has the protocol's events, in their order."""
    reader = text_turn(endpoint, protocol)
    _demand_grammar(reader)
    if not reader.blocks:
        raise Undecided("the model wrote nothing")
    return f"{len(reader.blocks)} part(s), ended with {reader.stop}"


@demand(
    "A tool is not run, or is run with broken arguments.", f"{_STREAMING}; vllm#42400, claude-code-router#790"
)
def check_tool_events(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A streamed call has an id, a name and JSON arguments, in one piece or in order."""
    reader = _call_turn(endpoint, protocol)
    if reader.stop in _CUT:
        raise Undecided(f"the turn was cut: {reader.stop}")
    is_free = endpoint.kept.get(("free", protocol.name))
    if is_free and reader.problems and all("no JSON object" in each for each in reader.problems):
        raise Undecided(f"the model, which cannot be made to call, wrote this: {reader.problems[0]}")
    _demand_grammar(reader)
    return f"{_calls(reader)} call(s) of complete JSON"


@demand(
    "The harness takes the turn for the last one and stops, with the tool not run.",
    "litellm#34692, bifrost#3638",
)
def check_stop_reason(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A turn with a call ends with the reason that says so."""
    reader = _call_turn(endpoint, protocol)
    wanted = {"messages": "tool_use", "chat": "tool_calls", "responses": "completed"}[protocol.name]
    if reader.stop in _CUT:
        raise Undecided(f"the turn was cut: {reader.stop}")
    if reader.stop != wanted:
        raise Failed(f"a turn with a call ends with {reader.stop!r}, not {wanted!r}")
    return wanted


@demand(
    "The next prompt has another order, so the cache is lost and the model sees what it did not write.",
    "both APIs have parts in order; Claude Code and Codex keep it",
    ("messages", "responses"),
)
def check_part_order(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Text and calls come in the order in which the model wrote them."""
    if not endpoint.plays_calls:
        raise Undecided("a model cannot be made to write text between calls; a scripted engine can")
    played = f"I look. \n{play_call('Oslo')}\nNow the other.\n{play_call('Rome')}"
    reader = endpoint.stream(
        protocol, endpoint.request(protocol, f"[[echo:{played}]]", tools=[LOOKUP], tokens=800)
    )
    if reader.problems:
        raise Undecided("its stream is out of order (see tool-events)")
    kinds = [block.kind for block in reader.blocks]
    cities = [json.loads(block.text or "{}").get("city") for block in reader.blocks if block.kind == "call"]
    if kinds != ["text", "call", "text", "call"] or cities != ["Oslo", "Rome"]:
        raise Failed(f"text, call, text, call came as {', '.join(kinds)}, the calls for {cities}")
    return "text, call, text, call"


@demand(
    "Claude Code, Codex and OpenCode run tools while the stream goes on: they wait for nothing.",
    "Claude Code 2.1.332 starts a tool at content_block_stop, Codex 0.171 at output_item.done",
)
def check_call_delay(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """A finished call reaches the client before the rest of the turn is generated."""
    for _ in range(_TRIES if endpoint.plays_calls else 1):
        is_late, seen = _measure_delay(endpoint, protocol)
        if not is_late:
            return seen
    raise Failed(seen)


def _measure_delay(endpoint: Endpoint, protocol: TurnProtocol) -> tuple[bool, str]:
    """Return whether the first call of a turn came late, and what was seen."""
    if endpoint.plays_calls:
        played = f"I look.\n{play_call('Oslo')}\n{_ASIDE}"
        body = endpoint.request(protocol, f"[[echo@{PACE}:{played}]]", tools=[LOOKUP], tokens=2000)
        reader, rest, whole = endpoint.stream(protocol, body), len(_ASIDE), len(played)
    else:
        reader = _call_turn(endpoint, protocol)
        lengths = [len(block.text) + 40 for block in reader.blocks if block.kind == "call"]
        rest, whole = sum(lengths[1:]), sum(lengths)
    calls = [at for at, block in enumerate(reader.blocks) if block.kind == "call"]
    if not calls or not rest:
        raise Undecided("nothing follows the call, so the stream does not show when it was complete")
    total = reader.seconds - (0 if endpoint.plays_calls else min(reader.begun))
    if total < 2 * _LATE_SECONDS:
        raise Undecided(f"the turn took {total * 1000:.0f} ms: too fast to tell")
    late = max(0.0, total * rest / whole - (reader.seconds - reader.done[calls[0]]))
    tokens = late / total * (reader.counts.generated or 0)
    seen = f"a finished call arrives {late * 1000:.0f} ms, about {tokens:.0f} tokens, after its last token"
    return late > _LATE_SHARE * total and late > _LATE_SECONDS, seen


@demand(
    "The harness compacts too early or too late, and bills are wrong.",
    "Claude Code takes the last counts that are not zero; litellm#22986",
)
def check_usage(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Input tokens are the same at the start, at the end and without streaming."""
    streamed = text_turn(endpoint, protocol)
    whole = endpoint.turn(protocol, endpoint.request(protocol, _text_prompt(endpoint))).counts
    if streamed.problems and streamed.counts.prompt is None:
        raise Undecided("the stream is out of order (see events)")
    if streamed.counts.prompt is None or streamed.counts.generated is None:
        raise Failed("the stream does not end with a usage, though it was asked for")
    if streamed.counts.prompt != whole.prompt:
        raise Failed(f"{streamed.counts.prompt} prompt tokens streamed, {whole.prompt} in one body")
    first = streamed.first_counts
    if first is not None and first.prompt and first.prompt != streamed.counts.prompt:
        raise Failed(f"{first.prompt} prompt tokens at the start, {streamed.counts.prompt} at the end")
    start = "" if first is None else f", {first.prompt} at the start"
    return f"{streamed.counts.prompt} prompt tokens{start}"


@demand(
    "Ctrl-C leaves the engine busy, and the next turn waits for a turn that nobody reads.",
    "every harness cancels by closing the connection",
)
def check_disconnect(endpoint: Endpoint, protocol: TurnProtocol) -> str:
    """Clients that hang up free the engine."""
    asked = "[[gen:20000:1:0.01]]" if endpoint.is_scripted else "Count from 1 to 2000, one number a line."
    short = endpoint.request(protocol, _text_prompt(endpoint), tokens=8)
    endpoint.turn(protocol, short)
    before, usual = _in_flight(endpoint), _timed(endpoint, protocol, short)
    for _ in range(3):
        endpoint.stream(protocol, endpoint.request(protocol, asked, tokens=2000), until=6)
    after = _timed(endpoint, protocol, short)
    if after > 3 * usual + 2:
        raise Failed(f"a request took {usual:.1f} s, and {after:.1f} s after three clients had hung up")
    if before is None:
        return f"the next request took {after:.1f} s, {usual:.1f} s before; no metrics show the engine"
    end = time.monotonic() + _FREE_SECONDS
    while (now := _in_flight(endpoint) or 0) > before and time.monotonic() < end:
        time.sleep(0.1)
    if now > before:
        raise Failed(
            f"{_FREE_SECONDS} s after three clients hung up {now - before:.0f} generations still run (/metrics)"
        )
    return "no generation is left in /metrics, and the next request was served at once"


def text_turn(endpoint: Endpoint, protocol: TurnProtocol) -> TurnReader:
    """Return a streamed turn of text, the same for all checks."""
    body = endpoint.request(protocol, _text_prompt(endpoint), tokens=40)
    return endpoint.once(("text", protocol.name), lambda: endpoint.stream(protocol, body))


def _text_prompt(endpoint: Endpoint) -> str:
    if endpoint.is_scripted:
        return "[[echo:A short answer.\n\nIn two paragraphs.]]"
    return "Write one short sentence about the sea."


def _call_turn(endpoint: Endpoint, protocol: TurnProtocol) -> TurnReader:
    reader = endpoint.once(("call", protocol.name), lambda: _stream_call(endpoint, protocol))
    if reader.error:
        raise Failed(f"the stream ends with an error: {reader.error}")
    if not _calls(reader):
        raise Undecided("the model called no tool")
    return reader


def _stream_call(endpoint: Endpoint, protocol: TurnProtocol) -> TurnReader:
    if endpoint.plays_calls:
        played = f"I look. \n{play_call('Oslo')}"
        body = endpoint.request(protocol, f"[[echo:{played}]]", tools=[LOOKUP], tokens=600)
        return endpoint.stream(protocol, body)
    asked = "Look up the weather of Oslo, Rome and Lima: call the tool lookup once for each, in one turn."
    body = endpoint.request(protocol, asked, tools=[LOOKUP], tokens=120)
    forced = {"type": "any"} if protocol.name == "messages" else "required"
    try:
        return endpoint.stream(protocol, {**body, "tool_choice": forced})
    except Refused:
        endpoint.kept["free", protocol.name] = True
    try:
        return endpoint.stream(protocol, body)
    except Refused as refused:
        raise NotApplicable(f"it takes no tools for this model: {refused.answer}") from None


def _demand_grammar(reader: TurnReader) -> None:
    if reader.problems or reader.error:
        raise Failed("; ".join(reader.problems) or f"the stream ends with an error: {reader.error}")


def _calls(reader: TurnReader) -> int:
    return sum(block.kind == "call" for block in reader.blocks)


def _timed(endpoint: Endpoint, protocol: TurnProtocol, body: dict[str, object]) -> float:
    began = time.perf_counter()
    endpoint.turn(protocol, body)
    return time.perf_counter() - began


def _in_flight(endpoint: Endpoint) -> float | None:
    answer = endpoint.get("/metrics")
    found = _IN_FLIGHT.findall(answer.body.decode(errors="replace")) if answer.status == 200 else []
    return sum(map(float, found)) if found else None
