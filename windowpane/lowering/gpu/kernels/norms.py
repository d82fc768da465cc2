"""RMS norms, and the residual additions between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out = norm of each row of x [rows, width], times a float32 weight unless that is None."""
    _launch(x, None, None, weight, None, eps, out, True, pdl)


def residual_norm(
    hidden: torch.Tensor, x: torch.Tensor, post_weight: torch.Tensor | None, next_weight: torch.Tensor | None,
    scalar: torch.Tensor | float | None, eps: float, out: torch.Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """hidden += x, normed before where there is a `post_weight`, then times `scalar`; out = its norm for what follows.

    `hidden` [rows, width] is updated in place. A `scalar` tensor has one element. Without `next_weight` nothing follows
    and `out` is left alone.
    """
    _launch(hidden, x, post_weight, next_weight, scalar, eps, out, next_weight is not None, pdl)


def _launch(
    hidden: torch.Tensor, x: torch.Tensor | None, post_weight: torch.Tensor | None, next_weight: torch.Tensor | None,
    scalar: torch.Tensor | float | None, eps: float, out: torch.Tensor, norms: bool, pdl: bool,
) -> None:  # fmt: skip
    """A row per program. 16 values a thread are two 16-byte loads, the fewest steps for one row."""
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        hidden, x, post_weight, next_weight, scalar, out, hidden.stride(0), None if x is None else x.stride(0),
        out.stride(0), eps, WIDTH=width, BLOCK=block, SCALAR_IS_TENSOR=isinstance(scalar, torch.Tensor), NORMS=norms,
        PDL=pdl, num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def normed(x, WIDTH: tl.constexpr, eps):
    """float32, padded with zeros up to the block."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)


@triton.jit
def _norm_kernel(
    HIDDEN, X, POST_WEIGHT, NEXT_WEIGHT, SCALAR, OUT, hidden_stride, x_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALAR_IS_TENSOR: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Without X, HIDDEN is only read. NORMS: what follows reads a norm of it, with or without a weight."""
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
    if X is not None:
        x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.load(HIDDEN + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
    if X is not None:
        if POST_WEIGHT is not None:
            x = (normed(x, WIDTH, eps) * post_weight).to(dtype).to(tl.float32)
        new = (hidden + x).to(dtype)
        if SCALAR is not None:
            scalar = tl.load(SCALAR).to(tl.float32) if SCALAR_IS_TENSOR else SCALAR
            new = (new.to(tl.float32) * scalar).to(dtype)
        tl.store(HIDDEN + row * hidden_stride + at, new, mask=inside)
        hidden = new.to(tl.float32)
    if NORMS:
        y = normed(hidden, WIDTH, eps)
        if NEXT_WEIGHT is not None:
            y *= next_weight
        tl.store(OUT + row * out_stride + at, y.to(OUT.dtype.element_ty), mask=inside)
