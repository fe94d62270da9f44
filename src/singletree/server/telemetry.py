"""Metrics, and one log line for each request. Neither contains prompt text."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as CollectedMetric
from prometheus_client.registry import Collector

from singletree.conversation import AgentContext, Hints
from singletree.engines.engine import Route
from singletree.errors import Rejected, SingletreeError
from singletree.events import Finished, FinishReason, Usage
from singletree.server.ids import new_id
from singletree.server.sessions.step import Cost, Step

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
request, is being loaded, or did not start."""

Metric = TypeVar("Metric", Counter, Histogram)
HintsOrAgent = TypeVar("HintsOrAgent", Hints, AgentContext)

DROPPED_RECORDS = Counter(
    "singletree_request_records_dropped",
    "Records of requests and tools that were dropped because they could not be written fast enough.",
    registry=None,
)
"""The metric of all queues of this process."""

STORE_FAILURES = Counter(
    "singletree_turn_store_failures",
    "Accesses to the store of the turn memory that failed or took too long. The turns were served without it.",
    ["access"],
    registry=None,
)
"""The metric of all turn memories of this process that have a store (``turn_stores``)."""


class MetricChildren(dict[str | tuple[str, ...], Metric]):
    """The children of a metric by their labels, each made at its first use: as ``Metric.labels``, at less cost."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self._metric: Metric = metric

    def __missing__(self, labels: str | tuple[str, ...]) -> Metric:
        child: Metric = self._metric.labels(*((labels,) if isinstance(labels, str) else labels))
        self[labels] = child
        return child


class Tally(dict[str | tuple[str, ...], float]):
    """A counter's increments by labels, until ``settle`` adds them to it: they cost a tenth of ``Counter.inc``."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._children = MetricChildren(counter)

    def __missing__(self, labels: str | tuple[str, ...]) -> float:
        _ = self._children[labels]  # Made now, since the metrics include the time at which it was made.
        return 0

    def settle(self) -> None:
        for labels, amount in self.items():
            self._children[labels].inc(amount)
        self.clear()


