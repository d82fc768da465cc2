"""What a step brings with it for the runner: pages to copy and table entries to update, as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.arena import Move, Offsets
from windowpane.kv.sharing import Ids, SharedPages
from windowpane.kv.tables import Columns, PageTable

Place = tuple[int, int, int]  # group, slot, column


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Entries of one group's table: row i says that `columns[i]` of `slots[i]` holds the pages `offsets[i]` (by
    stripe).
    """

    group: int
    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    offsets: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tail:
    """Tokens [start, stop) of a slot's chunk go to these pages too: row i has those of the i-th block, by stripe.

    A restore point inside the chunk keeps them; the sequence itself has slid past them by the end of the chunk.
    """

    group: int
    slot: int
    start: int
    stop: int
    offsets: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states in front of token `position` of a slot's chunk go to these pages of a group, one for each stripe."""

    group: int
    slot: int
    position: int
    offsets: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Pages to copy between the arena and the host's, beside steps: by group, their offsets in each."""

    number: int
    to_host: bool
    pages: tuple[tuple[int, Offsets, Offsets], ...]  # group, offsets in the arena, offsets in the host's


@dataclass(frozen=True, slots=True)
class Changes:
    """In order: copy pages, then update table entries and begin transfers.

    `late` updates replace a shared page that this step still reads: the step writes to the new page, but reads the old
    one, so tables for reading take them over only after it. `moved_reads` are such old pages that had to move within
    this very step: they concern tables for reading only, and at once. `tails` are written with the step's own tokens,
    and `snapshots` with the states between them, in the order of their slots' positions.

    `transfers` begin once all earlier steps and the copies of this one are done, and go on beside it. The step itself
    may read or write pages of earlier ones: those that have `landed`, or, where it has to `settle`, all of them.
    """

    copies: tuple[Move, ...] = ()
    entries: tuple[TableUpdate, ...] = ()
    late: tuple[TableUpdate, ...] = ()
    moved_reads: tuple[TableUpdate, ...] = ()
    tails: tuple[Tail, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    transfers: tuple[PageTransfer, ...] = ()
    landed: tuple[int, ...] = ()
    settle: bool = False


NO_CHANGES = Changes()


class ChangeLog:
    """Collects the changes of the step being put together. Entries are read from the tables when it is closed."""

    def __init__(self, num_groups: int) -> None:
        self.copies: list[Move] = []
        self._entries = [_Places() for _ in range(num_groups)]
        self._late = [_Places() for _ in range(num_groups)]
        self._moved_reads: set[Place] = set()
        self._tails: list[tuple[int, int, int, int, Ids]] = []
        self._snapshots: list[tuple[int, int, int, Ids]] = []
        self._transfers: list[tuple[int, bool, Sequence[tuple[int, Ids, Offsets]]]] = []
        self._landed: list[int] = []
        self._settle = False
        self._empty = True

    def copy(self, group: int, sources: Iterable[int], targets: Iterable[int]) -> None:
        self.copies += [Move(group, source, target) for source, target in zip(sources, targets, strict=True)]

    def entry(self, group: int, slot: int, column: int) -> None:
        self._empty = False
        places = self._entries[group]
        places.slots.append(slot)
        places.columns.append(column)

    def entries(self, group: int, slot: int, columns: Columns, *, late: bool = False) -> None:
        self._empty = False
        (self._late if late else self._entries)[group].runs.append((slot, columns))

    def moved_read(self, place: Place) -> None:
        self._moved_reads.add(place)

    def tail(self, group: int, slot: int, start: int, stop: int, ids: Ids) -> None:
        """Tokens [start, stop) also go to these shared pages, wherever they will lie when the step is closed."""
        self._empty = False
        self._tails.append((group, slot, start, stop, ids))

    def snapshot(self, group: int, slot: int, position: int, ids: Ids) -> None:
        """The states in front of token `position` go to these shared pages, wherever they will lie by then."""
        self._empty = False
        self._snapshots.append((group, slot, position, ids))

    @property
    def has_transfers(self) -> bool:
        return bool(self._transfers)

    def transfer(self, number: int, pages: Sequence[tuple[int, Ids, Offsets]], *, to_host: bool) -> None:
        """Begin to copy shared pages, by group, from or to these offsets in the host's arena."""
        self._empty = False
        self._transfers.append((number, to_host, pages))

    def landed(self, number: int) -> None:
        """The pages of this transfer may be read and written from now on."""
        self._empty = False
        self._landed.append(number)

    def settle(self) -> None:
        """The step moves or gives away pages of transfers that have not landed: it waits for them."""
        self._empty = False
        self._settle = True

    def forget_transfers(self) -> None:
        """Those that were not told yet shall not begin; the next step waits for all that have begun."""
        self._transfers = []
        self.settle()

    def close(
        self, tables: Sequence[PageTable], shared: Sequence[SharedPages], outgoing: Mapping[Place, Ids]
    ) -> Changes:
        """Everything since the last close; `outgoing` has the pages that moved reads now lie in."""
        if self._empty and not self.copies:
            return NO_CHANGES
        changes = Changes(
            tuple(self.copies),
            _drain(self._entries, tables),
            _drain(self._late, tables),
            tuple(_moved(place, shared[place[0]].offsets[outgoing[place]]) for place in self._moved_reads),
            tuple(_tail(tables[tail[0]], shared[tail[0]], *tail) for tail in self._tails),
            tuple(Snapshot(g, slot, at, shared[g].offsets[ids]) for g, slot, at, ids in self._snapshots),
            tuple(
                PageTransfer(number, to_host, tuple((g, shared[g].offsets[ids], offsets) for g, ids, offsets in pages))
                for number, to_host, pages in self._transfers
            ),
            tuple(self._landed),
            self._settle,
        )
        self._transfers, self._landed, self._settle = [], [], False
        self.copies = []
        self._tails = []
        self._snapshots = []
        self._moved_reads.clear()
        self._empty = True
        return changes


class _Places:
    """Places in one group's table: single ones side by side, and runs of columns of one slot."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.columns: list[int] = []
        self.runs: list[tuple[int, Columns]] = []

    def drain(self, group: int, table: PageTable) -> TableUpdate | None:
        if not self.slots and not self.runs:
            return None
        slots = [np.array(self.slots, dtype=np.int64), *(np.full(len(run), slot) for slot, run in self.runs)]
        columns = [np.array(self.columns, dtype=np.int64), *(run for _, run in self.runs)]
        for log in (self.slots, self.columns, self.runs):
            log.clear()
        rows, places = np.concatenate(slots), np.concatenate(columns)
        return TableUpdate(group, rows, places, np.maximum(table.entries[rows, places], 0))


def _drain(places: Sequence[_Places], tables: Sequence[PageTable]) -> tuple[TableUpdate, ...]:
    updates = (p.drain(g, table) for g, (p, table) in enumerate(zip(places, tables, strict=True)))
    return tuple(update for update in updates if update is not None)


def _moved(place: Place, offsets: Offsets) -> TableUpdate:
    group, slot, column = place
    return TableUpdate(group, np.array([slot]), np.array([column]), offsets[None])


def _tail(table: PageTable, shared: SharedPages, group: int, slot: int, start: int, stop: int, ids: Ids) -> Tail:
    return Tail(group, slot, start, stop, shared.offsets[ids].reshape(-1, table.group.stripes))
