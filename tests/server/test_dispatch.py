"""Complete calls and whole thoughts as events of their own: when, once each, and to nobody's harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.sdk import anthropic_sdk, openai_sdk
from families.sample_rows import all_rows
from protocols import grammar_chat, grammar_messages, grammar_responses, shapes
from protocols.event_stream import ByteEncoder, context
from protocols.shapes import SHAPES, Shape, names
from protocols.test_messages_families import read
from singletree.conversation import Conversation, Request, Tool, ToolCall
from singletree.errors import EngineFailed
from singletree.events import ToolCallBroken, ToolCallEnd, fold
from singletree.protocols import chat, messages, responses
from singletree.server.answers.choices import DispatchOptions, with_dispatch
from singletree.server.http.routes import dispatch_options
from singletree.server.settings.config import Config

from .memory import Reply, events
from .serving import MODEL, body, serving
from .test_generation import CALL, LIMIT, TOOLS, TURN, final, outcome

MODULES: dict[str, Any] = {
    "/v1/messages": messages,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
}
each_protocol = pytest.mark.parametrize("path", MODULES)
ASIDES = ("tool_call_dispatch", "reasoning_dispatch")
BOTH = {"x-singletree-tool-dispatch": "1", "x-singletree-reasoning-dispatch": "1"}
MODEL_OUTPUT = {
    "model": "m",
    "stream": True,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
}


BOTH_EVENTS = DispatchOptions(True, True)


def streamed(path: str, shape: Shape, asked: DispatchOptions = BOTH_EVENTS, **request: Any) -> bytes:
    """The stream of ``shape`` with the side events."""
    module = MODULES[path]
    of = module.decode(json.dumps(MODEL_OUTPUT | request).encode())
    return dispatching(module, of, asked).whole(shape.events, shape.finished)


def dispatching(module: Any, of: Request, asked: DispatchOptions) -> ByteEncoder:
    """The encoder of ``module`` with the side events."""
    return ByteEncoder(with_dispatch(module.Encoder(context(of, id="x_1")), of, asked))


def grammatical(path: str, stream: bytes) -> None:
    """Refuses a stream that is none of its protocol."""
    if path == "/v1/messages":
        grammar_messages.check(stream)
    else:
        (grammar_chat if path == "/v1/chat/completions" else grammar_responses).Grammar(stream)


def asides(stream: bytes, name: str) -> list[dict[str, Any]]:
    """The data of the side events called ``name``."""
    return [data for event, data in events(stream) if event == name]


def dispatched(stream: bytes) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of the calls that were told."""
    calls = [data["tool_call"] for data in asides(stream, "tool_call_dispatch")]
    assert all(set(call) == {"index", "id", "type", "function"} for call in calls)
    assert all(data["choice_index"] == 0 for data in asides(stream, "tool_call_dispatch"))
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]


def ended(shape: Shape) -> list[ToolCall]:
    """The calls of ``shape`` that the model completed."""
    return [call for call in shape.turn.tool_calls if call.complete]


@each_protocol
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_complete_calls_once_each_and_nothing_else(path: str, shape: Shape) -> None:  # C13 C15 C17
    stream = streamed(path, shape)
    grammatical(path, stream)
    assert dispatched(stream) == [(c.id, c.name, c.arguments or "{}") for c in ended(shape)]
    assert all(json.loads(arguments) is not None for _, _, arguments in dispatched(stream))


@each_protocol
@pytest.mark.parametrize("shape", SHAPES, ids=names)
def test_without_the_side_events_the_stream_is_what_it_was(path: str, shape: Shape) -> None:
    with_events = [e for e in events(streamed(path, shape)) if e[0] not in ASIDES]
    without = events(streamed(path, shape, DispatchOptions()))
    if path == "/v1/responses":
        for _, data in (*with_events, *without):
            del data["sequence_number"]
    assert with_events == without


@each_protocol
def test_a_call_is_reported_in_the_write_that_completes_it(path: str) -> None:
    module, shape = MODULES[path], shapes.by_name["two_calls_reasoning_between"]
    of = module.decode(json.dumps(MODEL_OUTPUT).encode())
    encoding = dispatching(module, of, DispatchOptions(calls=True))
    encoding.start()
    for event in shape.events:
        written = encoding.feed(event)
        assert (b"tool_call_dispatch" in written) == isinstance(event, ToolCallEnd)
        if isinstance(event, ToolCallEnd):
            complete = {"/v1/messages": b"content_block_stop", "/v1/responses": b"output_item.done"}
            at = written.index(b"event: tool_call_dispatch")
            assert written.rfind(complete.get(path, b""), 0, at) >= 0, "behind the protocol's own"


