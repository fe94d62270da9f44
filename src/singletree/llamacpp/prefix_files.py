"""Keeps states of llama.cpp's KV cache in a folder, and finds those that a prompt begins with."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from singletree.llamacpp.state_files import KEY_DIGITS, StateFile, StateOrigin, StateSeal, write_state
from singletree.model_files.saved_cache import oldest_beyond
from singletree.prefixes import common_text_prefix
from singletree.private_files import open_private

_LOG = logging.getLogger(__name__)

_SAVED = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}-[0-9a-f]{{32}}\.prefix")
_PART = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}-[0-9a-f]{{32}}\.part")
_OLD_PART_SECONDS = 3600.0  # Another server may be writing a younger one.
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A saved state.

    Attributes:
        packed_ids: the token ids that it was computed from, as of ``pack_ids``.
    """

    path: Path
    packed_ids: bytes

    @property
    def tokens(self) -> int:
        return len(self.packed_ids) // _ID_BYTES


def pack_ids(token_ids: Sequence[int], salt: str = "") -> bytes:
    """Return token ids as bytes, four of them each; none if one is out of range.

    Args:
        token_ids: may be the numbers of ``comparable_tokens``.
        salt: changes every id, so that the same prompts of two salts have no beginning in common.
    """
    try:
        packed = array("I", token_ids)
    except OverflowError:
        return b""
    if sys.byteorder == "big":
        packed.byteswap()
    data = packed.tobytes()
    if not salt or not data:
        return data
    mask = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
    masks = int.from_bytes(mask * len(packed))
    return (int.from_bytes(data) ^ masks).to_bytes(len(data))


def common_tokens(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two packed sequences, in tokens."""
    return common_text_prefix(one, other) // _ID_BYTES


def list_states(folder: Path) -> Iterator[tuple[Path, StateFile | str]]:
    """Yield each saved state of a folder, or why it cannot be read. The file is open until the next one."""
    for path in sorted(folder.iterdir()):
        if _SAVED.fullmatch(path.name):
            try:
                with path.open("rb") as file:
                    yield path, StateFile(file)
            except (OSError, ValueError) as error:
                yield path, str(error)


@contextlib.contextmanager
def _new_state(folder: Path, origin: StateOrigin) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file, and the path that it has when it is complete: all of it is on the disk then."""
    path = folder / f"{origin.key}-{secrets.token_hex(16)}.prefix"
    part = path.with_suffix(".part")
    try:
        with open(part, "xb", opener=open_private) as file:
            yield path, file
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def import_state(folder: Path, source: Path, origin: StateOrigin) -> Path:
    """Copy a state that another machine has saved into a folder. Raises OSError, and ValueError with the reason."""
    with source.open("rb") as file:
        state = StateFile(file)
        state.check()
        if reason := origin.refusal(state.about.origin):
            raise ValueError(f"it comes from {reason}")
        file.seek(0)
        with _new_state(folder, origin) as (path, target):
            shutil.copyfileobj(file, target)
    return path


class PrefixFiles:
    """The saved states of one model in a folder, which may have those of others as well. Every call blocks.

    Files that do not have the name of a saved state are never touched.

    Args:
        folder: where they are; see ``saved_cache.open_folder``.
        limit: largest size of all saved states in the folder, in bytes; the least recently used are removed first.
        origin: what they must have been computed with.
        seal: encrypts them; None for plain files.
    """

    def __init__(self, folder: Path, limit: int, origin: StateOrigin, seal: StateSeal | None = None) -> None:
        self.folder = folder
        self.seal = seal
        self._limit = limit
        self._origin = origin
        self._saved: dict[Path, SavedPrefix] = {}
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if _PART.fullmatch(path.name) and time.time() - path.stat().st_mtime > _OLD_PART_SECONDS:
                    path.unlink()
        refused = Counter(filter(None, (self._index(*each) for each in list_states(folder))))
        for reason, count in refused.items():
            _LOG.info("%d saved states in %s are not used: %s", count, folder, reason)
        self._evict()

    def _index(self, path: Path, file: StateFile | str) -> str:
        """Note a state that can be used; return why it cannot. One of this model that is damaged is removed."""
        try:
            if isinstance(file, str):
                raise ValueError(file)
            if reason := self._origin.refusal(file.about.origin):
                return reason
            packed_ids = file.packed_ids(self.seal)
            if len(packed_ids) != file.about.tokens * _ID_BYTES:
                raise ValueError("its token ids are cut")
        except (OSError, ValueError) as error:
            if isinstance(file, str) and path.name.startswith(self._origin.key):
                self.remove(path)
            return str(error)
        self._saved[path] = SavedPrefix(path, packed_ids)
        return ""

    def __len__(self) -> int:
        return len(self._saved)

    def longest(self, packed_ids: bytes, most: float) -> tuple[SavedPrefix, int] | None:
        """Find the state that shares the longest prefix with a prompt.

        Args:
            most: the most tokens that the state may have.

        Returns:
            The state, and how many tokens it shares; None if no state shares any.
        """
        found = [(common_tokens(each.packed_ids, packed_ids), each) for each in self._states()]
        shared = [(common, -each.tokens, each) for common, each in found if common and each.tokens <= most]
        if not shared:
            return None
        common, _, best = max(shared, key=lambda entry: entry[:2])
        return best, common

    def place(self, saved: SavedPrefix, folder: Path) -> Path:
        """Compare the checksum of a state, mark it as used, and return a file in ``folder`` for llama.cpp to read.

        The file is a link, or what was sealed; the caller removes it. Raises OSError, and ValueError for a state that
        is damaged, which is removed.
        """
        placed = folder / secrets.token_hex(16)
        try:
            with saved.path.open("rb") as file:
                state = StateFile(file)
                state.check()
                if self.seal is None:
                    placed.symlink_to(saved.path.resolve())
                else:
                    with open(placed, "xb", opener=open_private) as target:
                        target.writelines(state.state(self.seal))
            os.utime(saved.path)
        except (OSError, ValueError) as error:
            placed.unlink(missing_ok=True)
            if isinstance(error, ValueError | FileNotFoundError):
                self.remove(saved.path)
            raise
        return placed

    def remove(self, path: Path) -> None:
        """Remove a state; one that is gone already is forgotten."""
        self._saved.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def has_room(self, size: int) -> bool:
        """Return whether a state of ``size`` bytes is within the limit, and leaves as much free on the disk."""
        with contextlib.suppress(OSError):
            return size <= self._limit and 2 * size <= shutil.disk_usage(self.folder).free
        return False

    def add(self, source: Path, packed_ids: bytes) -> None:
        """Keep a copy of ``source``, which llama.cpp has saved, and evict others if the limit is exceeded.

        States that this one continues are removed: it serves every prompt that they serve. Raises OSError; then
        nothing has changed.
        """
        if not self.has_room(size := source.stat().st_size):
            raise OSError(f"{self.folder} has no room for {size // 10**6} MB")
        with source.open("rb") as state, _new_state(self.folder, self._origin) as (path, file):
            write_state(file, state, packed_ids, self._origin, self.seal)
        for other in self._states():
            if packed_ids.startswith(other.packed_ids):
                self.remove(other.path)
        self._saved[path] = SavedPrefix(path, packed_ids)
        self._evict()

    def _states(self) -> list[SavedPrefix]:
        return list(self._saved.values())  # at once: a thread may add one meanwhile

    def _evict(self) -> None:
        """Remove the least recently used states, of any key, until the rest is within the limit."""
        saved = (path for path in self.folder.iterdir() if _SAVED.fullmatch(path.name))
        for path in oldest_beyond(saved, self._limit):
            self.remove(path)
