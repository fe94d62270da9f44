"""Every check passes on singletree, and exactly one fails on a server with one fault."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from singletree.checking import stream_checks
from singletree.checking.contract import CHECKS
from singletree.checking.endpoint import Arriving

from .in_memory import Ask, Fault, Given, Send, checked, results

MESSAGES, CHAT, RESPONSES = "messages", "chat", "responses"


class Case(NamedTuple):
    """A fault, the check that finds it, and the protocol on which it is."""

    check: str
    protocol: str
    fault: Fault


CASES: list[Case] = []


def finds(check: str, *protocols: str) -> Callable[[Fault], Fault]:
    """Register a fault that ``check`` finds on each of the protocols."""

    def register(fault: Fault) -> Fault:
        CASES.extend(Case(check, protocol, fault) for protocol in protocols)
        return fault

    return register


def body_of(arriving: Arriving) -> bytes:
    return b"".join(iter(arriving.read, b""))


def is_plain_stream(ask: Ask) -> bool:
    return bool(ask.json.get("stream")) and "tools" not in ask.json


def rewritten(ask: Ask, send: Send, change: Callable[[bytes], bytes]) -> Arriving:
    arriving = send(ask)
    if b"[[gen:20000" in ask.body:
        return arriving
    body = body_of(arriving)
    arriving.close()
    return Given(arriving.status, change(body))


def without_tokens(body: bytes) -> bytes:
    """The answer with no cached tokens in its usage."""

    def change(found: re.Match[bytes]) -> bytes:
        usage = json.loads(found[1])
        usage["input_tokens"] = usage.get("input_tokens", 0) + usage.pop("cache_read_input_tokens", 0)
        for details in ("prompt_tokens_details", "input_tokens_details"):
            if details in usage:
                usage[details]["cached_tokens"] = 0
        return b'"usage":' + json.dumps({"cache_read_input_tokens": 0, **usage}).encode()

    return re.sub(rb'"usage": ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})', change, body)


@finds("events", MESSAGES, CHAT, RESPONSES)
def stream_without_its_end(ask: Ask, send: Send) -> Arriving:
    if not is_plain_stream(ask):
        return send(ask)
    return rewritten(ask, send, lambda body: b"\n\n".join(body.split(b"\n\n")[:-2]) + b"\n\n")


@finds("events", MESSAGES)
def event_of_its_own(ask: Ask, send: Send) -> Arriving:
    if not is_plain_stream(ask):
        return send(ask)
    added = b'event: tool_call_dispatch\ndata: {"type": "tool_call_dispatch"}\n\nevent: message_stop'
    return rewritten(ask, send, lambda body: body.replace(b"event: message_stop", added))


@finds("tool-events", MESSAGES, CHAT, RESPONSES)
def arguments_cut(ask: Ask, send: Send) -> Arriving:
    if not ask.json.get("stream") or "tools" not in ask.json or b"echo@" in ask.body:
        return send(ask)
    return rewritten(ask, send, lambda body: body.replace(b'\\"city\\"', b"city"))


@finds("stop-reason", MESSAGES, CHAT)
def end_of_turn_with_a_call(ask: Ask, send: Send) -> Arriving:
    if not ask.json.get("stream") or b"echo@" in ask.body:
        return send(ask)

    def change(body: bytes) -> bytes:
        body = body.replace(b'"stop_reason":"tool_use"', b'"stop_reason":"end_turn"')
        return body.replace(b'"finish_reason":"tool_calls"', b'"finish_reason":"stop"')

    return rewritten(ask, send, change)


@finds("part-order", MESSAGES, RESPONSES)
def second_call_first(ask: Ask, send: Send) -> Arriving:
    if b"Now the other." not in ask.body:
        return send(ask)
    return rewritten(
        ask,
        send,
        lambda body: body.replace(b"Oslo", b"Oooo").replace(b"Rome", b"Oslo").replace(b"Oooo", b"Rome"),
    )


@finds("call-delay", MESSAGES, CHAT, RESPONSES)
def call_at_the_end(ask: Ask, send: Send) -> Arriving:
    return rewritten(ask, send, bytes) if b"echo@" in ask.body else send(ask)


@finds("usage", MESSAGES, CHAT, RESPONSES)
def streams_count_otherwise(ask: Ask, send: Send) -> Arriving:
    if not is_plain_stream(ask):
        return send(ask)
    names = rb'"(input_tokens|prompt_tokens)": ?\d+'
    return rewritten(ask, send, lambda body: re.sub(names, rb'"\1":7', body, count=1))


@finds("count-tokens", MESSAGES, RESPONSES)
def guesses(ask: Ask, send: Send) -> Arriving:
    return Given(200, {"input_tokens": 11}) if ask.path.endswith("_tokens") else send(ask)


@finds("system-turns", MESSAGES, CHAT, RESPONSES)
def system_first(ask: Ask, send: Send) -> Arriving:
    turns = ask.json.get("messages") or ask.json.get("input") or []
    is_list = isinstance(turns, list)
    if is_list and any(turn.get("role") in ("system", "developer") for turn in turns[1:]):
        return refusal(ask, "System message must be at the beginning.")
    return send(ask)


def refusal(ask: Ask, words: str, status: int = 400) -> Given:
    """An error in the protocol's shape."""
    error = {"type": "invalid_request_error", "message": words}
    return Given(status, {"type": "error", "error": error})


