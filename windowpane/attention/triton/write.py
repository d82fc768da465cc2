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


def write(
    k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, view: LayerView, rows: torch.Tensor, offsets: torch.Tensor,
    within: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Store `k[rows]` and `v[rows]` at their pages. k and v are [tokens, KV heads, dim]; lists are int32 [n].

    Of a latent, k is the stored vector n and v is not looked at. Of a coded view, rows and `scales` are those of
    `CodedRows`. Entries with a row below 0 are padding and store nothing; a row may appear more than once, a place may
    not.
    """
    view.require_dtype(k)
    if not len(rows):
        return
    per_row = bool(view.scale_offsets)
    _write_kernel[(len(rows),)](
        k, v, *(scales or (None, None)), arena, rows, offsets, within, k.stride(0), v.stride(0), view.data_offsets[0],
        view.data_offsets[-1], *(view.scales_at() if per_row else (None, None)), H=view.kv_heads,
        H_BLOCK=triton.next_power_of_2(view.kv_heads), D=k.shape[2], P=view.block_tokens,
        ROW=view.row_words if view.code else view.dim, UNIT=view.unit_elements, PAIR=not view.latent, PER_ROW=per_row,
        DTYPE=tl.int16 if view.code else ELEMENTS[view.dtype], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ROWS", "OFFSETS", "WITHIN"])
def _write_kernel(
    K, V, KS, VS, ARENA, ROWS, OFFSETS, WITHIN, k_stride, v_stride, k_offset, v_offset, k_scales, v_scales,
    H: tl.constexpr, H_BLOCK: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr,
    PAIR: tl.constexpr, PER_ROW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """All heads of one row: of K (or the latent), then of V, so that one lookup serves both. ROW: elements apart."""
    i = tl.program_id(0)
    row = tl.load(ROWS + i).to(tl.int64)
    page = tl.load(OFFSETS + i).to(tl.int64)
    h = tl.arange(0, H_BLOCK)
    d = tl.arange(0, D)[None, :]
    ok = (h < H) & (row >= 0)
    place = h * P + tl.load(WITHIN + i)
    at = page * UNIT + place[:, None] * ROW + d
    for part in tl.static_range(1 + PAIR):
        X, stride, offset = (K, k_stride, k_offset) if part == 0 else (V, v_stride, v_offset)
        x = tl.load(X + row * stride + h[:, None] * D + d, mask=ok[:, None])
        tl.store(section(ARENA, offset, DTYPE) + at, x, mask=ok[:, None])
        if PER_ROW:
            S, scales = (KS, k_scales) if part == 0 else (VS, v_scales)
            scale = tl.load(S + row * H + h, mask=ok)
            tl.store(section(ARENA, scales, tl.int32) + page * 64 + place, scale, mask=ok)