@each_protocol
def test_the_index_is_the_protocols(path: str) -> None:  # C13
    shape = shapes.by_name["broken_call_then_call"]
    [dispatched] = asides(streamed(path, shape), "tool_call_dispatch")
    assert dispatched["tool_call"]["index"] == 0, "the broken one was never shown"
    seen = Shape(
        "", (*shapes.broken(0, "x", '{"a": ', raw="?"), *shapes.call(1, "now", "{}")), shapes.finished()
    )
    stream = streamed(path, seen)
    [dispatched] = asides(stream, "tool_call_dispatch")
    assert dispatched["tool_call"]["index"] == 1
    if path == "/v1/chat/completions":
        assert grammar_chat.Grammar(stream).calls[1]["id"] == dispatched["tool_call"]["id"]


@each_protocol
def test_a_span_of_reasoning_is_reported_when_it_ends(path: str) -> None:
    stream = streamed(path, shapes.by_name["interleaved"])
    dispatched = asides(stream, "reasoning_dispatch")
    assert [(t["index"], t["reasoning_content"]) for t in dispatched] == [
        (0, "One."),
        (0, "Two."),
        (0, "Three."),
    ]
    order = [name for name, _ in events(stream) if name in ASIDES]
    assert order == ["reasoning_dispatch"] * 2 + ["tool_call_dispatch", "reasoning_dispatch"]
    text = stream.index(b'"I list."')
    assert stream.index(b"event: reasoning_dispatch") < text, "before the first of the text"
    cut = asides(streamed(path, shapes.by_name["cut_in_reasoning"]), "reasoning_dispatch")
    assert [t["reasoning_content"] for t in cut] == ["Let me think about"]


def test_reasoning_that_the_client_does_not_want_is_not_reported_aside() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    stream = streamed("/v1/messages", shapes.by_name["reasoning_call"], thinking=thinking)
    assert not asides(stream, "reasoning_dispatch")
    assert b"I must read" not in stream
    assert len(dispatched(stream)) == 1


def test_a_custom_call_is_reported_with_its_raw_input() -> None:  # C25
    of = Request("m", Conversation((), (Tool("apply_patch", kind="custom"),)))
    encoding = dispatching(chat, of, DispatchOptions(calls=True))
    called = shapes.call(0, "apply_patch", '{"input": "a\\n', 'b"}')
    [dispatched] = asides(b"".join(map(encoding.feed, called)), "tool_call_dispatch")
    assert dispatched["tool_call"]["custom"] == {"name": "apply_patch", "input": "a\nb"}
    assert dispatched["tool_call"]["type"] == "custom"


def test_a_call_is_reported_under_the_names_that_the_client_knows() -> None:  # C26
    listed = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
    namespace = {"type": "namespace", "name": "files", "description": "", "tools": [listed]}
    of = responses.decode(json.dumps(MODEL_OUTPUT | {"tools": [namespace]}).encode())
    [tool] = of.conversation.tools
    encoding = dispatching(responses, of, DispatchOptions(calls=True))
    called = shapes.call(0, tool.name, "{}")
    stream = encoding.start() + b"".join(map(encoding.feed, called))
    [dispatched] = asides(stream, "tool_call_dispatch")
    [done] = [data["item"] for name, data in events(stream) if name == "response.output_item.done"]
    assert dispatched["tool_call"]["function"] == {k: done[k] for k in ("name", "namespace", "arguments")}
    assert tool.name != "ls"


@each_protocol
def test_a_failure_ends_the_stream_and_reports_no_call(path: str) -> None:  # C39
    module = MODULES[path]
    of = module.decode(json.dumps(MODEL_OUTPUT).encode())
    encoding = dispatching(module, of, DispatchOptions(True, True))
    sent = encoding.start() + b"".join(map(encoding.feed, shapes.call(0, "ls", '{"a": 1', ends=False)))
    sent += encoding.fail(EngineFailed("gone"))
    grammatical(path, sent)
    assert not dispatched(sent)


def test_a_broken_call_is_never_reported() -> None:  # C17
    shape = Shape(
        "", (*shapes.call(0, "x", "{}", ends=False), ToolCallBroken(0, ""), ToolCallEnd(0)), shapes.finished()
    )
    assert not dispatched(streamed("/v1/chat/completions", shape))


def test_white_space_alone_is_no_arguments() -> None:
    shape = Shape("", shapes.call(0, "now", " \n"), shapes.finished())
    assert [arguments for _, _, arguments in dispatched(streamed("/v1/messages", shape))] == ["{}"]


def test_of_every_family_only_complete_calls_with_valid_arguments_are_reported() -> None:  # C15 C17
    reported = 0
    for name, row, tools in all_rows():
        events = tuple(read(name, row, tools, 3))
        stream = streamed("/v1/messages", Shape("", events, shapes.finished()))
        grammar_messages.check(stream)
        calls = dispatched(stream)
        complete = [c for c in fold(events).tool_calls if c.complete]
        assert [(i, n, json.loads(a)) for i, n, a in calls] == [
            (c.id, c.name, json.loads(c.arguments or "{}")) for c in complete
        ]
        reported += len(calls)
    assert reported > 500


