"""OpenTelemetry: what the spans of a session say, how they hang together, and that texts leave only when asked for."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="pip install 'singletree[otel]'")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from singletree.conversation import Text, ToolResult, Turn
from singletree.errors import BadConfiguration, EngineFailed
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.records import span_attributes as spans
from singletree.records import span_export
from singletree.records.record_queue import RecordQueue
from singletree.records.request_records import RequestRecords
from singletree.records.span_attributes import questions
from singletree.records.span_export import SpanExport, exports_content, find_exporter

from .agent_traffic import CALL, LAYOUT, TOOL, Agent
from .carrying import ONE, Client
from .serving import MODEL, serving

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(SpanExporter):
    """Keeps spans, once it is let."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.answers = threading.Event()
        self.answers.set()

    def export(self, spans: Any) -> SpanExportResult:
        self.answers.wait(60)
        encode_spans(
            spans
        ).SerializeToString()  # as the exporter does: it raises for what UTF-8 does not have
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def named(self, name: str) -> list[Any]:
        """The spans whose names begin with ``name``, by their start."""
        found = (span for span in self.spans if span.name.startswith(name))
        return sorted(found, key=lambda span: span.start_time)


class Exporting:
    """A server whose records become spans in ``collector``."""

    def __init__(self, *, content: bool = False) -> None:
        self.collector = Collector()
        self.records = RequestRecords(RecordQueue(SpanExport(self.collector, content=content)))

    def serving(self, **scripts: str) -> Any:
        return serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT)

    def close(self) -> Collector:
        self.records.close()
        return self.collector


async def test_an_invocation_is_a_span_above_its_requests_and_tools() -> None:
    exporting = Exporting()
    async with exporting.serving(a=CALL, b="Done.") as served:
        served.service.records = exporting.records
        agent = Agent(served, "[[script:a,b]] List it.", {"x-claude-code-session-id": "s1"})
        first, second = await agent.ask(traceparent=TRACEPARENT), await agent.ask(traceparent="nonsense")
    collector = exporting.close()
    [invocation], [tool] = collector.named("invoke_agent"), collector.named("execute_tool ls")
    chats = collector.named(f"chat {MODEL}")
    assert len(chats) == 2
    assert len(collector.spans) == 4
    assert len({span.context.trace_id for span in collector.spans}) == 1
    assert invocation.parent is None
    assert {span.parent.span_id for span in (*chats, tool)} == {invocation.context.span_id}
    assert (invocation.start_time, invocation.end_time) == (chats[0].start_time, chats[1].end_time)
    assert (tool.start_time, tool.end_time) == (chats[0].end_time, chats[1].start_time)
    [link] = chats[0].links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == TRACEPARENT[3:-3]
    assert chats[1].links == ()
    assert [span.kind for span in (invocation, tool, *chats)] == [
        SpanKind.INTERNAL,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
        SpanKind.CLIENT,
    ]
    usage = [answer["usage"] for answer in (first, second)]
    read = [each["input_tokens"] + each["cache_read_input_tokens"] for each in usage]
    for span, answer, tokens, reason in zip(chats, (first, second), read, ("tool_call", "stop"), strict=True):
        found = span.attributes
        assert found["gen_ai.operation.name"] == "chat"
        assert found["gen_ai.conversation.id"] == "s1"
        assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == (MODEL, MODEL)
        assert found["gen_ai.request.max_tokens"] == 999
        assert found["gen_ai.response.id"] == answer["id"]
        assert found["gen_ai.response.finish_reasons"] == (reason,)
        assert found["gen_ai.usage.input_tokens"] == tokens
        assert found["gen_ai.usage.output_tokens"] == answer["usage"]["output_tokens"]
        assert 0 <= found["gen_ai.response.time_to_first_chunk"] < 30
    assert chats[1].attributes["singletree.prefix.course"] == "appended"
    assert invocation.attributes["gen_ai.usage.input_tokens"] == sum(read)
    assert tool.attributes["gen_ai.tool.call.id"] == first["content"][-1]["id"]
    exported = " ".join(str(span.to_json()) for span in collector.spans)
    for text in ("List it", "Done.", "a file", "Remember", "lists"):
        assert text not in exported


