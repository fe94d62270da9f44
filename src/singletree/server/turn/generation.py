"""One turn while it is generated: the value that the steps of a turn share."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from singletree.conversation import Request, Sampling
from singletree.engines.engine import Route
from singletree.events import Event, Finished, FinishReason, Usage
from singletree.prompts.prompt_writer import Prompt
from singletree.protocols.answer import Seal, SealEnd
from singletree.server.models.catalog import Model
from singletree.server.turn.constraints import Constraints
from singletree.server.turn.decoder import TurnDecoder
from singletree.server.turn.ids import NewId
from singletree.server.turn.logprobs import LogprobReader
from singletree.server.turn.picture_tokens import without_expansion
from singletree.server.turn.recorder import TurnRecorder


@dataclass(slots=True)
class Generation:
    """One turn that is generated: its request, its prompt, and its state.

    Attributes:
        sampling: the sampling for the engine; its ``max_tokens`` fits the window.
        fits_window: whether the window has room for as many tokens as the request asked for.
        constraints: the constraint for the engine, and warnings for the client.
        decoder: turns the tokens of the engine into events.
        recorder: keeps the turn for the turn memory; None if the turn is not kept.
        logprob_reader: reads tokens with their log-probabilities; None if the client asked for none.
        cached_tokens: prompt tokens that the engine had in its prefix cache; None until it reports them.
        final_usage: the counts at its end; None while it is generated.
        prompt_tokens: how many tokens the prompt has for the engine, with its pictures as far as they are known; 0 for
            as many as ``prompt.token_ids``.
        route: which of several engines generates; None where there is one.
        completed_calls: when each call became complete that has not been sent, on the clock of ``time.perf_counter``.
        ended: why the turn ended; None while it is generated.
        runner: replaces ``run`` where the events of the turn are not sent as they are.
        deliver: takes batches of events that need not be yielded, because the engine delivers their tokens without a
            switch of tasks; None for none.
    """

    model: Model
    request: Request
    prompt: Prompt
    sampling: Sampling
    fits_window: bool
    constraints: Constraints
    decoder: TurnDecoder
    recorder: TurnRecorder | None = None
    logprob_reader: LogprobReader | None = None
    cached_tokens: int | None = None
    final_usage: Usage | None = None
    prompt_tokens: int = 0
    route: Route | None = None
    completed_calls: list[float] = field(default_factory=list)
    ended: FinishReason | None = None
    runner: Runner | None = None
    deliver: DeliverEvents | None = None

    @property
    def token_ids(self) -> array[int]:
        """Return the tokens that the engine generated so far."""
        return self.decoder.turn.token_ids

    @property
    def events(self) -> list[Event]:
        """Return the events of the turn so far, one token's after another's."""
        return self.decoder.turn.events

    @property
    def session_name(self) -> str:
        """Return the session by which engines and routers know the turn; empty if it has none."""
        return self.request.session or self.request.agent.session_id

    def reported_cached_tokens(self) -> int | None:
        """Return how many of the prompt's token ids were cached; None until the engine reports it."""
        if self.cached_tokens is None:
            return None
        cached = min(self.cached_tokens, self.prompt_tokens or len(self.prompt.token_ids))
        return without_expansion(self.model.eyes, self.prompt.pictures, cached)

    def reported_route(self) -> Route | None:
        """Return the route, with its prediction as a number of the prompt's token ids."""
        route = self.route
        if route is None or route.predicted_cached_tokens is None:
            return route
        predicted = without_expansion(self.model.eyes, self.prompt.pictures, route.predicted_cached_tokens)
        return replace(route, predicted_cached_tokens=predicted)

    @property
    def seal(self) -> Seal | None:
        """The function that makes the capsule of a span of reasoning; None if the turn gets no capsules."""
        return None if self.recorder is None or self.model.capsules is None else self.recorder.seal

    def with_reasoning_ids(self, new_id: NewId) -> NewId:
        """Wrap ``new_id`` so that the ids of reasoning items identify this turn when they come back."""
        return new_id if self.recorder is None else self.recorder.with_reasoning_ids(new_id)

    @property
    def seal_end(self) -> SealEnd | None:
        """The function that makes the capsule of what follows the last span of reasoning, once the turn is over."""
        return None if self.recorder is None or self.model.capsules is None else self.recorder.seal_end

    @property
    def usage(self) -> Usage:
        """The exact token counts so far."""
        if self.final_usage is not None:
            return self.final_usage
        decoder = self.decoder
        prompt_tokens = self.prompt_tokens or len(self.prompt.token_ids)
        cached = min(self.cached_tokens or 0, prompt_tokens)
        return Usage(prompt_tokens, decoder.tokens, cached, decoder.reasoning_tokens)


DeliverEvents = Callable[[list[Event]], bool]
"""Takes a batch, and returns whether the next ones may come the same way; called while a batch is awaited, and not
again after it returned False, before one has been yielded. The first batch is yielded."""
Batches = AsyncGenerator[list[Event] | Finished, None]
Runner = Callable[[Generation, str], Batches]
