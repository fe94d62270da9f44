"""A model with eyes: the model whose every byte is a token, with a token and a template for pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import pytest
import tokenizers

from singletree.engines.engine import PictureSupport
from singletree.prompts.template.chat_template import load_chat_template
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import Pipeline, TokenizerDefinition
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.chat_format import find_eyes
from singletree.testing.scripted_engine import ScriptedEngine

PNG, WEBP = "image/png", "image/webp"
EXPANDED = 16
_ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
PAD = 256 + _ADDED.index("<|image_pad|>")

_CONTENT = (
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
TEMPLATE = (
    _CONTENT
    + "{%- if tools -%}{{ '<|im_start|>system\nTools: ' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- for message in messages -%}{%- if message.role == 'tool' -%}"
    "{{ '<|im_start|>user\n<tool_response>\n' + show(message.content) + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + show(message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments }}'
    "{{ '}\n</tool_call>' }}{%- endfor -%}{{ '<|im_end|>\n' }}"
    "{%- else -%}{{ '<|im_start|>' + message.role + '\n' + show(message.content) + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""In the manner of Qwen 2 VL."""


def tokenizer(*, marks_pictures: bool = False) -> Tokenizer:
    """Its tokenizer."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    added = tuple(AddedToken(256 + i, text, special=text.startswith("<|")) for i, text in enumerate(_ADDED))
    vocabulary = {character: id for id, character in enumerate(alphabet)} | {t.text: t.id for t in added}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    definition = TokenizerDefinition(
        pipeline=Pipeline(msgspec.Raw(msgspec.json.encode(model)), None, level, level),
        added_tokens=added,
        vocabulary_size=256 + len(added),
        named_tokens={"eos_token": "<|im_end|>"},
        stop_token_ids=frozenset({256 + _ADDED.index("<|im_end|>")}),
        chat_template=TEMPLATE,
        context_window=65536,
    )
    return Tokenizer(definition, marks_pictures=marks_pictures)


def seeing(
    scripts: Any = None,
    *,
    media_types: frozenset[str] = frozenset({PNG}),
    place: Any = "template",
    source: str = TEMPLATE,
) -> dict[str, Any]:
    """Arguments for ``serving``: a scripted engine that takes pictures, and a model with the template ``source``."""
    pytest.importorskip("PIL")
    tokens = tokenizer(marks_pictures=place == "mark")
    template = load_chat_template(tokens, source)
    support = PictureSupport(place, media_types)
    engine = ScriptedEngine(
        tokens.encode,
        tokens.decode,
        scripts,
        end_token_id=tokens.added_tokens["<|im_end|>"],
        pictures=support,
        picture_tokens=EXPANDED,
    )
    eyes, blindness = find_eyes(engine.info(), template, tokens)
    assert eyes is not None, blindness
    memory: dict[str, Any] = {"layout": template.layout(tokens)}
    return {"engine": engine, "tokenizer": tokens, "template": template, "eyes": eyes, **memory}


def picture(colour: str = "red", form: str = "PNG", size: tuple[int, int] = (32, 24)) -> bytes:
    """A picture of one colour."""
    image = pytest.importorskip("PIL.Image")
    target = io.BytesIO()
    image.new("RGB", size, colour).save(target, form)
    return target.getvalue()


def base64_of(data: bytes) -> str:
    """``data`` in base64."""
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = PNG) -> str:
    """A data: URL."""
    return f"data:{media_type};base64,{base64_of(data)}"


def block(data: bytes, media_type: str = PNG) -> dict[str, Any]:
    """An image block of Messages."""
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": base64_of(data)}}
