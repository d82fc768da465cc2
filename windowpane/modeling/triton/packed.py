"""Products with quantized weights (`windowpane.models.packing`): units are read once and dequantised in registers.

A unit's four values belong to four spans of 32 inputs, so that a tile of units becomes, shift by shift, four operands
for the tensor cores, each of one group and each met by 32 consecutive inputs.

Few rows (`_split_kernel`): reading is all that takes time. A program has some outputs, and its warps share the inputs;
their sums meet at the end. Scales are applied to sums, in float32.

More rows: `tiled`. So many that a dequantised matrix and cuBLAS are the faster way: `dequantize`. No sum depends on
timing.
"""

# mypy: disable-error-code="assignment,import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.kv.retention import ceil_div
from windowpane.modeling.quantized import PackedWeight
from windowpane.modeling.triton.dequantize import dequantize_into
from windowpane.modeling.triton.gated import gate_times_up, is_gelu
from windowpane.modeling.triton.hopper_tiled import Shares, has_hopper_kernel, hopper_product, plan_shares
from windowpane.modeling.triton.launch import SPLIT_ROWS, Launch, as_words, fixed_by, processors_of, stride_of
from windowpane.modeling.triton.tiled import plan_tiles, tiled_product
from windowpane.modeling.triton.unpacking import decode, fetch, scale_of, zero_of
from windowpane.models.packing import DEQUANTIZED_BYTES

__all__ = [
    "MOST_ROWS",
    "SPLIT_ROWS",
    "Launch",
    "Shares",
    "choose_launch",
    "dequantize_into",
    "dequantized_product",
    "packed_gated",
    "packed_linear",
    "packed_product",
    "plan_launch",
    "slice_outputs",
]

# Beyond, a dequantised matrix and cuBLAS are the faster way.
MOST_ROWS = HOPPER_ROWS = 256
# What slices of a dequantised matrix are cut between.
TILE_OUTPUTS = 128
MANY_OUTPUTS = 16_384
# Lines of 128 bytes of each output that are fetched into L2 before the kernel before has ended: some 20 MB in all.
LINES_OF_MANY, LINES_OF_FEW = 8, 32


def plan_launch(rows: int, outputs: int, inputs: int, processors: int) -> Launch:
    """`processors`: multiprocessors of the device."""
    if rows <= SPLIT_ROWS:
        # More outputs to a program decode with fewer instructions, but few outputs must go round.
        tile_rows = 8 if rows <= 8 else 16
        return Launch(32, tile_rows, 4, 4) if outputs >= MANY_OUTPUTS else Launch(16, tile_rows, 8, 3)
    return plan_tiles(rows, outputs, inputs, processors)


def choose_launch(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> Launch | Shares:
    """What runs where nothing else is asked for."""
    rows, (outputs, inputs) = len(x), weight.shape
    if x.element_size() != 2:
        return _plan_float32(rows)
    if rows > SPLIT_ROWS and has_hopper_kernel(x, weight, out):
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
    if len(x) > (HOPPER_ROWS if has_hopper_kernel(x, weight, out) else MOST_ROWS):
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
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    launch: Launch | Shares | None = None,
) -> None:
    """out [rows, outputs] = x [rows, inputs] · weightᵀ + bias by a kernel that reads units; sums in float32."""
    _launch(x, weight, bias, out, None, pdl, launch)


def packed_gated(
    x: torch.Tensor,
    gate_up: PackedWeight,
    out: torch.Tensor,
    activation: str,
    *,
    pdl: bool = False,
    launch: Launch | Shares | None = None,
) -> None:
    """out [rows, width] = activation(x · gateᵀ) × (x · upᵀ), for at most SPLIT_ROWS rows; `gate_up` is stacked."""
    _launch(x, gate_up, None, out, is_gelu(activation), pdl, launch)


def _launch(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool | None,
    pdl: bool,
    launch: Launch | Shares | None,
) -> None:
    """`gelu` None: not gated."""
    x = weight.in_order(x)
    rows, (outputs, inputs) = len(x), weight.shape
    launch = choose_launch(x, weight, out) if launch is None else launch
    if isinstance(launch, Shares):
        assert gelu is None, f"gates go with at most {SPLIT_ROWS} rows"
        hopper_product(x, weight, bias, out, launch, pdl=pdl)
        return
    if not launch.is_split:
        assert gelu is None, f"gates go with at most {SPLIT_ROWS} rows"
        tiled_product(x, weight, bias, out, launch, pdl=pdl)
        return
    scales, in_words = as_words(weight, x.dtype)
    operands = (x, weight.units, scales, weight.zeros)
    common = {
        **fixed_by(weight),
        "IS_WHOLE": inputs % 128 == 0,
        "WORDS": in_words,
        "USES_ASM": x.device.type == "cuda" and x.dtype.itemsize == 2,
        "OUTPUTS": launch.outputs,
        "TILE_ROWS": launch.rows,
        "STAGES": launch.stages,
        "PDL": pdl,
        "num_warps": launch.warps,
        "launch_pdl": pdl,
    }
    sizes = (x.stride(0), weight.units.stride(0), scales.stride(0), stride_of(weight.zeros))
    extent = (rows, outputs, inputs, weight.scales.shape[1])
    _split_kernel[(triton.cdiv(outputs, launch.outputs),)](
        *operands, bias, out, *sizes, out.stride(0), *extent,
        SPLIT=launch.warps, LINES=LINES_OF_MANY if outputs >= MANY_OUTPUTS else LINES_OF_FEW,
        GATED=gelu is not None, GELU=bool(gelu), **common,
    )  # fmt: skip