async def test_texts_are_exported_when_the_variable_of_the_conventions_asks_for_them() -> None:
    exporting = Exporting(content=True)
    async with exporting.serving(a=ONE, b="Sunny\ud800.") as served:
        served.service.records = exporting.records
        client = Client("/v1/responses", "[[script:a]] How is it?", stream=True)
        for _ in range(2):
            client.take(await client.ask(served))
    collector = exporting.close()
    first, second = (span.attributes for span in collector.named("chat"))
    [tool] = collector.named("execute_tool get_weather")
    asked = json.loads(second[spans.INPUT_MESSAGES])
    assert [message["role"] for message in asked] == ["user", "assistant", "tool"]
    assert asked[0]["parts"] == [{"type": "text", "content": "[[script:a]] How is it?"}]
    assert asked[2]["parts"][0]["response"] == "Sunny."
    [answered] = json.loads(first[spans.OUTPUT_MESSAGES])
    assert [part["type"] for part in answered["parts"]] == ["reasoning", "text", "tool_call"]
    assert answered["finish_reason"] == "tool_call"
    arguments = json.loads(tool.attributes[spans.TOOL_ARGUMENTS])
    assert arguments == answered["parts"][2]["arguments"] == asked[1]["parts"][2]["arguments"]
    assert tool.attributes[spans.TOOL_RESULT] == "Sunny."
    [invocation] = collector.named("invoke_agent")
    assert json.loads(invocation.attributes[spans.INPUT_MESSAGES]) == asked[:1]
    assert invocation.attributes[spans.OUTPUT_MESSAGES] == second[spans.OUTPUT_MESSAGES]
    assert json.loads(first[spans.TOOL_DEFINITIONS])[0]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("value", "asks"),
    [
        ("", False),
        ("false", False),
        ("NO_CONTENT", False),
        ("event_only", False),
        ("true", True),
        ("SPAN_ONLY", True),
    ],
)
def test_the_variable_of_the_conventions(value: str, asks: bool) -> None:
    assert exports_content({spans.CONTENT_VARIABLE: value}) is asks
    assert not exports_content({})


async def test_sub_agents_are_below_the_invocation_that_started_them() -> None:
    exporting = Exporting()
    scripts = {"main": CALL, "done": "Done.", "sub": "Found."}
    async with exporting.serving(**scripts) as served:
        served.service.records = exporting.records
        main = Agent(served, "[[script:main,done]] Go.", {"x-claude-code-session-id": "s"})
        await main.ask()
        sub = Agent(served, "[[script:sub]] Look.", main.headers | {"x-claude-code-agent-id": "a1"})
        await sub.ask()
        child = Agent(
            served, "[[script:sub]] Look there.", {"x-session-id": "c", "x-dynamo-parent-session-id": "s"}
        )
        await child.ask()
        grandchild = Agent(
            served, "[[script:sub]] And there.", {"x-session-id": "g", "x-dynamo-parent-session-id": "c"}
        )
        await grandchild.ask()
        title = Agent(served, "[[script:sub]] A title.", main.headers, tools=False)
        await title.ask()
        await main.ask()
    collector = exporting.close()
    assert len({span.context.trace_id for span in collector.spans}) == 1
    by_id = {span.attributes["gen_ai.conversation.id"]: span for span in collector.named("invoke_agent")}
    [top] = [span for span in collector.named("invoke_agent") if span.parent is None]
    below = [span for span in collector.named("invoke_agent") if span.parent is not None]
    parents = [span.parent.span_id for span in below]
    assert parents == [top.context.span_id, top.context.span_id, by_id["c"].context.span_id]
    assert below[0].attributes["gen_ai.agent.id"] == "a1"
    asked = [span for span in collector.named("chat") if span.parent.span_id == top.context.span_id]
    assert len(asked) == 3, "two turns of the main agent and the title"


