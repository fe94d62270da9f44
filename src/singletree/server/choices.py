"""Several generations that answer one request together: ``n``, and several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from singletree.conversation import Request
from singletree.errors import EngineFailed, SingletreeError
from singletree.events import Event, Finished, Fold, OfChoice, Usage
from singletree.protocols import chat
from singletree.protocols.choices import Choice, ChoiceEncoder, ChoicesEncoder, best
from singletree.server import pipeline
from singletree.server.catalog import Model
from singletree.server.dispatch import Wanted, dispatching_choice
from singletree.server.identity import NewId
from singletree.server.pipeline import Generation, Prompt
from singletree.server.protocol import Encoder, WireProtocol

Batch = list[Event] | Finished


class MakeChoice(Protocol):
    """How the encoder of a choice is made."""

    def __call__(
        self, request: Request, *, id: str, created: int, usage: Usage, new_id: NewId, index: int
    ) -> ChoiceEncoder:
        """For the choice with this number."""
        ...


class ChoicesProtocol(Protocol):
    """A module of ``protocols`` for an API with several choices."""

    @property
    def Encoder(self) -> MakeChoice:
        """The encoder of one choice."""
        ...

    def encode_choices(self, choices: Sequence[Choice], usage: Usage, *, id: str, created: int) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class Choices:
    """Generations that are answered together; to an answer they are like one.

    Args:
        kept: so many of each so many that follow one another are told, the likeliest (``best_of``).
    """

    def __init__(
        self, generations: Sequence[Generation], protocol: ChoicesProtocol, kept: tuple[int, int] = (1, 1)
    ) -> None:
        self._protocol = protocol
        self._kept = kept
        self.generations = tuple(generations)

    @property
    def request(self) -> Request:
        """What they answer."""
        return self.generations[0].request

    @property
    def model(self) -> Model:
        """Who answers."""
        return self.generations[0].model

    @property
    def prompt(self) -> Prompt:
        """The first one's."""
        return self.generations[0].prompt

    @property
    def usage(self) -> Usage:
        """The counts of all together; a prompt that several share counts once."""
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

    def encoder(self, *, id: str, created: int, new_id: NewId, dispatch: Wanted) -> Encoder:
        """The encoder of the stream."""
        make, usage = self._protocol.Encoder, self.usage
        requests = [generation.request for generation in self.generations]
        return ChoicesEncoder(
            [
                dispatching_choice(
                    make(request, id=id, created=created, usage=usage, new_id=new_id, index=index),
                    request,
                    dispatch,
                    index,
                )
                for index, request in enumerate(requests)
            ]
        )

    def body(self, folds: Sequence[Fold], ends: Sequence[Finished], *, id: str, created: int) -> bytes:
        """The body of the answer."""
        said = zip(self.generations, folds, ends, strict=True)
        choices = best(
            [Choice(generation.request, fold.turn(), end) for generation, fold, end in said], *self._kept
        )
        return self._protocol.encode_choices(choices, self.usage, id=id, created=created)


class Whole:
    """Takes the events of an answer that is not streamed, and makes its body of them."""

    def __init__(self, generation: Generation | Choices) -> None:
        self._generation = generation
        count = len(generation.generations) if isinstance(generation, Choices) else 1
        self._folds = [Fold() for _ in range(count)]
        self._ends = [Finished("error")] * count

    def feed(self, event: Event) -> None:
        """One more event."""
        if not isinstance(event, OfChoice):
            self._folds[0].feed(event)
        elif isinstance(event.said, Finished):
            self._ends[event.index] = event.said
        else:
            self._folds[event.index].feed(event.said)

    def encode(
        self, protocol: WireProtocol, finished: Finished, *, id: str, created: int, new_id: NewId
    ) -> bytes:
        """The body."""
        generation = self._generation
        if isinstance(generation, Choices):
            return generation.body(self._folds, self._ends, id=id, created=created)
        turn, seal = self._folds[0].turn(), generation.seal
        return protocol.encode(
            generation.request, turn, finished, id=id, created=created, new_id=new_id, seal=seal
        )


def generate(generation: Generation | Choices, request_id: str) -> AsyncGenerator[Batch, None]:
    """What ``pipeline.generate`` gives; of several, what each says as ``OfChoice``, in the order in which it comes.

    One that fails once a stream has words ends it, but only behind the others: what they have to say still comes.
    Before, and where there is no stream, it ends all at once. Closing the generator frees the engine of all of them.
    """
    if isinstance(generation, Choices):
        return _interleaved(generation, request_id)
    return pipeline.generate(generation, request_id)


async def _interleaved(choices: Choices, request_id: str) -> AsyncGenerator[Batch, None]:
    # Nothing is generated ahead of what is taken, so a client that does not read slows all of them.
    said: asyncio.Queue[tuple[int, Batch | Exception]] = asyncio.Queue(1)
    ids = enumerate(choices.generations)
    tasks = [asyncio.create_task(_run(one, i, f"{request_id}-{i}", said)) for i, one in ids]
    left, has_words, failure = len(tasks), False, None
    try:
        while left:
            index, batch = await said.get()
            left -= not isinstance(batch, list)
            if not isinstance(batch, Exception):
                yield [OfChoice(index, event) for event in (batch if isinstance(batch, list) else [batch])]
                has_words = has_words or bool(batch)
            elif has_words and choices.request.stream:
                failure = failure or _named(batch, index, len(tasks))
            else:
                raise batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failure is not None:
        raise failure
    yield Finished(choices.generations[0].ended or "stop", choices.usage)


def _named(error: Exception, index: int, count: int) -> Exception:
    """``error`` with the word which choice it is about."""
    if not isinstance(error, SingletreeError):
        return error
    return EngineFailed(f"choice {index} of {count} failed, the others are whole: {error.message}")


async def _run(
    generation: Generation, index: int, request_id: str, said: asyncio.Queue[tuple[int, Batch | Exception]]
) -> None:
    try:
        async with aclosing(pipeline.generate(generation, request_id)) as batches:
            async for batch in batches:
                await said.put((index, batch))
    except Exception as error:
        await said.put((index, error))


def drawn_again(request: Request, index: int) -> Request:
    """``request`` for its choice with this number: with a seed of its own, or all would say the same."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    # Not a sum: the largest seed that an engine takes has no next one.
    return replace(request, sampling=replace(request.sampling, seed=seed ^ index))


def several(first: Generation) -> Generation | Choices:
    """As many generations as the request of ``first`` asks for, on the prompt of that one. Raises as ``begin`` does."""
    request = first.request
    if request.choices == 1:
        return first
    # The first one tells of the prompt that they share.
    shared = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
    others = (
        pipeline.begin(first.model, drawn_again(shared, index), first.prompt)
        for index in range(1, request.choices)
    )
    return Choices([first, *others], chat)
