"""Metrics, and one log line for each request. Neither contains prompt text."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as CollectedMetric
from prometheus_client.registry import Collector

from singletree.conversation import AgentContext, Hints
from singletree.engines.engine import Route
from singletree.errors import Rejected, SingletreeError
from singletree.events import Finished, FinishReason, Usage
from singletree.server.answers.metric_children import MetricChildren, Tally
from singletree.server.answers.record_queue import DROPPED_RECORDS
from singletree.server.models.shared_turns import STORE_FAILURES
from singletree.server.sessions.sessions import Step
from singletree.server.turn.ids import new_id

LOG = logging.getLogger("singletree.requests")

# Buckets for agents: the first prompt of a session takes minutes on a small machine, a turn that continues it
# milliseconds; prompts begin at ten thousand tokens and end at the window; all but the last percent of one is in place.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
_TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_DISPATCH_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = tuple(2.0**power for power in range(8, 21))
_SHARES = (0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)
_CLIENT_LEFT = 499
_NOT_ANSWERED: tuple[FinishReason, ...] = ("error", "cancelled")
"""Ends of turns that say nothing about how long answers are and take."""
_PATH_LENGTH = 128
_NO_HINTS, _NO_AGENT = Hints(), AgentContext()
_SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""The variable with which prometheus_client keeps metrics in files that several processes share."""


MODEL_STATES = ("loaded", "unloaded", "lazy", "loading", "failed")
"""In which state a model can be: its engine runs, it was stopped because nobody used it, the model waits for its first
request, is being loaded, or did not start.
"""


HintsOrAgent = TypeVar("HintsOrAgent", Hints, AgentContext)


