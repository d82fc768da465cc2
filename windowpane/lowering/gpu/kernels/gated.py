"""Activated gates times what they gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped

# 8 values a thread: one 16-byte load each of gate and gated.
BLOCK, WARPS = 1024, 4


def gated(
    gate: torch.Tensor, out: torch.Tensor, activation: str, *, up: torch.Tensor | None = None, pdl: bool = False
) -> None:
    """out [rows, width] = activation(gate) × up. Without `up`, both are halves of the columns of `gate`."""
    rows, width = out.shape
    up, up_offset = (gate, width) if up is None else (up, 0)
    _gated_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), up_offset, out.stride(0), width,
        BLOCK=BLOCK, GELU=is_gelu(activation), PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor, *, pdl: bool = False) -> None:
    """x [rows, width] ×= σ(gate), in place."""
    _pointwise(x, gate, pdl)


def times_row_gate(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False) -> None:
    """out [rows, width] ×= σ(x · weightᵀ), one value a row, in place; weight is [1, inputs]."""
    (rows, width), inputs = out.shape, weight.shape[1]
    if rows:
        _row_gate_kernel[(rows,)](
            out, x, weight, out.stride(0), x.stride(0), width, inputs, BLOCK=triton.next_power_of_2(max(width, inputs)),
            PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip


def relu2(x: torch.Tensor, *, pdl: bool = False) -> None:
    """x [rows, width] = max(x, 0)², in place."""
    _pointwise(x, None, pdl)


def _pointwise(x: torch.Tensor, gate: torch.Tensor | None, pdl: bool) -> None:
    rows, width = x.shape
    if rows:
        _pointwise_kernel[(rows, triton.cdiv(width, BLOCK))](
            x, gate, x.stride(0), 0 if gate is None else gate.stride(0), width, BLOCK=BLOCK, PDL=pdl, num_warps=WARPS,
            launch_pdl=pdl,
        )  # fmt: skip


def is_gelu(activation: str) -> bool:
    if activation not in ("gelu_pytorch_tanh", "silu"):
        raise ValueError(f"no kernel for activation {activation!r}; there is gelu_pytorch_tanh and silu")
    return activation == "gelu_pytorch_tanh"


@triton.jit
def activate(x, GELU: tl.constexpr):
    """In float32. GELU's tanh form is x·σ(2u), which loses no digits where 1 + tanh(u) would."""
    if GELU:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate_times_up(gate, up, GELU: tl.constexpr):
    """Both in the activations' dtype, which the activated gate is rounded to as well."""
    activated = activate(gate.to(tl.float32), GELU).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def store_gated(OUT, sums, tile, out_stride, rows, width, GELU: tl.constexpr):
    """Sums [2 × pairs, rows] of a tile, in turn of a gate and of what it gates, as outputs [rows, width]."""
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    PAIRS: tl.constexpr = sums.shape[0] // 2
    # [pairs, 2, rows] with the 2 last, where it can be split.
    gate, up = tl.split(tl.permute(tl.reshape(sums, [PAIRS, 2, sums.shape[1]]), [0, 2, 1]))
    row = tl.arange(0, sums.shape[1])
    m = tile * PAIRS + tl.arange(0, PAIRS)
    y = gate_times_up(gate.to(DTYPE), up.to(DTYPE), GELU)
    kept = (m[:, None] < width) & (row[None, :] < rows)
    tl.store(OUT + row[None, :] * out_stride + m[:, None], y, mask=kept)


@triton.jit
def _gated_kernel(
    GATE, UP, OUT, gate_stride, up_stride, up_offset, out_stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(GATE + row * gate_stride + at, mask=inside, other=0.0)
    up = tl.load(UP + row * up_stride + up_offset + at, mask=inside, other=0.0)
    tl.store(OUT + row * out_stride + at, gate_times_up(gate, up, GELU), mask=inside)


@triton.jit
def _pointwise_kernel(X, GATE, x_stride, gate_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Times the gate's sigmoid, rounded as plain torch rounds it; without a gate, what is above 0 squared."""
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if GATE is not None:
        gate = tl.load(GATE + row * gate_stride + at, mask=inside, other=0.0)
        x *= (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32)
    else:
        x = tl.maximum(x, 0.0)
        x *= x
    tl.store(X + row * x_stride + at, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _row_gate_kernel(
    OUT, X, WEIGHT, out_stride, x_stride, width, inputs, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program: a row. The product and its sigmoid are rounded as plain torch rounds them."""
    wait_if_overlapped(PDL)
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + at, mask=at < inputs, other=0.0).to(tl.float32)
    to = OUT + row * out_stride + at
    out = tl.load(to, mask=at < width, other=0.0).to(tl.float32)
    gate = tl.sum(x * weight, 0).to(DTYPE).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    tl.store(to, (out * gate).to(DTYPE), mask=at < width)