class Tracing(Collector):
    """The metrics of one server.

    Counters are plain numbers, copied to the registry on each scrape: the registry calls ``collect`` first. With
    ``--workers`` the scrape may reach any process, so each request copies its numbers when it ends.

    Metrics must also work in files, for ``--workers``: a gauge is ``set``, with a ``multiprocess_mode``, and never
    computed on a scrape.

    Attributes:
        waiting: returns the number of generations that wait for an engine.
        running: the number of generations in this process.
        costs: returns what all turns of this process have cost.
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
        self.waiting: Callable[[], int] = int
        self.costs: Callable[[], Cost] = Cost
        self._settled = Cost()
        self.model_states: Callable[[], Iterable[tuple[str, str]]] = tuple
        # In the order in which they are written out.
        self._make_request_counters()
        self._make_gauges()
        self._make_histograms()
        self._make_prompt_counters()

    def _counter(self, name: str, description: str, *labels: str) -> Tally:
        tally = Tally(Counter(name, description, labels, registry=self.registry))
        self._tallies.append(tally)
        return tally

    def _make_request_counters(self) -> None:
        counter = self._counter
        self.requests = counter(
            "singletree_requests", "Requests by route and HTTP status.", "route", "status"
        )
        meaning = "Tokens: prompt, of which cached; completion, of which reasoning."
        self.tokens = counter("singletree_tokens", meaning, "model", "kind")
        self.finished = counter("singletree_generations", "Generations by how they ended.", "model", "reason")

    def _make_gauges(self) -> None:
        def gauge(name: str, description: str, *labels: str, mode: Any = "livesum") -> Gauge:
            return Gauge(name, description, labels, registry=self.registry, multiprocess_mode=mode)

        self._in_flight = gauge("singletree_generations_in_flight", "Generations now.")
        self._waiting = gauge("singletree_generations_waiting", "Generations that wait for an engine.")
        self._model_state = gauge(
            "singletree_model_state",
            "1 for the state that the model is in.",
            "model",
            "state",
            mode="livemax",
        )

    def _make_histograms(self) -> None:
        def histogram(
            name: str, buckets: Sequence[float], description: str, *labels: str
        ) -> MetricChildren[Histogram]:
            labels = ("model", *labels)
            made = Histogram(name, description, labels, registry=self.registry, buckets=buckets)
            return MetricChildren(made)

        self.first_token = histogram(
            "singletree_time_to_first_token_seconds",
            _SECONDS,
            "From the request's arrival to its first event.",
        )
        self.token_seconds = histogram(
            "singletree_time_per_output_token_seconds",
            _TOKEN_SECONDS,
            "Mean time between the tokens of an answer, one value for each answer.",
        )
        self.answer_seconds = histogram(
            "singletree_answer_seconds", _SECONDS, "From the request's arrival to the end of its answer."
        )
        self.prompt_length = histogram(
            "singletree_request_prompt_tokens", _TOKENS, "Length of prompts, one value for each answer."
        )
        self.answer_length = histogram(
            "singletree_request_output_tokens", _TOKENS, "Length of answers, one value for each answer."
        )
        self.in_place = histogram(
            "singletree_prefix_in_place_ratio",
            _SHARES,
            "Share of a prompt that continues the session's last prompt and turn, by how it continues it.",
            "course",
        )
        self.dispatch = histogram(
            "singletree_tool_call_dispatch_seconds",
            _DISPATCH_SECONDS,
            "From the token that completes a tool call to the write that sends the call, in streams.",
        )
        self.waited = histogram(
            "singletree_queue_seconds",
            _SECONDS,
            "How long generations waited for a place on an engine, if they did.",
        )

    def _make_prompt_counters(self) -> None:
        counter = self._counter
        self.rules = counter("singletree_stability_rules", "Prompts that a stability rule changed.", "rule")
        meaning = "Prompt tokens that continue the session's last prompt and turn, and new ones."
        self.prefix = counter("singletree_prefix_tokens", meaning, "model", "kind")
        meaning = (
            "Prompts by how they continue their session: first, appended, back to an earlier turn, broken."
        )
        self.courses = counter("singletree_prefix_courses", meaning, "model", "course")
        meaning = "Tokens that should have matched and did not, by the likely cause."
        self.lost = counter("singletree_prefix_lost_tokens", meaning, "model", "cause")
        meaning = (
            "Receipts, tokens: prompt, of which cached, new, unreported, read again by fault; generated."
        )
        self.receipt_tokens = counter("singletree_receipt_tokens", meaning, "kind")
        meaning = "Receipts, seconds that engines worked: prefill and decode."
        self.receipt_seconds = counter("singletree_receipt_seconds", meaning, "kind")
        meaning = "Earlier turns in prompts that were replayed with the tokens in which they were generated."
        self.replayed = counter("singletree_replayed_turns", meaning, "model")
        meaning = "Generations by the engine that they were sent to."
        self.routed = counter("singletree_routed_generations", meaning, "model", "worker")
        self.predicted = counter(
            "singletree_routing_tokens",
            "Prompt tokens: predicted in the engine's cache, cached as it reports, missing and unexpected of them.",
            "model",
            "worker",
            "kind",
        )

    def share(self) -> None:
        """Copy the counters to the shared files, if there are any: another process may answer the next scrape."""
        if self._has_shared_metrics:
            self.settle()

    def settle(self) -> None:
        costs = self.costs()
        for kind, tokens, before in list(zip(Cost._fields, costs, self._settled, strict=True))[1:]:
            counter = self.receipt_seconds if kind.endswith("_seconds") else self.receipt_tokens
            counter[kind.removesuffix("_seconds")] += tokens - before
        self._settled = costs
        for tally in self._tallies:
            tally.settle()
        self._in_flight.set(self.running)
        self._waiting.set(self.waiting())
        for model, current in self.model_states():
            for state in MODEL_STATES:
                self._model_state.labels(model, state).set(state == current)

    def collect(self) -> Iterable[CollectedMetric]:
        """Bring the metrics up to date for the registry, which calls this first. This object has none of its own."""
        self.settle()
        return ()

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format, summed over the processes of the server."""
        if not self._has_shared_metrics:
            return generate_latest(self.registry)
        self.settle()
        # Counters of ended processes stay in the files: a counter must not decrease.
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)