class Tracing(Collector):
    """The metrics of one server.

    Counters are tallies, of which the registry gets to know when it is read: it asks this object first. Where several
    processes share metrics, each request settles its tallies, since another process may be asked.

    A metric has to count in files too, for ``--workers``: a gauge is ``set``, with a ``multiprocess_mode``, and never
    computed while it is read.

    Attributes:
        waiting: counts the generations that wait for an engine.
        running: counts the generations that are not over, in this process.
        model_states: returns the name and the state (``MODEL_STATES``) of every model.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.running = 0
        self._has_shared_metrics = _SHARED_METRICS in os.environ
        self._tallies: list[Tally] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(STORE_FAILURES)
        self.registry.register(DROPPED_RECORDS)
        counter = self._counter
        self.requests = counter(
            "singletree_requests",
            "Requests by route and HTTP status.",
            ["route", "status"],
        )
        self.tokens = counter(
            "singletree_tokens",
            "Tokens: prompt, of which cached; completion, of which reasoning.",
            ["model", "kind"],
        )
        self.finished = counter(
            "singletree_generations",
            "Generations by how they ended.",
            ["model", "reason"],
        )
        self.waiting: Callable[[], int] = int
        self.model_states: Callable[[], Iterable[tuple[str, str]]] = tuple
        self._make_gauges()
        self._make_histograms()
        self._make_prompt_counters()
        self._make_routing_counters()

    def _make_gauges(self) -> None:
        def gauge(name: str, description: str, labels: Iterable[str] = (), mode: str = "livesum") -> Gauge:
            return Gauge(name, description, labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        self._in_flight = gauge("singletree_generations_in_flight", "Generations now.")
        self._waiting = gauge("singletree_generations_waiting", "Generations that wait for an engine.")
        self._model_state = gauge(
            "singletree_model_state", "1 for the state that the model is in.", ["model", "state"], "livemax"
        )

    def _make_histograms(self) -> None:
        def histogram(
            name: str, description: str, buckets: Sequence[float], labels: Iterable[str] = ("model",)
        ) -> MetricChildren[Histogram]:
            return MetricChildren(
                Histogram(name, description, labels, registry=self.registry, buckets=buckets)
            )

        self.first_token = histogram(
            "singletree_time_to_first_token_seconds",
            "From the request's arrival to its first event.",
            _SECONDS,
        )
        self.token_seconds = histogram(
            "singletree_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, one value for each answer.",
            _TOKEN_SECONDS,
        )
        self.answer_seconds = histogram(
            "singletree_answer_seconds", "From the request's arrival to the end of its answer.", _SECONDS
        )
        self.prompt_length = histogram(
            "singletree_request_prompt_tokens", "Length of prompts, one value for each answer.", _TOKENS
        )
        self.answer_length = histogram(
            "singletree_request_output_tokens", "Length of answers, one value for each answer.", _TOKENS
        )
        self.in_place = histogram(
            "singletree_prefix_in_place_ratio",
            "Share of a prompt that continues the session's last prompt and turn, by how it continues it.",
            _SHARES,
            ("model", "course"),
        )
        self.dispatch = histogram(
            "singletree_tool_call_dispatch_seconds",
            "From the token that completes a tool call to the write that sends the call, in streams.",
            _DISPATCH_SECONDS,
        )
        self.waited = histogram(
            "singletree_queue_seconds",
            "How long generations waited for a place on an engine, if they did.",
            _SECONDS,
        )

    def _counter(self, name: str, description: str, labels: Iterable[str]) -> Tally:
        tally = Tally(Counter(name, description, labels, registry=self.registry))
        self._tallies.append(tally)
        return tally

    def _make_prompt_counters(self) -> None:
        counter = self._counter
        self.rules = counter(
            "singletree_stability_rules",
            "Prompts that a stability rule changed.",
            ["rule"],
        )
        self.prefix = counter(
            "singletree_prefix_tokens",
            "Prompt tokens that continue the session's last prompt and turn, and new ones.",
            ["model", "kind"],
        )
        self.courses = counter(
            "singletree_prefix_courses",
            "Prompts by how they continue their session: first, appended, back to an earlier turn, broken.",
            ["model", "course"],
        )
        self.lost = counter(
            "singletree_prefix_lost_tokens",
            "Tokens that should have matched and did not, by the likely cause.",
            ["model", "cause"],
        )
        self.replayed = counter(
            "singletree_replayed_turns",
            "Earlier turns in prompts that were replayed with the tokens in which they were generated.",
            ["model"],
        )

    def _make_routing_counters(self) -> None:
        counter = self._counter
        self.routed = counter(
            "singletree_routed_generations",
            "Generations by the engine that they were sent to.",
            ["model", "worker"],
        )
        self.predicted = counter(
            "singletree_routing_tokens",
            "Prompt tokens: predicted in the engine's cache, cached as it reports, missing and unexpected of them.",
            ["model", "worker", "kind"],
        )

    def share(self) -> None:
        """Let other processes know the metrics, if they share them: another may be the next that is asked for all."""
        if self._has_shared_metrics:
            self.settle()

    def settle(self) -> None:
        """Bring the metrics up to date."""
        for tally in self._tallies:
            tally.settle()
        self._in_flight.set(self.running)
        self._waiting.set(self.waiting())
        for model, current in self.model_states():
            for state in MODEL_STATES:
                self._model_state.labels(model, state).set(state == current)

    def collect(self) -> Iterable[CollectedMetric]:
        """Bring the metrics up to date before the registry reads them; this object has none of its own."""
        self.settle()
        return ()

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format: where several processes serve, those of all together."""
        if not self._has_shared_metrics:
            return generate_latest(self.registry)
        self.settle()
        # The files of processes that died count as well: a counter never falls.
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)


