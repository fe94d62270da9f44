"""Which engines hold which blocks: one table of block hashes for all engines of a pool.

A number in the table has one bit for each *holder*, which is an engine's cache as one source knows it. A prefix cache
holds a block only if it holds those before it, and evicts from the end. So a prompt's chain is searched by bisection:
a prompt of 50,000 tokens costs a few dozen look-ups, however many engines there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHARED_SETS = 65536


class PrefixIndex:
    """The blocks of all holders."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sets: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._holders)

    def add(self, holder: int, blocks: Iterable[int]) -> None:
        """Note that ``holder`` has the blocks."""
        bit = self._one_object(1 << holder)
        holders, before, after = self._holders, 0, bit
        for block in blocks:
            old = holders.setdefault(block, bit)
            if old is not bit and not old & bit:
                if old != before:
                    before, after = old, self._one_object(old | bit)
                holders[block] = after

    def discard(self, holder: int, blocks: Iterable[int]) -> None:
        """Note that ``holder`` does not have the blocks any more, if it had them."""
        bit = 1 << holder
        holders = self._holders
        for block in blocks:
            old = holders.get(block, 0)
            if old == bit:
                del holders[block]
            elif old & bit:
                holders[block] = self._one_object(old & ~bit)

    def __contains__(self, block: int) -> bool:
        """Tell whether any holder has the block."""
        return block in self._holders

    def holds(self, holder: int, block: int) -> bool:
        """Tell whether ``holder`` has the block."""
        return bool(self._holders.get(block, 0) >> holder & 1)

    def matches(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many blocks of ``chain`` the holders have: pairs (holders as bits, blocks).

        The holders of each pair are among those of the pair before, and have more blocks.
        """
        found: list[tuple[int, int]] = []
        get, at, end = self._holders.get, 0, len(chain)
        holders = get(chain[0], 0) if end else 0
        while holders:
            if get(chain[end - 1], 0) & holders == holders:
                found.append((holders, end))
                break
            low, high = at, end - 1  # all of them hold ``low``, not all hold ``high``
            while high - low > 1:
                middle = (low + high) // 2
                if get(chain[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            found.append((holders, high))
            holders &= get(chain[high], 0)
            at = high
        return found

    def _one_object(self, holders: int) -> int:
        """Return an equal number: mostly one object for all blocks with the same holders."""
        if len(self._sets) >= _SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)


def blocks_by_holder(matches: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the number of matched blocks for each holder that has any."""
    found: dict[int, int] = {}
    for holders, blocks in matches:
        while holders:
            lowest = holders & -holders
            found[lowest.bit_length() - 1] = blocks
            holders ^= lowest
    return found
