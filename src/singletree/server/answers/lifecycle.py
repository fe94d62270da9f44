"""What the server does about an answer besides sending it: metrics, session, headers, repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from singletree.events import Finished, FinishReason
from singletree.server.answers.choices import Choices
from singletree.server.answers.frame_sinks import ResponseHeader
from singletree.server.answers.request_records import RequestRecords
from singletree.server.answers.speculative_prefill import SpeculativePrefills
from singletree.server.answers.tracing import Trace
from singletree.server.inspect.inspector import Arrival, Inspection
from singletree.server.inspect.links import INSPECT_HEADER, turn_link
from singletree.server.sessions.duplicate_requests import Cancel, InFlight, RequestKey
from singletree.server.sessions.report_headers import report_headers
from singletree.server.sessions.sessions import Opened, Sessions
from singletree.server.turn.protocol import MESSAGES, WireProtocol


def arrival_of(trace: Trace, protocol: WireProtocol, headers: Mapping[str, str], body: bytes) -> Arrival:
    """Return what the inspector gets to know of a request, which came with ``headers`` (names in lower case)."""
    name = getattr(protocol, "__name__", "").rpartition(".")[2]
    return Arrival(trace.request_id, trace.received, trace.began, name, trace.route, headers, body)


@dataclass(slots=True)
class SessionStep:
    """The place of an answer in its session, and whether its response headers report it.

    Attributes:
        inspection: what the inspector records of the turn; None when it is off.
    """

    sessions: Sessions
    opened: Opened
    is_reported: bool = False
    is_closed: bool = False
    inspection: Inspection | None = None

    def close(self, choices: Choices) -> None:
        """Record the end of the answer's first generation. Later calls have no effect."""
        if not self.is_closed:
            self.is_closed = True
            inspected = "" if self.inspection is None else self.inspection.turn.id
            self.sessions.close(self.opened, choices.first, choices.id, inspected)
            if self.inspection is not None:
                self.inspection.settle(choices.first)


@dataclass(slots=True)
class Lifecycle:
    """Follows one answer from its start to its end.

    Attributes:
        choices: the generations that answer the request.
        trace: the request's log line and metrics.
        headers: response headers that are known from the start.
        in_flight: the requests that may be repeated; None for an answer that a repetition cannot cancel.
        key: identifies the request among them; None for a request that is never treated as a repetition.
        session: the place in the session; None for a prompt without a session.
        prefills: reads the next prompt ahead if the request asks for it; None for never.
        records: takes a record of the answer; None to record nothing.
    """

    choices: Choices
    trace: Trace
    headers: Sequence[ResponseHeader] = ()
    in_flight: InFlight | None = None
    key: RequestKey | None = None
    session: SessionStep | None = None
    prefills: SpeculativePrefills | None = None
    records: RequestRecords | None = None

    @property
    def inspection(self) -> Inspection | None:
        """Return what the inspector records of the answer; None when it is off."""
        return None if self.session is None else self.session.inspection

    def guard(self, cancel: Cancel) -> AbstractContextManager[None]:
        """Return a context in which a repetition of the request can cancel this one with ``cancel``."""
        if self.in_flight is None or self.key is None:
            return nullcontext()
        return self.in_flight.guard(self.key, cancel)

    def start(self) -> None:
        """Record the start of the generation."""
        first = self.choices.first
        self.trace.generating(first.model.name, first.prompt.rules, first.prompt.replayed)
        if self.inspection is not None:
            self.inspection.start()

    def response_headers(self) -> list[ResponseHeader]:
        """Return the headers of the response, when it begins."""
        headers = [*self.headers]
        if self.session is not None and self.session.is_reported:
            headers += report_headers(self.session.opened.step, self.choices.first.reported_cached_tokens)
        if self.inspection is not None:
            headers.append((INSPECT_HEADER, turn_link(self.inspection.turn).encode()))
        return headers

    def end(self, reason: FinishReason) -> None:
        """Record the end of the answer. ``reason`` counts if the generation did not end itself."""
        if not self.trace.is_generated:
            self.trace.generated(Finished(reason, self.choices.usage))
        for each in self.choices.generations:
            if each.route is not None:
                self.trace.routed(each.route, each.cached_tokens)
        if self.session is not None:
            step = self.session.opened.step
            step.first_seconds, step.seconds = self.trace.first_seconds, self.trace.seconds
            step.ended = self.choices.first.ended or reason
            # This may change the number of the conversation, which the record has.
            self.session.close(self.choices)
            if self.records is not None:
                finished = Finished(step.ended, self.choices.usage)
                self.records.add(self.trace, self.choices, step, finished)
            if self.prefills is not None:
                as_objects = self.choices.protocol is MESSAGES
                self.prefills.begin(step.session, self.choices.first, as_objects=as_objects)
        if self.inspection is not None:
            self.inspection.close(
                self.choices.first.ended or reason,
                self.choices.usage,
                answer=self.choices.id,
                first_seconds=self.trace.first_seconds,
                error=self.trace.error,
            )
