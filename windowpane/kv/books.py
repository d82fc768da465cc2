"""The books: which page is live, promised, shared or cached, and how room is made when a promise is called in.

*Live* pages are held by a running sequence; *promised* ones are what running sequences may still take. Pages held only
by restore points are cached: they are given up, or moved together, when a promise is called in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from windowpane.kv.arena import Arena, ArenaFull, Cursor, Move, Offsets
from windowpane.kv.changes import ChangeLog, Place
from windowpane.kv.layout import Layout
from windowpane.kv.sharing import Ids, RestorePoint, SharedPages
from windowpane.kv.tables import Columns, PageTable

# When fewer slabs than this share are free, gaps beyond GAP_LIMIT of the arena are closed, some pages a step.
SCARCE = 0.1
GAP_LIMIT = 0.02
TIDY_PAGES_PER_STEP = 32
FEW = 4  # pages, for which a loop takes less time than array operations
CANDIDATES = 32  # least recently used restore points that are weighed when one has to go


class ReservationError(Exception):
    """The pages asked for are not there. Ask `can_reserve` first."""


@dataclass(frozen=True, slots=True)
class GroupBytes:
    live: int
    cached: int
    stranded: int


class Books:
    """Pages of all groups and who may have them. They give up restore points and, if they may, move pages together;
    lengths are not theirs.
    """

    def __init__(
        self,
        layout: Layout,
        num_slabs: int,
        num_slots: int,
        max_model_len: int,
        rollback_tokens: int,
        *,
        moves_pages: bool = True,
    ) -> None:
        groups = range(len(layout.groups))
        self.layout = layout
        self.arena = Arena(layout, num_slabs)
        self.tables = [PageTable(g, num_slots, max_model_len, rollback_tokens) for g in layout.groups]
        self.live_pages = [0 for _ in groups]
        self.promised_pages = [0 for _ in groups]
        self.credits = [[0] * num_slots for _ in groups]  # promised pages by sequence
        self.cursors = [[Cursor() for _ in range(num_slots)] for _ in groups]
        self.cache_cursors = [Cursor() for _ in groups]
        self.shared = [SharedPages(g, self.arena) for g in groups]
        self.points: dict[RestorePoint, None] = {}  # least recently used first
        self._freeable_bytes: list[int] = []  # by number of restore point: what giving it up would free
        self._free_numbers: list[int] = []
        self._next_victims: list[RestorePoint] = []  # weighed in this step, the next to go last
        # Shared pages that sequences slide past in the step being put together, by (group, slot, column).
        self.outgoing: dict[Place, Ids] = {}
        # Ring columns whose page moved in that step: the device's tables do not have the new offset yet.
        self.moved_columns: set[Place] = set()
        self.transit: dict[int, list[Ids]] = {}  # shared pages by group that a transfer holds, by its number
        self._moves_pages = moves_pages
        self.log = ChangeLog(len(layout.groups))
        self.moved_pages = 0
        self.evictions = 0
        self.clock = 0  # uses of restore points so far
        # Whoever decides which restore points to keep says what each is worth, in tokens, and hears when one goes.
        self.worth: Callable[[RestorePoint], float] = lambda point: point.length
        self.on_drop: Callable[[RestorePoint], None] = lambda point: None

    def group_bytes(self, group: int) -> GroupBytes:
        live = self.live_pages[group] * self.layout.groups[group].page_bytes
        return GroupBytes(live, self.arena.used_bytes(group) - live, self.arena.stranded_bytes(group))

    # -- promising -------------------------------------------------------------------------------------------------

    def can_reserve(self, demand: Sequence[int]) -> bool:
        slabs = 0
        for live, promised, more, per_slab in zip(
            self.live_pages, self.promised_pages, demand, self.arena.pages_per_slab, strict=True
        ):
            slabs += -(-(live + promised + more) // per_slab)
        return slabs <= self.arena.num_slabs

    def promise(self, slot: int, demand: Sequence[int]) -> None:
        for g, pages in enumerate(demand):
            self.promised_pages[g] += pages
            self.credits[g][slot] += pages

    def spend(self, g: int, slot: int, pages: int) -> None:
        """Turn promised pages into live ones."""
        if self.credits[g][slot] < pages:
            name = self.layout.groups[g].name
            raise ReservationError(f"slot {slot} takes {pages} pages of {name} beyond its reservation")
        self.credits[g][slot] -= pages
        self.promised_pages[g] -= pages
        self.live_pages[g] += pages

    def take_back(self, g: int, slot: int, offsets: Offsets) -> None:
        """Turn live pages that only this sequence holds into promised ones again."""
        pages = len(offsets)
        self.live_pages[g] -= pages
        self.promised_pages[g] += pages
        self.credits[g][slot] += pages
        self.arena.free(g, offsets)

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(self, g: int, pages: int, cursor: Cursor) -> Offsets:
        while self.arena.available_pages(g) < pages:
            self.make_room()
        # Rather than scatter over the gaps of many others, which would pin all their slabs, win slabs for these pages.
        while self.arena.free_slabs * self.arena.pages_per_slab[g] < pages and self._compact_any():
            pass
        return self.arena.take(g, pages, cursor)

    def fill(self, g: int, slot: int, columns: Columns, replaced: Sequence[int] = ()) -> None:
        """Take the promised pages of these columns. `replaced` are those whose old page this step still reads."""
        table = self.tables[g]
        pages = len(columns) * table.group.stripes
        self.spend(g, slot, pages)
        offsets = self.take(g, pages, self.cursors[g][slot])
        table.put(slot, columns, offsets)
        self.arena.tag(g, offsets, table.places(slot, columns))
        if replaced:
            late = np.array([column in replaced for column in columns.tolist()])  # a few: np.isin takes 100 µs
            self.log.entries(g, slot, columns[late], late=True)
            columns = columns[~late]
        self.log.entries(g, slot, columns)

    def fill_one(self, g: int, slot: int, column: int, *, late: bool = False, wins_slab: bool = False) -> None:
        """`fill` for one column, without arrays. `late`: this step still reads its old page. `wins_slab`: where no slab
        is free, pages are moved together before the gaps of others are filled.
        """
        table, arena = self.tables[g], self.arena
        pages = table.group.stripes
        self.spend(g, slot, pages)
        while wins_slab and not arena.free_slabs and self._compact_any():
            pass
        cursor, tag = self.cursors[g][slot], (slot * table.columns + column) * pages
        while True:
            try:
                offsets = arena.take_block(g, pages, cursor, tag)
                break
            except ArenaFull:
                self.make_room()
        for stripe, offset in enumerate(offsets):
            table.entries[slot, column, stripe] = offset
        table.filled[slot] += 1
        if late:
            self.log.entries(g, slot, np.array([column]), late=True)
        else:
            self.log.entry(g, slot, column)

    # -- holding and letting go ------------------------------------------------------------------------------------

    def hold(self, g: int, ids: Ids) -> None:
        """A sequence, or a step in flight, holds these shared pages."""
        shared = self.shared[g]
        holders = shared.slots[ids]
        shared.slots[ids] = holders + 1
        if len(unheld := ids[holders == 0]):
            self.live_pages[g] += len(unheld)
            self._count_freeable(g, unheld[shared.point_counts[unheld] == 1], -1)

    def send(self, number: int, pages: list[Ids]) -> None:
        """A transfer between tiers reads or writes these shared pages, by group, until it has landed."""
        self.transit[number] = pages
        for g, ids in enumerate(pages):
            self.hold(g, ids)

    def land(self, number: int) -> None:
        for g, ids in enumerate(self.transit.pop(number)):
            self.let_go(g, ids)

    def let_go(self, g: int, ids: Ids) -> None:
        """One holder less: a page that restore points keep becomes cached, any other is free."""
        if len(ids) <= FEW:
            self._let_go_few(g, ids.tolist())
            return
        shared = self.shared[g]
        holders = shared.slots[ids] - 1
        shared.slots[ids] = holders
        if len(unheld := ids[holders == 0]):
            self.live_pages[g] -= len(unheld)
            points = shared.point_counts[unheld]
            self._count_freeable(g, unheld[points == 1], 1)
            self._free_shared(g, unheld[points == 0])

    def _let_go_few(self, g: int, ids: list[int]) -> None:
        """`let_go` without arrays: what sequences that slide past shared pages do."""
        shared, free = self.shared[g], []
        for i in ids:
            holders = int(shared.slots[i]) - 1
            shared.slots[i] = holders
            if holders:
                continue
            self.live_pages[g] -= 1
            points = int(shared.point_counts[i])
            if points == 1:  # from now on giving up that restore point frees the page
                self._freeable_bytes[int(shared.point_numbers[i])] += self.layout.groups[g].page_bytes
            elif points == 0:
                free.append(i)
        if free:
            self._free_shared(g, np.array(free))

    def let_go_offsets(self, g: int, offsets: Offsets) -> None:
        """A sequence lets go of these pages, its own and shared ones."""
        if len(self.shared[g]):
            are_shared = self.shared[g].is_shared(offsets)
            if np.count_nonzero(are_shared):
                self.let_go(g, self.shared[g].ids(offsets[are_shared]))
                offsets = offsets[~are_shared]
        self.live_pages[g] -= len(offsets)
        self.arena.free(g, offsets)

    def let_outgoing_go(self) -> None:
        """The step that slides past shared pages was put together: they are free for later steps."""
        passed: dict[int, list[Ids]] = {}
        for (g, _, _), ids in self.outgoing.items():
            passed.setdefault(g, []).append(ids)
        for g, all_ids in passed.items():
            # One column's pages are all different.
            for once in (
                all_ids if len(all_ids) == 1 else _without_repeats([i for ids in all_ids for i in ids.tolist()])
            ):
                self.let_go(g, once)
        self.outgoing.clear()
        self.moved_columns.clear()

    def keep(self, point: RestorePoint) -> None:
        """A new restore point keeps its pages."""
        if not self._free_numbers:
            self._free_numbers.append(len(self._freeable_bytes))
            self._freeable_bytes.append(0)
        point.number = self._free_numbers.pop()
        for g, ids in enumerate(point.pages):
            shared = self.shared[g]
            points, holders = shared.point_counts[ids], shared.slots[ids]
            is_held = np.count_nonzero(holders) == len(ids)  # as a rule: its sequence still runs
            if not is_held:
                self._count_freeable(g, ids[(points == 1) & (holders == 0)], -1)  # another one keeps them too now
            shared.point_counts[ids] = points + 1
            shared.point_numbers[ids] ^= point.number
            if not is_held:
                self._count_freeable(g, ids[(points == 0) & (holders == 0)], 1)
        self.points[point] = None
        point.last_used = self.clock

    def touch(self, point: RestorePoint) -> None:
        self.clock += 1
        point.last_used = self.clock
        self._next_victims.clear()
        del self.points[point]
        self.points[point] = None

    def drop(self, point: RestorePoint) -> None:
        del self.points[point]
        for g, ids in enumerate(point.pages):
            if point.pending:
                self.let_go(g, ids)
            shared = self.shared[g]
            points, holders = shared.point_counts[ids] - 1, shared.slots[ids]
            shared.point_counts[ids] = points
            shared.point_numbers[ids] ^= point.number
            left = points + holders
            has_one = left == 1  # another restore point, or a sequence
            is_kept = points[has_one] == 1
            self._count_freeable(g, ids[has_one][is_kept], 1)
            self._free_shared(g, ids[left == 0])
            if self.tables[g].is_ring:
                self._give_back(g, ids[has_one][~is_kept])
        self._freeable_bytes[point.number] = 0
        self._free_numbers.append(point.number)
        self.on_drop(point)

    def _count_freeable(self, g: int, ids: Ids, sign: int) -> None:
        """One restore point keeps each of these pages and nobody holds it: giving that point up frees more, or less."""
        if len(ids):
            page_bytes, freeable_bytes = sign * self.layout.groups[g].page_bytes, self._freeable_bytes
            for number in self.shared[g].point_numbers[ids].tolist():
                freeable_bytes[number] += page_bytes

    def _free_shared(self, g: int, ids: Ids) -> None:
        if len(ids):
            self.arena.free(g, self.shared[g].offsets[ids])
            self.shared[g].forget(ids)

    def _give_back(self, g: int, ids: Ids) -> None:
        """Let the one sequence that still holds these window pages overwrite them, in place of promised pages."""
        if not len(ids):
            return
        table, shared = self.tables[g], self.shared[g]
        for slot in range(len(table.filled)):
            if not table.pinned[slot]:
                continue
            columns = np.flatnonzero(np.isin(table.entries[slot, :, 0], shared.offsets[ids]))
            if len(columns):
                offsets = table.entries[slot, columns].reshape(-1)
                shared.forget(shared.ids(offsets))
                self.arena.tag(g, offsets, table.places(slot, columns))
                table.pinned[slot] -= len(columns)
                self.credits[g][slot] -= len(offsets)
                self.promised_pages[g] -= len(offsets)

    # -- making room -----------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Win one slab, or at least one page: move stranded pages together, else give up a restore point, else move
        what is on its way too.
        """
        if self._compact_any():
            return
        victim = self.victim()
        if victim is not None:
            self.evictions += 1
            self.drop(victim)
        elif not self._compact_any(in_transit_too=True):
            raise AssertionError("a promised page is not there: the accounting is broken")

    def give_way(self, demand: Sequence[int]) -> bool:
        """Give up restore points whose pages running sequences pin, until `demand` can be reserved.

        A sequence whose window page a restore point pins was promised another page in its place; giving the point up
        returns that promise. Where giving up all of them would not be enough, none is given up and the answer is False.
        """
        pinned = [self._pinned_by_one(g) for g in range(len(self.tables))]
        if not self.can_reserve([d - p for d, p in zip(demand, pinned, strict=True)]):
            return False
        for point in list(self.points):
            if self.can_reserve(demand):
                break
            if not point.pending and self._pins(point):
                self.evictions += 1
                self.drop(point)
        return self.can_reserve(demand)

    def _pinned_by_one(self, g: int) -> int:
        """Window pages that one running sequence would have to itself if restore points were given up."""
        if not self.tables[g].is_ring:
            return 0
        shared = self.shared[g]
        pinned = (shared.slots == 1) & (shared.point_counts > 0)
        for point in self.points:
            if point.pending:
                pinned[point.pages[g]] = False
        for pages in self.transit.values():
            pinned[pages[g]] = False
        for place, ids in self.outgoing.items():
            if place[0] == g:
                pinned[ids] = False
        return int(np.count_nonzero(pinned))

    def _pins(self, point: RestorePoint) -> bool:
        """Whether this restore point keeps a window page that exactly one running sequence holds."""
        for g, table in enumerate(self.tables):
            shared, ids = self.shared[g], point.pages[g]
            if table.is_ring and ((shared.slots[ids] == 1) & (shared.point_counts[ids] >= 1)).any():
                return True
        return False

    def victim(self) -> RestorePoint | None:
        """The restore point that saves the fewest recomputed tokens per byte that giving it up would free.

        What was used long ago counts for less. None: no restore point has a page that is not in use.
        """
        while self._next_victims:
            point = self._next_victims[-1]
            if point in self.points and not point.pending and self._freeable_bytes[point.number]:
                return point
            self._next_victims.pop()
        freeable_bytes = self._freeable_bytes
        freeable = (point for point in self.points if freeable_bytes[point.number] and not point.pending)
        weighed = sorted(islice(freeable, CANDIDATES), key=lambda p: self._score(p, freeable_bytes[p.number]))
        if weighed:
            self._next_victims = weighed[CANDIDATES // 4 - 1 :: -1]
            return weighed[0]
        # Several restore points keep each cached page: giving up one frees nothing yet, giving up all of them does.
        return next((point for point in self.points if not point.pending and self._has_cached_page(point)), None)

    def score(self, point: RestorePoint) -> float | None:
        """Tokens saved per byte and age; None where giving it up frees nothing."""
        freeable_bytes = self._freeable_bytes[point.number]
        return self._score(point, freeable_bytes) if freeable_bytes else None

    def freeable_bytes(self, points: Iterable[RestorePoint]) -> int:
        """What giving up each of these alone would free, added up."""
        return sum(self._freeable_bytes[point.number] for point in points)

    def _score(self, point: RestorePoint, freeable_bytes: int) -> float:
        return self.worth(point) / freeable_bytes / (1 + self.clock - point.last_used)

    def _has_cached_page(self, point: RestorePoint) -> bool:
        return any((self.shared[g].slots[ids] == 0).any() for g, ids in enumerate(point.pages))

    def _compact_any(self, *, in_transit_too: bool = False) -> int:
        """Win one slab from the group with the most gaps that has one to win; returns the pages moved.

        A step that moves pages on their way between tiers has to wait for them, so they stay where they are unless
        asked for.
        """
        if not self._moves_pages:
            return 0
        arena = self.arena
        candidates = [g for g, per_slab in enumerate(arena.pages_per_slab) if arena.gap_pages(g) >= per_slab]
        for g in sorted(candidates, key=arena.gap_bytes, reverse=True):
            offsets = [self.shared[g].offsets[pages[g]] for pages in self.transit.values() if not in_transit_too]
            pinned = arena.slabs_of(np.concatenate(offsets)) if offsets else frozenset()
            moves = arena.compact(g, pinned)
            if moves:
                self.apply_moves(g, moves)
                return len(moves)
        return 0

    def tidy(self) -> None:
        """Close gaps while slabs are scarce, a few pages a step: that costs next to nothing and keeps waste small."""
        self._next_victims.clear()
        arena = self.arena
        moved = 0
        while arena.free_slabs < SCARCE * arena.num_slabs and moved < TIDY_PAGES_PER_STEP:
            gap_bytes = sum(map(arena.gap_bytes, range(len(self.tables))))
            if gap_bytes <= GAP_LIMIT * arena.total_bytes:
                return
            won = self._compact_any()
            if not won:
                return
            moved += won

    def apply_moves(self, g: int, moves: list[Move]) -> None:
        """Rewrite whatever names the moved pages; each target carries the tag of its source."""
        self.moved_pages += len(moves)
        self.log.copies += moves
        table = self.tables[g]
        shared: dict[int, Move] = {}
        for move in moves:
            place = self.arena.tag_of_one(g, move.target)
            if place >= 0:
                slot, column = table.place_page(place, move.target)
                self._log_moved(g, slot, column)
            else:
                shared[-1 - place] = move
        if shared:
            self._move_shared(g, shared)

    def _move_shared(self, g: int, moves: dict[int, Move]) -> None:
        """Rewrite what names these shared pages, by id."""
        shared = self.shared[g]
        held = {}  # the others stand in no table: only restore points keep them
        for i, move in moves.items():
            shared.offsets[i] = move.target
            if shared.slots[i]:
                held[move.source] = move.target
        if not held:
            return
        for slot, column in self.tables[g].rewrite(held):
            self._log_moved(g, slot, column)
        if any(not moves.keys().isdisjoint(pages[g].tolist()) for pages in self.transit.values()):
            self.log.settle()
        for place, outgoing in self.outgoing.items():
            if place[0] == g and not moves.keys().isdisjoint(outgoing.tolist()):
                self.log.moved_read(place)

    def _log_moved(self, g: int, slot: int, column: int) -> None:
        """Log that the page in this column has moved.

        Where this step still reads the column's earlier page, tables for reading take the new one over after the step.
        """
        place = (g, slot, column)
        if place in self.outgoing:
            self.log.entries(g, slot, np.array([column]), late=True)
            return
        self.log.entry(g, slot, column)
        if self.tables[g].is_ring:
            self.moved_columns.add(place)

    # -- truth -----------------------------------------------------------------------------------------------------

    def check_integrity(self, slots_in_use: Iterable[int]) -> None:
        """Raise AssertionError unless tables, books and arena agree."""
        in_use = set(slots_in_use)
        self.arena.check_integrity()
        assert self.can_reserve([0] * len(self.tables)), "more is promised than the arena holds"
        for point in self.points:
            alone = (
                len(self.shared[g].cached_by_one(ids)) * self.layout.groups[g].page_bytes
                for g, ids in enumerate(point.pages)
            )
            assert self._freeable_bytes[point.number] == sum(alone), "what a restore point frees is miscounted"
        for g, table in enumerate(self.tables):
            held = self._count_held(g, in_use)
            kept = self._count_kept(g)
            shared = self.shared[g]
            ids = shared.all_ids()
            assert len(ids) == len(shared), "a shared page is held by nobody"
            by_offset = dict(zip(shared.offsets[ids].tolist(), ids.tolist(), strict=True))
            assert len(by_offset) == len(ids), "a page is shared twice"
            for offset, i in by_offset.items():
                assert shared.slots[i] == held.get(offset, 0), "holders are miscounted"
                assert shared.point_counts[i] == kept.get(offset, 0), "points are miscounted"
            assert kept.keys() <= by_offset.keys(), "a kept page could be written"
            assert all(count == 1 or o in by_offset for o, count in held.items()), "two sequences may write one page"
            assert len(held) == self.live_pages[g], "live pages are miscounted"
            assert len(held.keys() | kept.keys()) == self.arena.used_pages[g], "the arena holds pages of nobody"
            assert sum(self.credits[g]) == self.promised_pages[g] >= 0
            assert min(self.credits[g], default=0) >= 0, "a sequence took more than it reserved"
            for slot in range(len(table.filled)):
                pinned = sum(int(o) in by_offset for o in table.entries[slot, :, 0]) if table.is_ring else 0
                assert pinned == table.pinned[slot], f"slot {slot} miscounts the pages it pins"

    def _count_held(self, g: int, in_use: set[int]) -> dict[int, int]:
        """Holders by page offset: sequences, and restore points that a step in flight still writes."""
        held: dict[int, int] = {}
        for slot in range(len(self.tables[g].filled)):
            offsets = self.tables[g].page_offsets(slot).tolist()
            for place, ids in self.outgoing.items():
                if place[:2] == (g, slot):
                    offsets += self.shared[g].offsets[ids].tolist()
            assert slot in in_use or not offsets, f"empty slot {slot} holds pages"
            assert len(set(offsets)) == len(offsets), f"slot {slot} holds a page twice"
            for offset in offsets:
                held[offset] = held.get(offset, 0) + 1
        for point in self.points:
            if point.pending:
                for offset in self.shared[g].offsets[point.pages[g]].tolist():
                    held[offset] = held.get(offset, 0) + 1
        for pages in self.transit.values():
            for offset in self.shared[g].offsets[pages[g]].tolist():
                held[offset] = held.get(offset, 0) + 1
        return held

    def _count_kept(self, g: int) -> dict[int, int]:
        """Restore points by page offset."""
        kept: dict[int, int] = {}
        for point in self.points:
            for offset in self.shared[g].offsets[point.pages[g]].tolist():
                kept[offset] = kept.get(offset, 0) + 1
        return kept


def _without_repeats(ids: list[int]) -> Iterator[Ids]:
    """The same ids in runs without repeats: two sequences may slide past one page in the same step."""
    while ids:
        once = set(ids)
        yield np.array(sorted(once), dtype=np.int64)
        again = []
        if len(once) < len(ids):
            for i in ids:
                if i in once:
                    once.remove(i)
                else:
                    again.append(i)
        ids = again
