"""Page tables: for each running sequence (a *slot*) the offsets of its pages, one table per group.

entries[slot, column, stripe]      a column is one block of tokens (State: one of its slots)

growing   Full            column = block
ring      Window, Chunk   column = block % columns: a page that slid out of sight is overwritten by the block that
                          needs its column next, so a steady sequence takes and frees nothing
fixed     State, Cross    all columns filled at the start
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.layout import TILE_TOKENS, Group
from windowpane.kv.retention import Chunk, Cross, Full, State, Window, ceil_div

NO_PAGE = -1
NEVER = 2**31 - 1  # a length no sequence reaches

Columns = NDArray[np.int64]
NO_COLUMNS: Columns = np.zeros(0, dtype=np.int64)
Ids = NDArray[np.int64]  # of shared pages: see `sharing`


class PageTable:
    """One group's table. It knows where pages belong; the manager knows who may have them."""

    def __init__(self, group: Group, num_slots: int, max_model_len: int, rollback_tokens: int = 0) -> None:
        self.group = group
        self.rollback_tokens = rollback_tokens
        self.block_tokens = group.block_tokens or 0
        self.grows = isinstance(group.retention, Full)
        self.is_ring = isinstance(group.retention, Window | Chunk)
        self.columns = group.max_pages(max_model_len, rollback_tokens) // group.stripes
        # The oldest token that a position sees, for groups that keep past tokens.
        self._first_visible = getattr(group.retention, "first_visible", None)
        # Growing tables are large and mostly untouched: zeros cost no memory until a row is used, and `filled` says
        # how far it is. Kernels read the entries of whole tiles, so rows end with a whole one.
        width = _whole_tiles(self.columns, self.block_tokens) if self.grows else self.columns
        make = np.zeros if self.grows else _no_pages
        self.entries: NDArray[np.int32] = make((num_slots, width, group.stripes), dtype=np.int32)
        self.filled = [0] * num_slots  # columns that hold a page
        self.pinned = [0] * num_slots  # ring columns that hold a page shared with a restore point

    def columns_to_write(self, old_length: int, new_length: int) -> range:
        """Blocks that a step from `old_length` to `new_length` tokens writes: only what the future can see."""
        retention = self.group.retention
        if isinstance(retention, State | Cross) or self.columns == 0:
            return range(0)
        held = retention.held(new_length, self.rollback_tokens)
        first = max(old_length, held.start)
        if first >= new_length:
            return range(0)
        return range(first // self.block_tokens, (new_length - 1) // self.block_tokens + 1)

    def missing(self, slot: int, old_length: int, new_length: int) -> Columns:
        """Columns that step would write and that hold no page yet."""
        blocks = self.columns_to_write(old_length, new_length)
        if self.grows:
            first = max(self.filled[slot], blocks.start)
            return np.arange(first, blocks.stop) if first < blocks.stop else NO_COLUMNS
        if len(blocks) == 1 and self.entries[slot, blocks.start % self.columns, 0] != NO_PAGE:
            return NO_COLUMNS
        columns: Columns = np.arange(blocks.start, blocks.stop) % max(self.columns, 1)
        empty: NDArray[np.bool_] = self.entries[slot, columns, 0] == NO_PAGE
        return columns[empty]

    def column_without_page(self, slot: int, position: int) -> int | None:
        """`missing` for one token: the column it would be written to, if that holds no page yet."""
        block = position // self.block_tokens
        if self.grows:
            return block if block >= self.filled[slot] else None
        column = block % self.columns
        if self.entries[slot, column, 0] != NO_PAGE or not self._is_held(position, position + 1):
            return None
        return column

    def fresh_column(self, slot: int, position: int) -> int | None:
        """`fresh_columns` for one token."""
        if not self._is_held(position, position + 1) or self._continues_block(slot, position):
            return None
        return position // self.block_tokens % self.columns

    def fresh_columns(self, slot: int, old_length: int, new_length: int) -> Columns:
        """Ring columns whose block begins in that step: what they held before may be overwritten or let go."""
        blocks = self.columns_to_write(old_length, new_length)
        first = max(blocks.start, old_length // self.block_tokens + self._continues_block(slot, old_length))
        return np.arange(first, max(first, blocks.stop)) % max(self.columns, 1)

    def _continues_block(self, slot: int, length: int) -> bool:
        """Whether the next token goes into a page that already holds tokens of its block."""
        if length % self.block_tokens == 0 or not self._is_held(length - 1, length):
            return False
        # A sequence that has just resumed holds only what it can be asked for: none of the tokens that a rollback
        # would need.
        column = length // self.block_tokens % self.columns
        return self.rollback_tokens == 0 or bool(self.entries[slot, column, 0] != NO_PAGE)

    def _is_held(self, position: int, length: int) -> bool:
        """Whether a sequence of `length` tokens, or what a rollback leaves of it, can be asked for this token."""
        assert self._first_visible is not None
        return bool(self._first_visible(max(0, length - self.rollback_tokens)) <= position)

    def held_columns(self, length: int) -> Columns:
        """Columns that hold what a sequence of `length` tokens can still be asked for, oldest block first.

        Tokens that only a rollback would need are not among them: this is what a restore point keeps, and no sequence
        is rolled back beyond one.
        """
        retention = self.group.retention
        if isinstance(retention, Cross):
            return np.arange(self.columns)
        if isinstance(retention, State) or self.columns == 0:
            return np.arange(0)
        held = retention.held(length)
        if not held:
            return np.arange(0)
        blocks: Columns = np.arange(held.start // self.block_tokens, (length - 1) // self.block_tokens + 1)
        if self.is_ring:
            blocks %= self.columns
        return blocks

    def resumed_pages(self, kept: Ids, kept_length: int, length: int) -> Ids:
        """Of the pages that a restore point at `kept_length` keeps, those that a sequence of `length` tokens needs."""
        if length == kept_length or not (self.grows or self.is_ring):
            return kept
        columns = len(self.held_columns(length))
        first = self.first_block(length) - self.first_block(kept_length) if self.is_ring and columns else 0
        return kept[first * self.group.stripes : (first + columns) * self.group.stripes]

    def shared_pages(self, resumed: Ids, length: int) -> Ids:
        """The pages among them that it shares: all but a partly filled last one, and no state."""
        if isinstance(self.group.retention, State):
            return resumed[:0]
        partly = (self.grows or self.is_ring) and length % self.block_tokens != 0
        return resumed[: -self.group.stripes] if partly else resumed

    def first_block(self, length: int) -> int:
        """The block of the oldest token that a restore point at `length` keeps, for groups that keep tokens."""
        retention = self.group.retention
        assert not isinstance(retention, State | Cross)
        return retention.held(length).start // self.block_tokens

    def can_change(self, slot: int) -> bool:
        """Whether the slot's row may need another page: a ring that is full and shares none never does."""
        if self.is_ring:
            return self.columns > 0 and (self.filled[slot] < self.columns or self.pinned[slot] > 0)
        return self.grows

    def horizon(self, slot: int, length: int) -> int:
        """The longest length this group reaches from `length` without a change to its table."""
        if self.grows:
            return self.filled[slot] * self.block_tokens
        if not self.can_change(slot):
            return NEVER
        if not self._continues_block(slot, length):
            return length
        return ceil_div(length, self.block_tokens) * self.block_tokens

    def page_offsets(self, slot: int) -> NDArray[np.int32]:
        """All pages in this slot's row, flat."""
        row = self.entries[slot, : self.filled[slot]] if self.grows else self.entries[slot]
        flat = row.reshape(-1)
        return flat if self.grows else flat[flat != NO_PAGE]

    def put(self, slot: int, columns: Columns, offsets: NDArray[np.int32]) -> None:
        self.entries[slot, columns] = offsets.reshape(-1, self.group.stripes)
        self.filled[slot] += len(columns)

    def truncate(self, slot: int, length: int) -> NDArray[np.int32]:
        """Take the pages out of a growing row that `length` tokens do not reach, and return them."""
        columns = ceil_div(length, self.block_tokens)
        emptied: NDArray[np.int32] = self.entries[slot, columns : self.filled[slot]].reshape(-1).copy()
        self.filled[slot] = columns
        return emptied

    def clear(self, slot: int) -> None:
        if not self.grows:
            self.entries[slot] = NO_PAGE
        self.filled[slot] = 0
        self.pinned[slot] = 0

    def places(self, slot: int, columns: Columns) -> Columns:
        """One number per page of these columns, stripes innermost: where in the table it stands."""
        stripes = self.group.stripes
        first: Columns = (slot * self.columns + columns) * stripes
        if stripes == 1:
            return first
        return (first[:, None] + np.arange(stripes)).reshape(-1)

    def place_page(self, place: int, offset: int) -> tuple[int, int]:
        """Put a page where `places` said; returns its slot and column."""
        at, stripe = divmod(place, self.group.stripes)
        slot, column = divmod(at, self.columns)
        self.entries[slot, column, stripe] = offset
        return slot, column

    def rewrite(self, moved: Mapping[int, int]) -> list[tuple[int, int]]:
        """Replace moved offsets wherever they stand; returns the slot and the column of each change."""
        slots = [slot for slot, filled in enumerate(self.filled) if filled]
        if not slots:
            return []
        rows = [self.entries[slot, : self.filled[slot]] if self.grows else self.entries[slot] for slot in slots]
        pages = np.concatenate(rows).reshape(-1)
        near = np.flatnonzero((pages >= min(moved)) & (pages <= max(moved)))
        starts = list(accumulate(map(len, rows), initial=0))
        changed: dict[tuple[int, int], None] = {}
        for at, page in zip(near.tolist(), pages[near].tolist(), strict=True):
            if page in moved:
                column, stripe = divmod(at, self.group.stripes)
                row = bisect_right(starts, column) - 1
                rows[row][column - starts[row], stripe] = moved[page]
                changed[slots[row], column - starts[row]] = None
        return list(changed)


def _whole_tiles(columns: int, block_tokens: int) -> int:
    per_tile = max(1, TILE_TOKENS // block_tokens)
    return ceil_div(columns, per_tile) * per_tile


def _no_pages(shape: tuple[int, ...], dtype: type[np.int32]) -> NDArray[np.int32]:
    return np.full(shape, NO_PAGE, dtype=dtype)
