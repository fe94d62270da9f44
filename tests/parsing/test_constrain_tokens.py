"""Markers that are single special tokens are asked for as those tokens: LLGuidance never spells one out of text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from families.test_special_tokens import WITH_TOKENS, split, tokens
from parsing.asking import PARIS, TIME, WEATHER
from singletree import families
from singletree.constraints.constrain import allow_calls, marks_calls, require_call, special_tokens_of
from singletree.constraints.expression import Expression, lark
from singletree.conversation import Part, Reasoning, Text
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer

END, STOP = 256, 257
WITH_CALLS = [f for f in WITH_TOKENS if f.forms]


class _Vocabulary:
    """All bytes, LLGuidance's own end token, another that ends turns, and the special tokens of a family."""

    def __init__(self, family: Family) -> None:
        self.special = {text: STOP + 1 + i for i, text in enumerate(sorted(tokens(family)))}
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [bytes([b]) for b in range(256)] + [
            b"<end>",
            b"<stop>",
            *(t.encode() for t in sorted(self.special)),
        ]
        self.special_token_ids = [END, STOP, *self.special.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def ids(self, family: Family, text: str) -> list[int]:
        pieces = split(family, text)
        return [i for t, special in pieces for i in ([self.special[t]] if special else t.encode())]


@cache
def vocabulary(family: Family) -> tuple[_Vocabulary, LLTokenizer]:
    made = _Vocabulary(family)
    return made, LLTokenizer(TokenizerWrapper(made))


@cache
def matcher_of(family: Family, grammar: str) -> LLMatcher:
    _, tokenizer = vocabulary(family)
    assert not LLMatcher.validate_grammar(grammar, tokenizer)
    return LLMatcher(tokenizer, grammar, log_level=0)


def takes(family: Family, expression: Expression | None, text: str, *, written: bool = False) -> bool:
    assert expression is not None
    made, _ = vocabulary(family)
    matcher = matcher_of(family, lark(expression, special_tokens_of(family, made.special))).deep_copy()
    ids: Any = list(text.encode()) if written else made.ids(family, text)
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda f: f.name)
def test_a_forced_call_is_made_of_tokens(family: Family) -> None:  # C38
    rendered = render_turn(family, [PARIS])
    wanted = require_call(family, [WEATHER, TIME], thinking="over", parallel=True)
    assert takes(family, wanted, rendered)
    if split(family, rendered)[0][1]:
        assert not takes(family, wanted, rendered, written=True)
        parser = Parser(family, [WEATHER], family.message_header or " ", special_tokens=tokens(family))
        reported = [
            e for text, special in split(family, rendered) for e in parser.feed(text, special)
        ] + parser.close()
        assert any(type(e).__name__ == "ToolCallEnd" for e in reported)


@pytest.mark.parametrize("family", [f for f in WITH_CALLS if f.reasoning], ids=lambda f: f.name)
def test_a_thought_ends_with_its_token(family: Family) -> None:
    assert family.reasoning is not None
    thought: list[Part] = [Reasoning("I need it."), PARIS]
    rendered = render_turn(family, thought)
    for thinking in ("open", "possible"):
        wanted = require_call(family, [WEATHER], thinking=thinking, parallel=True)
        assert takes(
            family, wanted, rendered.removeprefix(family.reasoning[0]) if thinking == "open" else rendered
        )


@pytest.mark.parametrize("family", [f for f in WITH_CALLS if marks_calls(f)], ids=lambda f: f.name)
def test_a_free_turn_calls_with_tokens_and_may_spell_them(family: Family) -> None:  # C18 C42
    wanted = allow_calls(family, [WEATHER, TIME], thinking="possible", parallel=True)
    thought: list[Part] = [Reasoning("Hm.")] if family.reasoning else []
    for parts in ([], [Text("So.")], [*thought, Text("So."), PARIS], [PARIS]):
        assert takes(family, wanted, render_turn(family, parts)), parts
    rendered = render_turn(family, [PARIS])
    broken = rendered.replace("3", '"soon"')
    assert not takes(family, wanted, broken)
    if split(family, rendered)[0] == (family.forms[0].opener.strip(), True) and not family.message_header:
        assert takes(family, wanted, broken, written=True), "a marker that is spelled out is prose"


@pytest.mark.parametrize("family", [f for f in WITH_CALLS if marks_calls(f)], ids=lambda f: f.name)
def test_a_turn_ends_with_the_token_that_the_model_has_learned(family: Family) -> None:
    made, tokenizer = vocabulary(family)
    free = allow_calls(family, [WEATHER], thinking="over", parallel=True)
    assert free is not None
    for expression in (free, require_call(family, [WEATHER], thinking="over", parallel=False)):
        grammar = lark(expression, special_tokens_of(family, made.special), [END, STOP])
        matcher_of_turn = LLMatcher(tokenizer, grammar, log_level=0)
        for stop, right in ((STOP, True), (ord("x"), expression is free and not family.message_header)):
            matcher = matcher_of_turn.deep_copy()
            ids = [*made.ids(family, render_turn(family, [PARIS])), stop]
            assert bool(matcher.consume_tokens(ids)) is right


TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
OTHER = ("[TOOL_CALLS]", "<tool", "plain", "<x y>", "<｜a｜>", "【call】", "<>")


def of_hugging_face(folder: Path) -> tuple[Tokenizer, LLTokenizer]:
    """Bytes and added tokens that are not special, as LLGuidance reads them in an engine of Hugging Face models."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(level.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*TAGS, *OTHER)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    ours = Tokenizer(read_directory(folder))
    return ours, LLTokenizer(made.to_str(), eos_token=ours.added_tokens["<|im_end|>"])


def test_which_tokens_an_engine_of_hugging_face_takes_as_special(tmp_path: Path) -> None:
    ours, theirs = of_hugging_face(tmp_path)
    for text, id in ours.added_tokens.items():
        assert (text in ours.control_tokens(with_tags=True)) == theirs.is_special_token(id), text
    assert set(ours.control_tokens()) == {"<|im_end|>"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "hermes"])
def test_tags_that_are_no_special_tokens_there_are_written_as_their_tokens(tmp_path: Path, name: str) -> None:
    ours, theirs = of_hugging_face(tmp_path)
    family = families.get(name)
    free = allow_calls(family, [WEATHER, TIME], thinking="over", parallel=True)
    assert free is not None
    ids = ours.encode(render_turn(family, [PARIS]))
    assert {ours.added_tokens["<tool_call>"], ours.added_tokens["</tool_call>"]} <= set(ids)
    for with_tags in (True, False):
        control = special_tokens_of(family, ours.control_tokens(with_tags=with_tags))
        for expression in (free, require_call(family, [WEATHER], thinking="over", parallel=False)):
            matcher = LLMatcher(theirs, lark(expression, control, ours.stop_token_ids), log_level=0)
            assert bool(matcher.consume_tokens([*ids, ours.added_tokens["<|im_end|>"]])) is with_tags
