"""Capsules: what a client keeps of a generated turn, so that any replica with the key can put it back by its tokens.

A capsule is one string, opaque and authenticated, that a client carries in ``signature`` (Messages) or in
``encrypted_content`` (Responses) and sends back as it was. It has to leave before the turn is over, so it holds the
tokens since the capsule before it; those of one turn, put in a row, are the turn up to the end of its last reasoning.

``singletree1.`` and, in base64url, the key's id (4 bytes), the process's salt (16), a counter (6), and AES-256-GCM
under a key that HKDF's expand step (https://www.rfc-editor.org/rfc/rfc5869#section-2.3) derives from the server's key
and the salt. So no nonce is used twice, however many servers seal under one key. Whoever holds a capsule may have its
turn put into a prompt of theirs, as with the reasoning itself: it is a bearer's token, worth as much as what it says.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.prompts.opening import Opening
from singletree.prompts.tokenizer import Tokenizer

PREFIX = "singletree1."
"""How a capsule of ours begins: whatever else a client brings is another server's."""

_KEY_BYTES, _ID_BYTES, _SALT_BYTES, _COUNTER_BYTES, _NONCE_BYTES = 32, 4, 16, 6, 12
_HEAD_BYTES = _ID_BYTES + _SALT_BYTES + _COUNTER_BYTES
_MOST_TOKENS = 2**20
_LONGEST = 8 * 2**20
_LEAST_PASSPHRASE = 16
_PROBES = 1000


class Tampered(Exception):
    """A capsule that one of our keys should open, and does not: it was changed or cut."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a generated turn.

    Attributes:
        turn: names the turn, 8 bytes.
        index: counts the capsules of the turn from 0.
        is_last: nothing of the turn comes after it.
        opening: how the prompt opened the turn.
        token_ids: the tokens since the span before, without the one that ended the turn.
    """

    turn: bytes
    index: int
    is_last: bool
    opening: Opening
    token_ids: array[int]


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    turn: bytes
    index: int
    is_last: bool
    opening: tuple[str, str, str, str, float]
    count: int
    token_ids: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


class Capsules:
    """Seals and opens. Safe to use from several threads.

    Args:
        keys: 32 bytes each; the first seals, all open.
        fingerprint: of the model and its tokenizer: what another model sealed is not opened.
        strict: whether a capsule that was changed refuses its request.
        salt: of this process, 16 random bytes by default; no two processes may have the same.

    Raises:
        ImportError: without the package ``cryptography``.
    """

    def __init__(
        self, keys: Sequence[bytes], fingerprint: bytes, *, strict: bool = False, salt: bytes | None = None
    ) -> None:
        self._keys = {_id_of(key): key for key in keys}
        self.fingerprint = fingerprint
        self.strict = strict
        salt = os.urandom(_SALT_BYTES) if salt is None else salt
        self._head = _id_of(keys[0]) + salt
        self._cipher = _cipher(keys[0], salt)
        self._counter = itertools.count()

    def seal(self, span: Span) -> str:
        """``span`` as a capsule; empty for one of over a million tokens."""
        if len(span.token_ids) > _MOST_TOKENS:
            return ""
        said = _Payload(
            self.fingerprint,
            span.turn,
            span.index,
            span.is_last,
            astuple(span.opening),
            len(span.token_ids),
            packed(span.token_ids),
        )
        return self.seal_text(_encode(said), PREFIX.encode())

    def open(self, capsule: str) -> Span | None:
        """What ``capsule`` holds; None for one of another server's, of an unknown key or of another model.

        Raises:
            Tampered: it is not as this server, or one with its key, sealed it.
        """
        data = self.open_text(capsule, PREFIX.encode())
        if data is None:
            return None
        try:
            said = _decode(data)
            if said.fingerprint != self.fingerprint:
                return None
            token_ids = unpacked(said.token_ids, said.count)
        except (ValueError, zlib.error):
            raise Tampered from None
        except msgspec.DecodeError:
            return None  # sealed by a version that says something else
        return Span(said.turn, said.index, said.is_last, Opening(*said.opening), token_ids)

    def seal_text(self, said: bytes, purpose: bytes) -> str:
        """``said`` as a client can carry it, to be opened for the same purpose only."""
        return PREFIX + base64.urlsafe_b64encode(self.seal_bytes(said, purpose)).rstrip(b"=").decode()

    def open_text(self, capsule: str, purpose: bytes) -> bytes | None:
        """What ``seal_text`` was given; None for what another server made or a key that is not ours.

        Raises:
            Tampered: it was changed.
        """
        return self.open_bytes(_decoded(capsule), purpose) if capsule.startswith(PREFIX) else None

    def seal_bytes(self, said: bytes, purpose: bytes) -> bytes:
        """``said``, to be opened for the same purpose only."""
        head = self._head + next(self._counter).to_bytes(_COUNTER_BYTES, "big")
        sealed: bytes = self._cipher.encrypt(_nonce(head), said, purpose + head)
        return head + sealed

    def open_bytes(self, data: bytes, purpose: bytes) -> bytes | None:
        """What ``seal_bytes`` was given; None for what was sealed under a key that is not ours.

        Raises:
            Tampered: it was changed.
        """
        from cryptography.exceptions import InvalidTag

        head = data[:_HEAD_BYTES]
        key = self._keys.get(head[:_ID_BYTES])
        if key is None:
            return None
        try:
            cipher = _cipher(key, head[_ID_BYTES:-_COUNTER_BYTES])
            opened: bytes = cipher.decrypt(_nonce(head), data[_HEAD_BYTES:], purpose + head)
        except (InvalidTag, ValueError):
            raise Tampered from None
        return opened


