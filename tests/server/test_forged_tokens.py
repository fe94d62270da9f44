"""No field of any protocol writes a special token, or one that sets turns off, wherever a prompt shows it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

from prompts.real_tokenizers import NAMES, directory
from prompts.template_sources import ALTERNATING, COLLECTED, HERMES, KIMI, PARTS, XML, collected, label
from singletree import families
from singletree.errors import BadConfiguration
from singletree.parsing.family import markers
from singletree.prompts.template.chat_template import CHATML
from singletree.prompts.tokenizer.added_tokens import strip_guards
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.server.models.chat_format import ChatFormat
from singletree.testing.byte_model import CHAT_TEMPLATE

from .forging import (
    HARMLESS,
    PROTOCOLS,
    attack,
    escaped,
    everywhere,
    one_by_one,
    prefills,
    speech,
    vocabulary,
    written,
)

_TURNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKED = {
    "as usual": {**dict.fromkeys(_TURNS, True), **dict.fromkeys(_TAGS, False)},
    "all special": dict.fromkeys((*_TURNS, *_TAGS, "§"), True),
    "none special": dict.fromkeys((*_TURNS, *_TAGS), False),
}
SOURCES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "bytes": CHAT_TEMPLATE,
    "xml": XML,
    "alternating": ALTERNATING,
    "parts": PARTS,
    "kimi": KIMI,
}


def check_together(spoken: ChatFormat) -> None:
    """All fields at once, of every protocol, and as a prefill."""
    hostile = attack(spoken)
    for name, (whole, decode) in PROTOCOLS.items():
        tried = 0
        for body in (whole, *prefills(whole)):
            expected = written(spoken, everywhere(body, HARMLESS), decode)
            tried += expected is not None
            for write in (str, escaped):
                found = written(spoken, everywhere(body, hostile, write=write), decode)
                assert found == expected, f"{name}, {len(body.get('messages', ()))} messages"
        assert tried, name


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("source", SOURCES)
def test_all_fields_at_once(marked: str, source: str) -> None:
    family = families.get("qwen3_coder" if source == "xml" else "qwen3")
    check_together(speech(vocabulary(MARKED[marked], "<|im_end|>"), SOURCES[source], family))


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("source", ["chatml", "hermes"])
def test_each_field_alone(name: str, source: str) -> None:
    spoken = speech(vocabulary(MARKED["as usual"], "<|im_end|>"), SOURCES[source], families.get("qwen3"))
    body, decode = PROTOCOLS[name]
    hostile, shown = dict(one_by_one(body, attack(spoken))), 0
    for where, benign in one_by_one(body, HARMLESS):
        expected = written(spoken, benign, decode)
        if expected is not None:  # some fields take no such word
            shown += 1
            assert written(spoken, hostile[where], decode) == expected, where
    assert shown > 30


@pytest.mark.parametrize("name", [family.name for family in families.table()])
def test_what_is_rendered_in_a_familys_own_format(name: str) -> None:
    """A template that knows nothing but words: reasoning and calls stand in it as the family writes them."""
    family = families.get(name)
    tokens = dict.fromkeys(_TURNS, True)
    tokens |= {
        text.strip(): True
        for text in markers(family)
        if len(text.strip()) > 2 and text.strip()[0] in "<[" and text.strip()[-1] in ">]"
    }
    check_together(speech(vocabulary(tokens, "<|im_end|>"), CHATML, family))


def test_the_models_own_tags_may_come_back() -> None:
    """Clients that keep the thought in the content send it as tokens that the model wrote."""
    tokenizer = vocabulary(MARKED["as usual"], "<|im_end|>")
    own = speech(tokenizer, CHATML, families.get("qwen3")).own_guard
    assert own("<think>\na\n</think>\n\nb<tool_call>") == "<think>\na\n</think>\n\nb<tool_call>"
    assert strip_guards(own("<|im_end|>")) == "<|im_end|>" != own("<|im_end|>")


@lru_cache(maxsize=1)
def _loaded(name: str, scratch: Path) -> Tokenizer:
    return load_tokenizer(directory(name, scratch), cache_bytes=2**20)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


_OF = {
    "qwen3": "llama.cpp/Qwen-Qwen3-0.6B",
    "deepseek_v3": "llama.cpp/deepseek-ai-DeepSeek-V3.1",
    "deepseek_v4": "llama.cpp/deepseek-ai-DeepSeek-V4",
    "llama3": "llama.cpp/meta-llama-Llama-3.1-8B-Instruct",
    "llama3_2": "llama.cpp/meta-llama-Llama-3.2-3B-Instruct",
    "mistral_nemo": "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
    "gemma3": "vllm/tool_chat_template_gemma3_json",
    "gemma4": "llama.cpp/ggml-vocab-gemma-4.embedded",
    "gpt_oss": "llama.cpp/openai-gpt-oss-120b",
}
"""A template for each vocabulary."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_a_real_vocabulary(name: str, scratch: Path) -> None:
    tokenizer = _loaded(name, scratch)
    path = COLLECTED / f"{_OF[name]}.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else tokenizer.chat_template
    if source is None:
        pytest.skip("it has no template, and the collected ones are not at hand")
    check_together(speech(tokenizer, source, families.find(source).family))


@pytest.mark.slow
@pytest.mark.parametrize("path", collected(), ids=label)
def test_every_collected_template(path: Path) -> None:
    """With a vocabulary that has the family's markers and the tags that the template itself writes."""
    source = path.read_text(encoding="utf-8")
    family = families.find(source).family
    tags = re.findall(r"<[|｜/]?[\w▁ :.-]{2,40}[|｜]?>|\[/?[A-Z_]{3,}\]", source)
    texts = {*tags, *(m.strip() for m in markers(family) if m.strip()[:1] in "<[" and m.strip()[-1:] in ">]")}
    try:
        spoken = speech(vocabulary(dict.fromkeys(sorted(texts), True)), source, family)
    except BadConfiguration as refused:
        pytest.skip(str(refused))
    check_together(spoken)
