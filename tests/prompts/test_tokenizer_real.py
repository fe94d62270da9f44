"""Vocabularies of real models: by segments is as whole, new text alone is encoded, and what a client spells is never a
token. See ``real_tokenizers`` for where they come from.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers

from prompts import real_tokenizers
from prompts.real_tokenizers import BIG, NAMES
from prompts.template_sources import COLLECTED, load_template, write_parts
from singletree.conversation import Conversation, Text, Tool, ToolCall, ToolResult, Turn
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.added_tokens import is_guarded, strip_guards
from singletree.prompts.tokenizer.encoder import PROBES
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer

each_tokenizer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in BIG)) for name in NAMES]
)
TEMPLATES = {
    "deepseek_v4": "llama.cpp/deepseek-ai-DeepSeek-V4",
    "gemma4": "llama.cpp/google-gemma-4-31B-it",
    "gpt_oss": "llama.cpp/openai-gpt-oss-120b",
}
"""Templates for the tokenizers that come without one."""


class Loaded(NamedTuple):
    """A tokenizer of ours, and the reference."""

    tokenizer: Tokenizer
    reference: tokenizers.Tokenizer
    guarded: tuple[str, ...]

    @property
    def structure(self) -> set[int]:
        """The ids that no client may bring in."""
        return {self.tokenizer.added_tokens[text] for text in self.guarded}

    def whole(self, text: str) -> list[int]:
        """What the reference makes of it."""
        ids: list[int] = self.reference.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@cache
def loaded(name: str, scratch: Path) -> Loaded:
    folder = scratch / name
    folder.mkdir(exist_ok=True)
    folder = real_tokenizers.directory(name, folder)
    tokenizer = load_tokenizer(folder)
    guarded = (token.text for token in tokenizer._added.tokens if is_guarded(token) and len(token.text) > 1)
    return Loaded(tokenizer, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), tuple(guarded))


def _texts(added: list[str], seed: int, count: int) -> Iterator[str]:
    """Texts of tokens, halves of tokens, words and white space, put together by chance."""
    chance = random.Random(seed)
    words = [
        *PROBES,
        " ",
        "  ",
        "\n",
        "\n\n",
        "x",
        "<",
        "|",
        ">",
        "▁",
        "👍🏽",
        "e\u0301",
        "\t",
        "0",
        "'s",
        "</",
    ]
    for _ in range(count):
        bits = []
        for _ in range(chance.randint(1, 12)):
            token = chance.choice(added)
            cut = chance.randint(0, len(token))
            bits.append(chance.choice([token, token, token[:cut], token[cut:], *chance.choices(words, k=3)]))
        yield "".join(bits)


@each_tokenizer
def test_by_segments_is_as_whole(name: str, scratch: Path) -> None:  # C7
    tokenizer, reference, _ = loaded(name, scratch)
    texts = list(_texts(list(tokenizer.added_tokens), 1, 120))
    expected = [ids.ids for ids in reference.encode_batch(texts, add_special_tokens=False)]
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode_array(text).tolist() == ids, "from the cache"


@each_tokenizer
def test_a_growing_text_is_as_whole(name: str, scratch: Path) -> None:  # C7
    """Every beginning of a conversation, and new text alone goes to the encoder."""
    tokenizer = loaded(name, scratch).tokenizer
    chance = random.Random(2)
    cut = tokenizer._separators[-1]
    encoded: list[int] = []
    encode = tokenizer._later.encode

    def watch(text: str) -> array[int]:
        encoded.append(len(text))
        return encode(text)

    tokenizer._later.encode = watch
    try:
        text = cut
        for bit in _texts(list(tokenizer.added_tokens), 3, 25):
            new = f"\nturn {chance.random()}\n{bit}{cut}"
            text += new
            encoded.clear()
            ids = tokenizer.encode(text)
            assert sum(encoded) <= len(new)
            assert ids == loaded(name, scratch).whole(text)
    finally:
        tokenizer._later.encode = encode


@each_tokenizer
@pytest.mark.slow
def test_the_faster_encoder_is_as_the_reference(name: str, scratch: Path) -> None:
    tokenizer, reference, _ = loaded(name, scratch)
    if not tokenizer.accelerate():
        pytest.skip("the faster encoder differs on a probe, so it is not used")
    texts = [f"{text} and {n}" for n, text in enumerate(_texts(list(tokenizer.added_tokens), 4, 200))]
    expected = [ids.ids for ids in reference.encode_batch(texts, add_special_tokens=False)]
    assert [tokenizer.encode(text) for text in texts] == expected


@each_tokenizer
def test_no_token_is_read_in_what_a_client_spells(name: str, scratch: Path) -> None:
    tokenizer, _, guarded = loaded(name, scratch)
    structure = loaded(name, scratch).structure
    whole = "".join(f" {token}{token} x{token}y" for token in guarded)
    assert not structure & set(tokenizer.encode(tokenizer.guard(whole)))
    alone = " ".join(tokenizer.guard(token) for token in guarded)
    assert not structure & set(tokenizer.encode(alone))
    assert strip_guards(alone) == " ".join(guarded)


@each_tokenizer
def test_no_token_is_completed_across_an_edge(name: str, scratch: Path) -> None:
    """Half a token from a client, and the other half from the template or from the next string."""
    tokenizer, _, guarded = loaded(name, scratch)
    structure, added = loaded(name, scratch).structure, tokenizer._added
    joined = []
    for token in guarded:
        for at in {1, 2, len(token) // 2, len(token) - 2, len(token) - 1} & set(range(1, len(token))):
            one, other = token[:at], token[at:]
            ours, theirs = tokenizer.guard(one), tokenizer.guard(other)
            joined += [
                ours + theirs,
                *([ours + other] if len(added.split(other)) == 1 else []),
                *([one + theirs] if len(added.split(one)) == 1 else []),
            ]
    assert not structure & set(tokenizer.encode("\n".join(joined)))


def _template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = tokenizer.chat_template
    if name in TEMPLATES or source is None:
        path = COLLECTED / f"{TEMPLATES.get(name, 'absent')}.jinja"
        if not path.is_file():
            pytest.skip("it has no template, and the collected ones are not at hand")
        source = path.read_text(encoding="utf-8")
    return load_template(source, named_tokens=tokenizer.named_tokens)


def _conversation(conversation: list[str]) -> Conversation:
    """Every one of ``said`` in each place where a client's words get into a prompt, whole and in two halves."""
    everything = " ".join(conversation)
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": everything, "enum": conversation[:8]}},
        "required": ["path"],
        "x-note": everything,
    }
    halves = [
        Text(half) for each in conversation for half in (each[: len(each) // 2], each[len(each) // 2 :])
    ]
    call = ToolCall("find", '{"path": ' + _quoted(everything) + "}", "call00001")
    turns = [
        Turn("system", (Text(everything),)),
        Turn("user", (Text(everything), *halves)),
        Turn("assistant", (call,)),
        Turn("tool", (ToolResult(call.id, (Text(everything), *halves)),)),
        Turn("assistant", (Text("Done."),)),
    ]
    edges = [cut for each in conversation for cut in (each[:-1], each[1:])]
    for edge in edges[:200]:
        turns += [Turn("user", (Text(edge),)), Turn("assistant", (Text("Yes."),))]
    return Conversation(
        (*turns, Turn("user", (Text(conversation[-1]),))), (Tool("find", everything, schema),)
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@each_tokenizer
def test_no_template_turns_a_clients_words_into_tokens(name: str, scratch: Path) -> None:
    tokenizer, _, guarded = loaded(name, scratch)
    structure = loaded(name, scratch).structure
    template = _template(name, tokenizer)

    def structure_of(output: list[str]) -> Counter[int]:
        text = template.render(_conversation(output), render_parts=write_parts, guard=tokenizer.guard)
        return Counter(id for id in tokenizer.encode(text) if id in structure)

    spelled = [token for token in guarded if token.strip() == token]
    assert structure_of(spelled) == structure_of([f"harmless{n}" for n, _ in enumerate(spelled)])
