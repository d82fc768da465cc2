"""Rows of this step's activations into pages, by a list of (row, page offset, row within the page)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.codes import INT4
from windowpane.attention.triton.view import ELEMENTS, LayerView, section


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The present as pages will hold it: words [tokens, KV heads, words], int16, and scales [tokens, KV heads], int32.

    Of a latent, k and v are the same. Formats with one scale per layer leave the scales as they are.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, view: LayerView, device: torch.device) -> CodedRows:
        words = view.dim // (4 if view.code == INT4 else 2)
        parts = [torch.empty(tokens, view.kv_heads, words, dtype=torch.int16, device=device) for _ in view.data_offsets]
        scales = [torch.empty(tokens, view.kv_heads, dtype=torch.int32, device=device) for _ in view.data_offsets]
        return cls(parts[0], parts[-1], scales[0], scales[-1])


@triton.jit(do_not_specialize_on_alignment=["ROWS", "OFFSETS", "WITHIN"])
def _write_coded_kernel(
    K, V, KS, VS, ARENA, ROWS, OFFSETS, WITHIN, k_offset, v_offset, k_scales, v_scales, H: tl.constexpr,
    H_BLOCK: tl.constexpr, W: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr, PAIR: tl.constexpr,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """As `_write_kernel`, with words and scales."""
    i = tl.program_id(0)
    row = tl.load(ROWS + i).to(tl.int64)
    page = tl.load(OFFSETS + i).to(tl.int64)
    h = tl.arange(0, H_BLOCK)
    w = tl.arange(0, W)[None, :]
    ok = (h < H) & (row >= 0)
    source = (row * H + h)[:, None] * W + w
    place = h * P + tl.load(WITHIN + i)
    at = page * 128 + place[:, None] * ROW + w
    tl.store(section(ARENA, k_offset, tl.int16) + at, tl.load(K + source, mask=ok[:, None]), mask=ok[:, None])
    if PER_ROW:
        scale = tl.load(KS + row * H + h, mask=ok)
        tl.store(section(ARENA, k_scales, tl.int32) + page * 64 + place, scale, mask=ok)
    if PAIR:
        tl.store(section(ARENA, v_offset, tl.int16) + at, tl.load(V + source, mask=ok[:, None]), mask=ok[:, None])
        if PER_ROW:
            scale = tl.load(VS + row * H + h, mask=ok)
            tl.store(section(ARENA, v_scales, tl.int32) + page * 64 + place, scale, mask=ok)


def write_coded(
    coded: CodedRows, arena: torch.Tensor, view: LayerView, rows: torch.Tensor, offsets: torch.Tensor,
    within: torch.Tensor,
) -> None:  # fmt: skip
    """Store these rows of what `prepare_heads` coded at their pages; lists as for `write`."""
    if not len(rows):
        return
    _write_coded_kernel[(len(rows),)](
        coded.k, coded.v, coded.k_scales, coded.v_scales, arena, rows, offsets, within, view.data_offsets[0],
        view.data_offsets[-1], *view.scales_at(), H=view.kv_heads, H_BLOCK=triton.next_power_of_2(view.kv_heads),
        W=coded.k.shape[2], P=view.block_tokens, ROW=view.row_words, PAIR=not view.latent,
        PER_ROW=bool(view.scale_offsets), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ROWS", "OFFSETS", "WITHIN"])
def _write_kernel(
    K, V, ARENA, ROWS, OFFSETS, WITHIN, k_stride, v_stride, k_offset, v_offset, H: tl.constexpr, H_BLOCK: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, PAIR: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """All heads of one row: of K (or the latent), then of V, so that one lookup serves both."""
    i = tl.program_id(0)
    row = tl.load(ROWS + i).to(tl.int64)
    page = tl.load(OFFSETS + i).to(tl.int64)
    h = tl.arange(0, H_BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = (h < H) & (row >= 0)
    at = page * UNIT + (h * P + tl.load(WITHIN + i)) * D + d
    k = tl.load(K + row * k_stride + h * D + d, mask=ok)
    tl.store(section(ARENA, k_offset, DTYPE) + at, k, mask=ok)
    if PAIR:
        v = tl.load(V + row * v_stride + h * D + d, mask=ok)
        tl.store(section(ARENA, v_offset, DTYPE) + at, v, mask=ok)


def write(
    k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, view: LayerView, rows: torch.Tensor, offsets: torch.Tensor,
    within: torch.Tensor,
) -> None:  # fmt: skip
    """Store `k[rows]` and `v[rows]` at their pages. k and v are [tokens, KV heads, dim]; lists are int32 [n].

    Of a latent, k is the stored vector n and v is not looked at. Entries with a row below 0 are padding and store
    nothing; a row may appear more than once, a place may not.
    """
    view.require_dtype(k)
    if not len(rows):
        return
    _write_kernel[(len(rows),)](
        k, v, arena, rows, offsets, within, k.stride(0), v.stride(0), view.data_offsets[0], view.data_offsets[-1],
        H=view.kv_heads, H_BLOCK=triton.next_power_of_2(view.kv_heads), D=view.dim, P=view.block_tokens,
        UNIT=view.unit_elements, PAIR=not view.latent, DTYPE=ELEMENTS[view.dtype], num_warps=4,
    )  # fmt: skip
