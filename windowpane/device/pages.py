"""The arena's memory, and reading and writing rows of it in plain torch, on any device.

Tables are kept twice. Steps read through `reading` and write through `writing`; they differ while a step slides past a
page it shares (see `windowpane.kv.changes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from windowpane.device import codecs
from windowpane.device.host_pages import HostPages
from windowpane.device.transfer import to_device
from windowpane.kv.caches import RouteCache, StateCache, TokenCache
from windowpane.kv.changes import Changes, Snapshot, Tail
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Layout, Slice
from windowpane.kv.retention import Chunk, LooksBack, Window
from windowpane.kv.tables import PageTable
from windowpane.schedule.step import Step

# Rows [n, heads, dim] of a part into page `offsets[i]`, token `within[i]`: part, offsets, within, rows.
Store = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]

QUERIES, KEYS = 0, 1  # sides of a balance
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ID_DTYPES = {"uint8": torch.uint8, "int16": torch.int16}
PAGES_AT_ONCE = 256  # of routed experts, on their way to the host: what is gathered for that was not planned for


class KVPages:
    """All pages of one device, addressed by layer. Sizes and `rollback_tokens` are those of the manager.

    `host_slabs` is how many slabs of host memory there are beside the arena.
    """

    def __init__(
        self,
        layout: Layout,
        num_slabs: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
        rollback_tokens: int = 0,
        host_slabs: int = 0,
    ) -> None:
        self.layout = layout
        self.rollback_tokens = rollback_tokens
        self.device = device
        self.arena = _zeros(num_slabs * layout.slab_bytes, device)
        self.host = HostPages(layout, host_slabs, self.arena)
        tables = [PageTable(g, num_slots, max_model_len, rollback_tokens) for g in layout.groups]
        self.columns = [max(t.columns, 1) for t in tables]
        # A window of one token keeps nothing and has no columns; it still gets one, so that reading it reads nothing.
        shapes = [(num_slots, max(t.entries.shape[1], 1), t.group.stripes) for t in tables]
        self.reading: list[NDArray[np.int32]] = [np.zeros(shape, dtype=np.int32) for shape in shapes]
        self.writing = [entries.copy() for entries in self.reading]
        # Where this step's decoding rows read and write: the same for all layers of a group.
        self._reads: dict[tuple[int, int, LooksBack], _Reads] = {}
        self._writes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, StatePlan] = {}  # of this step, by group
        # Where this step's rows store the experts they visit: the same for all layers.
        self._route_writes: tuple[torch.Tensor, torch.Tensor] | None = None
        self.tails: dict[tuple[int, int], list[Tail]] = {}  # of this step, by group and slot
        self.snapshots: dict[tuple[int, int], list[Snapshot]] = {}  # likewise, by position
        self.layers = {
            s.cache.layer: LayerPages(self, index, s)
            for index, g in enumerate(layout.groups)
            for s in g.slices
            if isinstance(s.cache, TokenCache)
        }
        self.states = {
            s.cache.layer: StatePages(self, index, s)
            for index, g in enumerate(layout.groups)
            for s in g.slices
            if isinstance(s.cache, StateCache)
        }
        self.routes = next(
            (
                RoutePages(self, index, s)
                for index, g in enumerate(layout.groups)
                for s in g.slices
                if isinstance(s.cache, RouteCache)
            ),
            None,
        )

    def forget_rows(self) -> None:
        """Other rows follow in the same step, such as a drafter's: where these read and write is looked up anew."""
        self._reads.clear()
        self._writes.clear()
        self._states.clear()
        self._route_writes = None

    def before_step(self, changes: Changes) -> None:
        self.forget_rows()
        self.tails, self.snapshots = {}, {}
        for tail in changes.tails:
            self.tails.setdefault((tail.group, tail.slot), []).append(tail)
        for snapshot in changes.snapshots:
            self.snapshots.setdefault((snapshot.group, snapshot.slot), []).append(snapshot)
        self.host.wait(changes)
        for move in changes.copies:
            page_bytes = self.layout.groups[move.group].page_bytes
            source, target = move.source * OFFSET_UNIT_BYTES, move.target * OFFSET_UNIT_BYTES
            self.arena[target : target + page_bytes] = self.arena[source : source + page_bytes]
        for update in (*changes.entries, *changes.moved_reads):
            self.reading[update.group][update.slots, update.columns] = update.offsets
        for update in (*changes.entries, *changes.late):
            self.writing[update.group][update.slots, update.columns] = update.offsets
        self.host.begin(changes.transfers)

    def after_step(self, changes: Changes) -> None:
        for update in changes.late:
            self.reading[update.group][update.slots, update.columns] = update.offsets

    def decoding_reads(self, group: int, stripe: int, sees: LooksBack, step: Step) -> _Reads:
        """The pages that decoding tokens see."""
        key = (group, stripe, sees)
        if key not in self._reads:
            block = self.layout.groups[group].block_tokens or 1
            slots, stops = step.decode_slots, step.decode_positions
            starts = np.array([sees.first_visible(position) for position in stops.tolist()])
            first_blocks, last_blocks = starts // block, np.maximum(-(-stops // block) - 1, starts // block)
            blocks = first_blocks[:, None] + np.arange(int((last_blocks - first_blocks).max()) + 1)
            columns = np.minimum(blocks, last_blocks[:, None]) % self.columns[group]
            offsets = self.reading[group][slots[:, None], columns, stripe].astype(np.int64)
            self._reads[key] = _Reads(
                offsets=self._tensor(offsets.reshape(-1)), shape=blocks.shape, starts=self._tensor(starts),
                stops=self._tensor(stops), most_tokens=int((stops - starts).max()),
                first_positions=self._tensor(first_blocks * block), block_tokens=block,
            )  # fmt: skip
        return self._reads[key]

    def decoding_writes(self, group: int, stripe: int, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Page offset and row of each decoding token."""
        key = (group, stripe)
        if key not in self._writes:
            block = self.layout.groups[group].block_tokens or 1
            columns = step.decode_positions // block % self.columns[group]
            entries = self.writing[group][step.decode_slots, columns, stripe].astype(np.int64)
            self._writes[key] = self._tensor(entries), self._tensor(step.decode_positions % block)
        return self._writes[key]

    def state_plan(self, group: int, step: Step) -> StatePlan:
        if group not in self._states:
            slots, present = step.sequences, step.state_slots.astype(np.int64)
            behind = self.writing[group][slots, (present + 1) % self.columns[group]]
            stops, pages, first_leaves = list(range(1, step.num_decoding + 1)), list(behind[: step.num_decoding]), []
            for segment, last in zip(step.segments, behind[step.num_decoding :], strict=True):
                first_leaves.append(len(stops))
                for snapshot in self.snapshots.get((group, segment.slot), ()):
                    stops.append(segment.row + snapshot.position - segment.start)
                    pages.append(snapshot.offsets)
                stops.append(segment.rows.stop)
                pages.append(last)
            self._states[group] = StatePlan(
                before=self._tensor(self.reading[group][slots, present].astype(np.int64)),
                new=self._tensor(np.flatnonzero(step.first_positions == 0)),
                after=self._tensor(np.array(pages, dtype=np.int64).reshape(-1, behind.shape[1])),
                stops=stops,
                first_leaves=[*range(step.num_decoding), *first_leaves, len(stops)],
            )
        return self._states[group]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


@dataclass(frozen=True)
class StatePlan:
    """Where a step's sequences read and write their states: those that decode, and then those of segments.

    A sequence leaves its states behind its last row, and in front of each position that has a snapshot: these *leaves*
    are in the order of rows.
    """

    before: torch.Tensor  # [sequences, stripes]: pages
    new: torch.Tensor  # sequences that begin from nothing
    after: torch.Tensor  # [leaves, stripes]: pages
    stops: list[int]  # [leaves]: the step's row behind which each is left
    first_leaves: list[int]  # [sequences + 1]

    @cached_property
    def in_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first rows of sequences [sequences + 1], `first_leaves` and `stops`."""
        stops, first_leaves = torch.tensor(self.stops), torch.tensor(self.first_leaves)
        return torch.cat([stops.new_zeros(1), stops])[first_leaves], first_leaves, stops


@dataclass(frozen=True)
class _Reads:
    """Pages of several slots, padded to the most that one of them has, and the past positions that count."""

    offsets: torch.Tensor
    shape: tuple[int, ...]  # slots, blocks
    starts: torch.Tensor  # [slots]
    stops: torch.Tensor
    most_tokens: int
    first_positions: torch.Tensor  # [slots]: those of the first column
    block_tokens: int

    @cached_property
    def positions(self) -> torch.Tensor:
        """[slots, tokens]: that of each column."""
        columns = torch.arange(self.shape[1] * self.block_tokens, device=self.offsets.device)
        return self.first_positions[:, None] + columns

    @cached_property
    def counts(self) -> torch.Tensor:
        """[slots, tokens]: which columns count."""
        return (self.positions >= self.starts[:, None]) & (self.positions < self.stops[:, None])

    @cached_property
    def unused(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and column of each that does not."""
        slots, columns = (~self.counts).nonzero(as_tuple=True)
        return slots, columns


class LayerPages:
    """The slices of one layer. `past` and `write` work on token positions of a slot."""

    def __init__(self, pages: KVPages, group: int, piece: Slice) -> None:
        spec = pages.layout.groups[group]
        assert isinstance(piece.cache, TokenCache) and spec.kv_format is not None and spec.block_tokens is not None
        self.kv_format = spec.kv_format
        self.is_coded = spec.kv_format.name not in TORCH_DTYPES
        self.dtype = torch.int16 if self.is_coded else TORCH_DTYPES[spec.kv_format.name]  # as it lies in memory
        self.block_tokens, self.retention = spec.block_tokens, spec.retention
        self._pages, self.group, self.stripe, self.dims = pages, group, piece.stripe, piece.cache.row_dims
        shape = (piece.cache.kv_heads, spec.block_tokens)
        widths = [codecs.row_words(spec.kv_format, dim) if self.is_coded else dim for dim in self.dims]
        self._views = [
            _page_view(pages.arena.view(self.dtype), offset, row_bytes, *shape, width)
            for offset, row_bytes, width in zip(piece.data_offsets, piece.row_bytes, widths, strict=True)
        ]
        scale_bytes = spec.kv_format.scale_bytes
        self._scale_views = [
            _page_view(pages.arena.view(torch.int32), offset, scale_bytes, *shape, 1) for offset in piece.scale_offsets
        ]
        self.basis = codecs.basis_for(spec.kv_format, self.dims, pages.device)
        # What a warm-up pass settles: the scales of K and V, or of one latent, where the format has one for the whole
        # layer, and what balances queries and keys where it has a basis. Until then rows are only looked at.
        self.layer_scales: list[float] | None = None
        self.balance: torch.Tensor | None = None  # float32 [queries and keys, KV heads, dim]
        self._largest = [0.0] * len(self.dims)
        self._kv_heads = piece.cache.kv_heads
        self._squares = [torch.zeros(self._kv_heads, self.dims[0])] * 2  # of queries and keys, in a warm-up pass

    def past(self, slot: int, start: int, stop: int) -> list[torch.Tensor]:
        """Tokens [start, stop): K and V, or one latent, each [heads, tokens, dim]."""
        offsets, skip = self.past_offsets(slot, start, stop), start % self.block_tokens
        found = []
        for part in range(len(self._views)):
            blocks = self._load(part, offsets)  # [blocks, heads, block_tokens, dim]
            rows = blocks.transpose(0, 1).reshape(blocks.shape[1], -1, blocks.shape[3])
            found.append(rows[:, skip : skip + stop - start])
        return found

    # -- where rows lie, for kernels ---------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """2 where K and V are stored, 1 where one latent is."""
        return len(self._views)

    def address(self, part: int) -> int:
        """Of this layer's K, V or latent in a page at offset 0; heads, tokens and dimensions follow in this order."""
        return self._views[part].data_ptr()

    def scale_address(self, part: int) -> int | None:
        """Of the rows' scales in a page at offset 0, by head and token, where the format has one for each row."""
        return self._scale_views[part].data_ptr() if self._scale_views else None

    def row_bytes(self, part: int) -> int:
        """From one token's row to the next's."""
        return self._views[part].stride(2) * self.dtype.itemsize

    def past_offsets(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Pages that hold tokens [start, stop)."""
        blocks = np.arange(start // self.block_tokens, -(-stop // self.block_tokens))
        return self._offsets(self._pages.reading, slot, blocks)

    def decoding_reads(self, step: Step, sees: LooksBack) -> _Reads:
        return self._pages.decoding_reads(self.group, self.stripe, sees, step)

    def decoding_writes(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Page offset and row of each decoding token."""
        return self._pages.decoding_writes(self.group, self.stripe, step)

    @property
    def unseen_every(self) -> int:
        """Of every so many tokens the last is seen by no later one; 0 where each is seen."""
        match self.retention:
            case Chunk(tokens=period) | Window(tokens=1 as period):
                return period
        return 0

    @property
    def keeps_every_token(self) -> bool:
        """Some later token can see each one."""
        return self.unseen_every == 0

    # -- in plain torch ----------------------------------------------------------------------------------------------

    def decoding_past(self, step: Step, sees: LooksBack) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """What the decoding tokens of a step can see of the past, all sequences at once, padded to the longest.

        Returns K and V (or one latent), each [slots, heads, tokens, dim], the positions [slots, tokens] of the columns,
        and which of them count. Values that do not count are 0, whatever their memory holds.
        """
        reads = self.decoding_reads(step, sees)
        unused_slots, unused_columns = reads.unused
        found = []
        for part in range(len(self._views)):
            loaded = self._load(part, reads.offsets)
            pages = loaded.view(*reads.shape, *loaded.shape[1:])
            rows = pages.transpose(1, 2).reshape(reads.shape[0], loaded.shape[1], -1, loaded.shape[3])
            rows[unused_slots, :, unused_columns] = 0
            found.append(rows)
        return found, reads.positions, reads.counts

    def decoding_rows(self, step: Step) -> list[torch.Tensor]:
        """Of a step whose decoding tokens were written before: their own rows, [slots, heads, dim] each."""
        columns = step.decode_positions // self.block_tokens % self._pages.columns[self.group]
        entries = self._pages.reading[self.group][step.decode_slots, columns, self.stripe].astype(np.int64)
        offsets = self._pages._tensor(entries)
        within = self._pages._tensor(step.decode_positions % self.block_tokens)
        each = torch.arange(len(within), device=within.device)
        return [self._load(part, offsets)[each, :, within] for part in range(len(self._views))]

    def write_decoding(self, step: Step, rows: list[torch.Tensor], store: Store | None = None) -> None:
        """Store the rows ([slots, heads, dim] each) of a step's decoding tokens, those that a later one can see."""
        offsets, within = self.decoding_writes(step)
        kept = self._kept_rows(step.decode_positions)
        for part, values in enumerate(rows):
            (store or self.store)(part, offsets[kept], within[kept], values[kept])

    def write(self, step: Step, rows: list[torch.Tensor], store: Store | None = None) -> None:
        """Store what `writes` lists of a step's rows ([rows, heads, dim] each)."""
        at, offsets, within = (self._pages._tensor(x.astype(np.int64)) for x in self.writes(step))
        own_offsets = offsets[:, self.stripe].contiguous()
        for part, values in enumerate(rows):
            (store or self.store)(part, own_offsets, within, values[at])

    def writes(self, step: Step) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """Rows of a step that a later token can see or a restore point keeps, the offsets of their pages [rows,
        stripes], and their tokens within these.
        """
        block, pages = self.block_tokens, self._pages
        rows = [np.arange(step.num_decoding)[self._kept_rows(step.decode_positions)]]
        slots = [step.decode_slots[rows[0]]]
        tail_rows, tail_positions, tail_offsets = [], [], []
        for segment in step.segments:
            kept = np.arange(self.first_written(segment.start, segment.stop), segment.stop)
            rows.append(kept - segment.start + segment.row)
            slots.append(np.full(len(kept), segment.slot))
            for tail in pages.tails.get((self.group, segment.slot), ()):
                tail_positions.append(np.arange(tail.start, tail.stop))
                tail_rows.append(tail_positions[-1] - segment.start + segment.row)
                tail_offsets.append(tail.offsets[tail_positions[-1] // block - tail.start // block])
        own = np.concatenate(rows)
        columns = step.positions[own] // block % pages.columns[self.group]
        offsets = np.concatenate([pages.writing[self.group][np.concatenate(slots), columns], *tail_offsets])
        within = np.concatenate([step.positions[own], *tail_positions]) % block
        return np.concatenate([own, *tail_rows]), offsets, within

    def transformed(self, values: torch.Tensor) -> torch.Tensor:
        """Values into the basis that they are stored in, and what was attended back out of it."""
        return values if self.basis is None else values @ self.basis.to(values.dtype)

    def balanced(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """QUERIES or KEYS [rows, heads, dim] into their basis; query heads share their KV head's balance."""
        if self.basis is None:
            return x
        heads = x.float().reshape(len(x), self._kv_heads, x.shape[1] // self._kv_heads, x.shape[2])
        if self.balance is None:
            self._squares[side] = self._squares[side] + F.normalize(heads, dim=-1).square().mean((0, 2)).cpu()
            return x
        return (heads * self.balance[side, :, None] @ self.basis).view(x.shape).to(x.dtype)

    def through_format(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """What `x` is once stored and loaded: the present is attended as the past will be."""
        if not self.is_coded:
            return x if x.dtype == self.dtype else x.to(self.dtype).to(x.dtype)
        if self.warming_up:
            self._largest[part] = max(self._largest[part], float(x.abs().amax()))
            return x
        words, scales = codecs.encode(self.kv_format, x, self._layer_scale(part))
        return codecs.decode(self.kv_format, words, scales, x.shape[-1], self._layer_scale(part)).to(x.dtype)

    @property
    def warming_up(self) -> bool:
        """The format has a scale or a balance for the whole layer, and it is not known yet."""
        needs_scale = self.is_coded and codecs.needs_layer_scale(self.kv_format) and self.layer_scales is None
        return needs_scale or (self.basis is not None and self.balance is None)

    def end_warm_up(self) -> None:
        """Settle the layer's scales or balance by what was seen. They never change again: pages hang on them."""
        if self.basis is not None:
            self.balance = codecs.balance_for(*self._squares).to(self._pages.device)
        else:
            self.layer_scales = [codecs.layer_scale_for(self.kv_format, largest) for largest in self._largest]

    def _layer_scale(self, part: int) -> float:
        return 1.0 if self.layer_scales is None else self.layer_scales[part]

    def _load(self, part: int, offsets: torch.Tensor) -> torch.Tensor:
        """All rows of these pages, [pages, heads, block_tokens, dim]."""
        stored = self._views[part].index_select(0, offsets)
        if not self.is_coded:
            return stored
        scales = self._scale_views[part].index_select(0, offsets)[..., 0] if self._scale_views else None
        return codecs.decode(self.kv_format, stored, scales, self.dims[part], self._layer_scale(part))

    def store(self, part: int, offsets: torch.Tensor, within: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [n, heads, dim] into page `offsets[i]`, token `within[i]`.

        What went through the format before is stored as it was then (the codecs' tests see to it).
        """
        if self.warming_up:
            return
        if not self.is_coded:
            self._views[part][offsets, :, within] = values.to(self.dtype)
            return
        words, scales = codecs.encode(self.kv_format, values, self._layer_scale(part))
        self._views[part][offsets, :, within] = words
        if scales is not None:
            self._scale_views[part][offsets, :, within] = scales[..., None]

    def first_written(self, start: int, stop: int) -> int:
        """The first of tokens [start, stop) that a later one can see, or one in the place of those taken back."""
        held = self.retention.held(stop, self._pages.rollback_tokens)  # type: ignore[union-attr]  # token groups only
        return max(start, held.start)

    def _kept_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64] | slice:
        """Which of these last tokens of their sequences a later one can see."""
        if self.keeps_every_token:
            return slice(0, len(positions))
        return np.flatnonzero([self.first_written(p, p + 1) <= p for p in positions.tolist()])

    def _offsets(self, tables: list[NDArray[np.int32]], slot: int, blocks: NDArray[np.int64]) -> torch.Tensor:
        columns = blocks % self._pages.columns[self.group]
        return self._pages._tensor(tables[self.group][slot, columns, self.stripe].astype(np.int64))


class StatePages:
    """The state of one layer: each of its parts is [page offset, head, element]."""

    def __init__(self, pages: KVPages, group: int, piece: Slice) -> None:
        assert isinstance(piece.cache, StateCache)
        self._pages, self.group, self.stripe, self.cache = pages, group, piece.stripe, piece.cache
        self.parts = []
        for part, offset in zip(piece.cache.parts, piece.data_offsets, strict=True):
            arena = pages.arena.view(TORCH_DTYPES[part.dtype or ""])
            row_bytes = part.elements_per_head * arena.element_size()
            view = _page_view(arena, offset, row_bytes, part.heads, 1, part.elements_per_head)
            self.parts.append(view[:, :, 0])

    def plan(self, step: Step) -> StatePlan:
        return self._pages.state_plan(self.group, step)

    def load(self, step: Step) -> list[torch.Tensor]:
        """Each part of the states before this step [sequences, heads, elements]. New sequences begin with zeros,
        whatever their page holds.
        """
        plan = self.plan(step)
        before = plan.before[:, self.stripe]
        return [part.index_select(0, before).index_fill_(0, plan.new, 0.0) for part in self.parts]

    def store(self, step: Step, states: list[torch.Tensor]) -> None:
        """Each part of the states that this step leaves [leaves, heads, elements]."""
        after = self.plan(step).after[:, self.stripe]
        for part, values in zip(self.parts, states, strict=True):
            part[after] = values.to(part.dtype)


class RoutePages:
    """The experts that tokens visited: [page offset, token, layer with experts, choice]."""

    def __init__(self, pages: KVPages, group: int, piece: Slice) -> None:
        block_tokens = pages.layout.groups[group].block_tokens
        assert isinstance(piece.cache, RouteCache) and block_tokens is not None
        self.cache, self.group, self.block_tokens, self._pages = piece.cache, group, block_tokens, pages
        self.arena = pages.arena.view(ID_DTYPES[piece.cache.dtype])
        self.row_ids = len(piece.cache.layers) * piece.cache.chosen
        assert piece.data_offsets == (0,)
        view = _page_view(self.arena, 0, piece.row_bytes[0], 1, block_tokens, self.row_ids)
        self._view = view.view(len(view), block_tokens, len(piece.cache.layers), piece.cache.chosen)

    def place(self, layer: int) -> int:
        """Which of the layers with experts this one is."""
        return self.cache.layers.index(layer)

    def writes(self, step: Step) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        """As those of `LayerPages`; here they are all rows of a step, in order."""
        slots = [step.decode_slots, *(np.full(s.stop - s.start, s.slot) for s in step.segments)]
        columns = step.positions // self.block_tokens % self._pages.columns[self.group]
        offsets = self._pages.writing[self.group][np.concatenate(slots), columns]
        return np.arange(len(step.positions)), offsets, step.positions % self.block_tokens

    def write(self, step: Step, layer: int, ids: torch.Tensor) -> None:
        """Store the experts [rows, choices] that all rows of a step visit in one layer."""
        pages = self._pages
        if pages._route_writes is None:
            _, offsets, within = self.writes(step)
            pages._route_writes = pages._tensor(offsets[:, 0].astype(np.int64)), pages._tensor(within)
        at, within_page = pages._route_writes
        self._view[at, within_page, self.place(layer)] = ids.to(self._view.dtype)

    def read(self, slot: int, start: int, stop: int) -> Callable[[], NDArray[np.integer[Any]]]:
        """Begin to read what tokens [start, stop) of a slot visited; calling the result waits for it.

        It is [tokens, layers, choices], as of the steps that were sent off so far: later ones may write these pages.
        """
        block, device = self.block_tokens, self._pages.device
        first = start // block
        offsets = self._pages.reading[self.group][slot, first : -(-stop // block), 0].astype(np.int64)
        on_gpu = device.type == "cuda"
        host = torch.empty(len(offsets), *self._view.shape[1:], dtype=self._view.dtype, pin_memory=on_gpu)
        for at in range(0, len(offsets), PAGES_AT_ONCE):
            some = slice(at, at + PAGES_AT_ONCE)
            host[some].copy_(self._view.index_select(0, to_device(offsets[some], device)), non_blocking=True)
        landed = torch.Event(device) if on_gpu else None
        if landed is not None:
            landed.record()

        def rows() -> NDArray[np.integer[Any]]:
            if landed is not None:
                landed.synchronize()
            found: NDArray[np.integer[Any]] = host.flatten(0, 1)[start - first * block : stop - first * block].numpy()
            return found.copy()  # pinned memory is scarce

        return rows


def _zeros(size_bytes: int, device: torch.device) -> torch.Tensor:
    """An arena. On a CPU through NumPy, whose zeros cost nothing until they are touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8))
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device)


def _page_view(
    arena: torch.Tensor, offset_bytes: int, row_bytes: int, heads: int, block_tokens: int, dim: int
) -> torch.Tensor:
    """[page offset, head, token, dim]: pages overlap in this view, since any offset unit may start one."""
    item = arena.element_size()
    unit, row, first = OFFSET_UNIT_BYTES // item, row_bytes // item, offset_bytes // item
    slice_elements = heads * block_tokens * row
    starts = max((arena.numel() - first - slice_elements) // unit + 1, 0)
    return arena.as_strided((starts, heads, block_tokens, dim), (unit, block_tokens * row, row, 1), first)
