"""One step as kernels read it: everything that varies lies in device tensors, brought by one transfer.

A step of decoding rows alone has a fixed shape once its rows are padded, so that it can be replayed as a graph; a
padding row has position -1, reads nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.attention.segments import ChunkQueries, Tiling, queries_of
from windowpane.attention.triton.decode_several import MOST_ROWS, split_rows
from windowpane.device.pages import KVPages, LayerPages, RoutePages
from windowpane.device.tables import NO_UPDATES, DeviceTables
from windowpane.device.transfer import Transfer
from windowpane.kv.caches import Kept, RouteCache, TokenCache
from windowpane.kv.changes import Changes
from windowpane.lowering.gpu.adapters import AdapterTables, DeviceRows
from windowpane.lowering.gpu.kernels.state_places import snapshot_tables
from windowpane.schedule.step import LAST_SAMPLED, Segment, Step

MOST_SEGMENT_TOKENS = MOST_ROWS  # of one whose rows decode together
FEWEST_ROWS = 2  # at once that kernels for such segments take, though each segment may have one
PADDING_ROW = (0, -1, 0)  # slot, position and present state
NO_DRAFT = LAST_SAMPLED
# How many inputs decoding rows have: those, then a draft, then the slot and the first position of a sequence. These two
# and the present state are by sequence in steps with drafts of sequences that have states.
PLAIN_INPUTS, DRAFT_INPUTS, STATE_DRAFT_INPUTS = 3, 4, 6


@dataclass(frozen=True, slots=True)
class PageWrites:
    """Rows of the step that a group stores, and where: page offset [stripes, rows] and token within the page."""

    rows: torch.Tensor
    offsets: torch.Tensor
    within: torch.Tensor


class Sequences(NamedTuple):
    """The sequences of a step, the decoding ones and then those of chunks: each one's slot, the position of its first
    row, and the slot of its present state. int32 [sequences] each.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    state_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A `Step` on the device. `wanted` are the rows whose logits are asked for, None for all.

    `writes` is by group, None where the rows are stored while they are made (steps that only decode). `segments` [n, 6]
    has the decoding rows of each sequence together, at most `most_rows` of them, where some have several. `snapshots`
    are those of the chunks' states: by group, `snapshot_tables`.
    """

    positions: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int32 [decoding rows]
    sequences: Sequences
    chunk_tokens: torch.Tensor | None = None
    chunks: ChunkQueries | None = None
    wanted: torch.Tensor | None = None
    wanted_chunks: ChunkQueries | None = None
    writes: list[PageWrites] | None = None
    segments: torch.Tensor | None = None
    most_rows: int = 1
    adapters: DeviceRows | None = None
    snapshots: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def decoding(
        cls, inputs: torch.Tensor, segments: torch.Tensor | None = None, most_rows: int = 1,
        adapters: DeviceRows | None = None,
    ) -> DeviceStep:  # fmt: skip
        """Of decoding rows alone, as `inputs` has them."""
        slots, positions, state_slots = inputs[:PLAIN_INPUTS]
        sequences = Sequences(slots, positions, state_slots)
        if segments is not None and len(inputs) == STATE_DRAFT_INPUTS:
            sequences = Sequences(inputs[4], inputs[5], state_slots)
        return cls(positions, slots, sequences, segments=segments, most_rows=most_rows, adapters=adapters)

    @classmethod
    def asking(cls, positions: torch.Tensor, segments: torch.Tensor, most_rows: int) -> DeviceStep:
        """Of a drafter's rows, which keep nothing: what each sees is said by its segment."""
        return cls(
            positions, positions, Sequences(positions, positions, positions), segments=segments, most_rows=most_rows
        )

    @property
    def num_decoding(self) -> int:
        return len(self.slots)


