"""Who holds which beginnings. A lookup costs little for a prompt of thousands of blocks that nobody knows.

The hashes of a prompt are first looked up all at once in a table of counts, by their low bits. Few that are not held
pass it, and only those that pass are looked up one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from windowpane.routing.hashes import Hashes

SLOTS_PER_HASH = 32  # half of that when it is time to grow: of unknown hashes one in 16 passes, or fewer
COUNTED_ONE_BY_ONE = 16  # so few are counted sooner without an array of them
FEWEST_SLOTS = 2**12


class HolderIndex:
    """Hash → replica → tokens that it saves."""

    def __init__(self) -> None:
        self.holders: dict[int, dict[str, int]] = {}
        self._counts = np.zeros(FEWEST_SLOTS, dtype=np.uint8)  # of the hashes in `holders`, by their low bits

    def put(self, name: str, hashes: Iterable[int], tokens: Iterable[int], *, replace: bool = True) -> None:
        """Unless it shall `replace` them, tokens that are known stay."""
        new = []
        for hashed, saved in zip(hashes, tokens, strict=True):
            holders = self.holders.get(hashed)
            if holders is None:
                new.append(hashed)
                self.holders[hashed] = {name: saved}
            elif replace or name not in holders:
                holders[name] = saved
        if len(self.holders) * SLOTS_PER_HASH > 2 * len(self._counts):
            self._grow()
        else:
            self._count(new, 1)

    def forget(self, name: str, hashes: Iterable[int]) -> None:
        gone = []
        for hashed in hashes:
            holders = self.holders.get(hashed)
            if holders is not None:
                holders.pop(name, None)
                if not holders:
                    del self.holders[hashed]
                    gone.append(hashed)
        self._count(gone, -1)

    def longest_first(self, hashes: Hashes) -> Iterator[Mapping[str, int]]:
        """The holders of those that somebody holds, from the last hash to the first."""
        maybe = hashes[self._counts[hashes & np.uint64(len(self._counts) - 1)] > 0]
        for hashed in reversed(maybe.tolist()):
            holders = self.holders.get(hashed)
            if holders is not None:
                yield holders

    def _count(self, hashes: list[int], change: int) -> None:
        low_bits = len(self._counts) - 1
        if len(hashes) > COUNTED_ONE_BY_ONE:
            slots = np.array(hashes, dtype=np.uint64) & np.uint64(low_bits)
            np.add.at(self._counts, slots, np.uint8(change % 256))
        else:
            for hashed in hashes:
                slot = hashed & low_bits
                self._counts[slot] = (int(self._counts[slot]) + change) % 256

    def _grow(self) -> None:
        slots = 1 << (len(self.holders) * SLOTS_PER_HASH - 1).bit_length()
        self._counts = np.zeros(slots, dtype=np.uint8)
        self._count(list(self.holders), 1)
