"""Experts of many rows on Hopper from the host's side: which ones, and what is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.view import launch_registers, processors_of
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.experts_activation import is_gated
from windowpane.lowering.gpu.kernels.experts_grouped import GROUP_BLOCKS
from windowpane.lowering.gpu.kernels.experts_sorted import Sorted
from windowpane.lowering.gpu.kernels.hopper_experts import LARGEST_SCALE, mxfp4_experts_kernel, plain_experts_kernel
from windowpane.lowering.gpu.kernels.hopper_tiled import described, is_copied, is_hopper
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.packed import PackedWeight, Weight
from windowpane.lowering.reference.routing import Routing
from windowpane.models.packing import BLOCK_INPUTS, BLOCK_UNITS

# Warp groups that multiply, by the pairs of a tile: as many as have registers. Each has so many outputs of either half.
GROUPS = {16: 3, 32: 3, 64: 2, 128: 2}
GROUP_OUTPUTS = 64
# Blocks of inputs that are on their way or being multiplied, as many as fit into shared memory, by the pairs of a tile.
STAGES = {16: 7, 32: 6, 64: 6, 128: 4}
# Weights in bf16 have smaller blocks. With fewer pairs, memory is the limit, and other kernels reach it.
PLAIN_GROUPS, PLAIN_INPUTS, PLAIN_ROWS, PLAIN_STAGES = 2, 64, 128, 4


class Boxed(NamedTuple):
    """Pairs of a tile."""

    rows: int


def takes_boxes(weight: torch.Tensor | PackedWeight, dtype: torch.dtype, rows: int) -> bool:
    """For tiles of so many pairs."""
    if isinstance(weight, PackedWeight):
        has_kernel, copied = weight.kind == "mxfp4", weight.units
    else:
        has_kernel, copied = rows == PLAIN_ROWS, weight
    has_rows = dtype == torch.bfloat16 and weight.shape[1] % 8 == 0
    return has_kernel and has_rows and is_hopper(weight.device) and is_copied(copied)


def has_large_scales(*weights: Weight) -> bool:
    """Whether scales are larger than `takes_boxes` knows of: no kernel here takes these. Waits for the device."""
    packed = [w for w in weights if isinstance(w, PackedWeight) and w.kind == "mxfp4"]
    return any(bool((w.scales > LARGEST_SCALE).any()) for w in packed)


def takes_rows(weight: torch.Tensor | PackedWeight, activation: int) -> bool:
    """Whether a product takes rows of tokens; else their pairs by expert."""
    return not isinstance(weight, PackedWeight) and is_gated(activation)


def gather_rows(x: torch.Tensor, by_expert: Sorted, routing: Routing, *, pdl: bool) -> torch.Tensor:
    """The row of each pair, by expert."""
    (rows, chosen), inputs = routing.ids.shape, x.shape[1]
    out = x.new_empty(rows * chosen, inputs)
    gather_kernel[(rows,)](
        x, by_expert.places, out, x.stride(0), inputs, CHOSEN=chosen, BLOCK=min(4096, triton.next_power_of_2(inputs)),
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def boxed_product(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, by_expert: Sorted,
    out: torch.Tensor, *, chosen: int, local: int, activation: int, limit: float, alpha: float, launch: Boxed,
    pdl: bool,
) -> None:  # fmt: skip
    """`x` [pairs by expert, inputs], or [rows, inputs] where each has `chosen` pairs, as `takes_rows` says. With an
    `activation`, out [pairs by expert, width]; else out [pairs, outputs].
    """
    outputs, gated = len(weight) // local, is_gated(activation)
    width = outputs // 2 if gated else outputs
    groups = GROUPS[launch.rows] if isinstance(weight, PackedWeight) else PLAIN_GROUPS
    tiles = ceil_div(width, (1 if gated else 2) * groups * GROUP_OUTPUTS)
    programs = min(processors_of(x.device), len(by_expert.blocks) * tiles)
    sizes = outputs, width, out.stride(0), float(limit), float(alpha)
    common = {
        "ROWS": launch.rows, "ACTIVATION": activation, "GROUP_BLOCKS": GROUP_BLOCKS, "PDL": pdl, "num_warps": 4,
        "maxnreg": launch_registers(groups), "launch_pdl": pdl,
    }  # fmt: skip
    if isinstance(weight, PackedWeight):
        mxfp4_experts_kernel[(programs,)](
            described(x, [launch.rows, BLOCK_INPUTS], 128), described(weight.units, [GROUP_OUTPUTS, BLOCK_UNITS], 64),
            weight.scales.view(torch.int32), out, bias, *by_expert[:3], tiles, ceil_div(weight.inputs, BLOCK_INPUTS),
            *sizes, GROUPS=groups, STAGES=STAGES[launch.rows], **common,
        )  # fmt: skip
        return
    by_rows = takes_rows(weight, activation)
    # Rows of tokens are copied 16 bytes at a time.
    assert not by_rows or is_copied(x)
    tokens = (None, x, x.stride(0) // 8, x.shape[1] // 8)
    inputs = tokens if by_rows else (described(x, [launch.rows, PLAIN_INPUTS], 128), None, 0, 0)
    plain_experts_kernel[(programs,)](
        *inputs, described(weight, [GROUP_OUTPUTS, PLAIN_INPUTS], 128), out, bias, *by_expert[:3], tiles,
        ceil_div(weight.shape[1], PLAIN_INPUTS), *sizes, CHOSEN=chosen if by_rows else 0, STAGES=PLAIN_STAGES, **common,
    )  # fmt: skip


@triton.jit
def gather_kernel(X, PLACES, OUT, x_stride, inputs, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program: a row, which is read once and copied to the places of its pairs. Other ranks' pairs have none."""
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    for start in tl.range(0, inputs, BLOCK):
        k = start + tl.arange(0, BLOCK)
        values = tl.load(X + row * x_stride + k, mask=k < inputs, cache_modifier=".cg")
        for pair in tl.static_range(CHOSEN):
            place = tl.load(PLACES + row * CHOSEN + pair, cache_modifier=".cg").to(tl.int64)
            tl.store(OUT + place * inputs + k, values, mask=(k < inputs) & (place >= 0))