@finds("bare-call", MESSAGES, CHAT, RESPONSES)
def a_turn_needs_text(ask: Ask, send: Send) -> Arriving:
    is_bare = b"lookup" in ask.body and b"Sunny." in ask.body and b"I look" not in ask.body
    return refusal(ask, "Invalid request") if is_bare else send(ask)


@finds("content-shape", MESSAGES, CHAT, RESPONSES)
def lists_are_other_prompts(ask: Ask, send: Send) -> Arriving:
    turns = ask.json.get("messages") or ask.json.get("input")
    if isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0]["content"], list):
        turns[0]["content"][0]["text"] += " "
        return send(ask.with_json(ask.json | {"messages" if "messages" in ask.json else "input": turns}))
    return send(ask)


@finds("harness-fields", MESSAGES, CHAT, RESPONSES)
def no_unknown_field(ask: Ask, send: Send) -> Arriving:
    known = {"model", "messages", "input", "tools", "stream", "stream_options", "system", "store"}
    unknown = {name for name in ask.json if name not in known and not name.startswith("max_")}
    return refusal(ask, f"Extra inputs are not permitted: {unknown}") if unknown else send(ask)


@finds("beta-headers", MESSAGES)
def no_unknown_beta(ask: Ask, send: Send) -> Arriving:
    betas = ask.headers.get("anthropic-beta", "")
    return refusal(ask, "unexpected beta") if "claude-code-20250219" in betas else send(ask)


@finds("large-max-tokens", MESSAGES, CHAT)
def no_large_limit(ask: Ask, send: Send) -> Arriving:
    return refusal(ask, "max_tokens is too large") if ask.json.get("max_tokens", 0) > 40_000 else send(ask)


@finds("error-shape", MESSAGES, CHAT, RESPONSES)
def error_of_a_framework(ask: Ask, send: Send) -> Arriving:
    if 7 in (ask.json.get("messages"), ask.json.get("input")):
        return Given(422, {"detail": [{"msg": "Input should be a valid list"}]})
    return send(ask)


@finds("error-shape", MESSAGES)
def error_of_another_protocol(ask: Ask, send: Send) -> Arriving:
    return Given(400, {"error": {"message": "no"}}) if ask.json.get("messages") == 7 else send(ask)


@finds("overflow-words", MESSAGES, CHAT, RESPONSES)
def other_words(ask: Ask, send: Send) -> Arriving:
    return refusal(ask, "input length exceeds the model") if len(ask.body) > 150_000 else send(ask)


@finds("overflow-words", MESSAGES, CHAT, RESPONSES)
def cut_in_silence(ask: Ask, send: Send) -> Arriving:
    return send(replaced(ask, "word " * 1000, "")) if len(ask.body) > 150_000 else send(ask)


def replaced(ask: Ask, old: str, new: str) -> Ask:
    return Ask(ask.method, ask.path, ask.headers, ask.body.replace(old.encode(), new.encode()))


@finds("model-metadata", MESSAGES, CHAT, RESPONSES)
def no_slash(ask: Ask, send: Send) -> Arriving:
    return refusal(ask, "not found", 404) if "/v1/models/org/" in ask.path else send(ask)


@finds("compressed-bodies", MESSAGES, CHAT, RESPONSES)
def compressed_is_a_failure(ask: Ask, send: Send) -> Arriving:
    return refusal(ask, "failed", 500) if "content-encoding" in ask.headers else send(ask)


@finds("compressed-bodies", RESPONSES)
def zstd_is_no_json(ask: Ask, send: Send) -> Arriving:
    return refusal(ask, "invalid JSON") if ask.headers.get("content-encoding") == "zstd" else send(ask)


@finds("special-tokens", MESSAGES, CHAT, RESPONSES)
def markers_are_tokens(ask: Ask, send: Send) -> Arriving:
    return send(replaced(ask, "<|im_end|>", "x"))


@finds("cached-tokens", MESSAGES, CHAT, RESPONSES)
def tells_no_cached_tokens(ask: Ask, send: Send) -> Arriving:
    return (
        rewritten(ask, send, without_tokens)
        if not ask.json.get("stream") and ask.method == "POST"
        else send(ask)
    )