def _id_of(key: bytes) -> bytes:
    return hmac.digest(key, b"singletree capsule key id", "sha256")[:_ID_BYTES]


@lru_cache(maxsize=256)
def _cipher(key: bytes, salt: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(hmac.digest(key, b"singletree capsule" + salt + b"\1", "sha256"))


def _nonce(head: bytes) -> bytes:
    return head[-_COUNTER_BYTES:].rjust(_NONCE_BYTES, b"\0")


def _decoded(capsule: str) -> bytes:
    """The bytes of a capsule; base64 that is spelled in another way than ``seal`` does was changed."""
    text = capsule[len(PREFIX) :]
    if len(text) > _LONGEST:
        raise Tampered
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except ValueError:
        raise Tampered from None
    if len(data) < _HEAD_BYTES or base64.urlsafe_b64encode(data).rstrip(b"=").decode() != text:
        raise Tampered
    return data


def packed(token_ids: array[int]) -> bytes:
    """The ids' low bytes, then their middle ones, then their high ones: alike stands beside alike for zlib.

    1.8 to 2.1 bytes a token of prose, less than as varints up to a few hundred tokens, and no loop in Python.
    """
    data = token_ids.tobytes()
    packer = zlib.compressobj(level=6, wbits=-zlib.MAX_WBITS, memLevel=9)
    return packer.compress(data[0::4] + data[1::4] + data[2::4]) + packer.flush()


def unpacked(data: bytes, count: int) -> array[int]:
    """The ``count`` ids of ``packed``, without ever holding more than they need.

    Raises:
        ValueError, zlib.error: it is not that.
    """
    if not 0 <= count <= _MOST_TOKENS:
        raise ValueError
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    planes = unpacker.decompress(data, 3 * count + 1)
    if len(planes) != 3 * count or not unpacker.eof:
        raise ValueError
    spread = bytearray(4 * count)
    for byte in range(3):
        spread[byte::4] = planes[byte * count : (byte + 1) * count]
    return array("I", bytes(spread))


def load_capsules(
    given: Sequence[str], fingerprint: bytes, *, strict: bool, say: Callable[[str], None]
) -> Capsules | None:
    """Capsules under the keys that were given, or under a random one that dies with the process.

    None, and a line to ``say``, without the package ``cryptography``.

    Raises:
        BadConfiguration: a key is none.
    """
    keys = keys_of(given) or (os.urandom(_KEY_BYTES),)
    try:
        return Capsules(keys, fingerprint, strict=strict)
    except ImportError:
        say("WARNING    no capsules, so reasoning outlives no restart: pip install cryptography")
        return None


def fingerprint_of(name: str, tokenizer: Tokenizer, template: str) -> bytes:
    """What tells a model, its vocabulary and its chat template from others."""
    ids = range(0, tokenizer.vocabulary_size, 1 + tokenizer.vocabulary_size // _PROBES)
    seen = (
        name,
        template,
        tokenizer.vocabulary_size,
        sorted(tokenizer.added_tokens.items()),
        tokenizer.decode(ids),
    )
    return hashlib.blake2b(msgspec.json.encode(seen), digest_size=8).digest()


def keys_of(given: Sequence[str]) -> tuple[bytes, ...]:
    """The keys that ``given`` names: 32 bytes in hex or base64, or a passphrase (scrypt, RFC 7914).

    Raises:
        BadConfiguration: a passphrase is too short.
    """
    return tuple(_raw(text.strip()) or _stretched(text.strip()) for text in given)


def _raw(text: str) -> bytes | None:
    try:
        if len(text) == 2 * _KEY_BYTES:
            return bytes.fromhex(text)
        key = base64.b64decode(_standard(text), validate=True)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _standard(text: str) -> str:
    """Either alphabet of base64, padded or not, as the one that Python reads."""
    bare = text.rstrip("=").replace("-", "+").replace("_", "/")
    return bare + "=" * (-len(bare) % 4)


def _stretched(passphrase: str) -> bytes:
    if len(passphrase) < _LEAST_PASSPHRASE:
        raise BadConfiguration(
            f"--capsule-key has {len(passphrase)} characters; give 32 bytes in base64 or hex "
            f"(openssl rand -base64 32), or a passphrase of at least {_LEAST_PASSPHRASE} characters"
        )
    salt = b"singletree capsule key"
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=2**14, r=8, p=1, dklen=_KEY_BYTES)
