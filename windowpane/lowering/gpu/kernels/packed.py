"""Products with quantized weights (`windowpane.models.packing`): units are read once and dequantised in registers.

A unit's four values belong to four spans of 32 inputs, so that a tile of units becomes, shift by shift, four operands
for the tensor cores, each of one group and each met by 32 consecutive inputs.

Few rows: `split`. More rows: `tiled`. So many that a dequantised matrix and cuBLAS are the faster way: `dequantize`.
No sum depends on timing.
"""

from __future__ import annotations

import torch

from windowpane.attention.triton.view import processors_of
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.dequantize import dequantize_into
from windowpane.lowering.gpu.kernels.gated import is_gelu
from windowpane.lowering.gpu.kernels.hopper_tiled import Shares, hopper_product, is_described, is_hopper, plan_shares
from windowpane.lowering.gpu.kernels.launch import SPLIT_ROWS, Launch
from windowpane.lowering.gpu.kernels.split import plan_split, split_product
from windowpane.lowering.gpu.kernels.tiled import plan_tiles, tiled_product
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import DEQUANTIZED_BYTES

__all__ = [
    "MOST_ROWS", "SPLIT_ROWS", "Launch", "Shares", "choose_launch", "dequantize_into", "dequantized_product",
    "packed_linear", "packed_product", "plan_launch", "slice_outputs",
]  # fmt: skip

# Beyond, a dequantised matrix and cuBLAS are the faster way.
MOST_ROWS = 256
# What slices of a dequantised matrix are cut between.
TILE_OUTPUTS = 128


def plan_launch(rows: int, outputs: int, inputs: int, processors: int) -> Launch:
    """`processors`: multiprocessors of the device."""
    if rows <= SPLIT_ROWS:
        return plan_split(rows)
    return plan_tiles(rows, outputs, inputs, processors)


def choose_launch(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> Launch | Shares:
    """What runs where nothing else is asked for."""
    rows, (outputs, inputs) = len(x), weight.shape
    if x.element_size() != 2:
        return _plan_float32(rows)
    if rows > SPLIT_ROWS and is_hopper(x.device) and is_described(x, weight, out):
        return plan_shares(rows, outputs, inputs, processors_of(x.device))
    return plan_launch(rows, outputs, inputs, processors_of(x.device))


def _plan_float32(rows: int) -> Launch:
    """Without tensor cores, for checks: as small as kernels come."""
    return Launch(16, 8 if rows <= 8 else 16, 4, 2) if rows <= SPLIT_ROWS else Launch(32, 32, 4, 2)


def packed_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, *, pdl: bool = False
) -> torch.Tensor:
    """x [rows, inputs] · weightᵀ + bias for any number of rows."""
    out = x.new_empty(len(x), len(weight))
    if len(x) > MOST_ROWS:
        dequantized_product(x, weight, out)
        return out if bias is None else out.add_(bias)
    if len(x):
        packed_linear(x, weight, out, bias, pdl=pdl)
    return out


def dequantized_product(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, slice_bytes: int | None = None
) -> None:
    """out = x · weightᵀ by a dequantised slice of the weight after another.

    They take one piece of memory that is used again; its size is part of the plan.
    """
    x = weight.in_order(x)
    at_once = slice_outputs(len(weight), (slice_bytes or DEQUANTIZED_BYTES) // (weight.inputs * x.element_size()))
    scratch = x.new_empty(at_once, weight.inputs)
    for start in range(0, len(weight), at_once):
        part = weight[start : start + at_once]
        dequantize_into(part, scratch)
        torch.mm(x, scratch[: len(part)].t(), out=out[:, start : start + at_once])


def slice_outputs(outputs: int, most: int) -> int:
    """Slices as even as whole tiles of cuBLAS allow, which are slow where they begin between 16 bytes."""
    if outputs <= most:
        return outputs
    if most < TILE_OUTPUTS:
        return max(1, most)
    slices = ceil_div(outputs, most // TILE_OUTPUTS * TILE_OUTPUTS)
    return ceil_div(ceil_div(outputs, slices), TILE_OUTPUTS) * TILE_OUTPUTS


def packed_linear(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, bias: torch.Tensor | None = None,
    *, activation: str | None = None, pdl: bool = False, launch: Launch | Shares | None = None,
) -> None:  # fmt: skip
    """out [rows, outputs] = x [rows, inputs] · weightᵀ + bias by a kernel that reads units; sums in float32.

    With an `activation`, the weight is a gate above what it gates and has no bias: out [rows, width] =
    activation(x · gateᵀ) × (x · upᵀ), for at most SPLIT_ROWS rows.
    """
    x = weight.in_order(x)
    launch = choose_launch(x, weight, out) if launch is None else launch
    if isinstance(launch, Launch) and launch.is_split:
        split_product(x, weight, bias, out, None if activation is None else is_gelu(activation), launch)
        return
    assert activation is None, f"gates go with at most {SPLIT_ROWS} rows"
    if isinstance(launch, Shares):
        hopper_product(x, weight, bias, out, launch, pdl=pdl)
    else:
        tiled_product(x, weight, bias, out, launch, pdl=pdl)