WORDS = {True: ("1", "true", "on", " Yes "), False: ("0", "false", "off", "NO")}


@pytest.mark.parametrize(("says", "word"), [(says, word) for says, words in WORDS.items() for word in words])
def test_the_words_of_a_header(says: bool, word: str) -> None:
    config = Config(enable_streaming_tool_dispatch=not says)
    assert dispatch_options(config, {"x-singletree-tool-dispatch": word}) == DispatchOptions(calls=says)


def test_headers_come_before_flags() -> None:
    on = Config(enable_streaming_tool_dispatch=True, enable_streaming_reasoning_dispatch=True)
    assert dispatch_options(Config(), {}) == DispatchOptions()
    assert dispatch_options(on, {}) == DispatchOptions(True, True)
    assert dispatch_options(Config(), BOTH) == DispatchOptions(True, True)
    assert dispatch_options(on, {"x-singletree-tool-dispatch": "0"}) == DispatchOptions(False, True)
    assert dispatch_options(on, {"x-singletree-tool-dispatch": "maybe"}) == DispatchOptions(True, True)


async def ask(
    path: str, turn: str, headers: dict[str, str], config: Config | None = None, **more: Any
) -> Reply:
    """The stream of a served turn."""
    async with serving({"s": turn}, config=config) as served:
        asked = body(path, "[[script:s]]", stream=True, tools=[TOOLS[path]], **more)
        return await served.client.post(path, asked, headers)


@each_protocol
async def test_served(path: str) -> None:
    plain, by_header = await ask(path, TURN, {}), await ask(path, TURN, BOTH)
    by_flag = await ask(path, TURN, {}, Config(enable_streaming_tool_dispatch=True))
    off = await ask(
        path, TURN, {"x-singletree-tool-dispatch": "0"}, Config(enable_streaming_tool_dispatch=True)
    )
    reported = [len(dispatched(reply.body)) for reply in (plain, by_header, by_flag, off)]
    assert reported == [0, 2, 2, 0], "off unless asked for: an unknown event ends OpenCode's turn"
    thought = [len(asides(reply.body, "reasoning_dispatch")) for reply in (plain, by_header, by_flag)]
    assert thought == [0, 1, 0]
    cut = await ask(path, CALL, BOTH, None, **{LIMIT[path]: len(CALL) // 2})
    assert not dispatched(cut.body)


@each_protocol
async def test_a_whole_answer_has_none(path: str) -> None:
    async with serving({"s": TURN}) as served:
        asked = body(path, "[[script:s]]", tools=[TOOLS[path]])
        reply = await served.client.post(path, asked, BOTH)
    assert outcome(path, final(path, reply))[1] == 2
    assert b"dispatch" not in reply.body


async def test_the_official_sdks_carry_on() -> None:
    messages: Any = [{"role": "user", "content": "[[script:s]]"}]
    async with serving({"s": TURN}) as served:
        async with anthropic_sdk(served.client) as sdk:
            tools: Any = [TOOLS["/v1/messages"]]
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": tools}
            for each in (sdk.messages, sdk.beta.messages):
                whole: Any = await each.create(**asked)
                async with each.stream(**asked, extra_headers=BOTH) as stream:
                    seen = [event.type async for event in stream]
                    message: Any = await stream.get_final_message()
                assert [b.type for b in message.content] == [b.type for b in whole.content]
                assert message.content[-1].input == {"path": "a"}
                assert seen[-1] == "message_stop"
        async with openai_sdk(served.client) as gpt:
            chat_tools: Any = [TOOLS["/v1/chat/completions"]]
            chunks: Any = await gpt.chat.completions.create(
                model=MODEL, messages=messages, tools=chat_tools, stream=True, extra_headers=BOTH
            )
            calls = [
                c async for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or ()
            ]
            assert sum(call.id is not None for call in calls) == 2
            asked = {"model": MODEL, "messages": messages, "tools": chat_tools, "extra_headers": BOTH}
            async with gpt.chat.completions.stream(**asked) as completing:
                completion: Any = await completing.get_final_completion()
            assert len(completion.choices[0].message.tool_calls) == 2
            asked = {
                "model": MODEL,
                "input": messages,
                "tools": [TOOLS["/v1/responses"]],
                "extra_headers": BOTH,
            }
            async with gpt.responses.stream(**asked) as responding:
                response: Any = await responding.get_final_response()
            assert [i.type for i in response.output] == [
                "reasoning",
                "message",
                "function_call",
                "function_call",
            ]
