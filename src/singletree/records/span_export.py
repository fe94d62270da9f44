"""Export the records of requests as OpenTelemetry spans, with its own SDK.

A session is one trace, whose id follows from the session's. In it there is a span for each invocation of an agent
(``invoke_agent``), and below it one for each request (``chat``) and each tool (``execute_tool``), whose times are those
of the record. A ``traceparent`` of the client is a link of the request's span. Endpoint, protocol, headers, sampling,
limits and resource come from the standard variables ``OTEL_*``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from random import getrandbits
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from singletree import __version__
from singletree.conversation import ToolResult, Turn
from singletree.errors import BadConfiguration
from singletree.events import fold
from singletree.lru import LruCache
from singletree.records import span_attributes as spans
from singletree.records.record_queue import AnswerRecords, RequestRecord
from singletree.records.span_attributes import Invocation, Invocations
from singletree.server.sparse_log import OncePerMinute

_CLOSING_SECONDS = 3.0
"""How long the end of the server waits for a collector."""

_ANSWER = spans.OUTPUT_MESSAGES
_ARGUMENT_BYTES = 32 * 2**20
"""Memory for the arguments of calls whose results have not come, where texts are exported."""
_NANOSECONDS = 1_000_000


def find_exporter() -> SpanExporter:
    """Return the exporter that ``OTEL_TRACES_EXPORTER`` and ``OTEL_EXPORTER_OTLP_PROTOCOL`` name, else OTLP over HTTP.

    Raises:
        BadConfiguration: it is not installed.
    """
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if wanted == "otlp":
        names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = next(filter(None, (os.environ.get(name, "").strip() for name in names)), "http/protobuf")
        wanted = f"otlp_proto_{protocol.partition('/')[0]}"
    found = [*entry_points(group="opentelemetry_traces_exporter", name=wanted)]
    if not found:
        raise BadConfiguration(
            f"--otel: no exporter is installed for {wanted!r}, which the variables OTEL_TRACES_EXPORTER and "
            "OTEL_EXPORTER_OTLP_PROTOCOL ask for; pip install 'singletree[otel]' has the one for http/protobuf"
        )
    exporter: SpanExporter = found[0].load()()
    return exporter


def exports_content(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variable of the conventions asks for texts in spans."""
    return environment.get(spans.CONTENT_VARIABLE, "").strip().lower() in spans.CONTENT_IN_SPANS


