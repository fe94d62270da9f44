"""Tokens that come together are decoded as one where the format allows it, and give what they give one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from singletree import families
from singletree.conversation import Conversation, Tool
from singletree.events import Event, FinishReason, TextDelta
from singletree.parsing.parser import Parser
from singletree.raw_tokens.routes import RawText
from singletree.server.ids import TurnCallIds
from singletree.server.turn.decoder import TurnDecoder, merge_deltas
from singletree.testing.byte_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOOL = Tool("ls", parameters={"properties": {"path": {"type": "string"}}})
TURNS = {
    "qwen3": (
        "<think>\nHm, `a < b`…\n\nYes — </b>.\n</think>\n\n\nI look: “here”.\n```\n<tool_call>\n```\n"
        '<tool_call>\n{"name": "ls", "arguments": {"path": "ä\\n<x>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call> after'
    ),
    "qwen3_coder": (
        "Text `<b>` first. \U0001f600 <tool_call>\n<function=ls>\n<parameter=path>\n/tmp <a>\n</parameter>\n"
        "</function>\n</tool_call>\nAnd more."
    ),
    "llama3_json": 'Prose, then\n{"name": "ls", "parameters": {"path": "x"}}',
}


@dataclass
class Decoded:
    """What a turn was decoded to."""

    events: list[Event]
    reasoning_tokens: int
    tokens: int
    length: int
    reasoning_ends: list[int]
    ended: FinishReason | None
    tapped: int


def decode(
    name: str, pieces: Iterable[Sequence[int]], stops: Sequence[str] = (), max_calls: int | None = None
) -> Decoded:
    ids = TurnCallIds(Conversation(()), new_id=lambda prefix: prefix + "1")
    parser = Parser(families.get(name), (TOOL,), special_tokens=TOKENIZER.special_tokens, mint_id=ids.mint)
    decoder = TurnDecoder(
        parser,
        TOKENIZER.new_detokenizer(),
        ids,
        stop_token_ids=TOKENIZER.stop_token_ids,
        stops=stops,
        max_calls=max_calls,
    )
    tapped: list[int] = []
    decoder.set_tap(lambda token_ids, events: tapped.extend(token_ids))
    events: list[Event] = []
    for piece in pieces:
        decoder.turn.token_ids.extend(piece)
        events += decoder.feed(piece)
        if decoder.ended is not None:
            break
    events += decoder.close()
    turn = decoder.turn
    assert merge_deltas(turn.events) == merge_deltas(events)
    return Decoded(
        merge_deltas(events),
        decoder.reasoning_tokens,
        decoder.tokens,
        turn.length,
        turn.reasoning_ends,
        decoder.ended,
        len(tapped),
    )


def cut(tokens: Sequence[int], seed: int) -> list[Sequence[int]]:
    chance, pieces, at = random.Random(seed), [], 0
    while at < len(tokens):
        end = at + chance.choice((0, 1, 1, 2, 3, 8, 40))
        pieces.append(tokens[at:end])
        at = end
    return pieces


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize(("stops", "max_calls"), [((), None), ((), 1), (("look", "first. "), None)])
def test_a_turn_is_the_same_however_its_tokens_come(
    name: str, stops: Sequence[str], max_calls: int | None
) -> None:
    tokens = [*TOKENIZER.encode_array(TURNS[name]), *TOKENIZER.stop_token_ids]
    alone = decode(name, [[token] for token in tokens], stops, max_calls)
    assert alone.tapped == alone.length
    for seed in range(40):
        together = decode(name, cut(tokens, seed), stops, max_calls)
        if (
            together.ended is not None
        ):  # The rest of the last piece was generated, and is no part of the turn.
            together.tokens = alone.tokens
        assert together == alone


def test_a_burst_of_prose_is_one_event_and_is_parsed_once() -> None:
    fed: list[str] = []

    class Noting(Parser):
        def feed(self, text: str, special: bool = False) -> list[Event]:
            fed.append(text)
            return super().feed(text, special)

    decoder = TurnDecoder(
        Noting(families.get("qwen3")), TOKENIZER.new_detokenizer(), TurnCallIds(Conversation(()))
    )
    decoder.feed(TOKENIZER.encode_array("A"))
    assert decoder.feed(TOKENIZER.encode_array(" burst of text")) == [
        TextDelta(" burst of text", " burst of text")
    ]
    assert fed == ["A", " burst of text"]


def test_raw_text_is_one_event_too() -> None:
    decoder = TurnDecoder(
        RawText(skip_special=False), TOKENIZER.new_detokenizer(), TurnCallIds(Conversation(()))
    )
    text = "<tool_call> and `more`"
    assert decoder.feed(TOKENIZER.encode_array(text)) == [TextDelta(text, text)]