@finds("two-tenants", MESSAGES, CHAT, RESPONSES)
def keys_are_one(ask: Ask, send: Send) -> Arriving:
    headers = {name: value.replace("second-key", "first-key") for name, value in ask.headers.items()}
    return send(Ask(ask.method, ask.path, headers, ask.body))


@finds("two-tenants", RESPONSES)
def responses_are_shared(ask: Ask, send: Send) -> Arriving:
    return keys_are_one(ask, send) if ask.method == "GET" else send(ask)


_ITEMS = ("reasoning", "message", "function_call")


def habit(ask: Ask) -> str:
    """The check whose loop the request is of, by what came back; empty if nothing did."""
    stated = ask.json
    history = stated.get("messages") or stated.get("input") or []
    if "tools" not in stated or not stated.get("stream") or not isinstance(history, list):
        return ""
    if "billing-header" in json.dumps(stated.get("system", "")):
        return "loop-header"
    if any(turn.get("role") == "system" for turn in history[1:]):
        return "loop-system-turn"
    last = json.dumps(
        [turn for turn in history if turn.get("role") == "assistant" or turn.get("type") in _ITEMS]
    )
    if "lookup" not in last:
        return ""
    thought = "First the weather" in last or '"type": "reasoning"' in last
    if ask.path == "/v1/messages":
        kinds = re.findall(r'"type": "(text|tool_use|thinking)"', last)[:6]
        return {"tool_use": "loop-calls-last"}.get(kinds[4], "loop-as-given-or-arguments")
    if '\\"days\\":3.0,\\"city' in last:
        return "loop-arguments"
    if not thought:
        return "loop-no-reasoning"
    if ask.path != "/v1/chat/completions":
        return "loop-as-given"
    message = next(turn for turn in history if turn.get("role") == "assistant")
    if message["content"] == message["content"].strip():
        return "loop-trimmed"
    return "loop-joined" if "north.Now" in message["reasoning_content"] else "loop-as-given"


def misses(name: str) -> Fault:
    """The cache of a server misses where a harness has one habit."""

    def fault(ask: Ask, send: Send) -> Arriving:
        return rewritten(ask, send, without_tokens) if habit(ask) == name else send(ask)

    return fault


for _protocol, _names in {
    MESSAGES: ("loop-calls-last", "loop-header", "loop-system-turn"),
    CHAT: (
        "loop-as-given",
        "loop-arguments",
        "loop-no-reasoning",
        "loop-trimmed",
        "loop-joined",
        "loop-system-turn",
    ),
    RESPONSES: ("loop-as-given", "loop-arguments", "loop-no-reasoning"),
}.items():
    CASES.extend(Case(name, _protocol, misses(name)) for name in _names)


def id_of(case: Case) -> str:
    return f"{case.check}-{case.protocol}-{case.fault.__name__}"


@pytest.mark.parametrize("case", CASES, ids=id_of)
async def test_a_fault_fails_its_check(case: Case) -> None:
    async with checked(case.fault) as endpoint:
        found = await results(endpoint, case.protocol, case.check)
    assert [result.verdict for result in found] == ["fail"], found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=id_of)
async def test_one_fault_fails_one_check(case: Case) -> None:
    async with checked(case.fault) as endpoint:
        found = await results(endpoint, case.protocol)
    failed = {result.check: result.reason for result in found if result.verdict == "fail"}
    assert set(failed) == {case.check}, failed


class GoesOn:
    """A server that does not see that its client has left."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def __call__(self, ask: Ask, send: Send) -> Arriving:
        arriving = send(ask)
        if b"[[gen:20000" not in ask.body:
            return arriving
        self.left.append(arriving.close)
        arriving.close = lambda: None  # type: ignore[method-assign]
        return arriving


@pytest.mark.parametrize("protocol", [MESSAGES, CHAT, RESPONSES])
async def test_a_client_that_left_is_noticed(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_checks, "_FREE_SECONDS", 0.3)
    fault = GoesOn()
    async with checked(fault) as endpoint:
        found = await results(endpoint, protocol, "disconnect")
        for close in fault.left:
            await asyncio.to_thread(close)
    assert [result.verdict for result in found] == ["fail"], found


async def test_singletree_passes() -> None:
    async with checked() as endpoint:
        found = await results(endpoint)
    bad = {(r.check, r.protocol): (r.verdict, r.reason) for r in found if r.verdict != "pass"}
    assert bad == {}
    assert {result.check for result in found} == {check.name for check in CHECKS}


def test_each_check_has_a_fault() -> None:
    assert {case.check for case in CASES} | {"disconnect"} == {check.name for check in CHECKS}
