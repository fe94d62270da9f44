"""Models made of a chat template: one real vocabulary with the template's added tokens, and turns as they write them.

The models' own vocabularies are not available here. What counts is which texts are one token, and that a prompt and
what follows it are encoded as by a real one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers
from clients.returned_turns import MODEL
from singletree import families
from singletree.conversation import (
    Conversation,
    Part,
    Reasoning,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    Turn,
)
from singletree.errors import InvalidRequest
from singletree.parsing.family import Family, markers
from singletree.parsing.parser import parse
from singletree.parsing.render_turn import render_turn
from singletree.prompts.replay.turn_memory import TurnMemory
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.added_tokens import AddedToken
from singletree.prompts.tokenizer.definition import TokenizerDefinition, end_of_turn_ids
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model import Model
from singletree.server.turn.prompt import write_prompt
from singletree.testing.scripted_engine import ScriptedEngine

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "templates"


def model(
    tokenizer: Tokenizer, template: ChatTemplate, family: Family, engine: ScriptedEngine, *, remembers: bool
) -> Model:
    """A served model."""
    return Model(
        names=(MODEL,),
        tokenizer=tokenizer,
        template=template,
        family=family,
        why="",
        memory=TurnMemory(2**26) if remembers else None,
        layout=template.layout(tokenizer),
        engine=engine,
        context_window=262_144,
        max_output_tokens=None,
        created=0,
    )


_TOKENS = re.compile(
    r"<[|｜/]?[\w▁:.|｜-]*[|｜][\w▁:.|｜-]*>|\[/?[A-Z][A-Z_]+\]|\]~!?b\[?\]?|\[e~\[|</?(?:start|end)_of_[a-z]+>"
    r"|</?(?:role|assistant|user|tool_calls|beginning_of_sentence|end_of_sentence|sep)>|<SPECIAL_\d+>|<seed:[a-z]+>"
)
"""What looks like an added token in the templates of the models."""

_ASKED = Turn("user", (Text("q"),))
_PROBE = Conversation((_ASKED, Turn("assistant", (Reasoning("r"), Text("t"))), _ASKED), (Tool("f", "d"),))


def vocabulary(definition: TokenizerDefinition, template: ChatTemplate, family: Family) -> Tokenizer:
    """The tokenizer of ``definition`` with what looks like an added token in the template and in what it prints."""
    known = {token.text for token in definition.added_tokens}
    marks = {
        *_TOKENS.findall(template.source + printed(template, family)),
        *(end for end in family.stop_markers if end in template.source),
        eos_token(family),
    }
    more = sorted(marks - known)
    first = definition.vocabulary_size
    added = tuple(AddedToken(first + i, text, special=True) for i, text in enumerate(more))
    tokens = [token for token in (*definition.added_tokens, *added) if token.text in marks]
    stops = end_of_turn_ids(tokens, family.stop_markers, markers(family))
    return Tokenizer(
        replace(
            definition,
            added_tokens=(*definition.added_tokens, *added),
            vocabulary_size=first + len(added),
            stop_token_ids=frozenset(stops),
        )
    )


def printed(template: ChatTemplate, family: Family) -> str:
    """A prompt: some templates put their tokens together from pieces."""
    try:
        return template.render(_PROBE, render_parts=partial(render_turn, family))
    except InvalidRequest:
        return ""


def eos_token(family: Family) -> str:
    """What the template may call its end of sequence."""
    return family.stop_markers[0] if family.stop_markers else "</s>"


def written_as(family: Family, template: ChatTemplate) -> Family:
    """``family`` with that of its spellings first in which the template prints a turn (Hunyuan 3)."""
    source = template.source + printed(template, family)
    reasoning = family.reasoning
    for pair in family.also_reasoning:
        if all(mark in source for mark in pair):
            reasoning = pair
    forms = sorted(family.forms, key=lambda form: form.opener not in source)
    others = tuple(pair for pair in (family.reasoning, *family.also_reasoning) if pair and pair != reasoning)
    return replace(family, reasoning=reasoning, also_reasoning=others, forms=tuple(forms))


_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
_TOOLS = (Tool("read_file", "Reads a file.", _SCHEMA),)
_TAIL = 200
"""Characters of a prompt's end that show how its turn is opened."""


def written(served: Model, parts: Sequence[Part], tail: str) -> str:
    """``parts`` as the model writes them after a prompt; empty where its format cannot express them there."""
    text = render_turn(served.family, parts)
    opened = next((size for size in range(min(len(tail), len(text)), 0, -1) if tail.endswith(text[:size])), 0)
    read = parse(served.family, text[opened:], _TOOLS, tail)
    return text[opened:] if _words(read.parts) == _words(parts) else ""


def first_tail(served: Model) -> str:
    """The end of a first prompt that asks for reasoning."""
    asked = Conversation((Turn("user", (Text("x"),)),), _TOOLS)
    request = Request(MODEL, asked, thinking=Thinking(enabled=True, effort="medium"))
    return write_prompt(served, request).text[-_TAIL:]


def _words(parts: Iterable[Part]) -> list[tuple[str, str]]:
    words = []
    for part in parts:
        if isinstance(part, ToolCall):
            words.append(("call", part.name))
        elif isinstance(part, Text | Reasoning) and part.text.strip():
            words.append((type(part).__name__, part.text.strip()))
    return words


class Scripted(NamedTuple):
    """A model that a scripted server is to play.

    Attributes:
        name: of its family.
        folder: its tokenizer and chat template.
        served: a served model that writes as it does.
        tail: the end of its prompts.
    """

    name: str
    folder: Path
    served: Model
    tail: str

    def writes(self, parts: Sequence[Part]) -> str:
        """``parts`` as it writes them. Raises ValueError where its format cannot express them."""
        text = written(self.served, parts, self.tail)
        if not text:
            raise ValueError(f"{self.name} cannot write {parts}")
        # A turn is written by itself; a model that numbers its calls does so through the conversation.
        calls = [part for part in parts if isinstance(part, ToolCall)]
        for index, call in reversed(list(enumerate(calls))):
            text = text.replace(f"functions.{call.name}:{index}", call.id, 1)
        return text


def scripted(template: Path, folder: Path) -> Scripted:
    """The model of a chat template, with Qwen3's vocabulary and what added tokens the template needs beside it.

    ``folder`` is made, for the server.
    """
    source = template.read_text(encoding="utf-8")
    family = families.find(source).family
    chat = ChatTemplate(source, eos_token=eos_token(family))
    family = written_as(family, chat)
    tokenizer = vocabulary(read_directory(peers.QWEN3), chat, family)
    played = ScriptedEngine(tokenizer.encode, tokenizer.decode)
    served = model(tokenizer, chat, family, played, remembers=True)
    _write(tokenizer, source, eos_token(family), folder)
    return Scripted(family.name, folder, served, first_tail(served))


def _write(tokenizer: Tokenizer, source: str, eos: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    definition: dict[str, Any] = json.loads((peers.QWEN3 / "tokenizer.json").read_bytes())
    known = {token["content"] for token in definition["added_tokens"]}
    definition["added_tokens"] += [
        {"id": id, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, id in tokenizer.added_tokens.items()
        if text not in known
    ]
    files: dict[str, object] = {
        "tokenizer.json": definition,
        "tokenizer_config.json": {"chat_template": source, "eos_token": eos},
        "generation_config.json": {"eos_token_id": sorted(tokenizer.stop_token_ids)},
        "config.json": {"max_position_embeddings": 262_144},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
