"""Decode attention over pages in plain Triton: pair or latent, 16-bit or int8 with a scale per token and head.

The past is cut into work items of whole tiles, so that short and long sequences fill the GPU evenly; each item leaves a
partial result, and `combine` merges them with the one present token, which comes from the activations.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bench.spike.pages import ROTARY_PAIRS, LayerView
from bench.spike.work import Work

INT8_TO_BF16 = tl.constexpr(
    """{ .reg .b32 t, u, s;
    prmt.b32 t, $2, 0, 0x4140;
    lop3.b32 u, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA;
    sub.bf16x2 $0, u, s;
    prmt.b32 t, $2, 0, 0x4342;
    lop3.b32 u, t, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA;
    sub.bf16x2 $1, u, s; }"""
)


@triton.jit
def to_float(x, dtype: tl.constexpr):
    """Stored values as operands of a matrix product; int8 to bf16 in two instructions a value.

    With u the low 7 bits and s the sign bit of a code, 0x4300 | u is the bf16 number 128 + u and 0x4300 | s is 128 or
    256: their difference is the code, exactly. Not declared pure, or the compiler would convert after rearranging
    single bytes between threads instead of before.
    """
    if x.dtype == tl.int8 and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    return x.to(dtype)


@triton.jit
def _pair_item(
    Q, DATA, SCALES, table, PART, LSE, item, seq, head, heads, lo, hi, first, past, k_offset, v_offset,
    k_scale_offset, v_scale_offset, scale_log2, D: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    UNIT: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, 16)  # a tensor-core tile has 16 rows: fewer query heads per KV head are padded
    n = tl.arange(0, N)
    d = tl.arange(0, D)[None, :]
    q = tl.load(Q + ((seq * heads + head) * G + g[:, None]) * D + d, mask=g[:, None] < G, other=0.0)
    m = tl.full([16], -1e30, tl.float32)
    norm = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for i in range(lo, hi, N):
        t = i + n
        ok = (t >= first) & (t < past)
        page = tl.load(table + t // P, mask=ok, other=0).to(tl.int64)  # widened before multiplying
        row = head * P + t % P
        start = (page * UNIT + row * D)[:, None] + d
        k = tl.load(DATA + k_offset + start, mask=ok[:, None], other=0)
        s = tl.dot(q, tl.trans(to_float(k, q.dtype))) * scale_log2
        if QUANT:
            s *= tl.load(SCALES + k_scale_offset + page * 64 + row, mask=ok, other=0.0)[None, :]
        s = tl.where(ok[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        if QUANT:
            p *= tl.load(SCALES + v_scale_offset + page * 64 + row, mask=ok, other=0.0)[None, :]
        v = tl.load(DATA + v_offset + start, mask=ok[:, None], other=0)
        acc = tl.dot(p.to(q.dtype), to_float(v, q.dtype), acc * alpha[:, None])
    out = item * G + g
    tl.store(PART + out[:, None] * D + d, acc / norm[:, None], mask=g[:, None] < G)
    tl.store(LSE + out, m + tl.log2(norm), mask=g < G)


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _latent_item(
    Q, DATA, SCALES, table, COS, SIN, W, PART, LSE, item, seq, head, heads, lo, hi, past, n_offset, scale_offset,
    scale_log2, D: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    QUANT: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, 16)
    n = tl.arange(0, N)
    d64 = tl.arange(0, 64)[None, :]
    d128 = tl.arange(0, 128)[None, :]
    d256 = tl.arange(0, 256)[None, :]
    q_row = Q + ((seq * heads + head) * G + g[:, None]) * D
    g_ok = g[:, None] < G
    q1 = tl.load(q_row + d64, mask=g_ok, other=0.0)
    q2 = tl.load(q_row + 64 + d64, mask=g_ok, other=0.0)
    q3 = tl.load(q_row + 128 + d128, mask=g_ok, other=0.0)
    q4 = tl.load(q_row + 256 + d256, mask=g_ok, other=0.0)
    w1 = tl.load(W + d64)
    w2 = tl.load(W + 64 + d64)
    m = tl.full([16], -1e30, tl.float32)
    norm = tl.zeros([16], tl.float32)
    a1 = tl.zeros([16, 64], tl.float32)
    a2 = tl.zeros([16, 64], tl.float32)
    a3 = tl.zeros([16, 128], tl.float32)
    a4 = tl.zeros([16, 256], tl.float32)
    for i in range(lo, hi, N):
        t = i + n
        ok = t < past
        row_ok = ok[:, None]
        page = tl.load(table + t // P, mask=ok, other=0).to(tl.int64)
        row = head * P + t % P
        x_row = DATA + n_offset + (page * UNIT + row * D)[:, None]
        x1 = to_float(tl.load(x_row + d64, mask=row_ok, other=0), q3.dtype)
        x2 = to_float(tl.load(x_row + 64 + d64, mask=row_ok, other=0), q3.dtype)
        x3 = to_float(tl.load(x_row + 128 + d128, mask=row_ok, other=0), q3.dtype)
        x4 = to_float(tl.load(x_row + 256 + d256, mask=row_ok, other=0), q3.dtype)
        cos = tl.load(COS + t[:, None] * 64 + d64, mask=row_ok, other=0.0).to(tl.float32)
        sin = tl.load(SIN + t[:, None] * 64 + d64, mask=row_ok, other=0.0).to(tl.float32)
        k1, k2 = _rotate(x1.to(tl.float32) * w1, x2.to(tl.float32) * w2, cos, sin)
        s = tl.dot(q1, tl.trans(k1.to(q3.dtype)))
        s = tl.dot(q2, tl.trans(k2.to(q3.dtype)), s)
        s = tl.dot(q3, tl.trans(x3), s)
        s = tl.dot(q4, tl.trans(x4), s) * scale_log2
        if QUANT:
            scale = tl.load(SCALES + scale_offset + page * 64 + row, mask=ok, other=0.0)[None, :]
            s *= scale
        s = tl.where(ok[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        if QUANT:
            p *= scale
        p = p.to(q3.dtype)
        a1 = tl.dot(p, x1, a1 * alpha[:, None])
        a2 = tl.dot(p, x2, a2 * alpha[:, None])
        a3 = tl.dot(p, x3, a3 * alpha[:, None])
        a4 = tl.dot(p, x4, a4 * alpha[:, None])
    out = item * G + g
    part = PART + out[:, None] * D
    r = 1.0 / norm[:, None]
    tl.store(part + d64, a1 * r, mask=g_ok)
    tl.store(part + 64 + d64, a2 * r, mask=g_ok)
    tl.store(part + 128 + d128, a3 * r, mask=g_ok)
    tl.store(part + 256 + d256, a4 * r, mask=g_ok)
    tl.store(LSE + out, m + tl.log2(norm), mask=g < G)


@triton.jit
def decode_kernel(
    Q, DATA, SCALES, TABLE, ITEMS, PROGRAM_ITEMS, PAST, FIRST, COS, SIN, W, PART, LSE, heads, table_stride,
    k_offset, v_offset, k_scale_offset, v_scale_offset, scale_log2, D: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, LATENT: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """The items of one program, one after another.

    Latent: K = rotate(n * w) in dims [0:128), w of the other dims is folded into q; V = n.
    """
    program = tl.program_id(0)
    for item in range(tl.load(PROGRAM_ITEMS + program), tl.load(PROGRAM_ITEMS + program + 1)):
        seq = tl.load(ITEMS + item * 4)
        head = tl.load(ITEMS + item * 4 + 1)
        lo = tl.load(ITEMS + item * 4 + 2) * N
        hi = lo + tl.load(ITEMS + item * 4 + 3) * N
        past = tl.load(PAST + seq)
        table = TABLE + seq * table_stride
        if LATENT:
            _latent_item(
                Q, DATA, SCALES, table, COS, SIN, W, PART, LSE, item, seq, head, heads, lo, hi, past, k_offset,
                k_scale_offset, scale_log2, D, P, G, N, UNIT, QUANT,
            )  # fmt: skip
        else:
            first = tl.load(FIRST + seq)
            _pair_item(
                Q, DATA, SCALES, table, PART, LSE, item, seq, head, heads, lo, hi, first, past, k_offset, v_offset,
                k_scale_offset, v_scale_offset, scale_log2, D, P, G, N, UNIT, QUANT,
            )  # fmt: skip


@triton.jit
def combine_kernel(Q, K, V, PART, LSE, HEAD_ITEMS, OUT, scale_log2, parts, D: tl.constexpr, G: tl.constexpr):
    """Merge the partial results of one query head with the present token, whose K and V come from the activations."""
    query_head = tl.program_id(0)
    seq = tl.program_id(1)
    query_heads = tl.num_programs(0)
    kv_head = seq * (query_heads // G) + query_head // G
    d = tl.arange(0, D)
    at = seq * query_heads + query_head
    q = tl.load(Q + at * D + d).to(tl.float32)
    k = tl.load(K + kv_head * D + d).to(tl.float32)
    m = tl.sum(q * k) * scale_log2
    norm = 1.0
    acc = tl.load(V + kv_head * D + d).to(tl.float32)
    for part in range(tl.load(HEAD_ITEMS + kv_head) * parts, tl.load(HEAD_ITEMS + kv_head + 1) * parts):
        row = part * G + query_head % G
        lse = tl.load(LSE + row)
        m_new = tl.maximum(m, lse)
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(lse - m_new)
        acc = acc * alpha + tl.load(PART + row * D + d) * weight
        norm = norm * alpha + weight
        m = m_new
    tl.store(OUT + at * D + d, (acc / norm).to(OUT.dtype.element_ty))


@dataclass(frozen=True)
class Tuning:
    """How a kernel is launched; found by measuring."""

    tile_tokens: int = 64
    programs_per_sm: int = 2
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Partial:
    """Where the items of one step leave their results (`parts` each), poisoned so that a row nobody wrote shows."""

    part: torch.Tensor
    lse: torch.Tensor
    parts: int

    @classmethod
    def empty(cls, work: Work, group: int, dim: int, parts: int = 1) -> "Partial":
        rows = work.count * parts * group
        device = work.items.device
        nan = float("nan")
        return cls(torch.full((rows, dim), nan, device=device), torch.full((rows,), nan, device=device), parts)


def decode(
    q: torch.Tensor, arena: torch.Tensor, view: LayerView, table: torch.Tensor, first_visible: torch.Tensor,
    past: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor, work: Work, out: Partial,
    scale_log2: float, tuning: Tuning,
) -> None:  # fmt: skip
    """Attend the past of every sequence; `combine` finishes. q is [sequence, query head, dim]; `arena` is bytes."""
    quant = bool(view.scale_offsets)
    data = arena.view(torch.int8 if quant else q.dtype)
    item_bytes = data.dtype.itemsize
    k_offset, v_offset = (offset // item_bytes for offset in (view.data_offsets * 2)[:2])
    k_scale, v_scale = (offset // 4 for offset in ((view.scale_offsets or (0,)) * 2)[:2])
    decode_kernel[(work.programs,)](
        q, data, arena.view(torch.float32), table, work.items, work.program_items, past, first_visible, *angles, w,
        out.part, out.lse, view.kv_heads, table.stride(0), k_offset, v_offset, k_scale, v_scale, scale_log2,
        D=view.dim, P=view.block_tokens,
        G=q.shape[1] // view.kv_heads,
        N=tuning.tile_tokens,
        UNIT=256 // item_bytes,
        LATENT=view.latent,
        QUANT=quant,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip


def combine(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partial: Partial, work: Work, out: torch.Tensor,
    scale_log2: float,
) -> None:  # fmt: skip
    """Finish a step. q and k are complete here (rotated, w applied): the present token needs no rebuilding."""
    batch, query_heads, dim = q.shape
    combine_kernel[(query_heads, batch)](
        q, k, v, partial.part, partial.lse, work.head_items, out, scale_log2, partial.parts, D=dim,
        G=query_heads // k.shape[1],
        num_warps=4,
    )  # fmt: skip


def angle_tables(
    tokens: int, dim: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the 64 rotary pairs, computed in float64: splitting a rotation then costs no accuracy."""
    inverse = 1e6 ** (-torch.arange(0, 2 * ROTARY_PAIRS, 2, device=device, dtype=torch.float64) / dim)
    angle = torch.arange(tokens, device=device, dtype=torch.float64)[:, None] * inverse
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rebuild_k(n: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """K of latent rows [..., tokens, dim] in plain torch; `cos` and `sin` are [tokens, 64]."""
    y = n * w
    a, b, rest = y[..., :64], y[..., 64:128], y[..., 128:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
