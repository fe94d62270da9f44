"""The generations that answer one request: one for most, several with ``n``, ``best_of`` and several prompts.

A stream may have side events, for harnesses that run a tool as soon as its call is complete (``dispatch``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from singletree.conversation import Request
from singletree.errors import EngineFailed, SingletreeError
from singletree.events import Finished, Fold, Usage
from singletree.protocols.answer import AnswerContext, EncodedResponse, EventEncoder, FinishedChoice
from singletree.protocols.openai.answers import tokens_of
from singletree.server.answers.observer import AnswerCapture, TurnObserver
from singletree.server.doors import open_door
from singletree.server.ids import NewId
from singletree.server.turn import pipeline
from singletree.server.turn.generation import Batches, Generation, start_generation
from singletree.server.turn.protocol import WireProtocol

TOOL_HEADER = "x-singletree-tool-dispatch"
REASONING_HEADER = "x-singletree-reasoning-dispatch"


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """Which side events a stream has: complete calls, complete reasoning."""

    calls: bool = False
    reasoning: bool = False


MakeDispatch = Callable[[EventEncoder, Request, DispatchOptions, int], EventEncoder]


def with_dispatch(
    encoder: EventEncoder, request: Request, options: DispatchOptions, index: int = 0
) -> EventEncoder:
    """Return ``encoder`` with the side events of the choice ``index``; ``encoder`` itself where there are none."""
    shown = not request.options.hidden_thinking and request.options.reasoning_fields != ()
    if not (options.calls or (options.reasoning and shown)):
        return encoder
    make: MakeDispatch = open_door("side events")
    return make(encoder, request, replace(options, reasoning=options.reasoning and shown), index)


@dataclass(slots=True)
class Choices:
    """The choices of one answer, and how they are encoded.

    Attributes:
        generations: one for each choice, at least one.
        new_id: creates the ids of the answer and its items; for ``req_`` it returns the id of the request.
        kept: (k, n): of every n consecutive generations the k most likely ones are answered (``best_of``).
        keep: gets the finished response, to store it.
        settle: waits until other processes know of the answer.
        inspection: records the answer for the inspector.
        capture: keeps the tokens of the answer, for training.
        created: when the answer was created, in unix seconds.
    """

    protocol: WireProtocol
    generations: Sequence[Generation]
    new_id: NewId
    kept: tuple[int, int] = (1, 1)
    keep: Callable[[EncodedResponse], None] | None = None
    settle: Callable[[], Awaitable[None]] | None = None
    inspection: TurnObserver | None = None
    capture: AnswerCapture | None = None
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.new_id(self.protocol.ID_PREFIX)

    @property
    def first(self) -> Generation:
        """Return the first generation. Its request, model and prompt stand for those of the answer."""
        return self.generations[0]

    @property
    def usage(self) -> Usage:
        """Return the sum of the counts; a prompt that several generations share counts once."""
        if len(self.generations) == 1:
            return self.first.usage
        usages = [generation.usage for generation in self.generations]
        prompts = {
            id(each.prompt): usage
            for each, usage in reversed(list(zip(self.generations, usages, strict=True)))
        }
        return Usage(
            sum(usage.prompt_tokens for usage in prompts.values()),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in prompts.values()),
            sum(usage.reasoning_tokens for usage in usages),
        )

    def contexts(self) -> list[AnswerContext]:
        usage = self.usage
        return [
            AnswerContext(
                generation.request,
                self.id,
                self.created,
                generation.with_reasoning_ids(self.new_id),
                usage=usage,
                index=index,
                seal=generation.seal,
                seal_end=generation.seal_end,
                keep=self.keep,
            )
            for index, generation in enumerate(self.generations)
        ]

    def encoders(self, dispatch: DispatchOptions) -> list[EventEncoder]:
        make = self.protocol.Encoder
        encoders = [with_dispatch(make(each), each.request, dispatch, each.index) for each in self.contexts()]
        if self.inspection is None:
            return encoders
        return [self.inspection.encoder(each, index) for index, each in enumerate(encoders)]

    def encode(self, folds: Sequence[Fold], ends: Sequence[Finished]) -> bytes:
        choices = [
            FinishedChoice(context, fold.turn(), end)
            for context, fold, end in zip(self.contexts(), folds, ends, strict=True)
        ]
        body = self.protocol.encode(best_choices(choices, *self.kept), self.usage)
        if self.inspection is not None:
            self.inspection.body(body, tokens_of(choices[0].turn))
        return body

    def take_completed_calls(self) -> list[float]:
        """Return when each call became complete whose frames are in the buffer, and forget it."""
        completed: list[float] = []
        for each in self.generations:
            if each.completed_calls:
                completed += each.completed_calls
                each.completed_calls.clear()
        return completed

    async def stored(self, *ends: tuple[int, Finished]) -> None:
        """Wait until the choices with these indices and ends are captured, and other processes know of the finished
        answer: its client may go on at any of them.
        """
        if self.capture is not None:
            for index, end in ends:
                await self.capture.finish(index, end)
        if self.settle is not None:
            await self.settle()

    def batches(self, index: int, request_id: str) -> Batches:
        return pipeline.generate(self.generations[index], f"{request_id}-{index}" if index else request_id)


def best_choices(choices: Sequence[FinishedChoice], kept: int, generated: int) -> list[FinishedChoice]:
    """Return the ``kept`` likeliest of each ``generated`` consecutive choices, the likeliest first.

    If all are kept, their order stays.
    """
    if kept == generated:
        return list(choices)
    groups = (choices[at : at + generated] for at in range(0, len(choices), generated))
    return [choice for group in groups for choice in sorted(group, key=_likelihood, reverse=True)[:kept]]


def _likelihood(choice: FinishedChoice) -> float:
    known = [token.logprob for token in tokens_of(choice.turn) if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")


async def run_together(choices: Sequence[Coroutine[Any, Any, None]], has_sent: Callable[[], bool]) -> None:
    """Run the choices of one answer to their ends.

    When one fails after the answer has sent events, the others run to their ends first, and then its error is raised.
    Before that, it is raised at once. All choices are over on return.

    Args:
        has_sent: returns whether the answer has sent events.
    """
    if len(choices) == 1:
        await choices[0]
        return
    tasks = [asyncio.create_task(choice) for choice in choices]
    waiting, failure = set(tasks), None
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for index, task in enumerate(tasks):
                if task in done and (error := task.exception()) is not None:
                    if not has_sent():
                        raise error
                    failure = failure or _numbered(error, index, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failure is not None:
        raise failure


def _numbered(error: BaseException, index: int, count: int) -> BaseException:
    if not isinstance(error, SingletreeError):
        return error
    return EngineFailed(f"choice {index} of {count} failed, the others are complete: {error.message}")


def with_choice_seed(request: Request, index: int) -> Request:
    """Return ``request`` for the choice number ``index``, with a different seed: equal seeds give equal answers."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    # Not a sum: the largest seed that an engine accepts cannot be incremented.
    return replace(request, sampling=replace(request.sampling, seed=seed ^ index))


def fan_out(first: Generation) -> list[Generation]:
    """Return ``first`` and the other generations that its request asks for, on the same prompt.

    Raises:
        SingletreeError: as ``start_generation``.
    """
    request = first.request
    # The log probabilities of the shared prompt are in the first choice.
    shared = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
    others = (
        start_generation(first.model, with_choice_seed(shared, index), first.prompt)
        for index in range(1, request.choices)
    )
    return [first, *others]
