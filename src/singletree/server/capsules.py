"""Capsules: the tokens of a generated turn, which a client carries so that any replica with the key can replay them.

A capsule is one encrypted and authenticated string that a client carries in ``signature`` (Messages) or in
``encrypted_content`` (Responses) and sends back unchanged. It has to be sent before the turn is over, so it holds the
tokens since the capsule before it; the capsules of one turn in a row hold the turn up to the end of its last reasoning.
A turn that ends in a call may have one more, up to its end: in ``data`` of a ``redacted_thinking`` block, in
``encrypted_content`` of a reasoning item, or in ``reasoning_details`` (Chat Completions).

The format is ``singletree1.`` and, in base64url, the key's id (4 bytes), the process's salt (16), a counter (6), and
the payload in AES-256-GCM under a key that HKDF's expand step (https://www.rfc-editor.org/rfc/rfc5869#section-2.3)
derives from the server's key and the salt. So no nonce is used twice, however many servers encrypt under one key.
Whoever holds a capsule can get its turn into a prompt of their own, as with the reasoning itself: it is a bearer token,
and as sensitive as its content.
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

from singletree.conversation import CAPSULE_PREFIX
from singletree.errors import BadConfiguration
from singletree.prompts.replay.turn_memory import GenerationPrompt
from singletree.prompts.tokenizer.tokenizer import Tokenizer

PREFIX = CAPSULE_PREFIX
"""The beginning of every capsule of singletree; a string without it comes from another server."""

_KEY_BYTES, _ID_BYTES, _SALT_BYTES, _COUNTER_BYTES, _NONCE_BYTES = 32, 4, 16, 6, 12
_HEAD_BYTES = _ID_BYTES + _SALT_BYTES + _COUNTER_BYTES
_MAX_TOKENS = 2**20
_MAX_CHARACTERS = 8 * 2**20
_MIN_PASSPHRASE = 16


class Tampered(Exception):
    """A capsule names one of the server's keys but cannot be decrypted with it: it was changed or cut."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a generated turn: the content of one capsule.

    Attributes:
        turn: the random id of the turn, 8 bytes.
        index: the number of the capsule in the turn, from 0.
        opening: how the prompt opened the turn.
        token_ids: the tokens since the span before, without the one that ended the turn.
    """

    turn: bytes
    index: int
    is_last: bool
    opening: GenerationPrompt
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
    """Encrypts (seals) and decrypts (opens) capsules. Safe to use from several threads.

    Args:
        keys: 32 bytes each; the first one encrypts, all of them decrypt.
        fingerprint: identifies the model and its tokenizer; capsules of another model are not opened.
        strict: whether a request with a capsule that was changed is refused.
        salt: 16 bytes that no other process may use; random by default.

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
        self._without_owner: Capsules | None = None

    def of(self, owner: str) -> Capsules:
        """Return the capsules of one owner, under keys of its own; itself for an empty name.

        Capsules of other owners are like those of another server. Capsules without an owner are opened: clients got
        them when keys were not separate yet.
        """
        if not owner:
            return self
        keys = [
            hmac.digest(key, b"singletree capsule owner" + owner.encode(), "sha256")
            for key in self._keys.values()
        ]
        own = Capsules(keys, self.fingerprint, strict=self.strict)
        own._without_owner = self
        return own

    def seal(self, span: Span) -> str:
        """Return ``span`` as a capsule; empty if it has over a million tokens."""
        if len(span.token_ids) > _MAX_TOKENS:
            return ""
        payload = _Payload(
            self.fingerprint,
            span.turn,
            span.index,
            span.is_last,
            astuple(span.opening),
            len(span.token_ids),
            pack_token_ids(span.token_ids),
        )
        return self.seal_text(_encode(payload), PREFIX.encode())

    def open(self, capsule: str) -> Span | None:
        """Return the content of ``capsule``; None if it comes from another server, key or model. Raises Tampered."""
        data = self.open_text(capsule, PREFIX.encode())
        if data is None:
            return None
        try:
            payload = _decode(data)
            if payload.fingerprint != self.fingerprint:
                return None
            token_ids = unpack_token_ids(payload.token_ids, payload.count)
        except (ValueError, zlib.error):
            raise Tampered from None
        except msgspec.DecodeError:
            return None  # Another version made it, with other fields.
        return Span(
            payload.turn, payload.index, payload.is_last, GenerationPrompt(*payload.opening), token_ids
        )

    def seal_text(self, data: bytes, purpose: bytes) -> str:
        """Encrypt ``data`` as text for a client to carry; it can be decrypted for the same ``purpose`` only."""
        return PREFIX + base64.urlsafe_b64encode(self.seal_bytes(data, purpose)).rstrip(b"=").decode()

    def open_text(self, capsule: str, purpose: bytes) -> bytes | None:
        """Decrypt the result of ``seal_text``; None if it comes from another server or key. Raises Tampered."""
        if not capsule.startswith(PREFIX):
            return None
        data = _decoded(capsule)
        opened = self.open_bytes(data, purpose)
        if opened is None and self._without_owner is not None:
            return self._without_owner.open_bytes(data, purpose)
        return opened

    def seal_bytes(self, data: bytes, purpose: bytes) -> bytes:
        """Encrypt ``data``; it can be decrypted for the same ``purpose`` only."""
        head = self._head + next(self._counter).to_bytes(_COUNTER_BYTES, "big")
        sealed: bytes = self._cipher.encrypt(_nonce(head), data, purpose + head)
        return head + sealed

    def names(self, text: str, purpose: bytes) -> list[bytes]:
        """Return ``text`` as a name of 16 bytes that reveals nothing of it: one for each key, the encrypting key first.

        The names of two models differ.
        """
        data = purpose + self.fingerprint + text.encode("utf-8", "surrogatepass")
        return [hashlib.blake2b(data, digest_size=16, key=key).digest() for key in self._keys.values()]

    def open_bytes(self, data: bytes, purpose: bytes) -> bytes | None:
        """Decrypt the result of ``seal_bytes``; None if it has the key of another server or owner. Raises Tampered."""
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
    """Return the bytes of a capsule. Raise Tampered for base64 in another form than that of ``seal``."""
    text = capsule[len(PREFIX) :]
    if len(text) > _MAX_CHARACTERS:
        raise Tampered
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except ValueError:
        raise Tampered from None
    if len(data) < _HEAD_BYTES or base64.urlsafe_b64encode(data).rstrip(b"=").decode() != text:
        raise Tampered
    return data