class SpanExport:
    """Makes spans of records, and exports them in batches, in a thread of the SDK; a ``RecordSink``.

    A collector that does not answer costs spans: the queue of the SDK is bounded (``OTEL_BSP_MAX_QUEUE_SIZE``).
    Spans have texts where ``content`` is set.
    """

    def __init__(self, exporter: SpanExporter, *, content: bool = False) -> None:
        self._ids = _ChosenIds()
        resource = Resource.create({"service.name": _service_name(), "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("singletree", __version__, schema_url=spans.SCHEMA_URL)
        self._content = content
        self._arguments: LruCache[tuple[str, str], str] = LruCache(_ARGUMENT_BYTES)
        self._invocations = Invocations()
        _hush("opentelemetry")

    def write(self, answer: AnswerRecords) -> None:
        """Export the spans of an answer: the tools before it, its own, and the invocations that are over with it."""
        *tools, request = answer.records
        for tool in tools:
            self._export_tool(tool, answer)
        self._export_chat(request, answer)
        for invocation in self._invocations.over(answer):
            self._export_invocation(invocation)

    def close(self) -> None:
        """Export what waits, for some seconds."""
        for invocation in self._invocations.rest():
            self._export_invocation(invocation)
        ending = threading.Thread(target=self._provider.shutdown, name="span export ends", daemon=True)
        ending.start()
        ending.join(_CLOSING_SECONDS)

    def _export_chat(self, record: RequestRecord, answer: AnswerRecords) -> None:
        request = record["request"]
        above = self._invocations.take(answer)
        attributes = spans.span_attributes(spans.CHAT, record)
        if self._content:
            generated = fold(answer.events)
            session = record["agent_context"]["session_id"]
            for call in generated.tool_calls:
                self._arguments.put((session, call.id), call.arguments, 4 * len(call.arguments))
            reason = spans.finish_reason(record)
            attributes |= spans.content_attributes(answer.turns, answer.tools, generated, reason)
            if above is not None and answer.tools:
                texts = spans.invocation_attributes(answer.turns, generated, reason)
                # Later questions may be reminders of the harness.
                above.attributes = texts | above.attributes | {_ANSWER: texts[_ANSWER]}
        self._export(
            f"{spans.CHAT} {attributes[spans.REQUEST_MODEL]}".rstrip(),
            SpanKind.CLIENT,
            self._invocations.trace_of(record),
            None if above is None else above.span_id,
            (request["request_received_ms"], record["event_time_unix_ms"]),
            attributes,
            links=[*_links(request["singletree"].get("traceparent", ""))],
        )

    def _export_tool(self, record: RequestRecord, answer: AnswerRecords) -> None:
        tool = record["tool"]
        above = self._invocations.of_tool(record)
        attributes = spans.span_attributes(spans.EXECUTE_TOOL, record)
        if self._content:
            attributes |= self._tool_texts(record, answer.turns)
        self._export(
            f"{spans.EXECUTE_TOOL} {attributes[spans.TOOL_NAME]}".rstrip(),
            SpanKind.INTERNAL,
            self._invocations.trace_of(record),
            None if above is None else above.span_id,
            (tool["started_at_unix_ms"], tool["ended_at_unix_ms"]),
            attributes,
        )

    def _export_invocation(self, invocation: Invocation) -> None:
        attributes = invocation.attributes
        if invocation.error:
            attributes = {**attributes, spans.ERROR_TYPE: invocation.error}
        self._export(
            f"{spans.INVOKE_AGENT} {attributes.get('gen_ai.agent.name', '')}".rstrip(),
            SpanKind.INTERNAL,
            invocation.trace_id,
            invocation.parent,
            (invocation.started, invocation.ended),
            attributes,
            span_id=invocation.span_id,
        )

    def _export(
        self,
        name: str,
        kind: SpanKind,
        trace_id: int,
        parent: int | None,
        times: tuple[int, int],
        attributes: Mapping[str, Any],
        *,
        span_id: int | None = None,
        links: list[Link] | None = None,
    ) -> None:
        """Give one span to the SDK. ``times`` are its start and its end in unix milliseconds."""
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if parent is not None:
            # All spans of a trace are sampled, or none: as the sampler decides for its root.
            decided = self._provider.sampler.should_sample(None, trace_id, name)
            flags = TraceFlags(
                TraceFlags.SAMPLED if decided.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
            )
            above = SpanContext(trace_id, parent, is_remote=False, trace_flags=flags)
            context = trace.set_span_in_context(NonRecordingSpan(above))
        self._ids.chosen_trace, self._ids.chosen_span = trace_id, span_id
        start, end = times
        # A half surrogate pair in the name of a model, tool or session would cost the whole batch.
        name = spans.whole_characters(name)
        attributes = {
            key: spans.whole_characters(value) if isinstance(value, str) else value
            for key, value in attributes.items()
        }
        span = self._tracer.start_span(
            name, context, kind, attributes, links=links or (), start_time=start * _NANOSECONDS
        )
        if error := attributes.get(spans.ERROR_TYPE):
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(max(start, end) * _NANOSECONDS)

    def _tool_texts(self, record: RequestRecord, turns: Sequence[Turn]) -> dict[str, str]:
        call_id = record["tool"]["tool_call_id"]
        texts = {}
        arguments = self._arguments.pop((record["agent_context"]["session_id"], call_id))
        if arguments is not None:
            texts[spans.TOOL_ARGUMENTS] = spans.content_json(spans.arguments_value(arguments))
        for turn in reversed(turns):
            for part in turn.parts:
                if isinstance(part, ToolResult) and part.call_id == call_id:
                    return {**texts, spans.TOOL_RESULT: spans.result_text(part)}
        return texts


class _ChosenIds(IdGenerator):
    """Makes the ids of spans, as an ``IdGenerator`` of the SDK: random ones where none is chosen. For one thread."""

    def __init__(self) -> None:
        self.chosen_trace: int | None = None
        self.chosen_span: int | None = None

    def generate_trace_id(self) -> int:
        return self.chosen_trace or (getrandbits(128) or 1)

    def generate_span_id(self) -> int:
        return self.chosen_span or (getrandbits(64) or 1)

    def is_trace_id_random(self) -> bool:
        """Tell that trace ids are digests: all of their bits are as good as random for a sampler."""
        return True


def _hush(name: str) -> None:
    """Let the loggers below ``name`` write one line a minute, all together."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.propagate = False
        logger.addHandler(_Sparse())


class _Sparse(logging.Handler):
    """Gives one record a minute to the root logger's handlers: a collector may be away for days, and the SDK reports
    each batch. A filter of a logger would not see the records of loggers below it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = OncePerMinute()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.take() is not None:
            logging.getLogger().handle(record)


def _links(traceparent: str) -> Iterator[Link]:
    with suppress(ValueError):
        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        found = trace.get_current_span(context).get_span_context()
        if found.is_valid:
            yield Link(found)


def _service_name() -> str:
    resource = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = next((each for each in resource.split(",") if each.strip().startswith("service.name=")), "")
    return os.environ.get("OTEL_SERVICE_NAME", "") or named.partition("=")[2].strip() or "singletree"
