"""What no router can exceed: the hits of one cache as large as all engines' together that knows which blocks are used
again when (Belady's MIN), on the requests in the order in which they came.

Any router with any eviction on the engines keeps a part of that cache's choices: a block on one engine is of no use to
a prompt on another, and an engine cannot know the future.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Read:
    """A request: the blocks of its prompt, and those of the prompt and the generated turn."""

    prompt: Sequence[int]
    after: Sequence[int]


def most_hits(reads: Sequence[Read], blocks: int) -> int:
    """Return how many blocks of the prompts a cache of ``blocks`` blocks with knowledge of the future has."""
    uses = defaultdict[int, deque[int]](deque)
    for at, read in enumerate(reads):
        for block in read.prompt:
            uses[block].append(at)
    held = dict[int, int]()  # block: its next use
    furthest = list[tuple[int, int]]()
    hits = 0
    for read in reads:
        for block in read.prompt:
            hits += block in held
            uses[block].popleft()
        for block in read.after:
            following = uses[block][0] if uses[block] else _NEVER
            if following == _NEVER:
                held.pop(block, None)
                continue
            held[block] = following
            heapq.heappush(furthest, (-following, block))
        while len(held) > blocks:
            following, block = heapq.heappop(furthest)
            if held.get(block) == -following:
                del held[block]
    return hits
