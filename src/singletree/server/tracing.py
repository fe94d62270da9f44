"""What the server tells about its work: metrics, and one log line a request. Neither holds prompt text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from singletree.conversation import AgentContext, Hints
from singletree.errors import Rejected, SingletreeError
from singletree.events import Finished, Usage
from singletree.server.identity import new_id
from singletree.server.sessions import Step

LOG = logging.getLogger("singletree.requests")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_CLIENT_LEFT = 499
_PATH_LENGTH = 128


class Tracing:
    """The counters of one server. ``running`` is how many generations are not yet over."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.running = 0
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "singletree_requests",
            "Requests by route and HTTP status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "singletree_tokens",
            "Tokens: prompt, of which cached; completion, of which reasoning.",
            ["model", "kind"],
            registry=self.registry,
        )
        self.finished = Counter(
            "singletree_generations",
            "Generations by how they ended.",
            ["model", "reason"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "singletree_time_to_first_token_seconds",
            "From the request's arrival to its first event.",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        in_flight = Gauge("singletree_generations_in_flight", "Generations now.", registry=self.registry)
        in_flight.set_function(lambda: self.running)
        self.rules = Counter(
            "singletree_stability_rules",
            "Prompts that a stability rule changed.",
            ["rule"],
            registry=self.registry,
        )
        self.prefix = Counter(
            "singletree_prefix_tokens",
            "Prompt tokens that the session's last prompt and turn had, and new ones.",
            ["model", "kind"],
            registry=self.registry,
        )
        self.courses = Counter(
            "singletree_prefix_courses",
            "Prompts by how they go on: first, appended, back to an earlier turn, broken.",
            ["model", "course"],
            registry=self.registry,
        )
        self.lost = Counter(
            "singletree_prefix_lost_tokens",
            "Tokens that should have matched and did not, by the likely cause.",
            ["model", "cause"],
            registry=self.registry,
        )
        self.replayed = Counter(
            "singletree_replayed_turns",
            "Earlier turns that stood in a prompt by the tokens in which they were generated.",
            ["model"],
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """All of it in the Prometheus text format."""
        return generate_latest(self.registry)


class Trace:
    """One request from arrival to the last byte. ``request_id`` is in the log line and in the answer's
    headers.
    """

    def __init__(self, tracing: Tracing, method: str, path: str, request_id: str) -> None:
        self.request_id = request_id
        self.route = "other"
        self.status = _CLIENT_LEFT
        self._tracing = tracing
        # A path may hold anything, line breaks included.
        self._method, self._path = ascii(method)[1:-1], ascii(path[:_PATH_LENGTH])[1:-1]
        self._began = time.perf_counter()
        self._first: float | None = None
        self._model = ""
        self._step: Step | None = None
        self._said = ""
        self._usage: Usage | None = None
        self._reason = ""
        self._error = ""

    def new_id(self, prefix: str) -> str:
        """A new id; for ``req_`` the request's own."""
        return self.request_id if prefix == "req_" else new_id(prefix)

    def asked(self, hints: Hints, agent: AgentContext) -> None:
        """What the harness says of the request and of itself: the log line has all of it."""
        given = [(field, getattr(each, field.name)) for each in (hints, agent) for field in fields(each)]
        self._said = "".join(
            f" {field.name}={_plain(str(value))}" for field, value in given if value != field.default
        )

    def generating(self, model: str, rules: Iterable[str], replayed: int = 0) -> None:
        """A generation begins, on a prompt that ``rules`` changed and that holds ``replayed`` turns by their tokens."""
        self._model = model
        self._tracing.running += 1
        self._tracing.replayed.labels(model).inc(replayed)
        for rule in rules:
            self._tracing.rules.labels(rule).inc()

    def goes_on(self, step: Step) -> None:
        """The prompt of a generation to come was compared with its session's."""
        tracing, self._step = self._tracing, step
        tracing.prefix.labels(step.model, "matched").inc(step.matched)
        tracing.prefix.labels(step.model, "new").inc(step.new)
        tracing.courses.labels(step.model, step.course).inc()
        if step.broken is not None:
            tracing.lost.labels(step.model, step.broken.cause.name).inc(step.lost)

    def first_event(self) -> None:
        """The model said its first word."""
        if self._first is None:
            self._first = time.perf_counter() - self._began
            self._tracing.first_token.labels(self._model).observe(self._first)

    def generated(self, finished: Finished) -> None:
        """The generation is over, for whatever reason. Only the first time counts."""
        if self._usage is not None:
            return
        self._usage, self._reason = finished.usage, finished.reason
        tracing, model, usage = self._tracing, self._model, finished.usage
        tracing.finished.labels(model, finished.reason).inc()
        tracing.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        tracing.tokens.labels(model, "cached").inc(usage.cached_tokens)
        tracing.tokens.labels(model, "completion").inc(usage.completion_tokens)
        tracing.tokens.labels(model, "reasoning").inc(usage.reasoning_tokens)

    def failed(self, error: SingletreeError) -> None:
        """An error is the answer, or the end of it."""
        self._error = type(error).__name__
        if not isinstance(error, Rejected):
            # What a client did wrong is told to the client alone: the words may quote the request.
            LOG.warning("id=%s %s: %s", self.request_id, self._error, error.message)

    def close(self) -> None:
        """The answer is out, or nobody is there to take it."""
        if self._model:
            self._tracing.running -= 1
        self._tracing.requests.labels(self.route, str(self.status)).inc()
        level = logging.INFO if self._usage is not None or self.status >= 400 else logging.DEBUG
        if LOG.isEnabledFor(level):
            LOG.log(level, "%s", self._line())

    def _line(self) -> str:
        took = time.perf_counter() - self._began
        line = f"{self._method} {self._path} {self.status} id={self.request_id} took={took:.3f}s"
        if self._error:
            line += f" error={self._error}"
        if self._usage is None:
            return line
        usage, first = self._usage, "-" if self._first is None else f"{self._first:.3f}s"
        return (
            f"{line} model={self._model} prompt={usage.prompt_tokens} cached={usage.cached_tokens} "
            f"completion={usage.completion_tokens} reasoning={usage.reasoning_tokens} first={first} "
            f"end={self._reason}{self._session()}{self._said}"
        )

    def _session(self) -> str:
        """How the prompt goes on, without a word of it."""
        step = self._step
        if step is None:
            return ""
        said = f" session={_plain(step.session)} matched={step.matched} new={step.new}"
        if step.broken is not None:
            said += f" break={step.broken.cause.name} lost={step.lost}"
        return said


def _plain(word: str) -> str:
    """A client's own word, which may hold anything, as one word of one line."""
    return ascii(word)[1:-1].replace(" ", "_")
