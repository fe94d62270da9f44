"""Several choices and told tokens on the wire, whole and streamed, for Chat Completions and for Completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from protocols import event_stream, grammar_chat, grammar_completions, shapes
from singletree.conversation import Conversation, PromptReport, Request, Sampling
from singletree.events import Event, Finished, PromptLogprobs, Token, TokenLogprobs, fold
from singletree.protocols import chat
from singletree.protocols.answer import FinishedChoice, encode_sse
from singletree.raw_tokens import completions
from singletree.request_options import CompletionOptions, RequestOptions
from singletree.server.answers.choices import best_choices

ID, CREATED = "id-0123", 1_763_700_000
YO = Token(2, "Yo", b"Yo", float("-inf"))
HI = Token(1, "Hi", b"Hi", -0.25, (Token(1, "Hi", b"Hi", -0.25), YO))
HALF = Token(3, "\ufffd", b"\xf0", -1.5)
END = Token(9, "<|end|>", b"<|end|>", None, is_visible=False)
PROMPT = (Token(7, "a", b"a"), Token(8, "b", b"b", -0.5, (YO,)))
CHAT, RAW = (chat, "chat"), (completions, "completions")
USAGE = replace(shapes.USAGE, completion_tokens=112)


def request(echoed: str = "", **completion: Any) -> Request:
    return Request(
        "org/model",
        Conversation(()),
        Sampling(logprobs=2),
        options=RequestOptions(
            return_token_ids=True, include_usage=True, completion=CompletionOptions(**completion)
        ),
        prompt_report=PromptReport([7, 8], echoed),
    )


def says(*pieces: str) -> tuple[Event, ...]:
    return (TokenLogprobs((HI, HALF)), *shapes.text(*pieces), TokenLogprobs((END,)))


def stream(api: ModuleType, of: Sequence[Request], streamed: Iterable[tuple[int, Event | Finished]]) -> bytes:
    """The stream of several choices; ``said`` has the events of each with its index."""
    fields: Any = {"id": ID, "created": CREATED, "usage": USAGE}
    encoders = [api.Encoder(event_stream.context(one, index=index, **fields)) for index, one in enumerate(of)]
    frames = [frame for encoder in encoders for frame in encoder.start()]
    for index, event in streamed:
        encoder = encoders[index]
        frames += encoder.end(event) if isinstance(event, Finished) else encoder.feed(event)
    return encode_sse([*frames, *encoders[0].tail(USAGE)])


def choice(of: Request, events: Iterable[Event], end: Finished) -> FinishedChoice:
    return FinishedChoice(event_stream.context(of, id=ID, created=CREATED), fold(events), end)


@pytest.mark.parametrize(("api", "name"), [CHAT, RAW], ids=["chat", "completions"])
def test_two_that_take_turns(api: ModuleType, name: str, golden: Callable[[str, bytes], None]) -> None:  # C14
    first, second = says("Hi", " there"), says("Yo")
    ends = (Finished("stop"), Finished("length"))
    turns = [event for pair in zip(first, (*second, ends[1]), strict=True) for event in enumerate(pair)]
    data = stream(api, [request()] * 2, [*turns, (0, ends[0])])
    golden(f"{name}/told_choices.sse", data)
    choices = [choice(request(), events, end) for events, end in zip((first, second), ends, strict=True)]
    golden(f"{name}/told_choices.json", api.encode(choices, USAGE))
    if api is chat:
        seen = grammar_chat.check(data)
        assert [(one.text, one.finish_reason) for one in seen] == [("Hi there", "stop"), ("Yo", "length")]
    else:
        assert grammar_completions.Grammar(data).texts == {0: "Hi there", 1: "Yo"}


def test_an_echo_with_what_is_reported_of_the_prompt(golden: Callable[[str, bytes], None]) -> None:
    of = request(echo=True, echoed="ab", prompt_logprobs=True)
    of = replace(of, sampling=Sampling(logprobs=2, prompt_logprobs=2))
    written = (PromptLogprobs(PROMPT), *says("Hi"))
    data = stream(completions, [of], [(0, event) for event in (*written, Finished("stop"))])
    golden("completions/echo.sse", data)
    whole = completions.encode([choice(of, written, Finished("stop"))], USAGE)
    golden("completions/echo.json", whole)
    assert grammar_completions.Grammar(data).texts == {0: "abHi"}


def test_what_is_reported_of_the_prompt_of_a_chat(golden: Callable[[str, bytes], None]) -> None:
    of = replace(request(), sampling=Sampling(prompt_logprobs=1))
    events = (PromptLogprobs(PROMPT), *says("Hi"))
    golden("chat/prompt_logprobs.json", chat.encode([choice(of, events, Finished("stop", USAGE))], USAGE))


def test_the_likeliest_are_kept() -> None:
    def rendered(logprob: float | None) -> FinishedChoice:
        tokens = (replace(HI, logprob=logprob), replace(HALF, logprob=logprob))
        return choice(request(), (TokenLogprobs(tokens), *shapes.text(str(logprob))), Finished("stop"))

    choices = [rendered(logprob) for logprob in (-3.0, -1.0, None, -9.0, -2.0, -4.0)]
    assert [one.turn.text for one in best_choices(choices, 2, 3)] == ["-1.0", "-3.0", "-2.0", "-4.0"]
    assert best_choices(choices, 3, 3) == choices