class Trace:
    """The metrics and the log line of one request, from arrival to the last byte.

    Attributes:
        received: when the request arrived, in unix seconds; ``began``: the same on the clock of ``perf_counter``.
        traceparent: the client's header of this name, or empty.
        error: the error that is the answer, or ends it.
        error_name: its name, also where it was unexpected; empty for none.
        first_seconds: from the request's arrival to its first event; None before that.
        asked, ended: when its generation began and ended, on the clock of ``perf_counter``; 0 before that.
        usage: the token counts of the answer; None until its generation is over.
    """

    asked = ended = 0.0

    def __init__(self, tracing: Tracing, method: str, path: str, request_id: str) -> None:
        self.request_id = request_id
        self.route = "other"
        self.status = _CLIENT_LEFT
        self.received = time.time()
        self.traceparent = ""
        self.error_name = ""
        self._tracing = tracing
        # A path may contain any character, line breaks included.
        self._method, self._path = ascii(method)[1:-1], ascii(path[:_PATH_LENGTH])[1:-1]
        self.began = time.perf_counter()
        self.first_seconds: float | None = None
        self._model = ""
        self._is_running = False
        self._step: Step | None = None
        self._hints = ""
        self._route = ""
        self.usage: Usage | None = None
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
        self._hints = _given(hints, _NO_HINTS) + _given(agent, _NO_AGENT)

    def generating(self, model: str, rules: Iterable[str], replayed: int = 0) -> None:
        """Record the start of a generation, with the stability rules and the replayed turns of its prompt."""
        self._model, self.asked = model, time.perf_counter()
        self.accepted()
        self._tracing.replayed[model] += replayed
        for rule in rules:
            self._tracing.rules[rule] += 1

    def record_step(self, step: Step) -> None:
        tracing, self._step = self._tracing, step
        tracing.prefix[step.model, "matched"] += step.matched
        tracing.prefix[step.model, "new"] += step.prompt_tokens - step.matched
        tracing.courses[step.model, step.course] += 1
        share = step.matched / max(1, step.prompt_tokens)
        tracing.in_place[step.model, step.course].observe(share)

    def first_event(self) -> None:
        """Record the time of the first event; later calls have no effect."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.began
            self._tracing.first_token[self._model].observe(self.first_seconds)

    @property
    def is_generated(self) -> bool:
        return self.usage is not None

    def generated(self, finished: Finished) -> None:
        """Record the end of the generation; later calls have no effect."""
        if self.usage is not None:
            return
        self.usage, self._reason, self.ended = finished.usage, finished.reason, time.perf_counter()
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
        seconds = self.ended - self.began
        tracing.answer_seconds[model].observe(seconds)
        if self.first_seconds is not None and usage.completion_tokens > 1:
            between = (seconds - self.first_seconds) / (usage.completion_tokens - 1)
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
    def seconds(self) -> float:
        """Return the time since the request's arrival, in seconds."""
        return time.perf_counter() - self.began

    def ends_with(self, error: Exception) -> None:
        """Record the error that ends the answer, before it becomes one."""
        self.error_name = type(error).__name__
        if isinstance(error, SingletreeError):
            self.error = error

    def failed(self, error: SingletreeError) -> None:
        self.ends_with(error)
        if not isinstance(error, Rejected):
            # A client's own mistake is not logged: the message may quote the request.
            LOG.warning("id=%s %s: %s", self.request_id, self.error_name, error.message)

    def close(self) -> None:
        """Count and log the request: the answer was sent, or the client has disconnected."""
        tracing = self._tracing
        tracing.requests[self.route, str(self.status)] += 1
        if self._is_running:
            self._is_running = False
            tracing.running -= 1
        step = self._step
        if step is not None and step.broken is not None:
            tracing.lost[step.model, step.broken.cause] += step.lost
        tracing.share()
        if self.error is not None:
            # Its frames hold the request, and refer to this trace: the memory would be free only after a collection.
            self.error.__traceback__ = self.error.__context__ = None
        level = logging.INFO if self.usage is not None or self.status >= 400 else logging.DEBUG
        if LOG.isEnabledFor(level):
            # Not LOG.log, which looks through the stack for the place of this call.
            LOG.handle(LOG.makeRecord(LOG.name, level, __file__, 0, self._line(), (), None, "close"))

    def _line(self) -> str:
        took = self.seconds
        line = f"{self._method} {self._path} {self.status} id={self.request_id} took={took:.3f}s"
        if self.error_name:
            line += f" error={self.error_name}"
        if self.usage is None:
            return line
        usage, first = self.usage, "-" if self.first_seconds is None else f"{self.first_seconds:.3f}s"
        return (
            f"{line} model={self._model} prompt={usage.prompt_tokens} cached={usage.cached_tokens} "
            f"completion={usage.completion_tokens} reasoning={usage.reasoning_tokens} first={first} "
            f"end={self._reason}{self._session()}{self._route}{self._hints}"
        )

    def _session(self) -> str:
        step = self._step
        if step is None:
            return ""
        line = f" session={_plain(step.place)} matched={step.matched} new={step.new}"
        if step.broken is not None:
            line += f" break={step.broken.cause} lost={step.lost}"
        return line


def _given(context: HintsOrAgent, default: HintsOrAgent) -> str:
    if context == default:
        return ""
    values = [
        (each.name, getattr(context, each.name), getattr(default, each.name)) for each in fields(context)
    ]
    return "".join([f" {name}={_plain(str(value))}" for name, value, usual in values if value != usual])


def _plain(word: str) -> str:
    """Return a client's string, which may contain any character, as one word of one line."""
    return ascii(word)[1:-1].replace(" ", "_")
