"""A model of the device: page contents and page tables, changed only through what the manager says.

Each logical sequence has a token history; what a page row must hold is a hash of the history up to that row's token, so
that two sequences agree on a row exactly when they share the prefix. Reading a row that holds anything else fails.
"""

from __future__ import annotations

import numpy as np

from windowpane.kv.changes import Changes, PageTransfer, Snapshot, Tail
from windowpane.kv.layout import Layout
from windowpane.kv.manager import KVManager
from windowpane.kv.retention import Cross, State

POISON = "poison"


class Device:
    def __init__(self, manager: KVManager) -> None:
        self.layout: Layout = manager.layout
        self.rollback_tokens = manager.rollback_tokens
        self.rows: dict[tuple[int, int], dict[int, object]] = {}  # (group, page offset) → row → content
        self.reading = [table.entries.copy() for table in manager.tables]
        self.writing = [table.entries.copy() for table in manager.tables]
        self.tails: tuple[Tail, ...] = ()
        self.snapshots: tuple[Snapshot, ...] = ()
        self.given_up: set[tuple[int, int]] = set()
        self.host: dict[tuple[int, int], dict[int, object]] = {}  # the same in the host's arena
        self.under_way: dict[int, PageTransfer] = {}
        self.kept: dict[int, set[object]] = {}  # by transfer to the host: what the rows of its point hold
        self._sources: dict[int, list[dict[int, object]]] = {}  # what each transfer found when it began

    def apply(self, changes: Changes, given_up: set[tuple[int, int]]) -> None:
        """Copy pages in order, then update exactly the table entries that are said to have changed, and begin
        transfers.
        """
        assert self.under_way.keys().isdisjoint(changes.landed), "a step was told of a transfer that has not landed"
        if changes.settle:
            for number in list(self._sources):
                self._transfer(number)
        for move in changes.copies:
            self.rows[move.group, move.target] = dict(self.rows.get((move.group, move.source), {}))
        for update in changes.entries + changes.moved_reads:
            self.reading[update.group][update.slots, update.columns] = update.offsets
        for update in changes.entries + changes.late:
            self.writing[update.group][update.slots, update.columns] = update.offsets
        self.tails, self.snapshots = changes.tails, changes.snapshots
        self.given_up = given_up
        for transfer in changes.transfers:
            self.under_way[transfer.number] = transfer
            sources = self._sources[transfer.number] = []
            for group, on_device, on_host in _pages(transfer):
                if transfer.to_host:
                    sources.append(dict(self.rows.get((group, on_device), {})))
                else:
                    sources.append(dict(self.host[group, on_host]))
                    self.rows[group, on_device] = {}  # half of it may have arrived

    def finish(self, number: int) -> None:
        """A transfer is over, unless a step had to wait for it before."""
        if number in self._sources:
            self._transfer(number)
        del self.under_way[number]

    def _transfer(self, number: int) -> None:
        """Copy at the last possible moment: what a page holds must not have changed since the transfer began."""
        transfer = self.under_way[number]
        for (group, on_device, on_host), before in zip(_pages(transfer), self._sources.pop(number), strict=True):
            if transfer.to_host:
                # The sequence that left a point goes on in its last page, behind the rows that the point keeps.
                now, kept = self.rows.get((group, on_device), {}), self.kept[number]
                before = {row: content for row, content in before.items() if content[1] in kept}
                assert before.items() <= now.items(), "a page changed while it was spilled"
                self.host[group, on_host] = dict(now)
            else:
                assert self.host[group, on_host] == before, "a page of the host changed while it was fetched"
                assert self.rows[group, on_device] == {}, "a page was written while it was fetched"
                self.rows[group, on_device] = dict(before)

    def after_step(self, changes: Changes) -> None:
        for update in changes.late:
            self.reading[update.group][update.slots, update.columns] = update.offsets

        for page in self.given_up:
            self.rows.pop(page, None)  # whoever reads it from now on reads poison
        self.given_up = set()

    def write_encoder(self, slot: int) -> None:
        for g, group in enumerate(self.layout.groups):
            if isinstance(group.retention, Cross):
                for column in self.writing[g][slot]:
                    self._store(g, column, 0, "encoder", fresh=True)

    def step(self, slot: int, history: tuple[int, ...], old: int, new: int, state_slot: int) -> None:
        """Compute tokens [old, new): read what each may see of the past, then write what the future can see."""
        for g, group in enumerate(self.layout.groups):
            table = self.reading[g][slot]
            if isinstance(group.retention, State):
                if old:
                    self._expect(g, table[state_slot], 0, ("state", hash(history[:old])))
                for snapshot in self.snapshots:
                    if (snapshot.group, snapshot.slot) == (g, slot):
                        assert old < snapshot.position < new, "a snapshot outside its chunk"
                        content = ("state", hash(history[: snapshot.position]))
                        self._store(g, snapshot.offsets, 0, content, fresh=True)
                behind = self.writing[g][slot][(state_slot + 1) % group.retention.slots]
                self._store(g, behind, 0, ("state", hash(history[:new])), fresh=True)
            elif isinstance(group.retention, Cross):
                for column in table:
                    self._expect(g, column, 0, "encoder")
            else:
                self._token_step(g, slot, history, old, new)

    def _token_step(self, g: int, slot: int, history: tuple[int, ...], old: int, new: int) -> None:
        group = self.layout.groups[g]
        reading, writing = self.reading[g][slot], self.writing[g][slot]
        columns = len(reading)
        first = group.retention.first_visible(old)
        for position in range(first, old):
            block, row = divmod(position, group.block_tokens)
            self._expect(g, reading[block % columns], row, hash(history[: position + 1]))
        for position in range(max(old, group.retention.held(new, self.rollback_tokens).start), new):
            block, row = divmod(position, group.block_tokens)
            self._store(g, writing[block % columns], row, hash(history[: position + 1]), fresh=row == 0)
        for tail in self.tails:
            if (tail.group, tail.slot) == (g, slot):
                assert old <= tail.start < tail.stop <= new, "a tail outside its chunk"
                self._write_tail(tail, history)

    def read_rows(self, slot: int, history: tuple[int, ...], old: int) -> None:
        """Tokens from `old` on were decoding rows, each of which finds those before it in pages."""
        for g, group in enumerate(self.layout.groups):
            if isinstance(group.retention, State | Cross):
                continue
            reading = self.reading[g][slot]
            for position in range(group.retention.first_visible(old), len(history)):
                block, row = divmod(position, group.block_tokens)
                if position < old or group.retention.held(len(history)).start <= position:
                    self._expect(g, reading[block % len(reading)], row, hash(history[: position + 1]))

    def _write_tail(self, tail: Tail, history: tuple[int, ...]) -> None:
        block_tokens = self.layout.groups[tail.group].block_tokens
        first = tail.start // block_tokens
        assert len(tail.offsets) == (tail.stop - 1) // block_tokens - first + 1
        for position in range(tail.start, tail.stop):
            block, row = divmod(position, block_tokens)
            self._store(tail.group, tail.offsets[block - first], row, hash(history[: position + 1]), fresh=False)

    def _expect(self, g: int, offsets: np.ndarray, row: int, content: object) -> None:
        for stripe, offset in enumerate(offsets.tolist()):
            found = self.rows.get((g, offset), {}).get(row, POISON)
            assert found == (stripe, content), f"{self.layout.groups[g].name}: row {row} of page {offset} holds {found}"

    def _store(self, g: int, offsets: np.ndarray, row: int, content: object, *, fresh: bool) -> None:
        for stripe, offset in enumerate(offsets.tolist()):
            if fresh:
                self.rows[g, offset] = {}
            self.rows.setdefault((g, offset), {})[row] = (stripe, content)


def _pages(transfer: PageTransfer) -> list[tuple[int, int, int]]:
    return [
        (group, on_device, on_host)
        for group, device_offsets, host_offsets in transfer.pages
        for on_device, on_host in zip(device_offsets.tolist(), host_offsets.tolist(), strict=True)
    ]


def given_up(changes: Changes, manager: KVManager) -> set[tuple[int, int]]:
    """Pages that a step copies and nobody holds any more; to be asked when the step has just been put together."""
    return {(m.group, m.source) for m in changes.copies if not _is_held(manager, m.group, m.source)}


def _is_held(manager: KVManager, group: int, offset: int) -> bool:
    table = manager.tables[group]
    in_tables = any(offset in table.page_offsets(slot) for slot in range(manager.num_slots))
    shared = manager.books.shared[group]
    under_way = any(offset in shared.offsets[pages[group]] for pages in manager.books.transit.values())
    kept = any(offset in manager.point_offsets(point, group) for point in manager.restore_points)
    return in_tables or under_way or kept
