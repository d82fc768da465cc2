"""Rows of this step's activations into pages, by a list of (row, page offset, row within the page)."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.view import ELEMENTS, LayerView, section


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
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    view: LayerView,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    within: torch.Tensor,
) -> None:
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
