"""One step row by row, as every lowering reads it: whose tokens lie where, and which of them ask for logits.

Decoding rows come first, one per sequence; then the rows of each segment. A sequence that computes several tokens at
once, be it a prompt's chunk or a few drafts, is a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windowpane.schedule.batch import Batch, wanted_rows

LAST_SAMPLED = -1  # in a token's stead: what the slot sampled last, which only the device knows


class Segment(NamedTuple):
    """Tokens [start, stop) of a slot, at rows `row`.. of the step; the last q_count of them ask, from rows `q_row`.."""

    slot: int
    start: int
    stop: int
    row: int
    q_row: int
    q_count: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.stop - self.start)

    @property
    def query_rows(self) -> slice:
        return slice(self.q_row, self.q_row + self.q_count)


@dataclass(frozen=True, slots=True)
class Step:
    """`positions` are those of all rows in their sequences, `tokens` those of the segments' rows: what decoding rows
    compute was sampled last and lies on the device.

    `wanted` are the rows whose logits are asked for: every decoding row, and the last ones of each segment. In
    `segments` all rows ask, in `wanted_segments` only the wanted ones. `state_slots` says which slot has the present
    state of each sequence, the decoding ones and then those of segments: it is read, and the other one is written, or
    the same where there is one.
    `adapters` has the slot of each row's adapter, 0 for none; it is empty where no row has one.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int64]
    decode_slots: NDArray[np.int64]
    segments: tuple[Segment, ...]
    wanted_segments: tuple[Segment, ...]
    wanted: NDArray[np.int64]
    state_slots: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    adapters: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    drafts_in_rows: bool = False  # a sequence may have several decoding rows: later ones find earlier ones in pages

    @classmethod
    def of_rows(cls, batch: Batch) -> Step:
        """A step of a batch whose chunks are all drafts, with every row a decoding one; `tokens` are the chunks'."""
        chunks, nothing = batch.chunks, np.zeros(0, dtype=np.int32)
        slots = np.concatenate([batch.decode_slots, *(np.full(len(c.tokens), c.slot) for c in chunks)])
        starts = (np.arange(c.start, c.start + len(c.tokens)) for c in chunks)
        positions = np.concatenate([batch.decode_positions, *starts])
        tokens = np.concatenate([nothing, *(c.tokens for c in chunks)])
        decoding = len(batch.decode_slots)
        ends = decoding + np.cumsum([len(c.tokens) for c in chunks])
        asking = (np.arange(end - wanted_rows(c, frozenset()), end) for c, end in zip(chunks, ends, strict=True))
        return cls(
            tokens, positions, slots, (), (), np.concatenate([np.arange(decoding), *asking]), batch.state_slots,
            _adapters_of_rows(batch), drafts_in_rows=bool(chunks),
        )  # fmt: skip

    @classmethod
    def of(cls, batch: Batch, all_logits_slots: frozenset[int] = frozenset()) -> Step:
        """Chunks without tokens are left out; of those in `all_logits_slots` every row is wanted."""
        decoding = len(batch.decode_slots)
        segments, narrowed, row, q_row = [], [], decoding, decoding
        state_slots = batch.state_slots[:decoding].tolist()
        tokens, positions, wanted = [np.zeros(0, dtype=np.int32)], [batch.decode_positions], [np.arange(decoding)]
        for chunk, state_slot in zip(batch.chunks, batch.state_slots[decoding:].tolist(), strict=True):
            count, asking = len(chunk.tokens), wanted_rows(chunk, all_logits_slots)
            if not count:
                continue
            stop = chunk.start + count
            segments.append(Segment(chunk.slot, chunk.start, stop, row, row, count))
            narrowed.append(Segment(chunk.slot, chunk.start, stop, row, q_row, asking))
            state_slots.append(state_slot)
            tokens.append(chunk.tokens)
            positions.append(np.arange(chunk.start, stop))
            row, q_row = row + count, q_row + asking
            wanted.append(np.arange(row - asking, row))
        return cls(
            np.concatenate(tokens),
            np.concatenate(positions),
            batch.decode_slots,
            tuple(segments),
            tuple(narrowed),
            np.concatenate(wanted),
            np.array(state_slots, dtype=np.int8),
            _adapters_of_rows(batch),
        )

    def whole(self) -> Step:
        """The same with all rows wanted."""
        return replace(self, wanted=np.arange(len(self.positions)), wanted_segments=self.segments)

    @property
    def num_decoding(self) -> int:
        return len(self.decode_slots)

    def decoding_segments(self) -> list[Segment]:
        """Decoding rows by sequence: those of one slot, one behind another, are one segment."""
        slots, at = self.decode_slots, self.decode_positions
        begins = np.append(True, (slots[1:] != slots[:-1]) | (at[1:] != at[:-1] + 1))[: len(slots)]
        rows = np.flatnonzero(begins)
        counts = np.diff(rows, append=len(slots))
        each = zip(slots[rows].tolist(), at[rows].tolist(), rows.tolist(), counts.tolist(), strict=True)
        return [Segment(slot, start, start + count, row, row, count) for slot, start, row, count in each]

    @property
    def decode_positions(self) -> NDArray[np.int64]:
        return self.positions[: self.num_decoding]

    @property
    def sequences(self) -> NDArray[np.int64]:
        """The slot of each sequence: the decoding ones, then those of segments."""
        return np.concatenate([self.decode_slots, np.array([s.slot for s in self.segments], dtype=np.int64)])

    @property
    def first_positions(self) -> NDArray[np.int64]:
        """Where in its sequence each of them begins in this step."""
        return np.concatenate([self.decode_positions, np.array([s.start for s in self.segments], dtype=np.int64)])

    @property
    def rotary_positions(self) -> NDArray[np.int64]:
        """What rows are rotated by. In text that is where they lie in their sequence."""
        return self.positions


def _adapters_of_rows(batch: Batch) -> NDArray[np.int32]:
    if not len(batch.adapters):
        return batch.adapters
    rows = [1] * len(batch.decode_slots) + [len(chunk.tokens) for chunk in batch.chunks]
    return np.repeat(batch.adapters, rows)
