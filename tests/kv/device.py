"""A model of the device: page contents and page tables, changed only through what the manager says.

Each logical sequence has a token history; what a page row must hold is a hash of the history up to that row's token, so
that two sequences agree on a row exactly when they share the prefix. Reading a row that holds anything else fails.
"""

from __future__ import annotations

import numpy as np

from windowpane.kv.changes import Changes, Tail
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
        self.given_up: set[tuple[int, int]] = set()

    def apply(self, changes: Changes, given_up: set[tuple[int, int]]) -> None:
        """Copy pages in order, then update exactly the table entries that are said to have changed."""
        for move in changes.copies:
            self.rows[move.group, move.target] = dict(self.rows.get((move.group, move.source), {}))
        for update in changes.entries + changes.moved_reads:
            self.reading[update.group][update.slots, update.columns] = update.offsets
        for update in changes.entries + changes.late:
            self.writing[update.group][update.slots, update.columns] = update.offsets
        self.tails = changes.tails
        self.given_up = given_up

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
                self._store(g, table[1 - state_slot], 0, ("state", hash(history[:new])), fresh=True)
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


def given_up(changes: Changes, manager: KVManager) -> set[tuple[int, int]]:
    """Pages that a step copies and nobody holds any more; to be asked when the step has just been put together."""
    return {(m.group, m.source) for m in changes.copies if not _is_held(manager, m.group, m.source)}


def _is_held(manager: KVManager, group: int, offset: int) -> bool:
    table = manager.tables[group]
    in_tables = any(offset in table.page_offsets(slot) for slot in range(manager.num_slots))
    return in_tables or any(offset in manager.point_offsets(point, group) for point in manager.restore_points)
