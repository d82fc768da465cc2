"""The KV manager: reservations, tables, sharing and release, on exact accounting.

The promise, kept after every operation:

    Σ over groups  ⌈(live pages + promised pages) / pages per slab⌉  ≤  slabs

*Live* pages are held by a running sequence; *promised* ones are what running sequences may still take. Pages held only
by restore points are cached: they are given up, or moved together, when a promise is called in. So `can_reserve` is
true exactly when the reservation succeeds, and a sequence inside its reservation never waits for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.arena import Arena, Cursor, Move, Offsets
from windowpane.kv.changes import ChangeLog, Changes, Place
from windowpane.kv.layout import Layout
from windowpane.kv.retention import State
from windowpane.kv.tables import NO_PAGE, Columns, PageTable

Demand = Sequence[int]  # pages per group

# When fewer slabs than this share are free, gaps beyond GAP_LIMIT of the arena are closed, some pages a step.
SCARCE = 0.1
GAP_LIMIT = 0.02
TIDY_PAGES_PER_STEP = 32


class ReservationError(Exception):
    """The pages asked for are not there. Ask `can_reserve` first."""


@dataclass(slots=True, eq=False)
class Retained:
    """Read-only pages kept so that a sequence can resume at `length` tokens: offsets per group, oldest block first."""

    length: int
    pages: list[NDArray[np.int32]]


@dataclass(slots=True)
class _Holders:
    """Who holds a read-only page: how many sequences and how many restore points."""

    slots: int
    retained: int


@dataclass(frozen=True, slots=True)
class GroupBytes:
    live: int
    cached: int
    stranded: int


class KVManager:
    """Memory of up to `num_slots` running sequences of up to `max_model_len` tokens in `num_slabs` slabs."""

    def __init__(
        self, layout: Layout, num_slabs: int, num_slots: int, max_model_len: int, rollback_tokens: int = 0
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.rollback_tokens = rollback_tokens
        self.arena = Arena(layout, num_slabs)
        self.tables = [PageTable(g, num_slots, max_model_len, rollback_tokens) for g in layout.groups]
        self.live_pages = [0] * len(layout.groups)
        self.promised_pages = [0] * len(layout.groups)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self.state_slot = np.zeros(num_slots, dtype=np.int8)  # which of the two states is the present one
        self.reserved_tokens = [0] * num_slots
        self.moved_pages = 0
        self._credits = [[0] * num_slots for _ in layout.groups]
        self._cursors = [[Cursor() for _ in range(num_slots)] for _ in layout.groups]
        self._cache_cursors = [Cursor() for _ in layout.groups]
        # Pages that a restore point keeps or that several sequences hold; all others have one owner that may write
        # them.
        self._shared: list[dict[int, _Holders]] = [{} for _ in layout.groups]
        self._retained: dict[int, Retained] = {}  # by id, least recently used first
        self._resuming: Retained | None = None
        # Shared pages that sequences slide past in the step being put together, by (group, slot, column).
        self._outgoing: dict[Place, list[int]] = {}
        self._log = ChangeLog(len(layout.groups))
        # Per slot, the groups whose table can still change: a full ring drops out until one of its pages is shared.
        self._open: list[list[int]] = [[] for _ in range(num_slots)]

    # -- asking ----------------------------------------------------------------------------------------------------

    def demand(self, tokens: int) -> list[int]:
        """Pages per group that a sequence of up to `tokens` tokens may own."""
        return [g.max_pages(tokens, self.rollback_tokens) for g in self.layout.groups]

    def can_reserve(self, demand: Demand) -> bool:
        """Whether these pages could be promised now, giving up cached pages and moving stranded ones if need be."""
        slabs = 0
        for live, promised, more, per_slab in zip(
            self.live_pages, self.promised_pages, demand, self.arena.pages_per_slab, strict=True
        ):
            slabs += -(-(live + promised + more) // per_slab)
        return slabs <= self.arena.num_slabs

    def could_ever_hold(self, tokens: int) -> bool:
        """Whether one sequence of this length fits an otherwise empty arena."""
        needed = zip(self.demand(tokens), self.arena.pages_per_slab, strict=True)
        return sum(-(-pages // per_slab) for pages, per_slab in needed) <= self.arena.num_slabs

    def horizon(self, slot: int) -> int:
        """The longest length this sequence reaches without `extend` or `renew`."""
        length = int(self.lengths[slot])
        return min([self.reserved_tokens[slot], *(self.tables[g].horizon(slot, length) for g in self._open[slot])])

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def start(self, slot: int, tokens: int, resume: Retained | None = None) -> None:
        """Reserve room for `tokens` tokens in an empty slot, resuming from a restore point if one is given."""
        if self.reserved_tokens[slot]:
            raise ValueError(f"slot {slot} is in use")
        demand = self.start_demand(tokens, resume)
        if not self.can_reserve(demand):
            raise ReservationError(f"{tokens} tokens need {demand} pages per group; promised and live leave too few")
        self.reserved_tokens[slot] = tokens
        self._resuming = resume  # its pages are being copied: not the time to give them up
        if resume is None:
            self._promise(slot, demand)
        else:
            self._adopt(slot, tokens, resume)
        for g, table in enumerate(self.tables):
            if not table.grows and not table.is_ring:
                self._fill(g, slot, np.flatnonzero(table.entries[slot, :, 0] < 0))
        if resume is not None:
            self._copy_states(slot, resume)
        self._resuming = None
        self._open[slot] = [g for g, table in enumerate(self.tables) if table.can_change(slot)]

    def start_demand(self, tokens: int, resume: Retained | None = None) -> list[int]:
        """Pages per group that `start` needs: new ones, and those of the restore point that are only cached."""
        demand = self.demand(tokens)
        if resume is not None:
            for g, table in enumerate(self.tables):
                if not table.is_ring:
                    demand[g] -= self._shared_columns(g, resume) * table.group.stripes
                demand[g] += sum(self._shared[g][o].slots == 0 for o in resume.pages[g].tolist())
        return demand

    def renew_demand(self, slot: int, tokens: int) -> list[int]:
        before, after = self.demand(self.reserved_tokens[slot]), self.demand(tokens)
        return [b - a for a, b in zip(before, after, strict=True)]

    def renew(self, slot: int, tokens: int) -> None:
        """Raise a reservation to `tokens` tokens."""
        demand = self.renew_demand(slot, tokens)
        if not self.can_reserve(demand):
            raise ReservationError(f"{demand} more pages per group are not there for slot {slot}")
        self._promise(slot, demand)
        self.reserved_tokens[slot] = tokens

    def extend(self, slot: int, length: int) -> None:
        """Give the sequence the pages that a step up to `length` tokens writes. Never fails inside the reservation."""
        old_length = int(self.lengths[slot])
        if not old_length <= length <= self.reserved_tokens[slot]:
            raise ValueError(
                f"slot {slot} holds {old_length} tokens and reserved {self.reserved_tokens[slot]}, not {length}"
            )
        if length == old_length + 1:
            self._extend_by_one(slot, old_length)
        else:
            for g in self._open[slot]:
                self._extend_group(g, slot, old_length, length)
        self.lengths[slot] = length

    def advance(self, slots: NDArray[np.int64]) -> None:
        """One more token for each of these sequences, all of them short of their horizon."""
        self.lengths[slots] += 1

    def flip_states(self, slots: NDArray[np.int64]) -> None:
        """A step wrote these sequences' other state: it is the present one from now on."""
        self.state_slot[slots] ^= 1

    def release(self, slot: int) -> None:
        """Return every byte of a sequence; pages that restore points keep become cached."""
        for g, table in enumerate(self.tables):
            offsets = table.page_offsets(slot).copy()
            self.promised_pages[g] -= self._credits[g][slot]
            self._credits[g][slot] = 0
            self._cursors[g][slot] = Cursor()
            table.clear(slot)
            self._drop_slot_pages(g, offsets)
        self.lengths[slot] = 0
        self.state_slot[slot] = 0
        self.reserved_tokens[slot] = 0

    def take_changes(self) -> Changes:
        """Close the step being put together. What it alone still reads is free for the steps after it."""
        self._tidy()
        changes = self._log.close(self.tables, self._outgoing)
        for (g, _, _), offsets in self._outgoing.items():
            self._drop_slot_pages(g, np.array(offsets, dtype=np.int32))
        self._outgoing.clear()
        return changes

    # -- sharing ---------------------------------------------------------------------------------------------------

    def retain(self, slot: int) -> Retained | None:
        """Keep a restore point at the sequence's present length; None where memory does not allow one.

        The sequence goes on: its full pages are shared in place, and its window pages become read-only, so it is
        promised new ones in their stead. The present state is copied.
        """
        length = int(self.lengths[slot])
        snapshots = [t.group.stripes if isinstance(t.group.retention, State) else 0 for t in self.tables]
        replacements = [
            sum(o not in self._shared[g] for o in self._held_pages(g, slot).tolist()) if table.is_ring else 0
            for g, table in enumerate(self.tables)
        ]
        if not self.can_reserve([r + s for r, s in zip(replacements, snapshots, strict=True)]):
            return None
        self._promise(slot, replacements)
        # Taking pages may move others, so states go first and everything else is read from the tables after that.
        states = {g: self._snapshot(g, slot) for g, count in enumerate(snapshots) if count}
        pages = [states[g] if g in states else self._held_pages(g, slot) for g in range(len(self.tables))]
        for g, table in enumerate(self.tables):
            if table.is_ring:
                table.pinned[slot] += replacements[g] // table.group.stripes
            for offset in pages[g].tolist():
                self._shared[g].setdefault(offset, _Holders(0 if g in states else 1, 0)).retained += 1
        self._open[slot] = [g for g, table in enumerate(self.tables) if table.can_change(slot)]
        kept = Retained(length, pages)
        self._retained[id(kept)] = kept
        return kept

    def drop(self, kept: Retained) -> None:
        """Forget a restore point; pages that nobody else holds are free again."""
        del self._retained[id(kept)]
        for g, offsets in enumerate(kept.pages):
            freed = []
            for offset in offsets.tolist():
                holders = self._shared[g][offset]
                holders.retained -= 1
                if holders.retained == holders.slots == 0:
                    del self._shared[g][offset]
                    freed.append(offset)
            self.arena.free(g, np.array(freed, dtype=np.int32))

    def touch(self, kept: Retained) -> None:
        """Mark a restore point as used just now: the least recently used is given up first."""
        self._retained[id(kept)] = self._retained.pop(id(kept))

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def retained(self) -> list[Retained]:
        return list(self._retained.values())

    def group_bytes(self, group: int) -> GroupBytes:
        page_bytes = self.layout.groups[group].page_bytes
        live = self.live_pages[group] * page_bytes
        return GroupBytes(live, self.arena.used_bytes(group) - live, self.arena.stranded_bytes(group))

    @property
    def free_bytes(self) -> int:
        """Bytes usable by any group, promised ones included."""
        return self.arena.free_bytes

    def owned_pages(self, slot: int, group: int) -> int:
        """Pages of a sequence that no restore point holds."""
        shared = self._shared[group]
        return sum(int(o) not in shared for o in self.tables[group].page_offsets(slot))

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, books and arena agree. Idle means nothing live and nothing promised."""
        self.arena.check_integrity()
        assert self.can_reserve([0] * len(self.tables)), "more is promised than the arena holds"
        for g, table in enumerate(self.tables):
            held: dict[int, int] = {}
            for slot in range(self.num_slots):
                offsets = table.page_offsets(slot).tolist()
                offsets += [o for at, out in self._outgoing.items() if at[:2] == (g, slot) for o in out]
                assert self.reserved_tokens[slot] or not offsets, f"empty slot {slot} holds pages"
                assert len(set(offsets)) == len(offsets), f"slot {slot} holds a page twice"
                for offset in offsets:
                    held[offset] = held.get(offset, 0) + 1
            kept: dict[int, int] = {}
            for r in self._retained.values():
                for offset in r.pages[g].tolist():
                    kept[offset] = kept.get(offset, 0) + 1
            shared = self._shared[g]
            assert all(h.slots == held.get(o, 0) and h.retained == kept.get(o, 0) for o, h in shared.items())
            assert kept.keys() <= shared.keys(), "a kept page could be written"
            assert all(count == 1 or o in shared for o, count in held.items()), "two sequences may write one page"
            assert len(held) == self.live_pages[g], "live pages are miscounted"
            assert len(held.keys() | kept.keys()) == self.arena.used_pages[g], "the arena holds pages of nobody"
            assert sum(self._credits[g]) == self.promised_pages[g] >= 0
            assert min(self._credits[g], default=0) >= 0, "a sequence took more than it reserved"
            for slot in range(self.num_slots):
                pinned = sum(int(o) in shared for o in table.entries[slot, :, 0]) if table.is_ring else 0
                assert pinned == table.pinned[slot], f"slot {slot} miscounts the pages it pins"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _promise(self, slot: int, demand: Demand) -> None:
        for g, pages in enumerate(demand):
            self.promised_pages[g] += pages
            self._credits[g][slot] += pages

    def _extend_by_one(self, slot: int, position: int) -> None:
        """What a decoding sequence does at a page boundary, without arrays."""
        saturated = False
        for g in self._open[slot]:
            table = self.tables[g]
            if table.pinned[slot]:
                self._extend_group(g, slot, position, position + 1)
            elif (column := table.column_without_page(slot, position)) is not None:
                self._fill_one(g, slot, column)
                saturated = saturated or not table.can_change(slot)
        if saturated:
            self._open[slot] = [g for g in self._open[slot] if self.tables[g].can_change(slot)]

    def _extend_group(self, g: int, slot: int, old_length: int, length: int) -> None:
        table = self.tables[g]
        replaced: list[int] = []
        if table.pinned[slot]:
            replaced = self._let_go(g, slot, table.fresh_columns(old_length, length))
        missing = table.missing(slot, old_length, length)
        if len(missing):
            self._fill(g, slot, missing, replaced)

    def _fill(self, g: int, slot: int, columns: Columns, replaced: Sequence[int] = ()) -> None:
        """Take the promised pages of these columns. This step still reads the `replaced` ones under their old page."""
        table = self.tables[g]
        pages = len(columns) * table.group.stripes
        self._spend(g, slot, pages)
        offsets = self._take(g, pages, self._cursors[g][slot])
        table.put(slot, columns, offsets)
        self.arena.tag(g, offsets, table.places(slot, columns))
        if replaced:
            late = np.isin(columns, replaced)
            self._log.entries(g, slot, columns[late], late=True)
            columns = columns[~late]
        self._log.entries(g, slot, columns)

    def _fill_one(self, g: int, slot: int, column: int) -> None:
        table = self.tables[g]
        if table.group.stripes > 1:
            self._fill(g, slot, np.array([column]))
            return
        self._spend(g, slot, 1)
        cursor = self._cursors[g][slot]
        while not self.arena.available_pages(g):
            self._make_room()
        offset = self.arena.take_one(g, cursor)
        table.entries[slot, column, 0] = offset
        self.arena.tag_one(g, offset, slot * table.columns + column)
        table.filled[slot] += 1
        self._log.entry(g, slot, column)

    def _spend(self, g: int, slot: int, pages: int) -> None:
        """Turn promised pages into live ones."""
        if self._credits[g][slot] < pages:
            name = self.layout.groups[g].name
            raise ReservationError(f"slot {slot} takes {pages} pages of {name} beyond its reservation")
        self._credits[g][slot] -= pages
        self.promised_pages[g] -= pages
        self.live_pages[g] += pages

    def _take(self, g: int, pages: int, cursor: Cursor) -> Offsets:
        while self.arena.available_pages(g) < pages:
            self._make_room()
        # Rather than scatter over the gaps of many others, which would pin all their slabs, win slabs for these pages.
        while self.arena.free_slabs * self.arena.pages_per_slab[g] < pages and self._compact_any():
            pass
        return self.arena.take(g, pages, cursor)

    def _make_room(self) -> None:
        """Win one slab, or at least one page: move stranded pages together, else give up the oldest restore point."""
        if self._compact_any():
            return
        for kept in self._retained.values():
            if kept is not self._resuming and self._frees_something(kept):
                self.drop(kept)
                return
        raise AssertionError("a promised page is not there: the accounting is broken")

    def _compact_any(self) -> int:
        """Win one slab from the group with the most gaps that has one to win; returns the pages moved."""
        groups = range(len(self.tables))
        for g in sorted(groups, key=self.arena.gap_bytes, reverse=True):
            moves = self.arena.compact(g)
            if moves:
                self._apply_moves(g, moves)
                return len(moves)
        return 0

    def _frees_something(self, kept: Retained) -> bool:
        return any(
            (holders := self._shared[g][o]).slots == 0 and holders.retained == 1
            for g, offsets in enumerate(kept.pages)
            for o in offsets.tolist()
        )

    def _tidy(self) -> None:
        """Close gaps while slabs are scarce, a few pages a step: that costs next to nothing and keeps waste small."""
        arena = self.arena
        moved = 0
        while arena.free_slabs < SCARCE * arena.num_slabs and moved < TIDY_PAGES_PER_STEP:
            gap_bytes = sum(arena.gap_bytes(g) for g in range(len(self.tables)))
            if gap_bytes <= GAP_LIMIT * arena.total_bytes:
                return
            won = self._compact_any()
            if not won:
                return
            moved += won

    def _apply_moves(self, g: int, moves: list[Move]) -> None:
        self.moved_pages += len(moves)
        self._log.copies += moves
        table, shared = self.tables[g], self._shared[g]
        own = [m for m in moves if m.source not in shared]
        places = self.arena.tags(g, np.array([m.target for m in own], dtype=np.int32))
        for move, place in zip(own, places.tolist(), strict=True):
            self._log.entry(g, *table.place_page(place, move.target))
        if len(own) < len(moves):
            self._rename_shared(g, {m.source: m.target for m in moves if m.source in shared})

    def _rename_shared(self, g: int, renamed: dict[int, int]) -> None:
        """Rewrite moved pages that several hold, wherever they stand."""
        sources, targets = (np.fromiter(o, dtype=np.int32) for o in (renamed.keys(), renamed.values()))
        for slot, columns in self.tables[g].rewrite(sources, targets):
            self._log.entries(g, slot, columns)
        shared = self._shared[g]
        for source, target in renamed.items():
            shared[target] = shared.pop(source)
        for kept in self._retained.values():
            kept.pages[g] = np.array([renamed.get(o, o) for o in kept.pages[g].tolist()], dtype=np.int32)
        for (group, slot, column), outgoing in self._outgoing.items():
            if group == g and not renamed.keys().isdisjoint(outgoing):
                outgoing[:] = [renamed.get(o, o) for o in outgoing]
                self._log.moved_read((g, slot, column))

    def _let_go(self, g: int, slot: int, columns: Columns) -> list[int]:
        """Empty the columns whose shared pages this step slides past; the pages stay until the step is behind us."""
        table = self.tables[g]
        emptied = []
        for column in columns.tolist():
            offsets = table.entries[slot, column].tolist()
            if offsets[0] in self._shared[g]:
                self._outgoing[g, slot, column] = offsets
                table.entries[slot, column] = NO_PAGE
                table.filled[slot] -= 1
                table.pinned[slot] -= 1
                emptied.append(column)
        return emptied

    def _drop_slot_pages(self, g: int, offsets: Offsets) -> None:
        """One sequence lets go of these pages: free them, or leave them to the restore points that keep them."""
        shared = self._shared[g]
        if shared:
            mine = []
            for offset in offsets.tolist():
                holders = shared.get(offset)
                if holders is None:
                    mine.append(offset)
                    continue
                holders.slots -= 1
                if holders.slots == 0:
                    if holders.retained == 0:
                        del shared[offset]
                        mine.append(offset)
                    else:
                        self.live_pages[g] -= 1
            offsets = np.array(mine, dtype=np.int32)
        self.live_pages[g] -= len(offsets)
        self.arena.free(g, offsets)

    def _held_pages(self, g: int, slot: int) -> NDArray[np.int32]:
        """What the sequence can still be asked for, oldest block first (nothing for State)."""
        table = self.tables[g]
        held: NDArray[np.int32] = table.entries[slot, table.held_columns(int(self.lengths[slot]))]
        return held.reshape(-1).copy()

    def _shared_columns(self, g: int, kept: Retained) -> int:
        """Columns that a resuming sequence shares: all but a partly filled last one, and no state."""
        table = self.tables[g]
        if isinstance(table.group.retention, State):
            return 0
        columns = len(kept.pages[g]) // table.group.stripes
        partly = (table.grows or table.is_ring) and kept.length % table.block_tokens != 0
        return columns - 1 if partly and columns else columns

    def _adopt(self, slot: int, tokens: int, kept: Retained) -> None:
        """Fill an empty slot from a restore point, copying what it would write into."""
        self.lengths[slot] = kept.length
        demand = self.demand(tokens)
        for g, table in enumerate(self.tables):
            count, stripes = self._shared_columns(g, kept), table.group.stripes
            columns = table.held_columns(kept.length)
            shared = kept.pages[g][: count * stripes]
            for offset in shared.tolist():
                holders = self._shared[g][offset]
                self.live_pages[g] += holders.slots == 0
                holders.slots += 1
            if count:
                table.put(slot, columns[:count], shared)
                self._log.entries(g, slot, columns[:count])
            if table.is_ring:
                table.pinned[slot] = count
            else:
                demand[g] -= len(shared)
        self._promise(slot, demand)
        for g, table in enumerate(self.tables):
            partly = table.held_columns(kept.length)[self._shared_columns(g, kept) :]
            if len(partly):
                self._fill(g, slot, partly)
                self._copy(g, kept.pages[g][-table.group.stripes :], table.entries[slot, partly[0]])

    def _snapshot(self, g: int, slot: int) -> NDArray[np.int32]:
        """Copy the present state into pages of its own."""
        table = self.tables[g]
        offsets = self._take(g, table.group.stripes, self._cache_cursors[g])
        self._copy(g, table.entries[slot, self.state_slot[slot]], offsets)
        return offsets

    def _copy_states(self, slot: int, kept: Retained) -> None:
        for g, table in enumerate(self.tables):
            if isinstance(table.group.retention, State):
                self._copy(g, kept.pages[g], table.entries[slot, 0])

    def _copy(self, g: int, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        self._log.copy(g, sources.tolist(), targets.tolist())
