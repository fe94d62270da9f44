"""A tokenizer for tests: every character is a token, and so is each of a few special ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
END = 0x110000 + SPECIAL.index("<|im_end|>")

_PARTS = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")")


def encode(text: str) -> list[int]:
    """Special tokens by name."""
    ids: list[int] = []
    for part in _PARTS.split(text):
        ids += [0x110000 + SPECIAL.index(part)] if part in SPECIAL else plain(part)
    return ids


def plain(text: str) -> list[int]:
    """The same characters, none of them a special token."""
    return [ord(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    """Special tokens by name."""
    return "".join(chr(id) if id < 0x110000 else SPECIAL[id - 0x110000] for id in ids)
