"""The KV manager: reservations, tables, restore points and release, on exact accounting.

The promise, kept after every operation:

    Σ over groups  ⌈(live pages + promised pages) / pages per slab⌉  ≤  slabs

So `can_reserve` is true exactly when the reservation succeeds, and a sequence inside its reservation never waits for
memory. What is live, promised, shared and cached stands in `books`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.arena import Arena, Cursor
from windowpane.kv.books import Books, GroupBytes, ReservationError
from windowpane.kv.changes import Changes, Place
from windowpane.kv.layout import Layout
from windowpane.kv.retention import Cross, State
from windowpane.kv.sharing import Ids, RestorePoint
from windowpane.kv.tables import NO_PAGE, Columns, PageTable

__all__ = ["Demand", "GroupBytes", "KVManager", "ReservationError", "RestorePoint"]

Demand = Sequence[int]  # pages per group


class KVManager:
    """Memory of up to `num_slots` running sequences of up to `max_model_len` tokens in `num_slabs` slabs.

    `rollback_tokens` is how many of its last tokens a sequence can take back (`truncate`): windows and chunks hold as
    many more past tokens.
    """

    def __init__(
        self, layout: Layout, num_slabs: int, num_slots: int, max_model_len: int, rollback_tokens: int = 0
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.rollback_tokens = rollback_tokens
        self.books = Books(layout, num_slabs, num_slots, max_model_len, rollback_tokens)
        self.arena: Arena = self.books.arena
        self.tables: list[PageTable] = self.books.tables
        # In how many slots each sequence has its states; 0 without any.
        self.state_slots = max((g.retention.slots for g in layout.groups if isinstance(g.retention, State)), default=0)
        self.has_state = self.state_slots > 0
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self.state_slot = np.zeros(num_slots, dtype=np.int8)  # which of the slots has the present state
        self.reserved_tokens = [0] * num_slots
        # Per slot: `truncate` goes back neither beyond the last restore point that the sequence left or began with,
        # nor `rollback_tokens` beyond the longest length that it was truncated from.
        self._point_length = [0] * num_slots
        self._truncated_from = [0] * num_slots
        self._extended = [(0, 0)] * num_slots  # lengths before and behind the last `extend`
        # Per slot, the groups whose table can still change: a full ring drops out until one of its pages is shared.
        self._open: list[list[int]] = [[] for _ in range(num_slots)]
        self._just_resumed: set[int] = set()  # slots that took over a restore point in the step being put together
        self._slides_freely = False  # the step that a sequence is being extended for reads no page that it slides past

    # -- asking ----------------------------------------------------------------------------------------------------

    def demand(self, tokens: int) -> list[int]:
        """Pages per group that a sequence of up to `tokens` tokens may own."""
        return [g.max_pages(tokens, self.rollback_tokens) for g in self.layout.groups]

    def can_reserve(self, demand: Demand) -> bool:
        """Whether these pages could be promised now, giving up cached pages and moving stranded ones if need be."""
        return self.books.can_reserve(demand)

    def could_ever_hold(self, tokens: int) -> bool:
        """Whether one sequence of this length fits an otherwise empty arena."""
        needed = zip(self.demand(tokens), self.arena.pages_per_slab, strict=True)
        return sum(-(-pages // per_slab) for pages, per_slab in needed) <= self.arena.num_slabs

    def shortest_truncation(self, slot: int) -> int:
        """The shortest length that this sequence can be truncated to now."""
        length = int(self.lengths[slot])
        shortest = max(self._point_length[slot], max(length, self._truncated_from[slot]) - self.rollback_tokens)
        if not self.has_state:
            return shortest
        if self.state_slots == 1:
            return length
        before, after = self._extended[slot]  # by the last step, which has left the state before it
        return before if after == length and before >= shortest else length

    def horizon(self, slot: int) -> int:
        """The longest length this sequence reaches without `extend` or `renew`."""
        length, horizon = int(self.lengths[slot]), self.reserved_tokens[slot]
        for g in self._open[slot]:
            horizon = min(horizon, self.tables[g].horizon(slot, length))
        return horizon

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def start(self, slot: int, tokens: int, resume: RestorePoint | None = None, length: int | None = None) -> None:
        """Reserve room for `tokens` tokens in an empty slot.

        With a restore point the sequence begins with its tokens, or with the first `length` of them: one of those that
        `longest_resume` names.
        """
        if self.reserved_tokens[slot]:
            raise ValueError(f"slot {slot} is in use")
        demand = self.start_demand(tokens, resume, length)
        if not self.can_reserve(demand):
            raise ReservationError(f"{tokens} tokens need {demand} pages per group; promised and live leave too few")
        self._begin(slot, tokens, resume, length)

    def _begin(self, slot: int, tokens: int, resume: RestorePoint | None, length: int | None) -> None:
        """`start`, where there is room."""
        self.reserved_tokens[slot] = tokens
        resumed: list[Ids] = []
        if resume is None:
            self.books.promise(slot, self.demand(tokens))
        else:
            length = resume.length if length is None else length
            resumed = self._resumed(resume, length)
            for g, ids in enumerate(resumed):
                self.books.hold(g, ids)  # taking pages may give up the restore point itself, but not these
            self._adopt(slot, tokens, resumed, length)
            self._point_length[slot] = length
            self._just_resumed.add(slot)
        for g, table in enumerate(self.tables):
            if not table.grows and not table.is_ring:
                self.books.fill(g, slot, np.flatnonzero(table.entries[slot, :, 0] < 0))
        for g, ids in enumerate(resumed):
            if isinstance(self.tables[g].group.retention, State):
                self._copy(g, self.books.shared[g].offsets[ids], self.tables[g].entries[slot, 0])
            self.books.let_go(g, ids)
        self._reopen(slot)

    def claim(self, slot: int, tokens: int, point: RestorePoint) -> None:
        """Reserve what `start` from a pending point will need: the slot stays empty until `start_claimed`.

        Where there is no room for the point beside the sequence, the sequence will take the point's pages over.
        """
        self.reserved_tokens[slot] = tokens
        demand = self.start_demand(tokens, point)
        if not self.can_reserve(demand):
            demand = [d - o for d, o in zip(demand, self._windows_of(point), strict=True)]
        self.books.promise(slot, demand)

    def start_claimed(self, slot: int, point: RestorePoint) -> None:
        """The pages of that point have arrived. Where there is no room for both, the point is given up."""
        tokens = self.reserved_tokens[slot]
        self.release(slot)
        has_room = self.can_reserve(self.start_demand(tokens, point))
        self._begin(slot, tokens, point, None)
        if not has_room:
            self.drop(point)  # which gives its window pages to the sequence, in place of promised ones
            self._reopen(slot)

    def _windows_of(self, point: RestorePoint) -> list[int]:
        """Window pages per group that a sequence which resumes at this pending point alone would share."""
        counts = []
        for table, shared, kept in zip(self.tables, self.books.shared, point.pages, strict=True):
            ids = table.shared_pages(kept, point.length)
            alone = (shared.slots[ids] == 1) & (shared.point_counts[ids] == 1)
            counts.append(int(np.count_nonzero(alone)) if table.is_ring else 0)
        return counts

    def start_demand(self, tokens: int, resume: RestorePoint | None = None, length: int | None = None) -> list[int]:
        """Pages per group that `start` needs: new ones, and those of the restore point that are only cached."""
        demand = self.demand(tokens)
        if resume is not None:
            length = resume.length if length is None else length
            for g, (table, ids) in enumerate(zip(self.tables, self._resumed(resume, length), strict=True)):
                if not table.is_ring:
                    demand[g] -= len(table.shared_pages(ids, length))
                demand[g] += int(np.count_nonzero(self.books.shared[g].slots[ids] == 0))
        return demand

    def renew_demand(self, slot: int, tokens: int) -> list[int]:
        before, after = self.demand(self.reserved_tokens[slot]), self.demand(tokens)
        return [b - a for a, b in zip(before, after, strict=True)]

    def renew(self, slot: int, tokens: int) -> None:
        """Raise a reservation to `tokens` tokens."""
        demand = self.renew_demand(slot, tokens)
        if not self.can_reserve(demand):
            raise ReservationError(f"{demand} more pages per group are not there for slot {slot}")
        self.books.promise(slot, demand)
        self.reserved_tokens[slot] = tokens

    def extend(self, slot: int, length: int) -> None:
        """Give the sequence the pages that a step up to `length` tokens writes. Never fails inside the reservation."""
        # What a window slides past can then not be seen by the step's first token either.
        self._slides_freely = length - int(self.lengths[slot]) <= self.rollback_tokens
        self._extend(slot, length)

    def _extend(self, slot: int, length: int) -> None:
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
        self._extended[slot] = old_length, length

    def extend_with_tails(self, slot: int, length: int, tails: Sequence[int]) -> list[RestorePoint]:
        """`extend`, leaving restore points inside the chunk: at these ascending lengths, where memory allows.

        Pages are taken as if the chunk had been cut at each of these lengths, but one step writes them all, including
        those that the sequence has slid past by the chunk's end, and its states at these lengths.
        """
        if not tails:
            self.extend(slot, length)
            return []
        self._slides_freely = False
        start = written_from = int(self.lengths[slot])
        points = []
        for tail in tails:
            self._extend(slot, tail)
            point = self._leave_point(slot, inside_chunk=True)
            if point is None:
                continue
            points.append(point)
            for g, table in enumerate(self.tables):
                if table.is_ring:
                    self._log_tail(g, slot, written_from, point)
            written_from = tail
        self._extend(slot, length)
        self._extended[slot] = start, length
        return points

    def advance(self, slots: NDArray[np.int64] | int, tokens: int = 1) -> None:
        """So many more tokens for each of these sequences, all of which stay within their horizon."""
        self.lengths[slots] += tokens

    def truncate(self, slot: int, length: int) -> None:
        """Take back the last tokens of a sequence, which no step in flight computes: it has `length` tokens again.

        Pages of full groups that become empty are promised to the sequence again, so that it can grow as before.
        Windows and chunks keep their pages, of which the rows beyond `length` are written anew. A page that a restore
        point keeps is not written below that point's length, so no truncation goes further back than that. A recurrent
        state exists before and behind a step, so a sequence that has one in two slots goes back to where its last step
        began, which must have been an `extend`, and the other one of its two states is the present one again.
        """
        old_length, shortest = int(self.lengths[slot]), self.shortest_truncation(slot)
        if not shortest <= length <= old_length or (self.has_state and length not in (shortest, old_length)):
            limit = f"rollback_tokens {self.rollback_tokens}, last restore point at {self._point_length[slot]}"
            if self.has_state:
                limit += "; a recurrent state exists before and behind the last step only"
            raise ValueError(
                f"slot {slot} holds {old_length} tokens and can be truncated to {shortest}, not to {length} ({limit})"
            )
        for g, table in enumerate(self.tables):
            if table.grows:
                self.books.take_back(g, slot, table.truncate(slot, length))
        if self.has_state and length < old_length:
            self.state_slot[slot] ^= 1
            self._extended[slot] = length, length
        self._truncated_from[slot] = max(old_length, self._truncated_from[slot])
        self.lengths[slot] = length

    def flip_states(self, slots: NDArray[np.int64]) -> None:
        """Make the other state of these sequences the present one, where there are two: a step has written it."""
        if self.state_slots > 1:
            self.state_slot[slots] ^= 1

    def release(self, slot: int) -> None:
        """Return every byte of a sequence; pages that restore points keep become cached."""
        for g, table in enumerate(self.tables):
            offsets = table.page_offsets(slot).copy()
            self.books.promised_pages[g] -= self.books.credits[g][slot]
            self.books.credits[g][slot] = 0
            self.books.cursors[g][slot] = Cursor()
            table.clear(slot)
            self.books.let_go_offsets(g, offsets)
        self.lengths[slot] = 0
        self.state_slot[slot] = 0
        self.reserved_tokens[slot] = 0
        self._point_length[slot] = 0
        self._truncated_from[slot] = 0
        self._extended[slot] = 0, 0

    def release_and_leave_point(self, slot: int) -> RestorePoint:
        """`release`, leaving a restore point at the sequence's length. It takes no additional memory.

        Only for a sequence that no step in flight computes.
        """
        pages = []
        for g, table in enumerate(self.tables):
            offsets = self._held_pages(g, slot)
            if isinstance(table.group.retention, State):
                offsets = table.entries[slot, self.state_slot[slot]].copy()
            pages.append(self.books.shared[g].share(offsets, slots=1))
        point = RestorePoint(int(self.lengths[slot]), pages)
        self.books.keep(point)
        self.release(slot)
        return point

    def take_changes(self) -> Changes:
        """Close the step being put together. Pages that only this step still reads are free for later steps."""
        books = self.books
        books.tidy()
        changes = books.log.close(self.tables, books.shared, books.outgoing)
        books.let_outgoing_go()
        self._just_resumed.clear()
        return changes

    # -- restore points --------------------------------------------------------------------------------------------

    def leave_point(self, slot: int) -> RestorePoint | None:
        """Keep a restore point at the sequence's present length; None where memory does not allow one.

        The sequence goes on: its full pages are shared in place, and its window pages become read-only, so it is
        promised new ones in their stead. The present state is copied. The point is pending, and its pages in use, until
        `publish` says that the step that computes them has landed.
        """
        return self._leave_point(slot, inside_chunk=False)

    def _leave_point(self, slot: int, *, inside_chunk: bool) -> RestorePoint | None:
        """`leave_point`; the states that exist inside a chunk only are written by the step itself."""
        snapshots = [t.group.stripes if isinstance(t.group.retention, State) else 0 for t in self.tables]
        replacements = self._replacements(slot)
        needed = [r + s for r, s in zip(replacements, snapshots, strict=True)]
        if not self.can_reserve(needed):
            return None
        # Taking pages may move others and give up restore points, so states go first.
        states = {g: self._snapshot(g, slot, inside_chunk) for g, count in enumerate(snapshots) if count}
        if states:
            replacements = self._replacements(slot)
        self.books.promise(slot, replacements)
        pages = []
        for g, table in enumerate(self.tables):
            if g in states:
                pages.append(states[g])
                continue
            if table.is_ring:
                table.pinned[slot] += replacements[g] // table.group.stripes
            pages.append(self.books.shared[g].share(self._held_pages(g, slot), slots=1))
        self._reopen(slot)
        point = RestorePoint(int(self.lengths[slot]), pages, pending=True)
        self._point_length[slot] = point.length
        self.books.keep(point)
        for g, ids in enumerate(pages):
            self.books.hold(g, ids)
        return point

    def publish(self, point: RestorePoint) -> None:
        """The step that computes this restore point has landed: it may be resumed from, and given up."""
        if point.pending and point in self.books.points:
            point.pending = False
            for g, ids in enumerate(point.pages):
                self.books.let_go(g, ids)

    def drop(self, point: RestorePoint) -> None:
        """Forget a restore point; pages that nobody else holds are free again."""
        self.books.drop(point)

    def touch(self, point: RestorePoint) -> None:
        """Mark a restore point as used just now."""
        self.books.touch(point)

    def longest_resume(self, point: RestorePoint, limit: int) -> int:
        """The longest length up to `limit` at which every group can go on from this restore point; 0 for none."""
        length, before = min(point.length, limit), -1
        while length != before:
            before = length
            for group in self.layout.groups:
                length = group.retention.longest_resume(point.length, length)
        return length

    def give_way(self, demand: Demand) -> bool:
        """Give up restore points whose pages running sequences pin, until `demand` can be reserved: see `books`."""
        return self.books.give_way(demand)

    def use_for_restoring(
        self, worth: Callable[[RestorePoint], float], on_drop: Callable[[RestorePoint], None]
    ) -> None:
        """Let whoever decides what to keep say what each restore point is worth, and hear when one is given up."""
        self.books.worth, self.books.on_drop = worth, on_drop

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def restore_points(self) -> list[RestorePoint]:
        return list(self.books.points)

    @property
    def live_pages(self) -> list[int]:
        return self.books.live_pages

    @property
    def promised_pages(self) -> list[int]:
        return self.books.promised_pages

    @property
    def moved_pages(self) -> int:
        return self.books.moved_pages

    def group_bytes(self, group: int) -> GroupBytes:
        return self.books.group_bytes(group)

    def keeps_all(self, length: int) -> bool:
        """Whether a sequence of `length` tokens can still be asked for every one of them: then it resumes anywhere."""
        retentions = [table.group.retention for table in self.tables]
        return all(not isinstance(r, State) and (isinstance(r, Cross) or not r.held(length).start) for r in retentions)

    @property
    def free_bytes(self) -> int:
        """Bytes usable by any group, promised ones included."""
        return self.arena.free_bytes

    @property
    def cached_bytes(self) -> int:
        return sum(self.group_bytes(g).cached for g in range(len(self.tables)))

    def tail_bytes(self, before: int, length: int) -> int:
        """What a restore point at `length` keeps beyond full pages, where there is one at `before` already."""
        total = 0
        for table in self.tables:
            columns = 1 if isinstance(table.group.retention, State) else 0
            if table.is_ring:
                new_blocks = length // table.block_tokens - before // table.block_tokens + 1
                columns = min(len(table.held_columns(length)), new_blocks)
            total += columns * table.group.stripes * table.group.page_bytes
        return total

    def point_offsets(self, point: RestorePoint, group: int) -> NDArray[np.int32]:
        """Where the pages of a restore point lie now."""
        return self.books.shared[group].offsets[point.pages[group]]

    def owned_pages(self, slot: int, group: int) -> int:
        """Pages of a sequence that no restore point holds."""
        offsets = self.tables[group].page_offsets(slot)
        return int(np.count_nonzero(~self.books.shared[group].is_shared(offsets)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, books and arena agree. Idle means nothing live and nothing promised."""
        self.books.check_integrity(slot for slot, tokens in enumerate(self.reserved_tokens) if tokens)

    def check_idle(self) -> None:
        """Raise AssertionError unless nothing is live or promised, as befits memory without sequences.

        The engine asks whenever it falls idle, so the arena is not looked through: that takes 70 ms with 110 GiB.
        """
        assert not any(self.reserved_tokens), "a slot is in use"
        assert not any(self.live_pages) and not any(self.promised_pages), "idle, but pages are held"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _reopen(self, slot: int) -> None:
        self._open[slot] = [g for g, table in enumerate(self.tables) if table.can_change(slot)]

    def _extend_by_one(self, slot: int, position: int) -> None:
        """What a decoding sequence does at a page boundary, without arrays."""
        saturated = False
        for g in self._open[slot]:
            table = self.tables[g]
            if table.pinned[slot]:
                self._slide_by_one(g, slot, position)
            elif (column := table.column_without_page(slot, position)) is not None:
                self.books.fill_one(g, slot, column)
                saturated = saturated or not table.can_change(slot)
        if saturated:
            self._open[slot] = [g for g in self._open[slot] if self.tables[g].can_change(slot)]

    def _slide_by_one(self, g: int, slot: int, position: int) -> None:
        """`_extend_group` for one token, without arrays where a block is one page."""
        table, books = self.tables[g], self.books
        if table.group.stripes > 1:
            self._extend_group(g, slot, position, position + 1)
            return
        column = table.fresh_column(slot, position)
        emptied = False
        if column is not None and (offset := int(table.entries[slot, column, 0])) != NO_PAGE:
            tag = self.arena.tag_of_one(g, offset)
            emptied = tag < 0
            if emptied:
                ids, place = np.array([-1 - tag]), (g, slot, column)
                if self._slides_freely or place in books.outgoing:
                    books.let_go(g, ids)
                else:
                    self._note_outgoing(place, ids)
                table.entries[slot, column, 0] = NO_PAGE
                table.filled[slot] -= 1
                table.pinned[slot] -= 1
        if (missing := table.column_without_page(slot, position)) is not None:
            books.fill_one(g, slot, missing, late=emptied and not self._slides_freely, wins_slab=True)

    def _extend_group(self, g: int, slot: int, old_length: int, length: int) -> None:
        table = self.tables[g]
        replaced: list[int] = []
        if table.pinned[slot]:
            replaced = self._slide_past(g, slot, table.fresh_columns(slot, old_length, length))
        missing = table.missing(slot, old_length, length)
        if len(missing):
            self.books.fill(g, slot, missing, replaced)

    def _slide_past(self, g: int, slot: int, columns: Columns) -> list[int]:
        """Empty the columns whose shared pages this step slides past, and return those whose pages it still reads: they
        stay until the step is behind us.
        """
        table, books = self.tables[g], self.books
        filled = columns[table.entries[slot, columns, 0] != NO_PAGE]
        passed = filled[books.shared[g].is_shared(table.entries[slot, filled, 0])]
        if not len(passed):
            return []
        ids = books.shared[g].ids(table.entries[slot, passed].reshape(-1)).reshape(len(passed), -1)
        emptied: list[int] = passed.tolist()
        again = [self._slides_freely or (g, slot, column) in books.outgoing for column in emptied]
        # Points inside a chunk empty a column more than once in a step, which reads only the page emptied first.
        books.let_go(g, ids[again].reshape(-1))
        for column, pages, is_there in zip(emptied, ids, again, strict=True):
            if not is_there:
                self._note_outgoing((g, slot, column), pages)
        table.entries[slot, passed] = NO_PAGE
        table.filled[slot] -= len(passed)
        table.pinned[slot] -= len(passed)
        return [] if self._slides_freely else emptied

    def _note_outgoing(self, place: Place, ids: Ids) -> None:
        """This step still reads these pages, although their column is empty now."""
        self.books.outgoing[place] = ids
        if place[1] in self._just_resumed or place in self.books.moved_columns:
            self.books.log.moved_read(place)  # no table on the device has it yet

    def _log_tail(self, g: int, slot: int, written_from: int, point: RestorePoint) -> None:
        """Have this step's tokens of the tail written to its pages; what came before them lies there already."""
        table = self.tables[g]
        start = max(written_from, table.group.retention.held(point.length).start)  # type: ignore[union-attr]
        if start < point.length:
            first = start // table.block_tokens - table.first_block(point.length)
            self.books.log.tail(g, slot, start, point.length, point.pages[g][first * table.group.stripes :])

    def _held_pages(self, g: int, slot: int) -> NDArray[np.int32]:
        """What the sequence can still be asked for, oldest block first (nothing for State)."""
        table = self.tables[g]
        held: NDArray[np.int32] = table.entries[slot, table.held_columns(int(self.lengths[slot]))]
        return held.reshape(-1).copy()

    def _replacements(self, slot: int) -> list[int]:
        """Window pages that the sequence may overwrite now and could not once they are kept."""
        return [
            int(np.count_nonzero(~self.books.shared[g].is_shared(self._held_pages(g, slot)))) if table.is_ring else 0
            for g, table in enumerate(self.tables)
        ]

    def _resumed(self, point: RestorePoint, length: int) -> list[Ids]:
        """Pages of a restore point that a sequence of `length` tokens can be asked for."""
        return [t.resumed_pages(ids, point.length, length) for t, ids in zip(self.tables, point.pages, strict=True)]

    def _adopt(self, slot: int, tokens: int, resumed: list[Ids], length: int) -> None:
        """Fill an empty slot with the pages of a restore point, copying what it would write into."""
        books = self.books
        self.lengths[slot] = length
        demand = self.demand(tokens)
        for g, table in enumerate(self.tables):
            ids = table.shared_pages(resumed[g], length)
            books.hold(g, ids)
            columns = table.held_columns(length)[: len(ids) // table.group.stripes]
            if len(columns):
                table.put(slot, columns, books.shared[g].offsets[ids])
                books.log.entries(g, slot, columns)
            if table.is_ring:
                table.pinned[slot] = len(columns)
            else:
                demand[g] -= len(ids)
        books.promise(slot, demand)
        for g, table in enumerate(self.tables):
            stripes = table.group.stripes
            partly = table.held_columns(length)[len(table.shared_pages(resumed[g], length)) // stripes :]
            if len(partly):
                books.fill(g, slot, partly)
                self._copy(g, books.shared[g].offsets[resumed[g][-stripes:]], table.entries[slot, partly[0]])

    def _snapshot(self, g: int, slot: int, inside_chunk: bool) -> Ids:
        """Pages of their own for the present states: they are copied, or written by the step that computes them."""
        table = self.tables[g]
        offsets = self.books.take(g, table.group.stripes, self.books.cache_cursors[g])
        self.arena.tag(g, offsets, np.zeros(len(offsets), dtype=np.int64))  # whatever they were before
        ids = self.books.shared[g].share(offsets, slots=0)
        if inside_chunk:
            self.books.log.snapshot(g, slot, int(self.lengths[slot]), ids)
        else:
            self._copy(g, table.entries[slot, self.state_slot[slot]], offsets)
        return ids

    def _copy(self, g: int, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        self.books.log.copy(g, sources.tolist(), targets.tolist())
