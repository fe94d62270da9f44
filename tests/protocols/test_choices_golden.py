"""Several choices and told tokens on the wire, whole and streamed, for Chat Completions and for Completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from protocols import grammar_chat, grammar_completions, shapes
from singletree.conversation import Conversation, Request, Sampling
from singletree.errors import EngineFailed
from singletree.events import Event, Finished, OfChoice, PromptRead, Token, TokensRead, fold
from singletree.protocols import chat, completions
from singletree.protocols.choices import Choice, ChoicesEncoder, best

ID, CREATED = "id-0123", 1_763_700_000
YO = Token(2, "Yo", b"Yo", float("-inf"))
HI = Token(1, "Hi", b"Hi", -0.25, (Token(1, "Hi", b"Hi", -0.25), YO))
HALF = Token(3, "\ufffd", b"\xf0", -1.5)
END = Token(9, "<|end|>", b"<|end|>", None, is_visible=False)
PROMPT = (Token(7, "a", b"a"), Token(8, "b", b"b", -0.5, (YO,)))
CHAT, RAW = (chat, "chat"), (completions, "completions")
USAGE = replace(shapes.USAGE, completion_tokens=112)


def request(**extra: Any) -> Request:
    told = {"return_token_ids": True, "prompt_token_ids": [7, 8], "include_usage": True}
    sampling = Sampling(logprobs=2)
    return Request("org/model", Conversation(()), sampling, extra=told | extra)


def says(*pieces: str) -> tuple[Event, ...]:
    return (TokensRead((HI, HALF)), *shapes.text(*pieces), TokensRead((END,)))


def stream(api: ModuleType, of: Sequence[Request], said: Sequence[Event], end: bytes | None = None) -> bytes:
    each = [
        api.Encoder(one, id=ID, created=CREATED, usage=USAGE, new_id=shapes.numbered(), index=index)
        for index, one in enumerate(of)
    ]
    encoder = ChoicesEncoder(each)
    data = encoder.start() + b"".join(map(encoder.feed, said))
    return data + (encoder.close(Finished("stop", USAGE)) if end is None else end)


@pytest.mark.parametrize(("api", "name"), [CHAT, RAW], ids=["chat", "completions"])
def test_two_that_take_turns(api: ModuleType, name: str, golden: Callable[[str, bytes], None]) -> None:  # C14
    first, second = says("Hi", " there"), says("Yo")
    ends = (Finished("stop"), Finished("length"))
    turns = [event for pair in zip(first, (*second, ends[1]), strict=True) for event in enumerate(pair)]
    said = [OfChoice(index, event) for index, event in turns] + [OfChoice(0, ends[0])]
    data = stream(api, [request()] * 2, said)
    golden(f"{name}/told_choices.sse", data)
    choices = [
        Choice(request(), fold(events), end) for events, end in zip((first, second), ends, strict=True)
    ]
    golden(f"{name}/told_choices.json", api.encode_choices(choices, USAGE, id=ID, created=CREATED))
    if api is chat:
        seen = grammar_chat.check(data)
        assert [(one.text, one.finish_reason) for one in seen] == [("Hi there", "stop"), ("Yo", "length")]
    else:
        assert grammar_completions.Grammar(data).texts == {0: "Hi there", 1: "Yo"}


def test_an_echo_with_what_is_told_of_the_prompt(golden: Callable[[str, bytes], None]) -> None:
    of = request(echo=True, echoed="ab", prompt_logprobs=True)
    of = replace(of, sampling=Sampling(logprobs=2, prompt_logprobs=2))
    said = (PromptRead(PROMPT), *says("Hi"))
    data = stream(completions, [of], [OfChoice(0, event) for event in (*said, Finished("stop"))])
    golden("completions/echo.sse", data)
    whole = completions.encode_choices(
        [Choice(of, fold(said), Finished("stop"))], USAGE, id=ID, created=CREATED
    )
    golden("completions/echo.json", whole)
    assert grammar_completions.Grammar(data).texts == {0: "abHi"}


def test_what_is_told_of_the_prompt_of_a_chat(golden: Callable[[str, bytes], None]) -> None:
    of = replace(request(), sampling=Sampling(prompt_logprobs=1))
    turn = fold((PromptRead(PROMPT), *says("Hi")))
    whole = chat.encode(
        of, turn, Finished("stop", USAGE), id=ID, created=CREATED, new_id=shapes.numbered(), seal=None
    )
    golden("chat/prompt_logprobs.json", whole)


@pytest.mark.parametrize("api", [chat, completions])
def test_a_failure_ends_all(api: ModuleType) -> None:  # C39
    encoder = api.Encoder(request(), id=ID, created=CREATED, usage=USAGE, new_id=shapes.numbered())
    both = ChoicesEncoder([encoder, encoder])
    assert both.fail(EngineFailed("it died")) == encoder.fail(EngineFailed("it died"))
    assert both.keep_alive() == b": keep-alive\n\n"


def test_the_likeliest_are_kept() -> None:
    def drawn(logprob: float | None) -> Choice:
        tokens = (replace(HI, logprob=logprob), replace(HALF, logprob=logprob))
        return Choice(request(), fold((TokensRead(tokens), *shapes.text(str(logprob)))), Finished("stop"))

    choices = [drawn(logprob) for logprob in (-3.0, -1.0, None, -9.0, -2.0, -4.0)]
    assert [one.turn.text for one in best(choices, 2, 3)] == ["-1.0", "-3.0", "-2.0", "-4.0"]
    assert best(choices, 3, 3) == choices
