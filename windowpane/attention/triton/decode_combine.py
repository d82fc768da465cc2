"""The second launch of decode attention: partial results of an item that several programs had are merged into one."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.attention.triton.decode_several import FIELDS
from windowpane.attention.triton.view import soft_capped, with_sinks


@triton.jit
def share_of(total, programs):
    """Units of each program. None is left without work while another has two."""
    return tl.maximum((total + programs - 1) // programs, 1)


@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["POSITIONS", "CUM"])
def combine_kernel(
    Q, K, V, PART, LSE, POSITIONS, CUM, OUT, SINKS, rows, kv_heads, programs, q_stride, k_stride, v_stride, out_stride,
    scale_log2, D: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, S: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of HEADS query heads, S at a time, with the present token. Whole items are done."""
    if PDL:
        gdc_launch_dependents()
    query_head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row = tl.program_id(1)
    head = tl.program_id(0) * HEADS // G
    share = share_of(tl.load(CUM + rows) * kv_heads, programs)
    before = tl.load(CUM + row)
    tiles = tl.load(CUM + row + 1) - before
    unit = before * kv_heads + head * tiles
    first = unit // share
    last = (unit + tiles - 1) // share
    in_parts = (tiles == 0) | (first < last)
    # `decode` let this launch begin once heads were ready: the present token is weighed while the past is attended.
    d = tl.arange(0, D)
    of_heads = query_head[:, None] * D + d[None, :]
    wanted = in_parts & (d >= 0)
    is_row = tl.load(POSITIONS + row) >= 0
    q = tl.load(Q + row.to(tl.int64) * q_stride + of_heads, mask=wanted[None, :], other=0.0, cache_modifier=".cg")
    k = tl.load(K + row.to(tl.int64) * k_stride + head * D + d, mask=wanted, other=0.0, cache_modifier=".cg")
    v = tl.load(V + row.to(tl.int64) * v_stride + head * D + d, mask=wanted, other=0.0, cache_modifier=".cg")
    m = soft_capped(tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale_log2, CAP)
    acc = tl.broadcast_to(v.to(tl.float32)[None, :], [HEADS, D])
    norm = tl.full([HEADS], 1.0, tl.float32)
    if PDL:
        gdc_wait()
    if in_parts:
        if tiles > 0:
            for i in range(first, last + 1, S):
                program = i + tl.arange(0, S)
                ok = (program <= last)[:, None]
                at = (program + row * kv_heads + head).to(tl.int64)[:, None] * G + query_head[None, :] % G
                lse = tl.load(LSE + at, mask=ok, other=float("-inf"))
                part = tl.load(PART + at[:, :, None] * D + d[None, None, :], mask=ok[:, :, None], other=0.0)
                m_new = tl.maximum(m, tl.max(lse, 0))
                alpha = tl.exp2(m - m_new)
                weight = tl.exp2(lse - m_new[None, :])
                acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 0)
                norm = norm * alpha + tl.sum(weight, 0)
                m = m_new
        norm = with_sinks(norm, m, SINKS, query_head, query_head >= 0)
        # A padding row's activations may be anything.
        attended = tl.where(is_row, acc / norm[:, None], 0.0)
        tl.store(OUT + row.to(tl.int64) * out_stride + of_heads, attended.to(OUT.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "programs"], do_not_specialize_on_alignment=["SEGMENTS", "CUM"])
def combine_rows_kernel(
    PART, LSE, SEGMENTS, CUM, OUT, SINKS, count, kv_heads, programs, out_stride, D: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row's query head, S at a time. Whole items are done."""
    query_head = tl.program_id(0)
    row = tl.program_id(1) // ROWS
    own = tl.program_id(1) % ROWS
    head = query_head // G
    share = share_of(tl.load(CUM + count) * kv_heads, programs)
    before = tl.load(CUM + row)
    tiles = tl.load(CUM + row + 1) - before
    unit = before * kv_heads + head * tiles
    first = unit // share
    last = (unit + tiles - 1) // share
    query_row = tl.load(SEGMENTS + row * FIELDS + 4) + own
    asks_one = own < tl.load(SEGMENTS + row * FIELDS + 5)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    d = tl.arange(0, D)
    to = OUT + query_row.to(tl.int64) * out_stride + query_head * D + d
    if asks_one & (tiles == 0):
        tl.store(to, tl.zeros([D], OUT.dtype.element_ty))
    if asks_one & (tiles > 0) & (first < last):
        m = -1e30
        acc = tl.zeros([D], tl.float32)
        norm = 0.0
        for i in range(first, last + 1, S):
            program = i + tl.arange(0, S)
            ok = program <= last
            # The item is its program's first one, unless it begins inside of that program's share.
            slot = 2 * program + ((program == first) & (unit > first * share))
            at = slot.to(tl.int64) * (ROWS * G) + own * G + query_head % G
            lse = tl.load(LSE + at, mask=ok, other=float("-inf"))
            part = tl.load(PART + at[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
            m_new = tl.maximum(m, tl.max(lse, 0))
            alpha = tl.exp2(m - m_new)
            weight = tl.exp2(lse - m_new)
            acc = acc * alpha + tl.sum(part * weight[:, None], 0)
            norm = norm * alpha + tl.sum(weight, 0)
            m = m_new
        norm = with_sinks(norm, m, SINKS, query_head, query_head >= 0)
        tl.store(to, (acc / norm).to(OUT.dtype.element_ty))
