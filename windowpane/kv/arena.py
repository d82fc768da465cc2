"""The slab arena: who holds which bytes. Offsets only; the memory itself belongs to the runner.

    arena = num_slabs × slab_bytes          offsets in 256-byte units
    ┌ slab 0: full ───────┬ slab 1: window ──┬ slab 2: free ┬ slab 3: full ───────┐
    │ page page page  ·   │ page             │              │ page  ·   ·    ·    │   · = stranded
    └─────────────────────┴──────────────────┴──────────────┴─────────────────────┘

A slab belongs to one group while it holds a page, and to nobody again when its last page is freed. A taker brings a
`Cursor` so that its pages lie slab by slab: when a sequence ends, whole slabs come back. Only when no slab is free does
it fill the gaps in other takers' slabs.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.layout import Layout

Offsets = NDArray[np.int32]
FREE = -1


class ArenaFull(Exception):
    """Not enough free slabs and gaps for this many pages of this group. Nothing was taken."""


@dataclass(slots=True)
class Cursor:
    """The slab that one taker is filling, for one group."""

    slab: int = FREE


class Move(NamedTuple):
    """Copy one page of `group` from `source` to `target` (offsets), then forget `source`."""

    group: int
    source: int
    target: int


class Arena:
    """Slabs and pages of one rank. Groups are named by their index in the layout."""

    def __init__(self, layout: Layout, num_slabs: int) -> None:
        if num_slabs < 0:
            raise ValueError(f"num_slabs must not be negative, got {num_slabs}")
        if num_slabs * layout.slab_units > 2**31 - 1:
            raise ValueError(f"{num_slabs:,} slabs of {layout.slab_bytes:,} B exceed the 512 GiB reach of page tables")
        self.layout = layout
        self.num_slabs = num_slabs
        self.page_units = [g.page_units for g in layout.groups]
        self.pages_per_slab = [layout.pages_per_slab(g) for g in layout.groups]
        self.used_pages = [0] * len(layout.groups)
        self.held_slabs = [0] * len(layout.groups)
        self._page_bytes = [g.page_bytes for g in layout.groups]
        self._slab_units = layout.slab_units
        self._owner = np.full(num_slabs, FREE, dtype=np.int32)
        self._used = np.zeros(num_slabs, dtype=np.int32)
        # A stack: the slab freed last is taken first, so that its pages are still warm.
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        # Gaps of partly filled slabs only: slab → indexes of free pages.
        self._gaps: list[dict[int, list[int]]] = [{} for _ in layout.groups]
        # One number per page, for its taker: when the page moves, it says which table entry to rewrite.
        self._tags = np.zeros((num_slabs, max(self.pages_per_slab)), dtype=np.int64)
        self._page_starts = [
            np.arange(per_slab, dtype=np.int32) * units
            for per_slab, units in zip(self.pages_per_slab, self.page_units, strict=True)
        ]

    # -- counting ------------------------------------------------------------------------------------------------

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * self.layout.slab_bytes

    @property
    def free_bytes(self) -> int:
        return self.free_slabs * self.layout.slab_bytes

    def used_bytes(self, group: int) -> int:
        return self.used_pages[group] * self.layout.groups[group].page_bytes

    def stranded_bytes(self, group: int) -> int:
        """Gaps in this group's partly filled slabs, and the remainders of all its slabs."""
        return self.held_slabs[group] * self.layout.slab_bytes - self.used_bytes(group)

    def gap_pages(self, group: int) -> int:
        return self.held_slabs[group] * self.pages_per_slab[group] - self.used_pages[group]

    def gap_bytes(self, group: int) -> int:
        """What `compact` could win back: stranded bytes without the remainders."""
        return self.gap_pages(group) * self._page_bytes[group]

    def available_pages(self, group: int) -> int:
        """Pages that `take` could hand out now, without moving anything."""
        return self.free_slabs * self.pages_per_slab[group] + self.gap_pages(group)

    def slab_use(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Per slab, the group that holds it (FREE where none does) and how many of its pages are taken."""
        return self._owner.copy(), self._used.copy()

    def slabs_of(self, offsets: Offsets) -> Set[int]:
        """The slabs that these pages lie in."""
        return frozenset(np.unique(offsets // self._slab_units).tolist())

    # -- taking and freeing --------------------------------------------------------------------------------------

    def take(self, group: int, pages: int, cursor: Cursor) -> Offsets:
        """Take `pages` pages: first from the cursor's slab, then fresh slabs, then gaps of others."""
        if pages > self.available_pages(group):
            raise self._full(group, pages)
        taken = self._take_gaps(group, cursor.slab, pages)
        fresh = self._take_fresh(group, pages - len(taken), cursor)
        more: list[int] = []
        while len(taken) + len(fresh) + len(more) < pages:
            cursor.slab = next(iter(self._gaps[group]))
            more += self._take_gaps(group, cursor.slab, pages - len(taken) - len(fresh) - len(more))
        self.used_pages[group] += pages
        if len(fresh) == pages:
            return fresh
        return np.concatenate([np.array(taken, dtype=np.int32), fresh, np.array(more, dtype=np.int32)])

    def take_packed(self, group: int, pages: int) -> Offsets:
        """`take`, with the gaps of others first and no more fresh slabs than there have to be."""
        taken: list[int] = []
        for slab in list(self._gaps[group]):
            if len(taken) == pages:
                break
            taken += self._take_gaps(group, slab, pages - len(taken))
        fresh = self._take_fresh(group, pages - len(taken), Cursor())
        self.used_pages[group] += pages
        return np.concatenate([np.array(taken, dtype=np.int32), fresh])

    def take_block(self, group: int, pages: int, cursor: Cursor, tag: int = 0) -> list[int]:
        """`take` for the pages of one block, without arrays: this is what a decoding sequence does.

        They are tagged with `tag` and the numbers after it.
        """
        gaps = self._gaps[group]
        free_pages = gaps.get(cursor.slab)
        if free_pages is None or len(free_pages) < pages:
            if pages > self.available_pages(group):
                raise self._full(group, pages)
            if free_pages is None:
                free_pages = self._open_slab(group, cursor)
        taken: list[int] = []
        while True:
            slab, count = cursor.slab, min(pages - len(taken), len(free_pages))
            for _ in range(count):
                index = free_pages.pop()
                self._tags[slab, index] = tag + len(taken)
                taken.append(slab * self._slab_units + index * self.page_units[group])
            if not free_pages:
                del gaps[slab]
            self._used[slab] += count
            if len(taken) == pages:
                break
            free_pages = self._open_slab(group, cursor)
        self.used_pages[group] += pages
        return taken

    def _open_slab(self, group: int, cursor: Cursor) -> list[int]:
        """Let the cursor go on in a free slab, or else in one with gaps; returns that slab's free pages."""
        gaps = self._gaps[group]
        if not self._free_slabs:
            cursor.slab = next(iter(gaps))
            return gaps[cursor.slab]
        slab = cursor.slab = self._free_slabs.pop()
        self._owner[slab] = group
        self.held_slabs[group] += 1
        gaps[slab] = list(range(self.pages_per_slab[group] - 1, -1, -1))
        return gaps[slab]

    def _full(self, group: int, pages: int) -> ArenaFull:
        name, available = self.layout.groups[group].name, self.available_pages(group)
        return ArenaFull(f"{pages} pages of {name} asked, {available} available")

    def tag(self, group: int, offsets: Offsets, tags: NDArray[np.int64]) -> None:
        """Write a number on each of these pages. It stays with the page when `compact` moves it."""
        self._tags[self._places(group, offsets)] = tags

    def tag_of_one(self, group: int, offset: int) -> int:
        slab, within = divmod(offset, self._slab_units)
        return int(self._tags[slab, within // self.page_units[group]])

    def tags(self, group: int, offsets: Offsets) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._tags[self._places(group, offsets)]
        return found

    def _places(self, group: int, offsets: Offsets) -> tuple[NDArray[np.int32], NDArray[np.int32] | int]:
        """The slab of each of these pages, and which of its pages it is."""
        slabs = offsets // self._slab_units
        if self.pages_per_slab[group] == 1:
            return slabs, 0
        return slabs, (offsets - slabs * self._slab_units) // self.page_units[group]

    def free(self, group: int, offsets: Offsets) -> None:
        """Give pages back. Each must be a taken page of this group."""
        if len(offsets) < 2:
            for offset in offsets.tolist():
                self._free_one(group, offset)
            return
        if self.pages_per_slab[group] == 1:
            self._free_slabs_of(group, offsets // self._slab_units)
            return
        units, slab_units = self.page_units[group], self._slab_units
        freed: dict[int, list[int]] = {}
        for offset in offsets.tolist():
            slab = offset // slab_units
            index = (offset - slab * slab_units) // units
            if slab in freed:
                freed[slab].append(index)
            else:
                freed[slab] = [index]
        used = {slab: int(self._used[slab]) - len(indexes) for slab, indexes in freed.items()}
        if min(used.values()) < 0 or any(self._owner[slab] != group for slab in freed):
            raise ValueError(f"freeing pages that {self.layout.groups[group].name} does not hold")
        self.used_pages[group] -= len(offsets)
        gaps = self._gaps[group]
        for slab, indexes in freed.items():
            self._used[slab] = used[slab]
            if used[slab]:
                gaps.setdefault(slab, []).extend(indexes)
        emptied = sorted(slab for slab, left in used.items() if not left)
        self.held_slabs[group] -= len(emptied)
        for slab in emptied:
            self._owner[slab] = FREE
            gaps.pop(slab, None)
        self._free_slabs += emptied

    def _free_slabs_of(self, group: int, slabs: NDArray[np.int32]) -> None:
        """`free` for a group whose pages fill a slab each: none of them has gaps."""
        freed = sorted(slabs.tolist())
        if len(set(freed)) < len(freed):
            raise ValueError(f"freeing a page of {self.layout.groups[group].name} twice")
        if np.count_nonzero(self._owner[slabs] != group):
            raise ValueError(f"freeing pages that {self.layout.groups[group].name} does not hold")
        self._used[slabs] = 0
        self._owner[slabs] = FREE
        self.used_pages[group] -= len(freed)
        self.held_slabs[group] -= len(freed)
        self._free_slabs += freed

    def _free_one(self, group: int, offset: int) -> None:
        """`free` for a single page, without arrays."""
        slab, within = divmod(offset, self._slab_units)
        left = int(self._used[slab]) - 1
        if self._owner[slab] != group or left < 0:
            raise ValueError(f"freeing pages that {self.layout.groups[group].name} does not hold")
        self._used[slab] = left
        self.used_pages[group] -= 1
        gaps = self._gaps[group]
        if left:
            gaps.setdefault(slab, []).append(within // self.page_units[group])
            return
        self._owner[slab] = FREE
        self.held_slabs[group] -= 1
        gaps.pop(slab, None)
        self._free_slabs.append(slab)

    def compact(self, group: int, pinned: Set[int] = frozenset()) -> list[Move]:
        """Empty the group's least used slab into the gaps of its others. [] when nothing can be won.

        The pages are moved in the books at once: the caller copies them in order and rewrites its tables. No page of a
        `pinned` slab is moved.
        """
        gaps = self._gaps[group]
        if self.gap_pages(group) < self.pages_per_slab[group] or gaps.keys() <= pinned:
            return []
        slabs, free_pages = list(gaps), list(map(len, gaps.values()))
        at = max((i for i, slab in enumerate(slabs) if slab not in pinned), key=free_pages.__getitem__)
        victim = slabs[at]
        free_indexes = set(gaps.pop(victim))  # gone from the gaps, so that no target lies in the slab being emptied
        kept = [i for i in range(self.pages_per_slab[group]) if i not in free_indexes]
        targets: list[int] = []
        # The fullest first: as few slabs as possible are left partly filled, and shared between takers.
        for i in sorted(range(len(slabs)), key=free_pages.__getitem__):
            if len(targets) == len(kept):
                break
            if i != at:
                targets += self._take_gaps(group, slabs[i], len(kept) - len(targets))
        start, units = victim * self._slab_units, self.page_units[group]
        for i, target in zip(kept, targets, strict=True):
            slab, within = divmod(target, self._slab_units)
            self._tags[slab, within // units] = self._tags[victim, i]
        self._used[victim] = 0
        self._owner[victim] = FREE
        self.held_slabs[group] -= 1
        self._free_slabs.append(victim)
        return [Move(group, start + i * units, target) for i, target in zip(kept, targets, strict=True)]

    def _take_gaps(self, group: int, slab: int, most: int) -> list[int]:
        """Up to `most` pages from the gaps of one partly filled slab of this group."""
        gaps = self._gaps[group].get(slab)
        if gaps is None or most == 0:
            return []
        start, units = slab * self._slab_units, self.page_units[group]
        taken = [start + gaps.pop() * units for _ in range(min(most, len(gaps)))]
        if not gaps:
            del self._gaps[group][slab]
        self._used[slab] += len(taken)
        return taken

    def _take_fresh(self, group: int, pages: int, cursor: Cursor) -> Offsets:
        """Up to `pages` pages from free slabs; the last one may stay partly filled."""
        per_slab = self.pages_per_slab[group]
        count = min(len(self._free_slabs), -(-pages // per_slab))
        if count == 0:
            return np.empty(0, dtype=np.int32)
        slabs = np.array(self._free_slabs[-count:][::-1], dtype=np.int32)
        del self._free_slabs[-count:]
        self._owner[slabs] = group
        self._used[slabs] = per_slab
        self.held_slabs[group] += count
        offsets = (slabs[:, None] * self._slab_units + self._page_starts[group]).reshape(-1)
        last = int(slabs[-1])
        cursor.slab = last
        excess = count * per_slab - pages
        if excess > 0:
            self._used[last] -= excess
            # Reversed, so that popping hands pages out in ascending order.
            self._gaps[group][last] = list(range(per_slab - 1, per_slab - 1 - excess, -1))
            offsets = offsets[:pages]
        return offsets

    # -- truth ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slab is accounted for exactly once."""
        free = set(self._free_slabs)
        assert len(free) == len(self._free_slabs), "a slab is free twice"
        assert {int(s) for s in np.flatnonzero(self._owner == FREE)} == free, "owners and the free list disagree"
        for group, gaps in enumerate(self._gaps):
            held = np.flatnonzero(self._owner == group)
            per_slab = self.pages_per_slab[group]
            assert len(held) == self.held_slabs[group]
            assert int(self._used[held].sum()) == self.used_pages[group]
            for slab in held.tolist():
                indexes = gaps.get(slab, [])
                assert len(set(indexes)) == len(indexes), f"slab {slab} has a gap twice"
                assert 0 < self._used[slab] == per_slab - len(indexes), f"slab {slab} miscounts its pages"
            assert set(gaps) <= set(held.tolist()), "gaps in a slab the group does not hold"
        booked = self.free_bytes + sum(
            self.used_bytes(g) + self.stranded_bytes(g) for g in range(len(self.layout.groups))
        )
        assert booked == self.total_bytes, "free + used + stranded bytes are not the arena"
