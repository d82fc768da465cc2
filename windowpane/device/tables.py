"""Page tables that live on the device, and the one transfer that brings each step what has changed.

All tables of all groups, once for reading and once for writing (see `windowpane.kv.changes`), lie in one flat tensor,
so that a step's changed entries are a list of (place, offset) whatever groups they belong to.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import triton
import triton.language as tl

from windowpane.device.transfer import Ints
from windowpane.kv.changes import Changes, TableUpdate

UPDATE_BLOCK = 256
NO_UPDATES: Ints = np.zeros(0, dtype=np.int32)


class DeviceTables:
    """`reading[g]` and `writing[g]` are [slots, width, stripes] views; `shapes` are those of the host's tables."""

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes]
        starts = np.concatenate([[0], np.cumsum(sizes + sizes)]).tolist()
        if starts[-1] > np.iinfo(np.int32).max:
            raise ValueError(f"page tables of {starts[-1]:,} entries; lower max_num_seqs or max_model_len")
        self._shapes = shapes
        self._flat = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        views = [
            self._flat[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes + sizes, shapes + shapes, strict=False)
        ]
        self.reading, self.writing = views[: len(shapes)], views[len(shapes) :]
        self._reading_starts, self._writing_starts = starts[: len(shapes)], starts[len(shapes) : -1]
        self._late: tuple[TableUpdate, ...] = ()

    def updates(self, changes: Changes) -> tuple[Ints, Ints]:
        """What the step before left for now, and what this one changes: two lists, to be applied in this order.

        A list is places and then as many offsets. They are two because they may concern the same place.
        """
        late = self._list((update, self._reading_starts) for update in self._late)
        self._late = changes.late
        reading = [(update, self._reading_starts) for update in (*changes.entries, *changes.moved_reads)]
        writing = [(update, self._writing_starts) for update in (*changes.entries, *changes.late)]
        return late, self._list(reading + writing)

    def apply(self, updates: torch.Tensor) -> None:
        """Write a list of updates that has reached the device."""
        count = len(updates) // 2
        if count:
            _apply_kernel[(triton.cdiv(count, UPDATE_BLOCK),)](self._flat, updates, count, BLOCK=UPDATE_BLOCK)

    def state_pages(
        self, group: int, slots: torch.Tensor, state_slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page offsets [stripes, sequences] of the states that a step reads, and of those that it writes.

        Of each sequence's states, the one that `state_slots` names is read, and the other one written if there are two.
        """
        reading, writing = self.reading[group], self.writing[group]
        _, width, stripes = reading.shape
        # Rows begin at multiples of 16 bytes, as kernels are compiled for.
        stride = -(-len(slots) // 4) * 4
        # States in one slot are also read by torch (their tails), which would index by whatever is in memory that a
        # kernel has not written because it was only being compiled.
        made = torch.zeros if width == 1 else torch.empty
        before, after = made(2, stripes, stride, dtype=torch.int32, device=slots.device)
        _state_pages_kernel[(triton.cdiv(stripes * stride, UPDATE_BLOCK),)](
            reading, writing, slots, state_slots, before, after, len(slots), stride, WIDTH=width, STRIPES=stripes,
            BLOCK=UPDATE_BLOCK,
        )  # fmt: skip
        return before[:, : len(slots)], after[:, : len(slots)]

    def _list(self, updates: Iterable[tuple[TableUpdate, list[int]]]) -> Ints:
        places: list[Ints] = []
        offsets: list[Ints] = []
        for update, starts in updates:
            _, width, stripes = self._shapes[update.group]
            first = starts[update.group] + (update.slots * width + update.columns) * stripes
            places.append((first[:, None] + np.arange(stripes)).reshape(-1).astype(np.int32))
            offsets.append(np.broadcast_to(update.offsets, (len(update.slots), stripes)).reshape(-1))
        if not places:
            return NO_UPDATES
        return _last_of_each(np.concatenate(places), np.concatenate(offsets))


def _last_of_each(places: Ints, offsets: Ints) -> Ints:
    """Places and then their offsets. Of one that is named twice only the last counts: a launch has no order."""
    kept, last = np.unique(places[::-1], return_index=True)
    return np.concatenate([kept, offsets[::-1][last]])


@triton.jit
def _apply_kernel(TABLES, UPDATES, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    place = tl.load(UPDATES + i, mask=valid, other=0)
    tl.store(TABLES + place, tl.load(UPDATES + count + i, mask=valid, other=0), mask=valid)


@triton.jit(do_not_specialize=["sequences", "stride"], do_not_specialize_on_alignment=["SLOTS", "STATE_SLOTS"])
def _state_pages_kernel(
    READING, WRITING, SLOTS, STATE_SLOTS, BEFORE, AFTER, sequences, stride, WIDTH: tl.constexpr, STRIPES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stripe, sequence = i // stride, i % stride
    valid = (stripe < STRIPES) & (sequence < sequences)
    row = tl.load(SLOTS + sequence, mask=valid, other=0).to(tl.int64) * WIDTH
    present = tl.load(STATE_SLOTS + sequence, mask=valid, other=0)
    tl.store(BEFORE + i, tl.load(READING + (row + present) * STRIPES + stripe, mask=valid, other=0), mask=valid)
    behind = (present + 1) % WIDTH
    tl.store(AFTER + i, tl.load(WRITING + (row + behind) * STRIPES + stripe, mask=valid, other=0), mask=valid)