def pack_token_ids(token_ids: array[int]) -> bytes:
    """Compress token ids: first all low bytes, then the middle ones, then the high ones, as zlib likes similar bytes.

    1.8 to 2.1 bytes a token of prose, less than as varints up to a few hundred tokens, and no loop in Python.
    """
    data = token_ids.tobytes()
    packer = zlib.compressobj(level=6, wbits=-zlib.MAX_WBITS, memLevel=9)
    return packer.compress(data[0::4] + data[1::4] + data[2::4]) + packer.flush()


def unpack_token_ids(data: bytes, count: int) -> array[int]:
    """Decompress the result of ``pack_token_ids``, without ever allocating more than ``count`` ids need.

    Raises:
        ValueError, zlib.error: ``data`` is not ``count`` packed ids.
    """
    if not 0 <= count <= _MAX_TOKENS:
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
    given: Sequence[str], fingerprint: bytes, *, strict: bool, report: Callable[[str], None]
) -> Capsules | None:
    """Return capsules under the keys in ``given``, or under a random one that is lost when the process ends.

    Without the package ``cryptography``, return None and pass a warning to ``report``. Raises BadConfiguration.
    """
    keys = parse_keys(given) or (os.urandom(_KEY_BYTES),)
    try:
        return Capsules(keys, fingerprint, strict=strict)
    except ImportError:
        report("WARNING    no capsules, so reasoning is lost at a restart: pip install cryptography")
        return None


def model_fingerprint(name: str, tokenizer: Tokenizer, template: str) -> bytes:
    """Return 8 bytes that identify a model's name, vocabulary and chat template."""
    identity = (
        name,
        template,
        tokenizer.vocabulary_size,
        sorted(tokenizer.added_tokens.items()),
        tokenizer.sample(),
    )
    return hashlib.blake2b(msgspec.json.encode(identity), digest_size=8).digest()


def parse_keys(given: Sequence[str], flag: str = "--capsule-key") -> tuple[bytes, ...]:
    """Return the keys for the texts in ``given``: 32 bytes in hex or base64, or a passphrase (scrypt, RFC 7914).

    Raises:
        BadConfiguration: a passphrase is too short; the error names ``flag``.
    """
    return tuple(_raw(text.strip()) or _derived(text.strip(), flag) for text in given)


def _raw(text: str) -> bytes | None:
    try:
        if len(text) == 2 * _KEY_BYTES:
            return bytes.fromhex(text)
        key = base64.b64decode(_standard(text), validate=True)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _standard(text: str) -> str:
    bare = text.rstrip("=").replace("-", "+").replace("_", "/")
    return bare + "=" * (-len(bare) % 4)


def _derived(passphrase: str, flag: str) -> bytes:
    if len(passphrase) < _MIN_PASSPHRASE:
        raise BadConfiguration(
            f"{flag} has {len(passphrase)} characters; give 32 bytes in base64 or hex "
            f"(openssl rand -base64 32), or a passphrase of at least {_MIN_PASSPHRASE} characters"
        )
    salt = b"singletree capsule key"
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=2**14, r=8, p=1, dklen=_KEY_BYTES)
