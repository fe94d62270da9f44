"""Prompts as chains of block hashes: the hash of a block includes those before it, as in an engine's prefix cache.

The hashes are this process's own (they differ from the engines'), so engines need no common seed, and a client cannot
make two prompts collide. They are computed once as a session grows: the chain of each session's last prompts is kept,
and a prompt that goes on from one of them costs a comparison of memory and the hashes of what is new.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from singletree.engines.engine import GenerationJob
from singletree.lru import LruCache
from singletree.pictures import PromptPicture
from singletree.prefixes import common_prefix, common_text_prefix

HASH_MASK = (1 << 60) - 1
"""Sixty bits: a collision is as good as impossible, and CPython keeps such a number in 32 bytes, not 48."""

TOKEN_BYTES = 4
MIN_UNIT = 16
_CHAINS_BYTES = 256 * 2**20
_ALIKE = 16
_HEAD_BYTES = 64 * TOKEN_BYTES
_CHAIN_BYTES = 400


@dataclass(frozen=True, slots=True)
class CacheScope:
    """What separates prompts of equal tokens in the engines' caches.

    Attributes:
        model, lora: names; ``lora`` is empty for the model itself.
        salt: the request's ``cache_salt``.
    """

    model: str = ""
    lora: str = ""
    salt: str = ""

    def seed(self, unit: int) -> int:
        """Return the number that stands before the first block of ``unit`` tokens."""
        return hash((self.model, self.lora, self.salt, unit)) & HASH_MASK


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """The tokens of a picture in a prompt as the engine reads it, from ``start`` to before ``end``."""

    start: int
    end: int
    identity: str


def unit_of(block_size: int) -> int:
    """Return how many tokens one hash covers for engines with blocks of ``block_size`` tokens.

    SGLang's pages have one token by default; a hash for each would cost much memory and improve no choice.
    """
    return block_size * max(1, MIN_UNIT // block_size)


def next_hash(parent: int, block: bytes, pictures: tuple[str, ...] = ()) -> int:
    """Return the hash of a block of tokens behind the block ``parent``, with the pictures that it is a part of."""
    return hash((parent, block, pictures) if pictures else (parent, block)) & HASH_MASK


@dataclass(slots=True, eq=False)
class BlockChain:
    """The block hashes of a prompt, which grow with it.

    Attributes:
        seed: the hash before the first block.
        unit: how many tokens a hash covers.
        tokens: the tokens, four bytes each, pictures expanded.
        pictures: where they are.
        hashes: of the complete blocks.
    """

    seed: int
    unit: int
    tokens: bytes = b""
    pictures: tuple[PictureSpan, ...] = ()
    hashes: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def extended(self, tokens: bytes, pictures: tuple[PictureSpan, ...]) -> BlockChain:
        """Return the chain of ``tokens``: this one, grown in place, if they begin with its own."""
        same = common_text_prefix(self.tokens, tokens) // TOKEN_BYTES
        if self.pictures or pictures:
            at = common_prefix(self.pictures, pictures)
            same = min(
                [same, *(each.start for each in (*self.pictures[at : at + 1], *pictures[at : at + 1]))]
            )
        kept = self.hashes if same == len(self) else self.hashes[: same // self.unit]
        grown = self if kept is self.hashes else BlockChain(self.seed, self.unit, hashes=kept)
        grown._set(tokens, pictures)
        return grown

    def _set(self, tokens: bytes, pictures: tuple[PictureSpan, ...]) -> None:
        self.tokens, self.pictures = tokens, pictures
        step, hashes = self.unit * TOKEN_BYTES, self.hashes
        parent, start = (hashes[-1] if hashes else self.seed), len(hashes) * step
        if pictures:
            for at in range(start, len(tokens) - step + 1, step):
                first = at // TOKEN_BYTES
                within = tuple(
                    each.identity for each in pictures if each.start < first + self.unit and first < each.end
                )
                parent = next_hash(parent, tokens[at : at + step], within)
                hashes.append(parent)
            return
        append = hashes.append
        for at in range(start, len(tokens) - step + 1, step):
            parent = hash((parent, tokens[at : at + step])) & HASH_MASK  # ``next_hash``, without its call
            append(parent)


class ChainMemory:
    """The chains of the sessions' last prompts, bounded in bytes.

    Args:
        model: the model's name.
        limit: in bytes.
    """

    def __init__(self, model: str = "", limit: int = _CHAINS_BYTES) -> None:
        self._model = model
        self._chains: LruCache[tuple[int, str | bytes], list[BlockChain]] = LruCache(limit)
        self._picture_tokens: LruCache[str, int] = LruCache(entries=65536)

    @property
    def memory_bytes(self) -> int:
        """The approximate memory in bytes."""
        return self._chains.bytes

    def learn_pictures(self, job: GenerationJob, picture_tokens: Sequence[int]) -> None:
        """Note how many tokens the pictures of ``job`` take."""
        for picture, tokens in zip(job.pictures, picture_tokens, strict=False):
            self._picture_tokens.put(picture.key, tokens)

    def chain_of(self, job: GenerationJob, unit: int, generated: Sequence[int] = ()) -> BlockChain:
        """Return the chain of the prompt of ``job`` and the tokens ``generated`` after it.

        A picture that no engine has counted yet is taken for one token.
        """
        tokens, pictures = self._expanded(job)
        if generated:
            tokens += array("I", generated).tobytes()
        seed = CacheScope(self._model, salt=job.cache_salt).seed(unit)
        key = (seed, job.session or tokens[:_HEAD_BYTES])
        alike = self._chains.peek(key) or []
        nearest, shared = None, -1
        for chain in alike:
            if (common := common_text_prefix(chain.tokens, tokens)) > shared:
                nearest, shared = chain, common
        found = (nearest or BlockChain(seed, unit)).extended(tokens, pictures)
        kept = [found, *(each for each in alike if each is not found)][:_ALIKE]
        self._chains.put(key, kept, sum(_CHAIN_BYTES + len(c.tokens) + 8 * len(c.hashes) for c in kept))
        return found

    def _expanded(self, job: GenerationJob) -> tuple[bytes, tuple[PictureSpan, ...]]:
        ids = job.prompt_token_ids
        tokens = ids if isinstance(ids, array) else array("I", ids)
        if not job.pictures:
            return tokens.tobytes(), ()
        known = {picture.key: self._picture_tokens.get(picture.key) or 1 for picture in job.pictures}
        return expand(tokens, job.pictures, known)


def expand(
    tokens: array[int], pictures: Sequence[PromptPicture], counts: Mapping[str, int]
) -> tuple[bytes, tuple[PictureSpan, ...]]:
    """Return a prompt as the engine reads it, four bytes a token: each placeholder as often as its picture takes.

    Args:
        counts: how many tokens a picture takes, by its key; one that is missing takes one.
    """
    parts, spans, read, length = [], [], 0, 0
    for picture in pictures:
        before = tokens[read : picture.position]
        count = counts.get(picture.key, 1)
        start = length + len(before)
        parts += [before.tobytes(), array("I", [picture.placeholder_id]).tobytes() * count]
        spans.append(PictureSpan(start, start + count, picture_identity(picture)))
        read, length = picture.position + 1, start + count
    return b"".join([*parts, tokens[read:].tobytes()]), tuple(spans)


def picture_identity(picture: PromptPicture) -> str:
    """Return the name by which engines know the picture: the one that it is sent with."""
    return f"sha256:{picture.key}"
