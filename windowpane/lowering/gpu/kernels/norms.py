"""RMS norms, and the residual additions between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out = norm of each row of x [rows, width], times a float32 weight unless that is None."""
    rows, width = x.shape
    block, warps = _row_launch(width)
    _rms_norm_kernel[(rows,)](
        x, weight, out, x.stride(0), out.stride(0), eps, WIDTH=width, BLOCK=block, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def residual_norm(
    hidden: torch.Tensor, x: torch.Tensor, post_weight: torch.Tensor | None, next_weight: torch.Tensor | None,
    scalar: torch.Tensor | float | None, eps: float, out: torch.Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """hidden += x, normed before where there is a `post_weight`, then times `scalar`; out = its norm for what follows.

    `hidden` [rows, width] is updated in place. A `scalar` tensor has one element. Without `next_weight` nothing follows
    and `out` is left alone.
    """
    rows, width = hidden.shape
    block, warps = _row_launch(width)
    _residual_norm_kernel[(rows,)](
        hidden, x, post_weight, next_weight, scalar, out, hidden.stride(0), x.stride(0), out.stride(0), eps,
        WIDTH=width, BLOCK=block, SCALAR_IS_TENSOR=isinstance(scalar, torch.Tensor), PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def _row_launch(width: int) -> tuple[int, int]:
    """A row per program: block and warps. 16 values a thread are two 16-byte loads, the fewest steps for one row."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


@triton.jit
def _normed(x, WIDTH: tl.constexpr, eps):
    """float32, padded with zeros up to the block."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit
def _rms_norm_kernel(
    X, WEIGHT, OUT, x_stride, out_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    y = _normed(tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32), WIDTH, eps)
    if WEIGHT is not None:
        y *= weight
    tl.store(OUT + row * out_stride + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _residual_norm_kernel(
    HIDDEN, X, POST_WEIGHT, NEXT_WEIGHT, SCALAR, OUT, hidden_stride, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALAR_IS_TENSOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    dtype = HIDDEN.dtype.element_ty
    if POST_WEIGHT is not None:
        post_weight = tl.load(POST_WEIGHT + at, mask=inside, other=0.0)
    if NEXT_WEIGHT is not None:
        next_weight = tl.load(NEXT_WEIGHT + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(HIDDEN + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
    if POST_WEIGHT is not None:
        x = (_normed(x, WIDTH, eps) * post_weight).to(dtype).to(tl.float32)
    hidden = (hidden + x).to(dtype)
    if SCALAR is not None:
        scalar = tl.load(SCALAR).to(tl.float32) if SCALAR_IS_TENSOR else SCALAR
        hidden = (hidden.to(tl.float32) * scalar).to(dtype)
    tl.store(HIDDEN + row * hidden_stride + at, hidden, mask=inside)
    if NEXT_WEIGHT is not None:
        y = _normed(hidden.to(tl.float32), WIDTH, eps) * next_weight
        tl.store(OUT + row * out_stride + at, y.to(OUT.dtype.element_ty), mask=inside)
