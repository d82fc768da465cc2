"""Random attention steps over pages, on any device: what kernels are given, and what they should answer.

Only rows that a token fills and may still be asked for are written; every other byte is NaN (0xFF).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.attention.chunk_attention import ChunkAttention, CodedChunkAttention, make_chunk_attention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import Mask
from windowpane.attention.reference import attend, attend_decoding
from windowpane.attention.scores import Scores
from windowpane.attention.segments import ChunkQueries, Tiling, queries_of
from windowpane.attention.triton.codes import INT4
from windowpane.attention.triton.decode import (
    DecodeScratch,
    decode,
    decode_programs,
    decode_rows,
    plan_decode,
    plan_rows,
)
from windowpane.attention.triton.decode_several import rows_at_once, split_rows
from windowpane.attention.triton.view import LatentRope, LayerView, PagedLayer
from windowpane.attention.triton.widen import plain_view, scratch_page_bytes
from windowpane.attention.triton.write import write
from windowpane.device import codecs
from windowpane.kv.caches import TokenCache
from windowpane.kv.decoded_past import TOGETHER_BYTES
from windowpane.kv.formats import KVFormat, kv_format
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Group, plan_layout
from windowpane.kv.retention import Chunk, Full, Window, ceil_div
from windowpane.kv.tables import PageTable
from windowpane.schedule.step import Segment

SMALL_ARENA_BYTES = 2**28  # beyond this, on a CPU, only pages in use are poisoned: untouched memory costs nothing
LAYER_SCALES = (0.01, 0.02)  # of K and V, for formats that have one for the whole layer
Vectors = tuple[torch.Tensor, torch.Tensor]  # K and V; of a latent rebuilt K and n


@dataclass(frozen=True)
class Layer:
    """`rotary` counts the rotary pairs of a latent; 0 means that K and V are stored. No KV format means that of the
    activations.
    """

    kv_heads: int
    group: int
    dim: int
    window_tokens: int | None = None
    rotary: int = 0
    block_tokens: int = 16
    stripes: int = 1
    kv_format: str | None = None
    softcap: float | None = None
    has_sinks: bool = False
    chunk_tokens: int | None = None

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def retention(self) -> Full | Window | Chunk:
        if self.chunk_tokens:
            return Chunk(self.chunk_tokens)
        return Window(self.window_tokens) if self.window_tokens else Full()

    @property
    def mask(self) -> Mask:
        return Mask(self.retention)

    def scores(self, device: torch.device | str) -> Scores:
        """Sinks from far below the scores to far above them."""
        sinks = torch.linspace(-9, 9, self.query_heads, device=device) if self.has_sinks else None
        return Scores(self.dim**-0.5, self.softcap, sinks)

    def pages(self, dtype: torch.dtype) -> Group:
        """Two such layers to a page, and the second one under test: no offset is 0."""
        retention = self.retention
        caches = [TokenCache(i, retention, self.kv_heads, self.dim, self.dim, latent=self.rotary > 0) for i in range(2)]
        name = str(dtype).removeprefix("torch.")
        formats = {retention.name: kv_format(self.kv_format or name)}
        return plan_layout(caches, formats, name, block_tokens=self.block_tokens).groups[0]


@dataclass(frozen=True)
class Paged:
    """Sequences with their past in pages. `past` has all of it, also what slid out of sight: [tokens, heads, dim]."""

    layer: Layer
    view: LayerView
    arena: torch.Tensor
    table: torch.Tensor
    slots: list[int]
    past: list[list[torch.Tensor]]
    rope: LatentRope | None
    dtype: torch.dtype  # of activations

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def lengths(self) -> list[int]:
        return [len(vectors[0]) for vectors in self.past]

    @property
    def for_kernels(self) -> PagedLayer:
        layer = self.layer
        return PagedLayer(
            kernel_arena(self),
            self.view,
            self.table,
            layer.query_heads,
            layer.mask,
            layer.scores(self.device),
            self.rope,
        )


def make_pages(
    layer: Layer, lengths: Sequence[int], device: str, dtype: torch.dtype, *, room_tokens: int = 0,
    arena_bytes: int | None = None, offset_bytes: int = 0,
) -> Paged:  # fmt: skip
    """Sequences of these past lengths, in scattered pages of an arena of which `offset_bytes` come before the first."""
    spec = layer.pages(dtype)
    table = PageTable(spec, len(lengths) + 3, max([*lengths, 1]) + room_tokens)
    view = LayerView.of(spec, spec.slices[1], table.columns, LAYER_SCALES[: len(spec.slices[1].data_offsets)])
    view = replace(view, stripe=layer.stripes - 1, stripes=layer.stripes)
    slots = np.random.default_rng(sum(lengths)).permutation(len(lengths) + 3)[: len(lengths)].tolist()
    held = [spec.retention.held(n) for n in lengths]  # type: ignore[union-attr]
    blocks = [range(h.start // view.block_tokens, -(-h.stop // view.block_tokens)) if h else range(0) for h in held]
    taken = sum(map(len, blocks))
    if arena_bytes is None:
        arena_bytes = offset_bytes + (taken + 5) * spec.page_bytes
    arena = _memory(arena_bytes, device)
    first = -(-offset_bytes // spec.page_bytes)
    page_count = arena_bytes // spec.page_bytes
    order = torch.randperm(page_count - first)[:taken] + first
    offsets = (order * spec.page_units).to(torch.int32)
    # What no page stands in means nothing: a ring has -1 there, a growing table whatever was there before.
    entries = torch.full((len(lengths) + 3, max(table.entries.shape[1], 1), layer.stripes), -1 if view.ring else 0)
    entries = entries.to(torch.int32)
    past, at = [], 0
    for slot, n, kept, span in zip(slots, lengths, held, blocks, strict=True):
        pages = offsets[at : at + len(span)].to(device)
        at += len(span)
        columns = torch.arange(span.start, span.stop) % view.columns
        entries[slot, columns, view.stripe] = pages.cpu()
        vectors = [
            torch.randn(n, view.kv_heads, view.dim, device=device).to(dtype) for _ in range(len(view.data_offsets))
        ]
        t = torch.arange(kept.start, kept.stop, device=device)
        places = pages[t // view.block_tokens - span.start].long(), t % view.block_tokens
        for part in range(len(vectors)):
            if device == "cpu" and arena_bytes > SMALL_ARENA_BYTES:
                _page_view(arena, view, part)[pages.long()] = -1 if view.code else float("nan")
            vectors[part] = _store(arena, view, spec.kv_format, part, places, vectors[part], kept.start)
        past.append(vectors)
    rope = _rope(layer, max([*lengths, 1]) + room_tokens, device)
    return Paged(layer, view, arena, entries.to(device), slots, past, rope, dtype)


def _store(
    arena: torch.Tensor, view: LayerView, fmt: KVFormat | None, part: int, places: tuple[torch.Tensor, torch.Tensor],
    vector: torch.Tensor, first: int,
) -> torch.Tensor:  # fmt: skip
    """Put the rows from `first` on into pages; returns all rows as they read there."""
    pages, within = places
    rows = _page_view(arena, view, part)
    if not view.code:
        rows[pages, :, within] = vector[first:]
        return vector
    assert fmt is not None
    words, scales = codecs.encode(fmt, vector, view.layer_scales[part])
    rows[pages, :, within] = words[first:]
    if scales is not None:
        _scale_view(arena, view, part)[pages, :, within] = scales[first:]
    return codecs.decode(fmt, words, scales, view.dim, view.layer_scales[part])


def _memory(size_bytes: int, device: str) -> torch.Tensor:
    if device == "cpu" and size_bytes > SMALL_ARENA_BYTES:
        return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8))
    return torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=device)


def _page_view(arena: torch.Tensor, view: LayerView, part: int) -> torch.Tensor:
    """[offset unit, head, token, dim or word]: pages overlap in this view, since any unit may start one."""
    row = view.row_words if view.code else view.dim
    width = view.dim // (4 if view.code == INT4 else 2) if view.code else view.dim
    return _strided(arena.view(view.dtype), view, view.data_offsets[part], row, width)


def _scale_view(arena: torch.Tensor, view: LayerView, part: int) -> torch.Tensor:
    return _strided(arena.view(torch.int32), view, view.scale_offsets[part], 1, 1)[..., 0]


def _strided(data: torch.Tensor, view: LayerView, offset_bytes: int, row: int, width: int) -> torch.Tensor:
    item = data.element_size()
    shape = (view.kv_heads, view.block_tokens, width)
    room = data.numel() * item - offset_bytes - view.kv_heads * view.block_tokens * row * item
    strides = (OFFSET_UNIT_BYTES // item, view.block_tokens * row, row, 1)
    return data.as_strided((room // OFFSET_UNIT_BYTES + 1, *shape), strides, offset_bytes // item)


def _rope(layer: Layer, positions: int, device: str) -> LatentRope | None:
    if not layer.rotary:
        return None
    frequency = 1e4 ** (-torch.arange(layer.rotary, dtype=torch.float64) / layer.rotary)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    w = torch.rand(layer.dim) + 0.5
    return angle.cos().float().to(device), angle.sin().float().to(device), w.to(device)


def rebuild(n: torch.Tensor, rope: LatentRope, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K of latent rows [tokens, heads, dim]: in float64 without rounding, otherwise in float32, then rounded."""
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = (a[positions].to(wide)[:, None] for a in rope[:2])
    y = n.to(wide) * rope[2].to(wide)
    pairs = cos.shape[-1]
    a, b = y[..., :pairs], y[..., pairs : 2 * pairs]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, y[..., 2 * pairs :]], -1).to(dtype)


