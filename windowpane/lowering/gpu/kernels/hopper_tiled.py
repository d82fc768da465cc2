"""Products with int4 weights on Hopper from the host's side: which ones, how work is shared, and what is launched."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windowpane.attention.triton.view import launch_registers
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.hopper_int4 import int4_kernel
from windowpane.lowering.gpu.kernels.hopper_sums import MOST_PARTS
from windowpane.lowering.gpu.kernels.launch import FLAGS, flags_of
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import BLOCK_INPUTS, BLOCK_UNITS

HOPPER = (9, 0)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
GROUP_INPUTS = 32
TILE_OUTPUTS = 256
# Blocks that are on their way or being multiplied, as many as fit into shared memory, by the rows of a tile.
STAGES = {32: 6, 48: 6, 64: 5, 80: 5, 96: 4, 128: 4}
# More programs to a tile would write and add more than they multiply.
TILE_PROGRAMS = 6


class Shares(NamedTuple):
    """A product cut into tiles, their blocks of inputs in one list, and a piece of the list for each program.

    The list has all blocks of a tile, then those of the next outputs, then those of the next rows.
    """

    rows: int
    stages: int
    programs: int
    tiles: int
    blocks: int
    work: int

    @property
    def most_parts(self) -> int:
        """Into how many pieces a tile falls at most."""
        return _most_parts(self)

    def parts(self, tile: int) -> int:
        first, last = tile * self.blocks, (tile + 1) * self.blocks - 1
        return self.program_of(last) - self.program_of(first) + 1

    def piece(self, program: int) -> range:
        return range(program * self.work // self.programs, (program + 1) * self.work // self.programs)

    def program_of(self, item: int) -> int:
        return ((item + 1) * self.programs - 1) // self.work


@cache
def _most_parts(shares: Shares) -> int:
    return max(shares.parts(tile) for tile in range(shares.work // shares.blocks))


@cache
def plan_shares(rows: int, outputs: int, inputs: int, processors: int, tile_rows: int | None = None) -> Shares:
    """`processors`: multiprocessors of the device, each of which holds one program."""
    if tile_rows is None:
        needed = ceil_div(rows, ceil_div(rows, max(STAGES)))
        tile_rows = next(size for size in STAGES if needed <= size)
    tiles, blocks = ceil_div(outputs, TILE_OUTPUTS), ceil_div(inputs, BLOCK_INPUTS)
    all_tiles = tiles * ceil_div(rows, tile_rows)
    programs = min(processors, TILE_PROGRAMS * all_tiles, all_tiles * blocks)
    return Shares(tile_rows, STAGES[tile_rows], programs, tiles, blocks, all_tiles * blocks)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


def is_symmetric_int4(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """In groups of 32, with scales in `dtype`: what the kernels for Hopper decode."""
    is_int4 = weight.kind == "int4" and weight.group_inputs == GROUP_INPUTS and weight.zeros is None
    return is_int4 and weight.scales.dtype == dtype


def is_described(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> bool:
    """Symmetric int4 in groups of 32 with scales in the inputs' dtype, all of which TMA can copy."""
    return (
        is_symmetric_int4(weight, x.dtype)
        and weight.scales.shape[1] > 1
        and x.dtype in DTYPES
        and out.dtype == x.dtype
        and all(is_copied(tensor) for tensor in (x, weight.units, weight.scales, out))
    )


def hopper_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, shares: Shares, *, pdl: bool
) -> None:
    """out = x · weightᵀ + bias; `x` has its inputs in the order of the units. Launches on a device run in turn."""
    rows, outputs = out.shape
    main = 2 ** (shares.rows.bit_length() - 1)
    extra = shares.rows - main
    parts = shares.most_parts
    # Each program writes the sums of at most two tiles that it shares.
    slots = 2 * shares.programs if parts > 1 else 0
    sums = torch.empty(slots * TILE_OUTPUTS * shares.rows, dtype=torch.float32, device=x.device)
    assert parts <= MOST_PARTS, f"a tile in {parts} pieces"
    # Two flags to a tile.
    assert 2 * shares.work // shares.blocks <= FLAGS, f"a product with {shares.work // shares.blocks} tiles"
    int4_kernel[(shares.programs,)](
        described(x, [main, BLOCK_INPUTS], 128),
        described(x, [extra or main, BLOCK_INPUTS], 128),
        described(weight.units, [TILE_OUTPUTS, BLOCK_UNITS], 64),
        described(weight.scales, [TILE_OUTPUTS, 8], 0),
        described(out, [main // 2, 64], 128),
        out, sums, flags_of(x.device), bias, shares.tiles, shares.blocks, shares.work, rows, outputs, out.stride(0),
        ROWS=main, EXTRA=extra, STAGES=shares.stages, DTYPE=DTYPES[x.dtype], PDL=pdl,
        num_warps=4, maxnreg=launch_registers(2), launch_pdl=pdl,
    )  # fmt: skip


def described(rows: torch.Tensor, box: list[int], swizzle_bytes: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, box, gl.NVMMASharedLayout(swizzle_bytes, 16, rank=2))


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether TMA can copy boxes of it."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
    return aligned and tensor.stride(1) == 1 and tensor.shape[0] > 0