# -- in kernels ----------------------------------------------------------------------------------------------------


@triton.jit
def _output(outputs, OUTPUTS: tl.constexpr, GATED: tl.constexpr, program):
    """Outputs of this program; of a gated one in turn one of the gate and the same of what it gates.

    Beyond the last, the last is read again: its loads need no mask, and its result is not stored.
    """
    r = program * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        width = outputs // 2
        return (tl.minimum(r // 2, width - 1) + r % 2 * width).to(tl.int64)
    return tl.minimum(r, outputs - 1).to(tl.int64)


@triton.jit
def _prefetch(at, LINES: tl.constexpr, LINE: tl.constexpr, length):
    """The first LINES lines, of LINE elements each, of rows [rows, 1] that are `length` elements long."""
    line = (at + tl.minimum(tl.arange(0, LINES) * LINE, length - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], tl.int32, False, 1)


@triton.jit
def _split_kernel(
    X, U, S, Z, BIAS, OUT, x_stride, u_stride, s_stride, z_stride, out_stride, rows, outputs, inputs, groups,
    SPLIT: tl.constexpr, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    IS_INT4: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    WORDS: tl.constexpr, USES_ASM: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles are [SPLIT, OUTPUTS, …]: each warp has its own blocks of inputs."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    n = _output(outputs, OUTPUTS, GATED, tl.program_id(0))
    part = tl.arange(0, SPLIT)
    j = tl.arange(0, 32)
    row = tl.arange(0, TILE_ROWS)
    at = U + n[None, :, None] * u_stride + (part[:, None, None] * 32 + j[None, None, :])
    if PDL:
        gdc_launch_dependents()
        if USES_ASM:
            # Nobody writes weights: their first lines may come while the kernel before still runs.
            LINE: tl.constexpr = 64 if IS_INT4 else 32
            _prefetch(U + n[:, None] * u_stride, LINES, LINE, u_stride)
            if WORDS and GROUP == 32:
                # Eight lines of units have one line of scales.
                _prefetch(S + n[:, None] * s_stride, LINES // 8, 16, s_stride)
        gdc_wait()
    blocks = tl.cdiv(inputs, 128)
    s_at = S + (n // SCALE_OUTPUTS)[None, :] * s_stride
    z_at = Z
    if Z is not None:
        z_at = Z + n[None, :] * z_stride
    x_at = X + row[None, None, :] * x_stride + (part[:, None, None] * 128 + j[None, :, None])
    is_row = row[None, None, :] < rows
    # Zero points are taken away from sums: (q - z)·x is (q - 8)·x and (8 - z) times the sum of x.
    HAS_ZEROS: tl.constexpr = Z is not None
    ones = tl.full([SPLIT, OUTPUTS, 32], 1.0, DTYPE)
    sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
    x_sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
    for first in tl.range(0, blocks, SPLIT, num_stages=STAGES):
        inside = (first + part < blocks)[:, None, None]
        u = tl.load(at + first * 32, mask=inside, other=0, eviction_policy="evict_first")
        w = decode(u, (), DTYPE, False, GROUP, False, IS_INT4, USES_ASM)
        if GROUP != 0:
            scales, zeros = fetch(s_at, z_at, (first + part)[:, None], groups, GROUP, WORDS)
        for span in tl.static_range(4):
            mask = is_row & inside
            if not IS_WHOLE:
                mask = mask & ((first + part[:, None, None]) * 128 + span * 32 + j[None, :, None] < inputs)
            x = tl.load(x_at + (first * 128 + span * 32), mask=mask, other=0.0)
            if GROUP == 0:
                sums = tl.dot(w[span], x, sums, input_precision="ieee")
                if HAS_ZEROS:
                    x_sums = tl.dot(ones, x, x_sums, input_precision="ieee")
            else:
                products = tl.dot(w[span], x, input_precision="ieee")
                if HAS_ZEROS:
                    zero = zero_of(zeros, span, GROUP, WORDS)
                    products += (8 - zero).to(tl.float32)[:, :, None] * tl.dot(ones, x, input_precision="ieee")
                scale = scale_of(scales, span, DTYPE, GROUP, WORDS)
                sums += products * scale.to(tl.float32)[:, :, None]
    total = tl.sum(sums, 0)
    if GROUP == 0:
        if HAS_ZEROS:
            zero = tl.load(Z + n * z_stride) & 15
            total += (8 - zero).to(tl.float32)[:, None] * tl.sum(x_sums, 0)
        total *= tl.load(S + n // SCALE_OUTPUTS * s_stride).to(tl.float32)[:, None]
    if GATED:
        # [pairs, 2, rows] with the 2 last, where it can be split.
        pairs = tl.permute(tl.reshape(total, [OUTPUTS // 2, 2, TILE_ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        m = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        y = gate_times_up(gate.to(DTYPE), up.to(DTYPE), GELU)
        kept = (m[:, None] < outputs // 2) & (row[None, :] < rows)
        tl.store(OUT + row[None, :] * out_stride + m[:, None], y, mask=kept)
    else:
        if BIAS is not None:
            total += tl.load(BIAS + n).to(tl.float32)[:, None]
        m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        kept = (m[:, None] < outputs) & (row[None, :] < rows)
        tl.store(OUT + row[None, :] * out_stride + m[:, None], total.to(DTYPE), mask=kept)
