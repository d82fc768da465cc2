"""Products with quantized weights (`windowpane.models.packing`): units are read once and dequantised in registers.

A unit's four values belong to four spans of 32 inputs, so that a tile of units becomes, shift by shift, four operands
for the tensor cores, each of one group and each met by 32 consecutive inputs.

Few rows (`_split_kernel`): reading is all that takes time. A program has some outputs, and its warps share the inputs;
their sums meet at the end. Scales are applied to sums, in float32.

More rows (`_tile_kernel`): a program has a tile of outputs by rows. Scales are applied to weights, which are rounded as
those of a dequantised matrix are. Where outputs are too few to keep the device busy, programs share the inputs, and
`_add_kernel` adds what they found. No sum depends on timing.
"""

# mypy: disable-error-code="assignment,import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.modeling.quantized import PackedWeight
from windowpane.modeling.triton.gated import is_gelu
from windowpane.modeling.triton.split import LINES, MOST_PROGRAMS, handover, split_kernel
from windowpane.modeling.triton.unpacking import decode, fetch, scale_of
from windowpane.models.packing import DEQUANTIZED_BYTES

# Beyond, a dequantised matrix and cuBLAS are the faster way.
MOST_ROWS = 256
# Up to these, warps share the inputs.
SPLIT_ROWS = 16
MANY_OUTPUTS = 16_384


class Launch(NamedTuple):
    """How a product is shared out.

    `outputs` and `rows` are a program's tile. The warps of a split launch take blocks of inputs in turn; several
    `programs` of a tiled one share the inputs of a tile.
    """

    outputs: int
    rows: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def is_split(self) -> bool:
        return self.rows <= SPLIT_ROWS


