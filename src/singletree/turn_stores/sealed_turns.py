"""Generated turns as encrypted bytes, for the stores of turns."""

from __future__ import annotations

import zlib
from dataclasses import astuple

import msgspec

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.server.turns.capsule import Capsules, Tampered, pack_token_ids, unpack_token_ids

_PURPOSE = b"singletree turn 1"


class _Text(msgspec.Struct, array_like=True, frozen=True, tag="text"):
    text: str
    is_reasoning: bool
    id: str = ""


class _Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    name: str
    arguments: str
    id: str
    complete: bool
    written_id: str = ""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    parts: list[_Text | _Call]
    opening: tuple[str, str, str, str, float]
    history_digest: str
    count: int
    token_ids: bytes
    has_unique_ids: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def seal_turn(known: GeneratedTurn, capsules: Capsules) -> bytes:
    """Return ``known`` encrypted; empty if it cannot be written."""
    parts: list[_Text | _Call] = []
    for part in known.turn.parts:
        if isinstance(part, ToolCall):
            parts.append(_Call(part.name, part.arguments, part.id, part.complete, part.written_id))
        elif isinstance(part, Text | Reasoning):
            id = part.id if isinstance(part, Reasoning) else ""
            parts.append(_Text(part.text, isinstance(part, Reasoning), id))
    ids = known.token_ids
    record = _Record(
        capsules.fingerprint,
        parts,
        astuple(known.opening),
        known.history_digest,
        len(ids),
        pack_token_ids(ids),
        known.has_unique_ids,
    )
    try:
        return capsules.seal_bytes(_encode(record), _PURPOSE)
    except UnicodeEncodeError:
        return b""  # A lone surrogate, from an escape in a name, has no UTF-8: the turn is not written.


def open_turn(sealed: bytes, capsules: Capsules) -> GeneratedTurn | None:
    """Return the turn; None if another key or model wrote it, or it is damaged."""
    try:
        data = capsules.open_bytes(sealed, _PURPOSE)
        record = None if data is None else _decode(data)
        if record is None or record.fingerprint != capsules.fingerprint:
            return None
        token_ids = unpack_token_ids(record.token_ids, record.count)
    except (Tampered, ValueError, zlib.error, msgspec.DecodeError):
        return None
    return GeneratedTurn(
        Turn("assistant", tuple(map(_part, record.parts))),
        GenerationPrompt(*record.opening),
        token_ids,
        record.history_digest,
        has_unique_ids=record.has_unique_ids,
    )


def _part(stored: _Text | _Call) -> Part:
    if isinstance(stored, _Call):
        return ToolCall(
            stored.name, stored.arguments, stored.id, stored.complete, written_id=stored.written_id
        )
    return Reasoning(stored.text, id=stored.id) if stored.is_reasoning else Text(stored.text)