def tokens_of(inputs: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """What decoding rows compute: a slot's last sampled token, or the draft that stands in a fourth row of `inputs`."""
    last = sampled[inputs[0]]
    return last if len(inputs) == PLAIN_INPUTS else torch.where(inputs[3] == NO_DRAFT, last, inputs[3].long())


def row_segments(step: Step, most_rows: int, padded: int) -> NDArray[np.int32]:
    """Decoding rows by sequence, at most so many together, and padding up to as many segments as there are rows."""
    found = split_rows(step.decoding_segments(), most_rows)
    unused = [Segment(0, -1, -1, row, row, 1) for row in range(step.num_decoding, padded)]
    nobody = [Segment(0, -1, -1, 0, 0, 0)] * (padded - len(found) - len(unused))
    return np.array([*found, *unused, *nobody], dtype=np.int32)


def padding(inputs: torch.Tensor) -> NDArray[np.int32]:
    """A column of `inputs` for a row that reads nothing and writes nothing."""
    return np.array((*PADDING_ROW, NO_DRAFT, *PADDING_ROW[:2])[: len(inputs)], dtype=np.int32)[:, None]


class StepBuilder:
    """Brings steps to the device. `tilings` are those that the model's layers use."""

    def __init__(
        self, pages: KVPages, tables: DeviceTables, tilings: frozenset[Tiling], adapters: AdapterTables | None = None
    ) -> None:
        self._pages = pages
        self._tables = tables
        self._tilings = tilings
        self._adapters = adapters
        # A group's layers store the same rows in the same pages; None where it keeps no tokens.
        self._layers = [self._keeper(group.slices[0].cache) for group in pages.layout.groups]

    def mixed(self, step: Step, changes: Changes | None, *, keeps: bool = True) -> DeviceStep:
        """A step with segments. Updates the device's tables on the way, unless `changes` is None: then these are more
        rows of the same step. Without `keeps`, nothing is stored.
        """
        transfer = Transfer(self._pages.device)
        updates = (NO_UPDATES, NO_UPDATES) if changes is None else self._tables.updates(changes)
        late, now = (transfer.add(some) for some in updates)
        arrays = (step.decode_slots, step.positions, step.tokens, step.wanted)
        slots, positions, tokens, wanted = (transfer.add(array) for array in arrays)
        of_sequences = (step.sequences, step.first_positions, step.state_slots)
        sequences = [transfer.add(array) for array in of_sequences]
        everything, narrowed = (self._queries(s, transfer) for s in (step.segments, step.wanted_segments))
        writes = []
        for layer in self._layers:
            lists = layer.writes(step) if layer else (step.wanted[:0],) * 3
            rows, offsets, within = lists if keeps else (array[:0] for array in lists)
            writes.append([transfer.add(array) for array in (rows, offsets.T, within)])
        snapshots = {}
        if changes is not None and changes.snapshots:
            groups = {snapshot.group for snapshot in changes.snapshots}
            snapshots = {g: transfer.add(self._snapshots(g, step)) for g in groups}
        adapters = None
        if self._adapters is not None and len(step.adapters):
            adapters = self._adapters.add(step.adapters, step.wanted, transfer)
        sent = transfer.send()
        self._tables.apply(sent[late])
        self._tables.apply(sent[now])
        stored = [PageWrites(*(sent[handle] for handle in handles)) for handles in writes]
        return DeviceStep(
            sent[positions], sent[slots], Sequences(*(sent[handle] for handle in sequences)), sent[tokens],
            everything(sent), sent[wanted].long(), narrowed(sent), stored,
            adapters=None if adapters is None else adapters(sent),
            snapshots={g: sent[handle] for g, handle in snapshots.items()},
        )  # fmt: skip

    def _keeper(self, cache: Kept) -> LayerPages | RoutePages | None:
        if isinstance(cache, RouteCache):
            return self._pages.routes
        return self._pages.layers[cache.layer] if isinstance(cache, TokenCache) else None

    def _snapshots(self, group: int, step: Step) -> NDArray[np.int32]:
        """Those of a group, a table for each stripe."""
        found = [self._pages.snapshots.get((group, segment.slot), ()) for segment in step.segments]
        pages = np.stack([snapshot.offsets for of_segment in found for snapshot in of_segment], axis=1)
        return snapshot_tables([[snapshot.position for snapshot in of_segment] for of_segment in found], pages)

    def _queries(
        self, segments: tuple[Segment, ...], transfer: Transfer
    ) -> Callable[[list[torch.Tensor]], ChunkQueries]:
        """Puts these segments and their tiles on the transfer; what is returned finds them in what was sent."""
        arrived: list[torch.Tensor] = []

        def bring(array: NDArray[np.int32]) -> Callable[[], torch.Tensor]:
            at = transfer.add(array)
            return lambda: arrived[at]

        make = queries_of(segments, self._tilings, bring)

        def find(sent: list[torch.Tensor]) -> ChunkQueries:
            arrived[:] = sent
            return make()

        return find
