"""Remembers what was found out about tokenizer files, so that a server that starts again need not load them first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from pathlib import Path

import msgspec
import tokenizers

_FORMAT = 1
"""Raise it when ``TokenizerFacts`` or how they are found changes: files of another format are not found."""


class TokenizerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What only a loaded tokenizer shows.

    Attributes:
        vocabulary_size: one more than the highest id.
        strip_first: whether it puts a space before the first segment of a text.
        strip_later: whether it puts a space before the later ones.
        sample: the text of ids from all over the vocabulary (``Tokenizer.sample``).
    """

    vocabulary_size: int
    strip_first: bool
    strip_later: bool
    sample: str


class KnownTokenizerFiles:
    """The facts of each ``tokenizer.json`` that was loaded, by the checksum of its bytes, in files of a folder.

    The checksum covers the version of the library that read it, too. A file that cannot be read, or that is damaged,
    counts as none; a folder that cannot be written to stays as it is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, file: Path) -> tuple[Path | None, TokenizerFacts | None]:
        """Return the path under which the facts of ``file`` are kept, and the facts if they are there.

        Both are None for a ``file`` that cannot be read.
        """
        checksum = hashlib.sha256(f"{_FORMAT} {tokenizers.__version__} ".encode())
        try:
            checksum.update(file.read_bytes())
        except OSError:
            return None, None
        path = self._folder / f"{checksum.hexdigest()}.json"
        try:
            check, _, text = path.read_bytes().partition(b"\n")
            if check == _check(text):
                return path, msgspec.json.decode(text, type=TokenizerFacts)
        except (OSError, msgspec.DecodeError):
            pass
        return path, None

    def keep(self, path: Path, facts: TokenizerFacts) -> None:
        """Write ``facts`` to ``path``, which ``find`` returned: whole or not at all."""
        text = msgspec.json.encode(facts)
        own = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            own.write_bytes(_check(text) + b"\n" + text)
            own.replace(path)


def _check(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