def fused_rows(layer: Layer, rows: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v as slices of one buffer, as a fused projection leaves them: rows are strided."""
    heads = (layer.query_heads, layer.kv_heads, layer.kv_heads)
    buffer = torch.randn(rows, sum(heads) * layer.dim, device=device).to(dtype)
    return tuple(x.view(rows, -1, layer.dim) for x in buffer.split([h * layer.dim for h in heads], dim=1))


def keys_values(paged: Paged, sequence: int, present: Vectors, dtype: torch.dtype) -> Vectors:
    """All of one sequence in `dtype`, [heads, tokens, dim] each: its past, then K and V of the present."""
    past = paged.past[sequence]
    past_k = past[0]
    if paged.rope is not None:
        past_k = rebuild(past_k, paged.rope, torch.arange(len(past_k), device=past_k.device), dtype)
    keys = torch.cat([past_k.to(dtype), present[0].to(dtype)])
    values = torch.cat([past[-1].to(dtype), present[1].to(dtype)])
    return keys.transpose(0, 1), values.transpose(0, 1)


def run_decode(
    paged: Paged, *, padding: int = 0, programs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decode step of all sequences, in random order with padding rows between: kernel, float64, same dtype."""
    layer, view, device = paged.layer, paged.view, paged.device
    count = len(paged.lengths)
    rows = count + padding
    real = torch.randperm(rows)[:count].to(device)
    q, k, v = fused_rows(layer, rows, str(device), paged.dtype)
    lengths = torch.tensor(paged.lengths, dtype=torch.int32, device=device)
    positions = torch.full((rows,), -1, dtype=torch.int32, device=device)
    slots = torch.full((rows,), 2**20, dtype=torch.int32, device=device)
    positions[real], slots[real] = lengths, torch.tensor(paged.slots, dtype=torch.int32, device=device)
    idle = positions < 0
    q[idle], k[idle], v[idle] = float("nan"), float("nan"), float("nan")
    if paged.rope is not None:
        k = k.clone()
        k[real] = rebuild(v[real], paged.rope, lengths.long(), paged.dtype)
    cum_tiles = torch.full((rows + 1,), -7, dtype=torch.int32, device=device)
    plan_decode(positions, cum_tiles, layer.mask)
    scratch = DecodeScratch(
        rows, view.kv_heads, layer.group, view.dim, programs or decode_programs(view, device), device
    )
    out = torch.full((rows, layer.query_heads, view.dim), float("nan"), dtype=paged.dtype, device=device)
    decode(q, k, v, paged.for_kernels, slots, positions, cum_tiles, scratch, out)
    if not bool((out[idle] == 0).all()):
        raise AssertionError("padding rows must be 0")
    exact, rounded = [q[:0].double()], [q[:0]]
    for i, row in enumerate(real.tolist()):
        present = (k[row : row + 1], v[row : row + 1])
        exact.append(_decode_reference(paged, i, q[row : row + 1].double(), present))
        rounded.append(_decode_reference(paged, i, q[row : row + 1], present))
    return out[real], torch.cat(exact), torch.cat(rounded)


def _decode_reference(paged: Paged, sequence: int, q: torch.Tensor, present: Vectors) -> torch.Tensor:
    keys, values = (x[None] for x in keys_values(paged, sequence, present, q.dtype))
    position = keys.shape[2] - 1
    first, scores = paged.layer.mask.first_visible(position), paged.layer.scores(q.device)
    counts = torch.ones(1, position - first, dtype=torch.bool, device=q.device)
    return attend_decoding(
        q, keys[:, :, first:-1], values[:, :, first:-1], counts, keys[:, :, -1], values[:, :, -1], scores
    )


def chunk_queries(segments: Sequence[Segment], tiling: Tiling, device: torch.device | str) -> ChunkQueries:
    """As a step's builder makes them, for one layer."""

    def bring(array: NDArray[np.int32]) -> Callable[[], torch.Tensor]:
        there = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return lambda: there

    return queries_of(segments, [tiling], bring)()


def run_prefill(
    paged: Paged, chunks: Sequence[tuple[int, int]], scratch: PrefillScratch | None = None, *, together: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk (tokens, those of them that ask) of each sequence in one step: kernels, float64, same dtype.

    A coded past is decoded for all chunks `together`, or where there is room for only one of the longest at a time.
    """
    layer, view, device = paged.layer, paged.view, paged.device
    row, q_row = 2, 1  # rows before each segment and behind the last belong to someone else
    segments = []
    for slot, start, (tokens, asking) in zip(paged.slots, paged.lengths, chunks, strict=True):
        segments.append(Segment(slot, start, start + tokens, row, q_row, asking))
        row, q_row = row + tokens + 1, q_row + asking + 1
    q = fused_rows(layer, q_row, str(device), paged.dtype)[0]
    _, k, v = fused_rows(layer, row, str(device), paged.dtype)
    others, asked_by_others = (torch.ones(n, dtype=torch.bool, device=device) for n in (row, q_row))
    for segment in segments:
        others[segment.rows], asked_by_others[segment.query_rows] = False, False
    k[others], v[others] = (float("nan"),) * 2
    out = torch.full((q_row, layer.query_heads, view.dim), float("nan"), dtype=paged.dtype, device=device)
    attention = chunk_attention(paged, scratch, together=together)
    attention(q, k, v, chunk_queries(segments, attention.tiling, device), out)
    if not bool(out[asked_by_others].isnan().all()):
        raise AssertionError("a row that no segment owns was written")
    exact, rounded = [], []
    for i, (_, start, stop, at, q_at, asking) in enumerate(segments):
        mine = slice(at, at + stop - start)
        positions = torch.arange(start, stop, device=device)
        for answers, dtype in ((exact, torch.float64), (rounded, paged.dtype)):
            present_k = k[mine] if paged.rope is None else rebuild(v[mine], paged.rope, positions, dtype)
            keys, values = keys_values(paged, i, (present_k, v[mine]), dtype)
            asked, where = q[q_at : q_at + asking].to(dtype), positions[len(positions) - asking :]
            answers.append(attend(asked, where, keys, values, 0, layer.mask, layer.scores(device)))
    return out[~asked_by_others], torch.cat(exact), torch.cat(rounded)


def chunk_attention(
    paged: Paged, scratch: PrefillScratch | None, *, together: bool = True
) -> ChunkAttention | CodedChunkAttention:
    view = paged.view
    longest = scratch_page_bytes(plain_view(view, paged.dtype)) * ceil_div(max(paged.lengths), view.block_tokens)
    decoded = torch.empty(TOGETHER_BYTES if together else longest, dtype=torch.uint8, device=paged.device)
    return make_chunk_attention(paged.for_kernels, scratch, decoded, paged.dtype)


def run_write(layer: Layer, device: str, dtype: torch.dtype, *, offset_bytes: int = 0) -> None:
    """Rows of a chunk to scattered places, with padding between: they must arrive, and nothing else may change."""
    paged = make_pages(layer, [5 * layer.block_tokens], device, dtype, offset_bytes=offset_bytes)
    view, block = paged.view, layer.block_tokens
    rows, n = 40, 33
    _, k, v = fused_rows(layer, rows, device, dtype)
    pages = paged.table[paged.slots[0], : view.columns, view.stripe]
    pages = pages[pages >= 0]
    places = torch.randperm(len(pages) * block)[:n].to(device)
    chosen = torch.randint(0, rows, (len(places),), device=device).to(torch.int32)
    offsets, within = pages[places // block], (places % block).to(torch.int32)
    chosen[::7] = -1
    views = [_page_view(paged.arena, view, part) for part in range(len(view.data_offsets))]
    want = [x[pages.long()].clone() for x in views]
    for source, pages_now in zip((k, v), want, strict=False):
        for row, place in zip(chosen.tolist(), places.tolist(), strict=True):
            if row >= 0:
                pages_now[place // block, :, place % block] = source[row]
    before = _bytes_outside(paged, pages)
    write(k, v, kernel_arena(paged), view, chosen, offsets, within)
    for x, expected in zip(views, want, strict=True):
        if not torch.equal(x[pages.long()].view(torch.uint8), expected.view(torch.uint8)):
            raise AssertionError("rows differ from what was written")
    if not torch.equal(before, _bytes_outside(paged, pages)):
        raise AssertionError("the writer touched bytes outside its layer's slice")


def _bytes_outside(paged: Paged, pages: torch.Tensor) -> torch.Tensor:
    """The first layer's slices of these pages and of the pages behind them."""
    page_units = paged.layer.pages(paged.dtype).page_units
    starts = torch.cat([pages, pages + page_units]).long() * OFFSET_UNIT_BYTES
    bytes_of = starts[:, None] + torch.arange(paged.view.data_offsets[0], device=paged.device)
    return paged.arena[bytes_of[bytes_of[:, -1] < paged.arena.numel()]]


def kernel_arena(paged: Paged) -> torch.Tensor:
    """What kernels get. The interpreter copies tensors around each launch: on a CPU they get only the first bytes."""
    if paged.arena.device.type != "cpu":
        return paged.arena
    return torch.from_numpy(paged.arena.numpy()[:OFFSET_UNIT_BYTES])


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def run_rows(
    paged: Paged, counts: Sequence[int], *, padding: int = 0, programs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of so many rows of each sequence, which see their past and each other: kernel, float64, same dtype.

    Segments come in random order with padding between, and rows that no segment owns.
    """
    layer, view, device = paged.layer, paged.view, paged.device
    most = min(max(*counts, 2), rows_at_once(layer.group, view.dim))
    own, row = [], 1
    for slot, start, count in zip(paged.slots, paged.lengths, counts, strict=True):
        own.append(Segment(slot, start, start + count, row, row, count))
        row += count
    segments = [*split_rows(own, most), *[Segment(2**20, -1, -1, 0, 0, 0)] * padding]
    order = torch.randperm(len(segments)).tolist()
    table = torch.tensor([segments[i] for i in order], dtype=torch.int32, device=device)
    q, k, v = fused_rows(layer, row + 1, str(device), paged.dtype)
    if paged.rope is not None:
        k = k.clone()
    for segment in own:
        if paged.rope is not None:
            positions = torch.arange(segment.start, segment.stop, device=device)
            k[segment.rows] = rebuild(v[segment.rows], paged.rope, positions, paged.dtype)
    for x in (q, k, v):
        x[0], x[-1] = float("nan"), float("nan")
    cum_tiles = torch.full((len(segments) + 1,), -7, dtype=torch.int32, device=device)
    plan_rows(table, cum_tiles, layer.mask)
    scratch = DecodeScratch.of_rows(view, layer.group, most, device)
    scratch.programs = min(programs or scratch.programs, scratch.programs)
    out = torch.full((row + 1, layer.query_heads, view.dim), float("nan"), dtype=paged.dtype, device=device)
    decode_rows(q, k, v, paged.for_kernels, table, cum_tiles, scratch, out, rows=most)
    if not bool(out[[0, -1]].isnan().all()):
        raise AssertionError("a row that no segment owns was written")
    answers: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for i, segment in enumerate(own):
        positions = torch.arange(segment.start, segment.stop, device=device)
        for found, dtype in zip(answers, (torch.float64, paged.dtype), strict=True):
            rows = segment.rows
            present_k = k[rows] if paged.rope is None else rebuild(v[rows], paged.rope, positions, dtype)
            keys, values = keys_values(paged, i, (present_k, v[rows]), dtype)
            found.append(attend(q[rows].to(dtype), positions, keys, values, 0, layer.mask, layer.scores(device)))
    return out[1:-1], torch.cat(answers[0]), torch.cat(answers[1])
