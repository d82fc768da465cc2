"""Coded past as plain pages, for chunks: what a chunk can see is decoded once, and plain prefill kernels read that.

A prompt's chunk reads each past row once per tile of its queries, so decoding it once first costs little and keeps the
products as fast as over plain pages. What is decoded lies in scratch pages of one layer, of the past's own block size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from windowpane.attention.triton.codes import dims_of, scales_of
from windowpane.attention.triton.view import LayerView, PagedLayer, last_hidden, section
from windowpane.device.transfer import Transfer
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.kv.retention import ceil_div


def plain_view(view: LayerView, dtype: torch.dtype) -> LayerView:
    """A layer's scratch pages: its slice alone, in a ring of as many columns as a chunk's past has blocks."""
    vector_bytes = view.kv_heads * view.block_tokens * view.dim * dtype.itemsize
    offsets = tuple(vector_bytes * part for part in range(len(view.data_offsets)))
    return LayerView(view.kv_heads, view.dim, view.block_tokens, 1, True, offsets, 0, 1, dtype)


@dataclass(frozen=True, slots=True)
class PastPlan:
    """Which blocks of which chunks are decoded, for chunks [first, last) of a step, by host arithmetic alone.

    `pages` [n, 2] are (segment, block) and `table` [segments, columns] their offsets in the scratch; `segments` are
    those of the step with their own number for a slot. On the device, int32.
    """

    first: int
    last: int
    pages: torch.Tensor
    table: torch.Tensor
    segments: torch.Tensor


def plan_past(segments: NDArray[np.int32], layer: PagedLayer, dtype: torch.dtype, scratch_bytes: int) -> list[PastPlan]:
    """Scratch pages for chunks with these segments (see `prefill`), in as many goes as this much scratch takes."""
    page_bytes = scratch_page_bytes(plain_view(layer.view, dtype))
    starts = segments[:, 1].astype(np.int64)
    firsts = np.array([layer.mask.first_visible(start) for start in starts.tolist()], dtype=np.int64)
    first_blocks = firsts // layer.view.block_tokens
    counts = np.where(firsts < starts, -(-starts // layer.view.block_tokens) - first_blocks, 0)
    most_pages = scratch_bytes // page_bytes
    if counts.max(initial=0) > most_pages:
        raise ValueError(
            f"a past of {counts.max():,} blocks of {page_bytes:,} bytes exceeds {scratch_bytes:,} of scratch"
        )
    return [
        _plan(segments, first, last, first_blocks, counts, page_bytes, layer.arena.device)
        for first, last in _goes(counts, most_pages)
    ]


def _goes(counts: NDArray[np.int64], most_pages: int) -> Iterator[tuple[int, int]]:
    first, held = 0, 0
    for index, count in enumerate(counts.tolist()):
        if index > first and held + count > most_pages:
            yield first, index
            first, held = index, 0
        held += count
    yield first, len(counts)


def _plan(
    segments: NDArray[np.int32], first: int, last: int, first_blocks: NDArray[np.int64], counts: NDArray[np.int64],
    page_bytes: int, device: torch.device,
) -> PastPlan:  # fmt: skip
    first_blocks, counts = first_blocks[first:last], counts[first:last]
    before = np.cumsum(counts) - counts
    columns = max(int(counts.max(initial=0)), 1)
    numbers = np.repeat(np.arange(last - first), counts)
    pages = np.arange(len(numbers))
    blocks = pages - before[numbers] + first_blocks[numbers]
    table = np.zeros((last - first, columns), dtype=np.int32)
    table[numbers, blocks % columns] = pages * (page_bytes // OFFSET_UNIT_BYTES)
    own = segments[first:last].copy()
    own[:, 0] = np.arange(last - first)
    transfer = Transfer(device)
    for array in (np.stack([numbers + first, blocks], 1), table, own):
        transfer.add(array)
    return PastPlan(first, last, *transfer.send())


def scratch_page_bytes(view: LayerView) -> int:
    slice_bytes = len(view.data_offsets) * view.kv_heads * view.block_tokens * view.dim * view.dtype.itemsize
    return ceil_div(slice_bytes, OFFSET_UNIT_BYTES) * OFFSET_UNIT_BYTES


def widen(
    layer: PagedLayer, segments: torch.Tensor, plan: PastPlan, scratch: torch.Tensor, dtype: torch.dtype
) -> PagedLayer:
    """Decode the past that a plan names into `scratch`, which is then an arena; returns the layer over it."""
    view, table = layer.view, layer.table
    plain = replace(plain_view(view, dtype), columns=plan.table.shape[1])
    page_bytes = scratch_page_bytes(plain)
    if len(plan.pages):
        _widen_kernel[(len(plan.pages), view.kv_heads)](
            layer.arena, table, segments, plan.pages, scratch.view(dtype), table.stride(0), view.columns, view.stripe,
            view.data_offsets[0], view.data_offsets[-1], *view.scales_at(), view.layer_scales[0],
            view.layer_scales[-1], layer.reach_tokens, page_bytes // dtype.itemsize, CHUNKED=layer.mask.is_chunked,
            H=view.kv_heads, D=view.dim, P=view.block_tokens, ROW=view.row_words, STRIPES=view.stripes, RING=view.ring,
            PAIR=not view.latent, CODE=view.code, PER_ROW=bool(view.scale_offsets), num_warps=4,
        )  # fmt: skip
    return replace(layer, arena=scratch, view=plain, table=plan.table)


@triton.jit(do_not_specialize=["stripe"], do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "PAGES"])
def _widen_kernel(
    ARENA, TABLE, SEGMENTS, PAGES, OUT, table_stride, columns, stripe, k_offset, v_offset, k_scales, v_scales,
    k_layer_scale, v_layer_scale, reach, page_elements, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    ROW: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr, CHUNKED: tl.constexpr, PAIR: tl.constexpr,
    CODE: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """One head of one page: K (or the latent), then V."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    segment = SEGMENTS + tl.load(PAGES + number * 2) * 6
    block = tl.load(PAGES + number * 2 + 1)
    start = tl.load(segment + 1)
    column = block % columns if RING else block
    entry = TABLE + tl.load(segment).to(tl.int64) * table_stride + column * STRIPES + stripe
    page = tl.load(entry).to(tl.int64)
    token = tl.arange(0, P)
    t = block * P + token
    ok = (t < start) & (t > last_hidden(start, reach, CHUNKED))
    out = OUT + number.to(tl.int64) * page_elements + (head * P + token)[:, None] * D
    _widen_rows(ARENA, out, page, head * P + token, ok, k_offset, k_scales, k_layer_scale, D, ROW, CODE, PER_ROW)
    if PAIR:
        out += H * P * D
        _widen_rows(ARENA, out, page, head * P + token, ok, v_offset, v_scales, v_layer_scale, D, ROW, CODE, PER_ROW)


@triton.jit
def _widen_rows(
    ARENA, out, page, row, ok, offset, scales, layer_scale, D: tl.constexpr, ROW: tl.constexpr, CODE: tl.constexpr,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = D // (4 if CODE == 4 else 2)
    d = tl.arange(0, D)[None, :]
    ok_row = ok[:, None]
    words = section(ARENA, offset, tl.int16) + (page * 128 + row * ROW)[:, None]
    scale, base = scales_of(section(ARENA, scales, tl.int32), page * 64 + row, ok, layer_scale, CODE, PER_ROW)
    x = base[:, None] + scale[:, None] * dims_of(words, 0, D, ok_row, W, CODE, tl.float32)
    tl.store(out + d, x.to(out.dtype.element_ty), mask=ok_row)
