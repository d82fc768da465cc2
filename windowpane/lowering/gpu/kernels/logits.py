"""What happens to logits on their way to a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped

CAP_BLOCK, CAP_WARPS = 2048, 4
# 64 parts of a 262,144-token vocabulary: enough programs to read one row of it quickly.
ARGMAX_BLOCK, ARGMAX_WARPS = 4096, 8


def softcap(logits: torch.Tensor, out: torch.Tensor, cap: float | None, *, pdl: bool = False) -> None:
    """out, in float32, = cap · tanh(logits / cap), or the logits as they are."""
    rows, width = logits.shape
    _softcap_kernel[(rows, triton.cdiv(width, CAP_BLOCK))](
        logits, out, logits.stride(0), out.stride(0), width, cap, BLOCK=CAP_BLOCK, PDL=pdl,
        num_warps=CAP_WARPS, launch_pdl=pdl,
    )  # fmt: skip


class ArgmaxScratch:
    """The best of each part of a row, for up to `rows` rows of `width` values."""

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        self.parts = triton.cdiv(width, ARGMAX_BLOCK)
        self.values = torch.empty(rows, self.parts, dtype=torch.float32, device=device)
        self.places = torch.empty(rows, self.parts, dtype=torch.int32, device=device)


def argmax(values: torch.Tensor, out: torch.Tensor, scratch: ArgmaxScratch, *, pdl: bool = False) -> None:
    """out int64 [rows] = where each float32 row is largest: the first place where several are, or where one is NaN."""
    rows, width = values.shape
    _argmax_parts_kernel[(rows, scratch.parts)](
        values, scratch.values, scratch.places, values.stride(0), width, BLOCK=ARGMAX_BLOCK, PDL=pdl,
        num_warps=ARGMAX_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    _argmax_kernel[(rows,)](
        scratch.values, scratch.places, out, scratch.parts, BLOCK=triton.next_power_of_2(scratch.parts), PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _tanh(x):
    """Near 0, where the quotient would lose digits, the series: both are good to some 1e-7 where they meet."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    quotient = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(square < 0.04, series, quotient)


@triton.jit
def _softcap_kernel(LOGITS, OUT, in_stride, out_stride, width, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * in_stride + at, mask=at < width, other=0.0).to(tl.float32)
    if cap is not None:
        x = _tanh(x / cap) * cap
    tl.store(OUT + row * out_stride + at, x, mask=at < width)


@triton.jit
def _argmax_parts_kernel(VALUES, BEST, PLACES, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_if_overlapped(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(VALUES + row * stride + at, mask=at < width, other=float("-inf"))
    # A NaN compares with nothing; as the largest value it still leads to a place that exists.
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, 0)
    place = tl.min(tl.where(x == best, at, width), 0)
    slot = row * tl.num_programs(1) + part
    tl.store(BEST + slot, best)
    tl.store(PLACES + slot, place)


@triton.jit
def _argmax_kernel(BEST, PLACES, OUT, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.load(BEST + row * parts + at, mask=at < parts, other=float("-inf"))
    places = tl.load(PLACES + row * parts + at, mask=at < parts, other=2147483647)
    tl.store(OUT + row, tl.min(tl.where(best == tl.max(best, 0), places, 2147483647), 0).to(tl.int64))