class Trace:
    """The metrics and the log line of one request, from arrival to the last byte.

    Args:
        tracing: the server's metrics.
        method, path: of the HTTP request.
        request_id: is in the log line and in the response headers.

    Attributes:
        received: when the request arrived, in unix seconds.
        traceparent: the client's header of this name, which names the span that the request belongs to; else empty.
        began: the same time as ``received``, on the clock of ``time.perf_counter``.
        error: the error that is the answer, or ends it; None for none.
    """

    def __init__(self, tracing: Tracing, method: str, path: str, request_id: str) -> None:
        self.request_id = request_id
        self.route = "other"
        self.status = _CLIENT_LEFT
        self.received = time.time()
        self.traceparent = ""
        self._error = ""
        self._tracing = tracing
        # A path may contain any character, line breaks included.
        self._method, self._path = ascii(method)[1:-1], ascii(path[:_PATH_LENGTH])[1:-1]
        self.began = time.perf_counter()
        self._first: float | None = None
        self._model = ""
        self._is_running = False
        self._step: Step | None = None
        self._hints = ""
        self._route = ""
        self._usage: Usage | None = None
        self._reason = ""
        self.error: SingletreeError | None = None

    def new_id(self, prefix: str) -> str:
        """Return a new id; for the prefix ``req_`` the request's own."""
        return self.request_id if prefix == "req_" else new_id(prefix)

    def accepted(self) -> None:
        """Count the request as running until ``close``: a server that shuts down waits for it."""
        if not self._is_running:
            self._is_running = True
            self._tracing.running += 1
            self._tracing.share()

    def record_hints(self, hints: Hints, agent: AgentContext) -> None:
        """Add the request's hints and the agent's context to the log line."""
        self._hints = _given(hints, _NO_HINTS) + _given(agent, _NO_AGENT)

    def generating(self, model: str, rules: Iterable[str], replayed: int = 0) -> None:
        """Record the start of a generation.

        Args:
            model: its name.
            rules: names of the stability rules that changed the prompt.
            replayed: number of turns in the prompt that were replayed with their own tokens.
        """
        self._model = model
        self.accepted()
        self._tracing.replayed[model] += replayed
        for rule in rules:
            self._tracing.rules[rule] += 1

    def record_step(self, step: Step) -> None:
        """Record how the request's prompt continues its session."""
        tracing, self._step = self._tracing, step
        tracing.prefix[step.model, "matched"] += step.matched
        tracing.prefix[step.model, "new"] += step.new
        tracing.courses[step.model, step.course] += 1
        share = step.matched / max(1, step.prompt_tokens)
        tracing.in_place[step.model, step.course].observe(share)
        if step.broken is not None:
            tracing.lost[step.model, step.broken.cause.name] += step.lost

    def first_event(self) -> None:
        """Record the time of the first event; later calls have no effect."""
        if self._first is None:
            self._first = time.perf_counter() - self.began
            self._tracing.first_token[self._model].observe(self._first)

    @property
    def first_seconds(self) -> float | None:
        """Return the time from the request's arrival to its first event, in seconds; None before that."""
        return self._first

    @property
    def is_generated(self) -> bool:
        """Tell whether the end of the generation was recorded."""
        return self._usage is not None

    def generated(self, finished: Finished) -> None:
        """Record the end of the generation; later calls have no effect."""
        if self._usage is not None:
            return
        self._usage, self._reason = finished.usage, finished.reason
        tracing, model, usage = self._tracing, self._model, finished.usage
        tracing.finished[model, finished.reason] += 1
        tracing.tokens[model, "prompt"] += usage.prompt_tokens
        tracing.tokens[model, "cached"] += usage.cached_tokens
        tracing.tokens[model, "completion"] += usage.completion_tokens
        tracing.tokens[model, "reasoning"] += usage.reasoning_tokens
        if finished.reason not in _NOT_ANSWERED:
            self._observe_answer(usage)

    def _observe_answer(self, usage: Usage) -> None:
        tracing, model = self._tracing, self._model
        tracing.prompt_length[model].observe(usage.prompt_tokens)
        tracing.answer_length[model].observe(usage.completion_tokens)
        seconds = self.seconds
        tracing.answer_seconds[model].observe(seconds)
        if self._first is not None and usage.completion_tokens > 1:
            between = (seconds - self._first) / (usage.completion_tokens - 1)
            tracing.token_seconds[model].observe(between)

    def dispatched(self, completed: float) -> None:
        """Record that a tool call was sent, which became complete at ``completed`` on the clock of ``perf_counter``."""
        self._tracing.dispatch[self._model].observe(time.perf_counter() - completed)

    def routed(self, route: Route, cached: int | None) -> None:
        """Record which engine generated, and how many tokens it reported as cached; None if it did not."""
        tracing, model = self._tracing, self._model
        if route.waited_seconds:
            tracing.waited[model].observe(route.waited_seconds)
        if not route.worker:
            return
        tracing.routed[model, route.worker] += 1
        self._route = f" worker={_plain(route.worker)}"
        predicted = route.predicted_cached_tokens
        # After a failover, the count is that of the first engine and the prediction that of the last one.
        if predicted is None or cached is None or route.failovers:
            return
        self._route += f" predicted={predicted}"
        for kind, tokens in (
            ("predicted", predicted),
            ("cached", cached),
            ("missing", max(0, predicted - cached)),
            ("unexpected", max(0, cached - predicted)),
        ):
            tracing.predicted[model, route.worker, kind] += tokens

    @property
    def error_name(self) -> str:
        """Return the name of the error that ended the request; empty for none."""
        return self._error

    @property
    def seconds(self) -> float:
        """Return the time since the request's arrival, in seconds."""
        return time.perf_counter() - self.began

    def ends_with(self, error: Exception) -> None:
        """Record the error that ends the answer, before it becomes one."""
        self._error = type(error).__name__
        if isinstance(error, SingletreeError):
            self.error = error

    def failed(self, error: SingletreeError) -> None:
        """Record the error that is the answer, or ends it, and log it."""
        self.ends_with(error)
        if not isinstance(error, Rejected):
            # A client's own mistake is not logged: the message may quote the request.
            LOG.warning("id=%s %s: %s", self.request_id, self._error, error.message)

    def close(self) -> None:
        """Count and log the request: the answer was sent, or the client has disconnected."""
        tracing = self._tracing
        tracing.requests[self.route, str(self.status)] += 1
        if self._is_running:
            self._is_running = False
            tracing.running -= 1
        tracing.share()
        if self.error is not None:
            # Its frames hold the request, and refer to this trace: the memory would be free only after a collection.
            self.error.__traceback__ = self.error.__context__ = None
        level = logging.INFO if self._usage is not None or self.status >= 400 else logging.DEBUG
        if LOG.isEnabledFor(level):
            # Not LOG.log, which looks through the stack for the place of this call.
            LOG.handle(LOG.makeRecord(LOG.name, level, __file__, 0, self._line(), (), None, "close"))

    def _line(self) -> str:
        took = self.seconds
        line = f"{self._method} {self._path} {self.status} id={self.request_id} took={took:.3f}s"
        if self._error:
            line += f" error={self._error}"
        if self._usage is None:
            return line
        usage, first = self._usage, "-" if self._first is None else f"{self._first:.3f}s"
        return (
            f"{line} model={self._model} prompt={usage.prompt_tokens} cached={usage.cached_tokens} "
            f"completion={usage.completion_tokens} reasoning={usage.reasoning_tokens} first={first} "
            f"end={self._reason}{self._session()}{self._route}{self._hints}"
        )

    def _session(self) -> str:
        """Return how the prompt continues its session, without any text of the prompt."""
        step = self._step
        if step is None:
            return ""
        line = f" session={_plain(step.session)} matched={step.matched} new={step.new}"
        if step.broken is not None:
            line += f" break={step.broken.cause.name} lost={step.lost}"
        return line


def _given(context: HintsOrAgent, default: HintsOrAgent) -> str:
    """Return what ``context`` has more than ``default``, for the log line."""
    if context == default:
        return ""
    values = [
        (each.name, getattr(context, each.name), getattr(default, each.name)) for each in fields(context)
    ]
    return "".join([f" {name}={_plain(str(value))}" for name, value, usual in values if value != usual])


def _plain(word: str) -> str:
    """Return a client's string, which may contain any character, as one word of one line."""
    return ascii(word)[1:-1].replace(" ", "_")
