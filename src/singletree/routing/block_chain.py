"""Prompts as chains of block hashes: the hash of a block includes those before it, as in an engine's prefix cache.

The hashes are this process's own (they differ from the engines'), so engines need no common seed, and a client cannot
make two prompts collide. They are computed once as a session grows: the chain of each session's last prompts is kept,
and a prompt that goes on from one of them costs a comparison of memory and the hashes of what is new. They are computed
when they are asked for: a prompt that no engine holds is not hashed to its end to find that out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from struct import iter_unpack

from singletree.engines.engine import GenerationJob
from singletree.lru import LruCache
from singletree.pictures import PromptPicture
from singletree.prefixes import common_prefix, common_text_prefix

TOKEN_BYTES = 4
MIN_UNIT = 16
_CHAINS_BYTES = 256 * 2**20
_ALIKE = 16
_HEAD_BYTES = 64 * TOKEN_BYTES
_CHAIN_BYTES = 400
_FIRST_SEARCH = 128


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
        return hash((self.model, self.lora, self.salt, unit))


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
    return hash((parent, block, pictures) if pictures else (parent, block))


@dataclass(slots=True, eq=False)
class BlockChain:
    """The block hashes of a prompt, which grow with it.

    Attributes:
        seed: the hash before the first block.
        unit: how many tokens a hash covers.
        tokens: the tokens, four bytes each, pictures expanded.
        known: hashes of the first blocks, as many as were asked for. The array grows in place.
    """

    seed: int
    unit: int
    tokens: bytes = b""
    pictures: tuple[PictureSpan, ...] = ()
    known: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def hashes(self) -> array[int]:
        return self._compute(len(self) // self.unit)

    def hashes_while(self, is_held: Callable[[int], bool]) -> Sequence[int]:
        """Return the hashes of the first blocks: of all, or of so many that ``is_held`` is false for the last one.

        Args:
            is_held: tells of a hash whether anybody has the block; of no block after one for which it is false.
        """
        whole, asked = len(self) // self.unit, _FIRST_SEARCH
        while asked < whole:
            if not is_held(self._compute(asked)[asked - 1]):
                return self.known[:asked]
            asked *= 2
        return self.hashes

    def extended(self, tokens: bytes, pictures: tuple[PictureSpan, ...]) -> BlockChain:
        """Return the chain of ``tokens``: this one, grown in place, if they begin with its own."""
        same = common_text_prefix(self.tokens, tokens) // TOKEN_BYTES
        if self.pictures or pictures:
            at = common_prefix(self.pictures, pictures)
            same = min(
                [same, *(each.start for each in (*self.pictures[at : at + 1], *pictures[at : at + 1]))]
            )
        if same < len(self):
            return BlockChain(self.seed, self.unit, tokens, pictures, self.known[: same // self.unit])
        self.tokens, self.pictures = tokens, pictures
        return self

    def _compute(self, blocks: int) -> array[int]:
        known, step = self.known, self.unit * TOKEN_BYTES
        if len(known) >= blocks:
            return known
        parent, start = (known[-1] if known else self.seed), len(known)
        new = iter_unpack(f"{step}s", memoryview(self.tokens)[start * step : blocks * step])
        if not self.pictures:
            # ``next_hash``, without its call: thousands of blocks of a prompt that is seen for the first time.
            known.extend([parent := hash((parent, block)) for (block,) in new])
            return known
        for first, (block,) in zip(count(start * self.unit, self.unit), new, strict=False):
            within = tuple(
                each.identity for each in self.pictures if each.start < first + self.unit and first < each.end
            )
            parent = next_hash(parent, block, within)
            known.append(parent)
        return known


class ChainMemory:
    """The chains of the sessions' last prompts, bounded in bytes.

    Args:
        limit: in bytes.
    """

    def __init__(self, model: str = "", limit: int = _CHAINS_BYTES) -> None:
        self._model = model
        self._chains: LruCache[tuple[int, str | bytes], list[BlockChain]] = LruCache(limit)
        self._picture_tokens: LruCache[str, int] = LruCache(entries=65536)

    def learn_pictures(self, job: GenerationJob, picture_tokens: Sequence[int]) -> None:
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
        self._chains.put(key, kept, sum(_CHAIN_BYTES + len(c.tokens) + 8 * (len(c) // unit) for c in kept))
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
        spans.append(PictureSpan(start, start + count, f"sha256:{picture.key}"))
        read, length = picture.position + 1, start + count
    return b"".join([*parts, tokens[read:].tobytes()]), tuple(spans)