async def test_each_question_is_an_invocation_and_one_that_is_left_ends() -> None:
    exporting = Exporting()
    async with exporting.serving(call=CALL, done="Done.") as served:
        served.service.records = exporting.records
        agent = Agent(served, "[[script:done,call,done]] One.", {"x-session-id": "s"})
        await agent.ask()
        agent.messages.append({"role": "user", "content": "Two."})
        await agent.ask()
        agent.messages[-1] = {"role": "user", "content": "No, three."}  # without the result of the call
        agent.messages[-2] = {"role": "assistant", "content": "I stop."}
        await agent.ask()
    collector = exporting.close()
    invocations = collector.named("invoke_agent")
    assert len(invocations) == 3
    assert len({span.context.span_id for span in invocations}) == 3
    assert [span.parent.span_id for span in collector.named("chat")] == [
        span.context.span_id for span in invocations
    ]


async def test_names_that_utf8_does_not_have_cost_no_spans() -> None:
    exporting = Exporting(content=True)
    call = '<tool_call>\n{"name": "l\\ud800s", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    async with exporting.serving(a=call, b="Done.") as served:
        served.service.records = exporting.records
        agent = Agent(served, "[[script:a,b]] \udfff", {"x-session-id": "s\x01\xff"})
        agent.tools = [TOOL | {"name": "l\ud800s"}]
        for _ in range(2):
            await agent.ask()
    collector = exporting.close()
    assert len(collector.named("chat")) == 2
    [tool] = collector.named("execute_tool")
    assert tool.name.startswith("execute_tool l")


async def test_a_failure_is_the_status_of_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exporting = Exporting()
    async with exporting.serving(a="x") as served:
        served.service.records = exporting.records

        async def fails(job: Any) -> Any:
            raise EngineFailed("the engine died of a secret")
            yield

        monkeypatch.setattr(served.engine, "generate", fails)
        agent = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        assert (await served.client.post("/v1/messages", agent)).status == 500
    [span] = exporting.close().spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "EngineFailed"
    assert "secret" not in span.to_json()


async def test_the_trace_of_a_session_is_the_same_in_every_process() -> None:
    ids = set()
    for _ in range(2):
        exporting = Exporting()
        async with exporting.serving(a="x") as served:
            served.service.records = exporting.records
            await Agent(served, "[[script:a]]", {"x-session-id": "s"}).ask()
        spans = exporting.close().named("invoke_agent")
        ids.add((spans[0].context.trace_id, spans[0].context.span_id))
    assert len(ids) == 1


async def test_a_sampler_decides_for_whole_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporting = Exporting()
    async with exporting.serving(call=CALL, done="Done.") as served:
        served.service.records = exporting.records
        for number in range(16):
            agent = Agent(served, "[[script:call,done]]", {"x-session-id": f"s{number}"})
            await agent.ask()
            await agent.ask()
    kept: dict[int, int] = {}
    for span in exporting.close().spans:
        kept[span.context.trace_id] = kept.get(span.context.trace_id, 0) + 1
    assert 0 < len(kept) < 16
    assert set(kept.values()) == {4}


async def test_a_collector_that_does_not_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setattr(span_export, "_CLOSING_SECONDS", 0.2)
    exporting = Exporting()
    exporting.collector.answers.clear()
    async with exporting.serving(a="x") as served:
        served.service.records = exporting.records
        for number in range(40):
            await Agent(served, "[[script:a]]", {"x-session-id": f"s{number}"}).ask()
        began = time.perf_counter()
    exporting.close()
    assert time.perf_counter() - began < 5
    exporting.collector.answers.set()


def test_the_names_are_those_of_the_conventions() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for names in spans._ATTRIBUTES.values() for name in names}
    used |= {value for value in vars(spans).values() if isinstance(value, str)}
    own = {name for name in used if name.startswith("gen_ai.")}
    assert len(own) > 20
    assert own <= known


def test_an_exporter_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(BadConfiguration, match="zipkin"):
        find_exporter()


def test_reminders_beside_results_are_no_questions() -> None:
    user, answer = Turn("user", (Text("q"),)), Turn("assistant", (Text("a"),))
    result = Turn("tool", (ToolResult("1"),))
    assert questions([]) == 0
    assert questions([Turn("system"), user, user]) == 1
    assert questions([user, answer, result, user, answer]) == 1
    assert questions([user, answer, result, answer, user]) == 2