def plan_launch(rows: int, outputs: int, inputs: int, processors: int) -> Launch:
    """`processors`: multiprocessors of the device."""
    if rows <= SPLIT_ROWS:
        # More outputs to a program decode with fewer instructions, but few outputs must go round.
        tile_rows = 8 if rows <= 8 else 16
        return Launch(32, tile_rows, 4, 4, 4)
    tile_rows = min(128, max(32, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(outputs, 128) * triton.cdiv(rows, tile_rows)
    # Two programs fit on a multiprocessor: one multiplies while the other decodes.
    programs = max(1, min(8, 2 * processors // tiles, inputs // 1024))
    return Launch(128, tile_rows, 8, 2, programs)


def _plan_float32(rows: int) -> Launch:
    """Without tensor cores, for checks: as small as kernels come."""
    return Launch(16, 8 if rows <= 8 else 16, 4, 2) if rows <= SPLIT_ROWS else Launch(32, 32, 4, 2)


def packed_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, *, pdl: bool = False
) -> torch.Tensor:
    """x [rows, inputs] · weightᵀ + bias for any number of rows.

    Many rows are multiplied by a dequantised slice of the weight after another, in one piece of memory that is used
    again; its size is part of the plan.
    """
    out = x.new_empty(len(x), len(weight))
    if len(x) == 0:
        return out
    if len(x) <= MOST_ROWS:
        packed_linear(x, weight, out, bias, pdl=pdl)
        return out
    x = weight.in_order(x)
    at_once = max(1, DEQUANTIZED_BYTES // (weight.inputs * x.element_size()))
    scratch = x.new_empty(min(at_once, len(weight)), weight.inputs)
    for start in range(0, len(weight), at_once):
        part = weight[start : start + at_once]
        dequantize_into(part, scratch)
        torch.mm(x, scratch[: len(part)].t(), out=out[:, start : start + at_once])
    return out if bias is None else out.add_(bias)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    launch: Launch | None = None,
) -> None:
    """out [rows, outputs] = x [rows, inputs] · weightᵀ + bias, for at most MOST_ROWS rows; sums in float32."""
    _launch(x, weight, bias, out, None, pdl, launch)


def packed_gated(
    x: torch.Tensor,
    gate_up: PackedWeight,
    out: torch.Tensor,
    activation: str,
    *,
    pdl: bool = False,
    launch: Launch | None = None,
) -> None:
    """out [rows, width] = activation(x · gateᵀ) × (x · upᵀ), for at most SPLIT_ROWS rows; `gate_up` is stacked."""
    _launch(x, gate_up, None, out, is_gelu(activation), pdl, launch)


def dequantize_into(weight: PackedWeight, out: torch.Tensor) -> None:
    """The matrix in `out` [outputs, inputs], its columns in the order of the units."""
    outputs, inputs = weight.shape
    _dequantize_kernel[(triton.cdiv(outputs, 16), triton.cdiv(weight.units.shape[1], 32))](
        weight.units,
        weight.scales,
        weight.zeros,
        out,
        weight.units.stride(0),
        weight.scales.stride(0),
        _stride(weight.zeros),
        out.stride(0),
        outputs,
        inputs,
        weight.scales.shape[1],
        **_shape(weight),
        TILE=16,
        num_warps=4,
    )


def _launch(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool | None,
    pdl: bool,
    launch: Launch | None,
) -> None:
    """`gelu` None: not gated."""
    x = weight.in_order(x)
    rows, (outputs, inputs) = len(x), weight.shape
    on_cuda = x.device.type == "cuda"
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if on_cuda else 4
    if launch is None:
        is_half = x.element_size() == 2
        launch = plan_launch(rows, outputs, inputs, processors) if is_half else _plan_float32(rows)
    scales, in_words = _as_words(weight, x.dtype)
    operands = (x, weight.units, scales, weight.zeros)
    common = {
        **_shape(weight),
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
    sizes = (x.stride(0), weight.units.stride(0), scales.stride(0), _stride(weight.zeros))
    extent = (rows, outputs, inputs, weight.scales.shape[1])
    if launch.is_split:
        work = triton.cdiv(outputs, launch.outputs) * triton.cdiv(triton.cdiv(inputs, 128), launch.warps)
        grid = (min(MOST_PROGRAMS, processors * launch.programs, work),)
        per_tile = launch.outputs if gelu is None else launch.outputs // 2
        split_kernel[grid](
            *operands, bias, out, *handover(x.device), *sizes, out.stride(0), *extent,
            SPLIT=launch.warps, LINES=LINES, GATED=gelu is not None, GELU=bool(gelu),
            FITS=(outputs if gelu is None else outputs // 2) % per_tile == 0, **common,
        )  # fmt: skip
        return
    assert gelu is None, f"gates go with at most {SPLIT_ROWS} rows"
    grid = (triton.cdiv(rows, launch.rows), triton.cdiv(outputs, launch.outputs), launch.programs)
    shared = launch.programs > 1
    sums = torch.empty(launch.programs, rows, outputs, dtype=torch.float32, device=x.device) if shared else None
    target = out if sums is None else sums
    _tile_kernel[grid](
        *operands, None if shared else bias, target, *sizes, target.stride(-2), rows * outputs, *extent, **common
    )
    if sums is not None:
        block = 1024
        _add_kernel[(rows, triton.cdiv(outputs, block))](
            sums, bias, out, out.stride(0), rows, outputs,
            PROGRAMS=launch.programs, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


def _as_words(weight: PackedWeight, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Scales, as words where those of a block are one, or a pair of blocks has one."""
    scales, groups = weight.scales, weight.scales.shape[1]
    word = {32: torch.int64, 64: torch.int32, 128: torch.int32}.get(weight.group_inputs or 0)
    if word is None or scales.dtype != dtype or dtype.itemsize != 2 or groups * 2 % word.itemsize:
        return scales, False
    return scales.view(word), True


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _shape(weight: PackedWeight) -> dict[str, int | bool]:
    """What a weight fixes for a compiled kernel. GROUP 0: one scale for all inputs."""
    group = 0 if weight.scales.shape[1] == 1 else weight.group_inputs or 0
    return {"IS_INT4": weight.kind == "int4", "GROUP": group, "SCALE_OUTPUTS": weight.scale_outputs}


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
def _four(x):
    return (x, x, x, x)


@triton.jit
def _tile_kernel(
    X, U, S, Z, BIAS, OUT, x_stride, u_stride, s_stride, z_stride, out_stride, program_stride, rows, outputs, inputs,
    groups, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, STAGES: tl.constexpr, IS_INT4: tl.constexpr,
    GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr, IS_WHOLE: tl.constexpr, WORDS: tl.constexpr,
    USES_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, output tile, share of the inputs); the weight's outputs are the tensor core's rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: tl.constexpr = X.dtype.element_ty
    n = _output(outputs, OUTPUTS, False, tl.program_id(1))
    j = tl.arange(0, 32)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = (row < rows)[None, :]
    at = U + n[:, None] * u_stride + j[None, :]
    s_at = S + n // SCALE_OUTPUTS * s_stride
    z_at = Z
    if Z is not None:
        z_at = Z + n * z_stride
    x_at = X + row.to(tl.int64)[None, :] * x_stride + j[:, None]
    blocks = tl.cdiv(inputs, 128)
    share = tl.cdiv(blocks, tl.num_programs(2))
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, blocks)
    sums = tl.zeros([OUTPUTS, TILE_ROWS], tl.float32)
    only = ()
    if GROUP == 0 and Z is not None:
        only = _four(tl.load(z_at))
    for block in tl.range(begin, end, num_stages=STAGES):
        u = tl.load(at + block * 32)
        if GROUP == 0:
            w = decode(u, only, DTYPE, Z is not None, GROUP, False, IS_INT4, USES_ASM)
        else:
            scales, zeros = fetch(s_at, z_at, block, groups, GROUP, WORDS)
            w = decode(u, zeros, DTYPE, Z is not None, GROUP, WORDS, IS_INT4, USES_ASM)
        for span in tl.static_range(4):
            mask = is_row
            if not IS_WHOLE:
                mask = mask & (block * 128 + span * 32 + j[:, None] < inputs)
            x = tl.load(x_at + (block * 128 + span * 32), mask=mask, other=0.0)
            if GROUP == 0:
                scaled = w[span]
            elif WORDS or S.dtype.element_ty == DTYPE:
                scaled = w[span] * scale_of(scales, span, DTYPE, GROUP, WORDS)[:, None]
            else:
                scale = scale_of(scales, span, DTYPE, GROUP, WORDS).to(tl.float32)
                scaled = (w[span].to(tl.float32) * scale[:, None]).to(DTYPE)
            sums = tl.dot(scaled, x, sums, input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(s_at).to(tl.float32)[:, None]
    if BIAS is not None:
        sums += tl.load(BIAS + n).to(tl.float32)[:, None]
    m = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept = (m[:, None] < outputs) & is_row
    to = OUT + tl.program_id(2).to(tl.int64) * program_stride + row.to(tl.int64)[None, :] * out_stride + m[:, None]
    tl.store(to, sums.to(OUT.dtype.element_ty), mask=kept)


@triton.jit
def _add_kernel(
    SUMS, BIAS, OUT, out_stride, rows, outputs, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """What programs that share the inputs found, always added in the same order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for program in tl.static_range(PROGRAMS):
        total += tl.load(SUMS + (program * rows + row) * outputs + m, mask=m < outputs, other=0.0)
    if BIAS is not None:
        total += tl.load(BIAS + m, mask=m < outputs, other=0.0).to(tl.float32)
    tl.store(OUT + row * out_stride + m, total.to(OUT.dtype.element_ty), mask=m < outputs)


@triton.jit
def _dequantize_kernel(
    U, S, Z, OUT, u_stride, s_stride, z_stride, out_stride, outputs, inputs, groups, TILE: tl.constexpr,
    IS_INT4: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One block of inputs of TILE outputs."""
    n = _output(outputs, TILE, False, tl.program_id(0))
    block = tl.program_id(1)
    j = tl.arange(0, 32)
    z_at = Z
    if Z is not None:
        z_at = Z + n * z_stride
    s_at = S + n // SCALE_OUTPUTS * s_stride
    u = tl.load(U + n[:, None] * u_stride + (block * 32 + j)[None, :])
    # One scale for all inputs is a group that never ends.
    scales, zeros = fetch(s_at, z_at, block, groups, GROUP or 2**30, False)
    w = decode(u, zeros, tl.float32, Z is not None, GROUP, False, IS_INT4, False)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    for span in tl.static_range(4):
        k = block * 128 + span * 32 + j
        value = w[span] * scale_of(scales, span, tl.float32, GROUP, False).to(tl.float32)[:, None]
        to = OUT + m.to(tl.int64)[:, None] * out_stride + k[None, :]
        tl.store(to, value.to(OUT.dtype.element_ty), mask=(m[:, None] < outputs) & (k[None, :] < inputs))
