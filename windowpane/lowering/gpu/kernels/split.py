"""Products of few rows with quantized weights: reading is all that takes time, so the device reads without a pause.

As many programs run as fit at once. The work is a row of steps, tile of outputs by tile of outputs and within a tile
along the inputs, and each program has an equal share of it, wherever tiles begin and end; loads run ahead across tiles.
A tile that two or more shares have parts of is finished by the share that begins it, as the last thing it does; for the
others it was the first, and they have left their sums. No sum depends on timing.

The warps of a program share the inputs of a step; their sums meet at a tile's end. Scales are applied to sums, in
float32.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.view import processors_of
from windowpane.lowering.gpu.kernels.gated import store_gated
from windowpane.lowering.gpu.kernels.launch import Launch, Operands, flags_of
from windowpane.lowering.gpu.kernels.unpacking import decode, fetch, scale_of, zero_of
from windowpane.lowering.packed import PackedWeight

MOST_PROGRAMS = 2048
MOST_SUMS = 64 * 16  # outputs by rows of a tile


@cache
def _sums(device: torch.device) -> torch.Tensor:
    """Where shares leave what others need, for all products of a device: they run one after the other."""
    return torch.empty(MOST_PROGRAMS * MOST_SUMS, dtype=torch.float32, device=device)


def plan_split(rows: int) -> Launch:
    """Launches that measured best on an H200 with 1 and 8 rows. `programs` to a multiprocessor are as many as run at
    once, and their warps a multiple of its four schedulers.
    """
    if 2 < rows <= 8:
        return Launch(64, 8, 2, 3, 4)
    return Launch(32, 8 if rows <= 8 else 16, 2, 3, 6)


def split_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, gelu: bool | None,
    launch: Launch,
) -> None:  # fmt: skip
    """`gelu` None: not gated. Begins when the launch before has ended: overlapped, it takes longer (measured)."""
    rows, (outputs, inputs) = len(x), weight.shape
    operands = Operands.of(weight, x.dtype)
    work = triton.cdiv(outputs, launch.outputs) * triton.cdiv(triton.cdiv(inputs, 128), launch.warps)
    split_kernel[(min(MOST_PROGRAMS, processors_of(x.device) * launch.programs, work),)](
        x, *operands.tensors, bias, out, _sums(x.device), flags_of(x.device), x.stride(0), *operands.strides,
        out.stride(0), rows, outputs, inputs, weight.scales.shape[1], **operands.fixed, SPLIT=launch.warps,
        OUTPUTS=launch.outputs, TILE_ROWS=launch.rows, STAGES=launch.stages, GATED=gelu is not None, GELU=bool(gelu),
        FITS=outputs % launch.outputs == 0, num_warps=launch.warps,
    )  # fmt: skip


@triton.jit
def _first_step(share, programs, steps):
    """Of a share; of the one behind the last, where the work ends."""
    return (share.to(tl.int64) * steps // programs).to(tl.int32)


@triton.jit
def _outputs(tile, outputs, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """Outputs of a tile; of a gated one in turn one of the gate and the same of what it gates.

    Beyond the last, the last is read again: its loads need no mask, and its result is not stored.
    """
    r = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        width = outputs // 2
        return (tl.minimum(r // 2, width - 1) + r % 2 * width).to(tl.int64)
    return tl.minimum(r, outputs - 1).to(tl.int64)


@triton.jit
def split_kernel(
    X, U, S, Z, BIAS, OUT, SUMS, DONE, x_stride, u_stride, s_stride, z_stride, out_stride, rows, outputs, inputs,
    groups, SPLIT: tl.constexpr, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, WORDS: tl.constexpr, USES_ASM: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    FITS: tl.constexpr,
):  # fmt: skip
    """Tiles are [SPLIT, OUTPUTS, …]: each warp has its own blocks of inputs. FITS: all tiles are full."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    HAS_ZEROS: tl.constexpr = Z is not None
    programs = tl.num_programs(0)
    # The last share first: programs wait for none that begins after them.
    share = programs - 1 - tl.program_id(0)
    blocks = tl.cdiv(inputs, 128)
    steps = tl.cdiv(blocks, SPLIT)  # of a tile
    work = tl.cdiv(outputs, OUTPUTS) * steps
    begin = _first_step(share, programs, work)
    end = _first_step(share + 1, programs, work)
    tile = begin // steps
    step = begin - tile * steps
    part = tl.arange(0, SPLIT)
    j = tl.arange(0, 32)
    row = tl.arange(0, TILE_ROWS)
    n = _outputs(tile, outputs, OUTPUTS, GATED)
    # Of full tiles, addresses differ by the same from one to the next.
    n0 = n
    first_tile = tile
    PER_TILE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    x_at = X + row[None, None, :] * x_stride + (part[:, None, None] * 128 + j[None, :, None])
    is_row = row[None, None, :] < rows
    # Zero points are taken away from sums: (q - z)·x is (q - 8)·x and (8 - z) times the sum of x.
    ones = tl.full([SPLIT, OUTPUTS, 32], 1.0, DTYPE)
    sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
    x_sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
    for _ in tl.range(begin, end, num_stages=STAGES):
        first = step * SPLIT
        inside = (first + part < blocks)[:, None, None]
        if FITS:
            further = (tile - first_tile).to(tl.int64) * PER_TILE
            n = n0
        else:
            further = tl.zeros([], tl.int64)
            n = _outputs(tile, outputs, OUTPUTS, GATED)
        at = U + (further * u_stride + first * 32) + (n[None, :, None] * u_stride + part[:, None, None] * 32) + j
        u = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
        w = decode(u, (), DTYPE, False, GROUP, False, KIND, USES_ASM)
        if GROUP != 0:
            s_at = S + ((n + further) // SCALE_OUTPUTS)[None, :] * s_stride
            z_at = Z
            if HAS_ZEROS:
                z_at = Z + (n + further)[None, :] * z_stride
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
                scale = scale_of(scales, span, DTYPE, GROUP, WORDS, KIND)
                sums += products * scale.to(tl.float32)[:, :, None]
        is_last = step == steps - 1
        if is_last:
            total = _total(sums, x_sums, S, Z, tile, s_stride, z_stride, outputs, OUTPUTS, GATED, GROUP, SCALE_OUTPUTS)
            if tile * steps < begin:
                tl.store(SUMS + _places(share, OUTPUTS, TILE_ROWS), total)
            else:
                _store(OUT, BIAS, total, tile, out_stride, rows, outputs, DTYPE, GATED, GELU)
            sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
            x_sums = tl.zeros([SPLIT, OUTPUTS, TILE_ROWS], tl.float32)
        step = tl.where(is_last, 0, step + 1)
        tile += is_last.to(tl.int32)
    # What is left begins a tile that others end, or is the middle of one. Sums of a tile that another began are told
    # only now: loads would not run ahead in a loop with barriers.
    if step > 0:
        total = _total(sums, x_sums, S, Z, tile, s_stride, z_stride, outputs, OUTPUTS, GATED, GROUP, SCALE_OUTPUTS)
        if tile * steps < begin:
            tl.store(SUMS + _places(share, OUTPUTS, TILE_ROWS), total)
            _tell(DONE, share)
        else:
            if begin % steps > 0:
                _tell(DONE, share)
            other = share + 1
            while _first_step(other, programs, work) < (tile + 1) * steps:
                total += _taken(SUMS, DONE, other, OUTPUTS, TILE_ROWS)
                other += 1
            _store(OUT, BIAS, total, tile, out_stride, rows, outputs, DTYPE, GATED, GELU)
    elif begin % steps > 0:
        _tell(DONE, share)


@triton.jit
def _total(
    sums, x_sums, S, Z, tile, s_stride, z_stride, outputs, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """[outputs, rows] of one share: all that is linear in the inputs it saw."""
    total = tl.sum(sums, 0)
    if GROUP == 0:
        n = _outputs(tile, outputs, OUTPUTS, GATED)
        if Z is not None:
            zero = tl.load(Z + n * z_stride) & 15
            total += (8 - zero).to(tl.float32)[:, None] * tl.sum(x_sums, 0)
        total *= tl.load(S + n // SCALE_OUTPUTS * s_stride).to(tl.float32)[:, None]
    return total


@triton.jit
def _places(share, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    return share * (OUTPUTS * TILE_ROWS) + tl.arange(0, OUTPUTS)[:, None] * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]


@triton.jit
def _tell(DONE, share):
    tl.debug_barrier()  # all sums are there before the flag
    tl.atomic_xchg(DONE + share, 1, sem="release")


@triton.jit
def _taken(SUMS, DONE, share, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    while tl.atomic_cas(DONE + share, 1, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()
    return tl.load(SUMS + _places(share, OUTPUTS, TILE_ROWS), cache_modifier=".cg")


@triton.jit
def _store(
    OUT, BIAS, total, tile, out_stride, rows, outputs, DTYPE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr
):
    OUTPUTS: tl.constexpr = total.shape[0]
    TILE_ROWS: tl.constexpr = total.shape[1]
    row = tl.arange(0, TILE_ROWS)
    if GATED:
        store_gated(OUT, total, tile, out_stride, rows, outputs // 2, GELU)
    else:
        m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        if BIAS is not None:
            total += tl.load(BIAS + m, mask=m < outputs, other=0.0).to(tl.float32)[:, None]
        kept = (m[:, None] < outputs) & (row[None, :] < rows)
        tl.store(OUT + row[None, :] * out_stride + m[:, None], total.to(DTYPE), mask=kept)
