"""Pages that restore points keep, or that several sequences hold. They are read-only and known by an id.

    table of a sequence ──► offset ──► tag on the page: −1 − id (a place in a table where the page has one owner)
    restore point ──► ids ──► offset, how many sequences hold it, how many restore points keep it

An id stays with its page when the page moves, so that a move touches no restore point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.arena import Arena, Offsets

Ids = NDArray[np.int64]
NO_IDS: Ids = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class RestorePoint:
    """Pages kept so that a sequence can resume at `length` tokens; ids per group, oldest block first.

    While it is `pending`, the step that writes it has not landed: nobody may resume there and it is not given up.
    """

    length: int
    pages: list[Ids]
    number: int = 0  # by which the books know it
    pending: bool = False
    last_used: int = 0
    hidden_row: int | None = None  # where its last token's final hidden state is kept


class SharedPages:
    """The shared pages of one group."""

    def __init__(self, group: int, arena: Arena) -> None:
        self._group = group
        self._arena = arena
        self.offsets: Offsets = np.zeros(0, dtype=np.int32)
        self.slots = np.zeros(0, dtype=np.int32)  # sequences that hold it, and steps in flight that write it
        self.point_counts = np.zeros(0, dtype=np.int32)  # restore points that keep it
        self.point_numbers = np.zeros(0, dtype=np.int64)  # of those, combined by xor: where one keeps it, its number
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.offsets) - len(self._free)

    def is_shared(self, offsets: Offsets) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._arena.tags(self._group, offsets) < 0
        return found

    def ids(self, offsets: Offsets) -> Ids:
        """Ids of pages that are shared."""
        return -1 - self._arena.tags(self._group, offsets)

    def share(self, offsets: Offsets, slots: int) -> Ids:
        """Make pages that so many sequences hold shared ones; those that are already stay as they are."""
        tags = self._arena.tags(self._group, offsets)
        new = tags >= 0
        ids = -1 - tags
        count = int(np.count_nonzero(new))
        if count:
            fresh = self._new_ids(count)
            self.offsets[fresh] = offsets[new]
            self.slots[fresh] = slots
            self.point_counts[fresh] = 0
            self._arena.tag(self._group, offsets[new], -1 - fresh)
            ids[new] = fresh
        return ids

    def forget(self, ids: Ids) -> None:
        """These pages are free, or have one owner again."""
        self._free += ids.tolist()
        self.slots[ids] = self.point_counts[ids] = 0

    def cached_by_one(self, ids: Ids) -> Ids:
        """Those of these that a single restore point keeps and nobody holds: they would be free without it."""
        alone: Ids = ids[(self.point_counts[ids] == 1) & (self.slots[ids] == 0)]
        return alone

    def all_ids(self) -> Ids:
        """Every id in use."""
        return np.flatnonzero(self.slots + self.point_counts)

    def _new_ids(self, count: int) -> Ids:
        if len(self._free) < count:
            size = len(self.offsets)
            more = max(count, size, 64)
            self.offsets = np.concatenate([self.offsets, np.zeros(more, dtype=np.int32)])
            self.slots = np.concatenate([self.slots, np.zeros(more, dtype=np.int32)])
            self.point_counts = np.concatenate([self.point_counts, np.zeros(more, dtype=np.int32)])
            self.point_numbers = np.concatenate([self.point_numbers, np.zeros(more, dtype=np.int64)])
            self._free += range(size + more - 1, size - 1, -1)
        taken = self._free[-count:]
        del self._free[-count:]
        return np.array(taken, dtype=np.int64)
