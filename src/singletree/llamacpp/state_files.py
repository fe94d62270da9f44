"""Writes and reads files with a state of llama.cpp's KV cache and what it was computed from.

A file is what llama.cpp saved, then the token ids (int32, little-endian), both sealed if there is a key, then ``About``
as JSON, then a footer with the three sizes and a SHA-256 of everything before it. llama.cpp ends its process when it
restores a state that is damaged (``GGML_ASSERT`` in llama-context.cpp), so a file is restored only after its checksum
was compared. It reads the state only, and ignores what follows.

With a key, each piece is sealed for the random id of its file, its number, and whether it is the last: pieces cannot be
exchanged, moved or left out.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from singletree.errors import BadConfiguration
from singletree.model_files.saved_cache import digest_weights
from singletree.server.capsules import Capsules, Tampered, parse_keys

_PURPOSE = b"singletree state 1"
_PIECE = 1 << 20


class StateSeal:
    """Seals and opens the states of a folder. Raises BadConfiguration for a key that is too short."""

    def __init__(self, key: str) -> None:
        try:
            self._capsules = Capsules(parse_keys([key], "--prefix-cache-key"), b"")
        except ImportError:
            raise BadConfiguration("--prefix-cache-key: pip install cryptography") from None
        self._piece = _PIECE + len(self._capsules.seal_bytes(b"", b""))

    def seal(self, source: BinaryIO, id: bytes) -> Iterator[bytes]:
        """Yield the sealed pieces of ``source``."""
        data, number = source.read(_PIECE), 0
        while True:
            following = source.read(_PIECE)
            yield self._capsules.seal_bytes(data, self._purpose(id, number, is_last=not following))
            if not following:
                return
            data, number = following, number + 1

    def open(self, source: BinaryIO, size: int, id: bytes) -> Iterator[bytes]:
        """Yield what was sealed as the next ``size`` bytes of ``source``. Raises ValueError."""
        number = 0
        while size > 0:
            data = source.read(min(size, self._piece))
            size -= self._piece
            try:
                opened = self._capsules.open_bytes(data, self._purpose(id, number, is_last=size <= 0))
            except Tampered:
                raise ValueError("it was changed") from None
            if opened is None:
                raise ValueError("it was encrypted with another key; give that one with --prefix-cache-key")
            yield opened
            number += 1

    @staticmethod
    def _purpose(id: bytes, number: int, *, is_last: bool) -> bytes:
        return b"%s%s%d%d" % (_PURPOSE, id, number, is_last)


KEY_DIGITS = 16
"""Length of ``StateOrigin.key``."""

_FOOTER = struct.Struct("<QQQ32s8s")  # bytes of the state, of the token ids, of About; checksum, magic
_MAGIC = b"stprefx2"
_LONGEST_ABOUT = 1 << 16
_CHUNK = 1 << 20
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_ID_BYTES = 4


class StateOrigin(msgspec.Struct, frozen=True):
    """What a state was computed with. It is restored only where all of it is the same.

    Attributes:
        model: a digest of the GGUF file.
        build: the build of llama.cpp.
        settings: those that change a state: types of the KV cache, rope, LoRA.
        name: the name of the model's file, which may differ.
    """

    model: str
    build: str
    settings: str
    name: str = ""

    @property
    def key(self) -> str:
        """The beginning of the names of its files."""
        text = "\0".join((self.model, self.build, self.settings))
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    def refusal(self, other: StateOrigin) -> str:
        """Return why states of ``other`` cannot be restored here; empty if they can."""
        if other.model != self.model:
            return f"another model file ({other.name}; this is {self.name})"
        if other.build != self.build:
            return f"another build of llama.cpp ({other.build}; this is {self.build})"
        same = other.settings == self.settings
        return "" if same else f"other settings ({other.settings}; not {self.settings})"


class About(msgspec.Struct, frozen=True):
    """What a file says of its state. ``seal`` is the random id for which it was sealed; empty if it is plain."""

    origin: StateOrigin
    tokens: int
    seal: str = ""


def read_state_origin(path: Path, build: str, settings: str) -> StateOrigin:
    """Return the origin of a model's states; its digest covers all parts of the GGUF file."""
    return StateOrigin(digest_weights(_parts(path)), build, settings, path.name)


def _parts(path: Path) -> list[Path]:
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    stem, total = path.name[: split.start()], split[1]
    parts = [path.with_name(f"{stem}-{at:05}-of-{total}.gguf") for at in range(1, int(total) + 1)]
    return [part for part in parts if part.exists()]


class StateFile:
    """An open file with a saved state. Raises ValueError for one that is not complete.

    Attributes:
        about: what it says of itself.
        size: of the whole file, in bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        if self.size < _FOOTER.size:
            raise ValueError("it is cut")
        file.seek(self.size - _FOOTER.size)
        self._state, self._ids, about, self._checksum, magic = _FOOTER.unpack(file.read(_FOOTER.size))
        if magic != _MAGIC:
            raise ValueError("it is cut, or another version of singletree wrote it")
        if about > _LONGEST_ABOUT or self._state + self._ids + about + _FOOTER.size != self.size:
            raise ValueError("its footer does not fit")
        file.seek(self._state + self._ids)
        try:
            self.about = msgspec.json.decode(file.read(about), type=About)
        except msgspec.DecodeError as error:
            raise ValueError(f"its description is damaged ({error})") from None

    def check(self) -> None:
        """Raise ValueError if the checksum differs."""
        self._file.seek(0)
        digest, left = hashlib.sha256(), self.size - _FOOTER.size
        while left > 0 and (data := self._file.read(min(left, _CHUNK))):
            digest.update(data)
            left -= len(data)
        if digest.digest() != self._checksum:
            raise ValueError("its checksum differs")

    def packed_ids(self, seal: StateSeal | None) -> bytes:
        self._file.seek(self._state)
        return b"".join(self._opened(self._ids, seal, b"ids"))

    def state(self, seal: StateSeal | None) -> Iterator[bytes]:
        """Yield what llama.cpp saved."""
        self._file.seek(0)
        return self._opened(self._state, seal, b"state")

    def _opened(self, size: int, seal: StateSeal | None, part: bytes) -> Iterator[bytes]:
        if bool(self.about.seal) != (seal is not None):
            raise ValueError(
                "it is encrypted: give --prefix-cache-key" if self.about.seal else "it is not encrypted"
            )
        if seal is not None:
            yield from seal.open(self._file, size, part + self.about.seal.encode())
            return
        while size > 0 and (data := self._file.read(min(size, _CHUNK))):
            yield data
            size -= len(data)


def write_state(
    file: BinaryIO, state: BinaryIO, packed_ids: bytes, origin: StateOrigin, seal: StateSeal | None
) -> None:
    """Write what llama.cpp has saved as ``state``. Raises OSError."""
    id = secrets.token_hex(16) if seal is not None else ""
    about = msgspec.json.encode(About(origin, len(packed_ids) // _ID_BYTES, id))
    parts = (
        _pieces(state, seal, b"state" + id.encode()),
        _pieces(io.BytesIO(packed_ids), seal, b"ids" + id.encode()),
        (about,),
    )
    digest, sizes = hashlib.sha256(), []
    for part in parts:
        sizes.append(0)
        for data in part:
            file.write(data)
            digest.update(data)
            sizes[-1] += len(data)
    file.write(_FOOTER.pack(*sizes, digest.digest(), _MAGIC))


def _pieces(source: BinaryIO, seal: StateSeal | None, id: bytes) -> Iterator[bytes]:
    return iter(lambda: source.read(_CHUNK), b"") if seal is None else seal.seal(source, id)
