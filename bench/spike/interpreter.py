"""The plain Triton kernels against plain torch on a CPU, at small sizes (TRITON_INTERPRET=1 before importing triton).

Float32 throughout: the interpreter's dot is wrong for bf16. The Gluon kernel (`decode_tma`) has no
interpreter; `python3 -m bench.spike.run` checks it on a GPU.
"""

import os
import warnings

import torch

from bench.spike.decode import Partial, Tuning, angle_tables, combine, decode, rebuild_k
from bench.spike.measure import LOG2E, attend, relative_error, require
from bench.spike.pages import LayerView, random_tables, rows, scales
from bench.spike.work import plan_work
from bench.spike.writer_check import check as check_writer

# Two KV heads, two layers to a page, the second one under test: small, but no offset is zero.
LATENT = LayerView(16, 2 * 65536, 2, 512, (65536,), ())
PAIR = LayerView(16, 2 * 65536, 2, 256, (65536, 65536 + 32768), ())
INT8_LATENT = LayerView(16, 2 * 16640, 2, 512, (16640,), (16640 + 16384,))
INT8_PAIR = LayerView(16, 2 * 16640, 2, 256, (16640, 16640 + 8192), (16640 + 16384, 16640 + 16512))


def check_interpreter() -> None:
    """Raise AssertionError where a kernel and its reference differ."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    with warnings.catch_warnings():
        # the interpreter's own use of NumPy
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        _check_all()


def _check_all() -> None:
    torch.manual_seed(0)
    for view in (LATENT, INT8_LATENT):
        check_decode(view, past=[37, 1, 64], first=[0, 0, 0], tuning=Tuning(tile_tokens=16))
    for view in (PAIR, INT8_PAIR):
        check_decode(view, past=[37, 40, 2], first=[7, 0, 0], tuning=Tuning(tile_tokens=16))
    for view in (LATENT, PAIR, INT8_LATENT, INT8_PAIR):
        check_writer(view, "cpu", torch.float32)


def check_decode(view: LayerView, past: list[int], first: list[int], tuning: Tuning) -> None:
    query_heads = 4
    arena = random_arena(view)
    table = random_tables(view, past, arena.numel(), "cpu")
    q = torch.randn(len(past), query_heads, view.dim) * 2 / view.dim**0.5
    k, v = torch.randn(len(past), view.kv_heads, view.dim), torch.randn(len(past), view.kv_heads, view.dim)
    w = torch.ones(view.dim)
    w[:128].uniform_(0.5, 1.5)
    angles = angle_tables(max(past) + 65, 512, "cpu")
    work = plan_work(first, past, tuning.tile_tokens, view.kv_heads, 5, "cpu")
    partial = Partial.empty(work, query_heads // view.kv_heads, view.dim)
    counts = (torch.tensor(first, dtype=torch.int32), torch.tensor(past, dtype=torch.int32))
    decode(q, arena, view, table, *counts, angles, w, work, partial, LOG2E, tuning)
    out = torch.full_like(q, float("nan"))
    combine(q, k, v, partial, work, out, LOG2E)
    for seq in range(len(past)):
        tokens = range(first[seq], past[seq])
        stored = [stored_rows(arena, view, table[seq], tokens, which) for which in range(len(view.data_offsets))]
        past_k, past_v = (stored * 2)[:2]
        if view.latent:
            past_k = rebuild_k(past_k, w, *(a[: tokens.stop] for a in angles))
        want = attend(q[seq][:, None], torch.cat([past_k, k[seq][:, None]], 1), torch.cat([past_v, v[seq][:, None]], 1))
        require(relative_error(out[seq], want[:, 0]), 1e-5, f"decode {view} sequence {seq}")


def stored_rows(arena: torch.Tensor, view: LayerView, table: torch.Tensor, tokens: range, which: int) -> torch.Tensor:
    if view.scale_offsets:
        codes = rows(arena, view, table, tokens, which, torch.int8).float()
        return codes * scales(arena, view, table, tokens, which)[..., None]
    return rows(arena, view, table, tokens, which, torch.float32)


def random_arena(view: LayerView) -> torch.Tensor:
    """16 pages of random rows: float32, or int8 codes with scales."""
    if not view.scale_offsets:
        return torch.randn(16 * view.page_bytes // 4).view(torch.uint8)
    arena = torch.randint(0, 256, (16 * view.page_bytes,), dtype=torch.uint8)
    size = view.kv_heads * view.block_tokens * 4
    for offset in view.scale_offsets:
        section = arena.view(-1, view.page_bytes)[:, offset : offset + size]
        section.copy_((torch.rand(16, size // 4) * 0.015 + 0.005).view(torch.uint8))
    return arena
