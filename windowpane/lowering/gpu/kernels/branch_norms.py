"""RMS norms around branches of one input: several of one row at once, and a sum of results that are normed first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.gpu.kernels.norms import normed

MOST_NORMS = 4


def rms_norms(
    x: torch.Tensor, weights: Sequence[torch.Tensor | None], eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """[weights, rows, width]: the norm of each row of x, times each float32 weight that is not None."""
    (rows, width), count = x.shape, len(weights)
    assert 0 < count <= MOST_NORMS
    out = x.new_empty(count, rows, width)
    block = triton.next_power_of_2(width)
    given = [*weights, *[None] * (MOST_NORMS - count)]
    if rows:
        norms_kernel[(rows,)](
            x, *given, out, x.stride(0), rows, eps, COUNT=count, WIDTH=width, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out


def add_branches(
    made: Sequence[torch.Tensor], after: Sequence[tuple[bool, torch.Tensor | None]], eps: float, *, pdl: bool = False
) -> torch.Tensor:
    """The sum of two results [rows, width], of which each is normed before where its `after` says so, by its weight."""
    (first, second), ((norms_first, first_weight), (norms_second, second_weight)) = made, after
    (rows, width), out = first.shape, torch.empty_like(first)
    block = triton.next_power_of_2(width)
    if rows:
        sum_kernel[(rows,)](
            first, second, first_weight, second_weight, out, first.stride(0), second.stride(0), eps,
            NORMS_FIRST=norms_first, NORMS_SECOND=norms_second, WIDTH=width, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit
def norms_kernel(
    X, W0, W1, W2, W3, OUT, x_stride, rows, eps, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program: a row."""
    wait_if_overlapped(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    x = normed(tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32), WIDTH, eps)
    for i in tl.static_range(COUNT):
        W = W0 if i == 0 else W1 if i == 1 else W2 if i == 2 else W3
        y = x
        if W is not None:
            y = x * tl.load(W + at, mask=inside, other=0.0)
        tl.store(OUT + (i * rows + row) * WIDTH + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _branch(X, W, at, inside, eps, NORMS: tl.constexpr, WIDTH: tl.constexpr):
    """One result, rounded as it would be by a launch of its own."""
    x = tl.load(X + at, mask=inside, other=0.0)
    if NORMS:
        y = normed(x.to(tl.float32), WIDTH, eps)
        if W is not None:
            y *= tl.load(W + at, mask=inside, other=0.0)
        return y.to(x.dtype).to(tl.float32)
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        return x.to(tl.float32)


@triton.jit
def sum_kernel(
    FIRST, SECOND, FIRST_WEIGHT, SECOND_WEIGHT, OUT, first_stride, second_stride, eps, NORMS_FIRST: tl.constexpr,
    NORMS_SECOND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a row."""
    wait_if_overlapped(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    first = _branch(FIRST + row * first_stride, FIRST_WEIGHT, at, inside, eps, NORMS_FIRST, WIDTH)
    second = _branch(SECOND + row * second_stride, SECOND_WEIGHT, at, inside, eps, NORMS_SECOND, WIDTH)
    tl.store(OUT + row * WIDTH + at, (first + second).to(OUT.dtype.element_ty), mask=inside)
