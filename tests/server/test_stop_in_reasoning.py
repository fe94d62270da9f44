"""A stop string ends a turn where it is in visible text, and nowhere in reasoning, however the text is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from singletree import families
from singletree.conversation import Conversation
from singletree.events import fold
from singletree.parsing.parser import Parser
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.tokenizer.detokenizer import Detokenizer, TokenTexts
from singletree.server.ids import TurnCallIds
from singletree.server.turn.decoder import TurnDecoder

from .carrying import LAYOUT, capsules
from .serving import body, serving
from .test_generation import PATHS, STOP, final, outcome

THOUGHT = "<think>\nHm,\n\nEND of it.\n</think>\n\n"


def detokenizer(pieces: Sequence[str]) -> Detokenizer:
    """Each token is the piece of this number."""
    texts = TokenTexts((), {0: ""}.get, "byte_level")
    texts.update(enumerate(pieces))
    return Detokenizer(texts)


def decoded(
    pieces: Sequence[str], stops: Sequence[str], *, opened: bool, **more: Any
) -> tuple[str, str, str | None]:
    """Reasoning, visible text and the stop string."""
    parser = Parser(families.get("qwen3"), (), "<|im_start|>assistant\n" + ("<think>\n" if opened else ""))
    decoder = TurnDecoder(parser, detokenizer(pieces), TurnCallIds(Conversation(())), stops=stops, **more)
    for id in range(len(pieces)):
        decoder.feed([id])
        if decoder.ended:
            break
    decoder.close()
    turn = fold(decoder.turn.events)
    return turn.reasoning, turn.text, decoder.stop_sequence


CASES: list[tuple[str, list[str], tuple[str, str, str | None]]] = [
    ("<think>\na END\n</think>\n\nx ENDy", ["END"], ("a END", "x ", "END")),
    ("<think>\na\n\nb\n</think>\n\nx\n\ny", ["\n\n"], ("a\n\nb", "x", "\n\n")),
    ("<think>\na\n\nb\n</think>\n\nxy", ["\n\n"], ("a\n\nb", "xy", None)),
    ("<think>E</think>ND END", ["END"], ("E", "ND ", "END")),
    ("x <think>END</think> END", ["END"], ("END", "x ", "END")),
    ("x E<think>ND</think>END.", ["END"], ("ND", "x E", "END")),
    ("x END <think>", ["END"], ("", "x ", "END")),
    ("x <think>a", ["<think>"], ("", "x ", "<think>")),
]


@pytest.mark.parametrize(("text", "stops", "expected"), CASES)
def test_every_split_has_the_same_end(
    text: str, stops: list[str], expected: tuple[str, str, str | None]
) -> None:
    check_splits(text, stops, expected, opened=False)
    if text.startswith("<think>"):
        check_splits(text.removeprefix("<think>"), stops, expected, opened=True)


def check_splits(text: str, stops: list[str], expected: tuple[str, str, str | None], *, opened: bool) -> None:
    assert decoded(list(text), stops, opened=opened) == expected
    for size in (0, 1, 2):
        for cuts in itertools.combinations(range(1, len(text)), size):
            edges = [0, *cuts, len(text)]
            pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
            assert decoded(pieces, stops, opened=opened) == expected, pieces


@pytest.mark.parametrize("least", range(6))
def test_white_space_behind_reasoning_ends_no_turn_after_unwatched_tokens(least: int) -> None:
    pieces = ["<think>", "hm", "</think>", "\n\n", "Answer", "\n\n", "more"]
    found = decoded(pieces, ["\n\n"], opened=False, min_tokens=least)
    assert found == ("hm", "Answer" if least < 6 else "Answer\n\nmore", "\n\n" if least < 6 else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["END", "\n\n", "Hm"])
async def test_a_turn_goes_on_behind_a_stop_string_in_its_reasoning(
    path: str, stream: bool, stop: str
) -> None:
    scripts = {"s": f"{THOUGHT}It is.{stop}No."}
    async with serving(scripts, memory=TurnMemory(2**20), layout=LAYOUT, capsules=capsules()) as served:
        more: dict[str, Any] = {STOP[path]: [stop], "tools": []}
        if path == "/v1/responses":
            more["include"] = ["reasoning.encrypted_content"]
        reply = await served.client.post(path, body(path, "[[script:s]]", stream=stream, **more))
    assert outcome(path, final(path, reply))[2] == "It is."
    if path == "/v1/messages":
        assert b'"stop_reason":"stop_sequence"' in reply.body
        assert b'"singletree1.' in reply.body
    if path == "/v1/responses":
        assert b'"encrypted_content":"singletree1.' in reply.body
