"""One step as kernels read it: everything that varies lies in device tensors, brought by one transfer.

Decoding rows come first, then the chunks. A step of decoding rows alone has a fixed shape once its rows are padded, so
that it can be replayed as a graph; a padding row has position -1, reads nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.attention.segments import ChunkSegment, Tiling
from windowpane.attention.triton.prefill import prefill_tiles
from windowpane.attention.triton.widen import PastPlan
from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.device.transfer import Ints, Transfer
from windowpane.kv.caches import TokenCache
from windowpane.schedule.batch import Batch, PromptChunk, wanted_rows

PADDING = -1


@dataclass(frozen=True, slots=True)
class ChunkQueries:
    """The chunks of a step, for one set of rows that ask.

    `segments` is [chunks, 6], the fields of `host_segments`. `tiles` lists the query tiles that layers ask for.
    `goes` are what must be decoded first where a past is coded, made once for layers that are alike.
    """

    segments: torch.Tensor
    host_segments: tuple[ChunkSegment, ...]
    tiles: dict[Tiling, torch.Tensor]
    goes: dict[tuple[Hashable, ...], list[tuple[PastPlan, ChunkQueries]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PageWrites:
    """Rows of the step that a group stores, and where: page offset [stripes, rows] and token within the page."""

    rows: torch.Tensor
    offsets: torch.Tensor
    within: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """`wanted` are the rows whose logits are asked for, None for all. `writes` is by group, None where the rows are
    stored while they are made (steps that only decode).
    """

    positions: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int32 [decoding rows]
    chunk_tokens: torch.Tensor | None = None
    chunks: ChunkQueries | None = None
    wanted: torch.Tensor | None = None
    wanted_chunks: ChunkQueries | None = None
    writes: list[PageWrites] | None = None

    @property
    def num_decoding(self) -> int:
        return len(self.slots)


class StepBuilder:
    """Turns batches into device steps. `tilings` are those that the model's layers use."""

    def __init__(self, pages: KVPages, tables: DeviceTables, tilings: frozenset[Tiling]) -> None:
        self._pages = pages
        self._tables = tables
        self._tilings = tilings
        self._token_groups = [isinstance(g.slices[0].cache, TokenCache) for g in pages.layout.groups]

    def mixed(self, batch: Batch, all_logits_slots: frozenset[int]) -> DeviceStep:
        """A step with chunks; those without tokens are not its business. Updates the device's tables on the way."""
        chunks = [c for c in batch.chunks if len(c.tokens)]
        transfer = Transfer(self._pages.device)
        late, now = (transfer.add(updates) for updates in self._tables.updates(batch.changes))
        slots = transfer.add(batch.decode_slots)
        positions = transfer.add(_positions(batch, chunks))
        tokens = transfer.add(np.concatenate([np.zeros(0, dtype=np.int32), *(c.tokens for c in chunks)]))
        wanted, counts = _wanted(batch, chunks, all_logits_slots)
        rows = transfer.add(wanted)
        decoding = len(batch.decode_slots)
        everything = _queries(chunks, decoding, [len(c.tokens) for c in chunks], self._tilings, transfer)
        narrowed = _queries(chunks, decoding, counts, self._tilings, transfer)
        writes = [
            [transfer.add(a) for a in self._writes(batch, chunks, g)] if is_tokens else None
            for g, is_tokens in enumerate(self._token_groups)
        ]
        sent = transfer.send()
        self._tables.apply(sent[late])
        self._tables.apply(sent[now])
        nothing = sent[rows][:0]
        return DeviceStep(
            positions=sent[positions],
            slots=sent[slots],
            chunk_tokens=sent[tokens],
            chunks=everything.on_device(sent),
            wanted=sent[rows].long(),
            wanted_chunks=narrowed.on_device(sent),
            writes=[
                PageWrites(*(sent[h] for h in handles)) if handles else PageWrites(nothing, nothing, nothing)
                for handles in writes
            ],
        )

    def _writes(self, batch: Batch, chunks: list[PromptChunk], group: int) -> tuple[Ints, Ints, Ints]:
        """What the future can see of every token of the step, and where this group stores it."""
        layer = self._pages.layers[self._pages.layout.groups[group].slices[0].cache.layer]
        row = len(batch.decode_slots)
        decoding = np.arange(row if layer.first_written(0, 1) == 0 else 0)  # a window of one token keeps nothing
        rows = [decoding]
        slots = [batch.decode_slots[decoding]]
        positions = [batch.decode_positions[decoding]]
        tail_rows, tail_positions, tail_offsets = [], [], []
        for chunk in chunks:
            stop = chunk.start + len(chunk.tokens)
            kept = np.arange(layer.first_written(chunk.start, stop), stop)
            rows.append(kept - chunk.start + row)
            slots.append(np.full(len(kept), chunk.slot))
            positions.append(kept)
            for tail in self._pages.tails.get((group, chunk.slot), ()):
                tail_positions.append(np.arange(tail.start, tail.stop))
                tail_rows.append(tail_positions[-1] - chunk.start + row)
                blocks = tail_positions[-1] // layer.block_tokens - tail.start // layer.block_tokens
                tail_offsets.append(tail.offsets[blocks])
            row += len(chunk.tokens)
        own = np.concatenate(positions)
        columns = own // layer.block_tokens % self._pages.columns(group)
        offsets = np.concatenate([self._pages.writing[group][np.concatenate(slots), columns], *tail_offsets])
        rows += tail_rows
        at = np.concatenate([own, *tail_positions])
        return (
            np.concatenate(rows).astype(np.int32),
            np.ascontiguousarray(offsets.T),
            (at % layer.block_tokens).astype(np.int32),
        )


def _queries(
    chunks: list[PromptChunk], first_row: int, counts: list[int], tilings: frozenset[Tiling], transfer: Transfer
) -> _QueryHandles:
    segments = []
    row = query_row = first_row
    for chunk, count in zip(chunks, counts, strict=True):
        segments.append(ChunkSegment(chunk.slot, chunk.start, chunk.start + len(chunk.tokens), row, query_row, count))
        row += len(chunk.tokens)
        query_row += count
    table = np.array(segments, dtype=np.int32).reshape(-1, 6)
    tiles = {tiling: transfer.add(prefill_tiles(tiling.queries(table), tiling.tokens)) for tiling in tilings}
    return _QueryHandles(transfer.add(table), tuple(segments), tiles)


@dataclass(frozen=True, slots=True)
class _QueryHandles:
    segments: int
    host_segments: tuple[ChunkSegment, ...]
    tiles: dict[Tiling, int]

    def on_device(self, sent: list[torch.Tensor]) -> ChunkQueries:
        tiles = {tiling: sent[handle] for tiling, handle in self.tiles.items()}
        return ChunkQueries(sent[self.segments], self.host_segments, tiles)


def _wanted(
    batch: Batch, chunks: list[PromptChunk], all_logits_slots: frozenset[int]
) -> tuple[NDArray[np.int64], list[int]]:
    """Rows whose logits are asked for, and how many of them each chunk has: its last ones."""
    counts = [wanted_rows(chunk, all_logits_slots) for chunk in chunks]
    rows = [np.arange(len(batch.decode_slots))]
    row = len(batch.decode_slots)
    for chunk, count in zip(chunks, counts, strict=True):
        row += len(chunk.tokens)
        rows.append(np.arange(row - count, row))
    return np.concatenate(rows), counts


def _positions(batch: Batch, chunks: list[PromptChunk]) -> NDArray[np.int64]:
    return np.concatenate([batch.decode_positions, *(np.arange(c.start, c.start + len(c.tokens)) for c in chunks)])
