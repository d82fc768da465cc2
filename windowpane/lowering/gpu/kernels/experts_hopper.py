"""Experts of many rows on Hopper from the host's side: which ones, and what is launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from windowpane.attention.triton.view import processors_of
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.experts_activation import is_gated
from windowpane.lowering.gpu.kernels.experts_grouped import GROUP_BLOCKS
from windowpane.lowering.gpu.kernels.experts_sorted import Sorted
from windowpane.lowering.gpu.kernels.hopper_experts import mxfp4_experts_kernel, plain_experts_kernel
from windowpane.lowering.gpu.kernels.hopper_tiled import REGISTERS, described, is_copied, is_hopper
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import BLOCK_INPUTS, BLOCK_UNITS

HALF_OUTPUTS = 128
# Blocks of inputs that are on their way or being multiplied, as many as fit into shared memory, by the pairs of a tile.
STAGES = {16: 10, 32: 8, 64: 6, 128: 4}
# Weights in bf16 have smaller blocks. With fewer pairs, memory is the limit, and other kernels reach it.
PLAIN_OUTPUTS, PLAIN_INPUTS, PLAIN_ROWS, PLAIN_STAGES = 64, 64, 128, 4


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


def boxed_product(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, by_expert: Sorted,
    out: torch.Tensor, *, chosen: int, local: int, activation: int, limit: float, alpha: float, launch: Boxed,
    pdl: bool,
) -> None:  # fmt: skip
    """With an `activation`, x [rows, inputs], each of which has `chosen` pairs, and out [pairs by expert, width]; else
    x [pairs by expert, inputs] and out [pairs, outputs].
    """
    outputs, gated = len(weight) // local, is_gated(activation)
    width = outputs // 2 if gated else outputs
    tiles = ceil_div(width, HALF_OUTPUTS) if gated else ceil_div(outputs, 2 * HALF_OUTPUTS)
    programs = min(processors_of(x.device), len(by_expert.blocks) * tiles)
    box = BLOCK_INPUTS if isinstance(weight, PackedWeight) else PLAIN_INPUTS
    # Rows of tokens are copied 16 bytes at a time.
    tokens = (None, x, x.stride(0) // 8, x.shape[1] // 8)
    inputs = tokens if gated else (described(x, [launch.rows, box], 128), None, 0, 0)
    sizes = outputs, width, out.stride(0), float(limit), float(alpha)
    common = {
        "CHOSEN": chosen, "ROWS": launch.rows, "ACTIVATION": activation, "GROUP_BLOCKS": GROUP_BLOCKS, "PDL": pdl,
        "num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": pdl,
    }  # fmt: skip
    if isinstance(weight, PackedWeight):
        mxfp4_experts_kernel[(programs,)](
            *inputs, described(weight.units, [HALF_OUTPUTS, BLOCK_UNITS], 64), weight.scales.view(torch.int32), out,
            bias, *by_expert[:3], tiles, ceil_div(weight.inputs, BLOCK_INPUTS), *sizes,
            STAGES=STAGES[launch.rows], **common,
        )  # fmt: skip
        return
    plain_experts_kernel[(programs,)](
        *inputs, described(weight, [PLAIN_OUTPUTS, PLAIN_INPUTS], 128), out, bias, *by_expert[:3], tiles,
        ceil_div(weight.shape[1], PLAIN_INPUTS), *sizes, STAGES=PLAIN_STAGES, **common,
    )  # fmt: skip
