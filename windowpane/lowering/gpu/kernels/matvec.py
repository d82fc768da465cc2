"""Products of a few rows with a weight [outputs, inputs]: each weight is read once, and reading is all that takes time.

A program has a few rows of the weight to itself and walks along its inputs, one tile ahead of what it multiplies. Where
rows of the weight are so few that programs would be, several share the inputs; the last to finish adds up what they
found in their order, so that results do not depend on timing.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.gated import gate_times_up, is_gelu, store_gated
from windowpane.lowering.gpu.kernels.launch import flags_of, wait_if_overlapped

MAX_ROWS = 8  # that the kernels take
FEW_ROWS = 2  # up to which the tensor cores are not needed
_LOAD_BYTES = 16


class Launch(NamedTuple):
    """How a weight is shared out: rows of it per program, and warps to share each row.

    In a step, each thread takes one 16-byte load of every row: 256 16-bit weights a warp. With `uses_dot` the tensor
    cores multiply instead, 128 inputs a step, and so many programs have `parts` of the inputs.
    """

    weight_rows: int
    warps: int
    uses_dot: bool = False
    parts: int = 1


# By least number of outputs, then of inputs; the best of a sweep on an H200. Memory is busy when some 50 KB are on
# their way to each multiprocessor: few outputs make few programs, which then need more warps.
_LAUNCHES = (
    (16_384, 2_048, Launch(1, 2)),
    (16_384, 0, Launch(2, 2)),
    (4_096, 4_096, Launch(8, 4)),
    (4_096, 0, Launch(2, 2)),
    (2_048, 0, Launch(2, 4)),
    (0, 0, Launch(1, 4)),
)
# 8 rows at 4.3 TB/s are 17 T multiply-adds a second, more than half of what float32 units can do.
_DOT_LAUNCH = Launch(64, 4, uses_dot=True)
_DOT_STEP, _DOT_STAGES = 128, 5
_DOT_COLUMNS = 16  # the fewest of a tensor-core product
# Up to one program to a multiprocessor of an H200, inputs are shared out, but not among more than these.
_PROCESSORS, _MOST_PARTS = 132, 8


def pays(rows: int) -> bool:
    """Whether these kernels are the faster way (measured on an H200; docs/performance.md)."""
    return rows <= MAX_ROWS


def plan_launch(rows: int, outputs: int, inputs: int) -> Launch:
    if rows > FEW_ROWS:
        parts = max(1, _PROCESSORS // ceil_div(outputs, _DOT_LAUNCH.weight_rows))
        return _DOT_LAUNCH._replace(parts=min(parts, _MOST_PARTS, ceil_div(inputs, _DOT_STEP)))
    launch = next(launch for least, width, launch in _LAUNCHES if outputs >= least and inputs >= width)
    # Threads beyond the last input would have nothing to read.
    most_warps = max(1, triton.next_power_of_2(inputs) // 256)
    return launch if launch.warps <= most_warps else launch._replace(warps=most_warps)


def matvec(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None,
    *, activation: str | None = None, pdl: bool = False, launch: Launch | None = None,
) -> None:  # fmt: skip
    """out [rows, outputs] = x [rows, inputs] · weightᵀ + bias, for at most MAX_ROWS rows; sums in float32.

    With an `activation`, the weight is a gate above what it gates, [2 × width, inputs], and has no bias:
    out [rows, width] = activation(x · gateᵀ) × (x · upᵀ).
    """
    (rows, inputs), outputs = x.shape, len(weight)
    launch = launch or plan_launch(rows, outputs, inputs)
    # A gate and what it gates go together.
    weight_rows = launch.weight_rows if activation is None else max(2, launch.weight_rows)
    tiles = ceil_div(outputs, weight_rows)
    strides = x.stride(0), weight.stride(0), out.stride(0)
    common: dict[str, Any] = {
        "WEIGHT_ROWS": weight_rows, "GATED": activation is not None, "PDL": pdl, "num_warps": launch.warps,
        "GELU": activation is not None and is_gelu(activation), "launch_pdl": pdl,
    }  # fmt: skip
    if launch.uses_dot:
        share, parts = ceil_div(ceil_div(inputs, _DOT_STEP), launch.parts) * _DOT_STEP, launch.parts
        partial = flags = None
        if parts > 1:
            partial = torch.empty(tiles * parts * weight_rows * _DOT_COLUMNS, device=x.device)
            flags = flags_of(x.device)
        _dot_kernel[(tiles, parts)](
            x, weight, bias, out, partial, flags, *strides, outputs, inputs, rows, share,
            IS_WHOLE=inputs % _DOT_STEP == 0, STEP=_DOT_STEP, STAGES=_DOT_STAGES, PADDED=_DOT_COLUMNS, PARTS=parts,
            **common,
        )  # fmt: skip
        return
    lanes, vector = 32 * launch.warps, _LOAD_BYTES // weight.element_size()
    _sums_kernel[(tiles,)](
        x, weight, bias, out, *strides, outputs, inputs, ROWS=rows, IS_WHOLE=inputs % (lanes * vector) == 0,
        LANES=lanes, VECTOR=vector, **common,
    )  # fmt: skip


@triton.jit
def _weight_row(outputs, WEIGHT_ROWS: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weight for this program; of a gated one in turn a row of the gate and the same of what it gates.

    Beyond the last output the last row is read again: its loads need no mask, and its result is not stored.
    """
    r = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
    if GATED:
        width = outputs // 2
        return tl.minimum(r // 2, width - 1) + r % 2 * width
    return tl.minimum(r, outputs - 1)


@triton.jit
def _load_weights(at, k, start, inputs, IS_WHOLE: tl.constexpr):
    """Of one step; one beyond the last reads nothing. No weight is read twice, so the cache keeps other things."""
    if IS_WHOLE:
        return tl.load(at + start, mask=start < inputs, other=0.0, eviction_policy="evict_first")
    return tl.load(at + start, mask=start + k < inputs, other=0.0, eviction_policy="evict_first")


@triton.jit
def _sums_kernel(
    X, W, BIAS, OUT, x_stride, w_stride, out_stride, outputs, inputs, ROWS: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr, IS_WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Tiles are [LANES, WEIGHT_ROWS, VECTOR]: a thread has the same inputs of each weight row, and the rows of x share
    what it read. LANES counts all threads, so that the layout of x needs no exchange between them.
    """
    STEP: tl.constexpr = LANES * VECTOR
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    n = _weight_row(outputs, WEIGHT_ROWS, GATED)
    k = (tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :])[:, None, :]
    at = W + n.to(tl.int64)[None, :, None] * w_stride + k
    w = _load_weights(at, k, 0, inputs, IS_WHOLE)
    if PDL:
        gdc_wait()
    sums = (tl.zeros([LANES, WEIGHT_ROWS], tl.float32),) * ROWS
    for start in tl.range(0, inputs, STEP):
        upcoming = _load_weights(at, k, start + STEP, inputs, IS_WHOLE)
        w32 = w.to(tl.float32)
        more = ()
        for row in tl.static_range(ROWS):
            if IS_WHOLE:
                x = tl.load(X + row * x_stride + start + k)
            else:
                x = tl.load(X + row * x_stride + start + k, mask=start + k < inputs, other=0.0)
            more += (sums[row] + tl.sum(w32 * x.to(tl.float32), 2),)
        sums = more
        w = upcoming
    for row in tl.static_range(ROWS):
        y = tl.sum(sums[row], 0)
        if GATED:
            gate, up = tl.split(tl.reshape(y, [WEIGHT_ROWS // 2, 2]))
            to = OUT + row * out_stride
            m = tl.program_id(0) * (WEIGHT_ROWS // 2) + tl.arange(0, WEIGHT_ROWS // 2)
            tl.store(to + m, gate_times_up(gate.to(DTYPE), up.to(DTYPE), GELU), mask=m < outputs // 2)
        else:
            if BIAS is not None:
                y += tl.load(BIAS + n).to(tl.float32)
            m = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
            tl.store(OUT + row * out_stride + m, y.to(DTYPE), mask=m < outputs)


@triton.jit
def _store_sums(
    OUT, BIAS, sums, n, rows, out_stride, outputs, WEIGHT_ROWS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr
):
    """Sums [weight rows, rows] of this program's tile."""
    if GATED:
        store_gated(OUT, sums, tl.program_id(0), out_stride, rows, outputs // 2, GELU)
    else:
        if BIAS is not None:
            sums += tl.load(BIAS + n).to(tl.float32)[:, None]
        m = tl.program_id(0) * WEIGHT_ROWS + tl.arange(0, WEIGHT_ROWS)
        row = tl.arange(0, sums.shape[1])
        inside = (m[:, None] < outputs) & (row[None, :] < rows)
        tl.store(OUT + row[None, :] * out_stride + m[:, None], sums.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _dot_kernel(
    X, W, BIAS, OUT, PARTIAL, FLAGS_AT, x_stride, w_stride, out_stride, outputs, inputs, rows, share,
    WEIGHT_ROWS: tl.constexpr, IS_WHOLE: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (tile, part of the inputs, `share` of them). The weight's rows are the tensor core's rows; the rows of x,
    padded, its columns.
    """
    wait_if_overlapped(PDL)
    n = _weight_row(outputs, WEIGHT_ROWS, GATED)
    k = tl.arange(0, STEP)
    row = tl.arange(0, PADDED)
    at = W + n.to(tl.int64)[:, None] * w_stride + k[None, :]
    x_at = X + row[None, :] * x_stride + k[:, None]
    sums = tl.zeros([WEIGHT_ROWS, PADDED], tl.float32)
    first = tl.program_id(1) * share
    for start in tl.range(first, tl.minimum(first + share, inputs), STEP, num_stages=STAGES):
        w = _load_weights(at, k[None, :], start, inputs, IS_WHOLE)
        if IS_WHOLE:
            x = tl.load(x_at + start, mask=row[None, :] < rows, other=0.0)
        else:
            x = tl.load(x_at + start, mask=(row[None, :] < rows) & (start + k[:, None] < inputs), other=0.0)
        sums = tl.dot(w, x, sums, input_precision="ieee")
    if PARTS == 1:
        _store_sums(OUT, BIAS, sums, n, rows, out_stride, outputs, WEIGHT_ROWS, GATED, GELU)
    else:
        SUMS: tl.constexpr = WEIGHT_ROWS * PADDED
        places = tl.program_id(0) * (PARTS * SUMS) + tl.arange(0, WEIGHT_ROWS)[:, None] * PADDED + row[None, :]
        tl.store(PARTIAL + tl.program_id(1) * SUMS + places, sums)
        # All threads of the program have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(FLAGS_AT + tl.program_id(0), 1, sem="acq_rel") == PARTS - 1:
            total = tl.load(PARTIAL + places, cache_modifier=".cg")
            for part in tl.static_range(1, PARTS):
                total += tl.load(PARTIAL + part * SUMS + places, cache_modifier=".cg")
            _store_sums(OUT, BIAS, total, n, rows, out_stride, outputs, WEIGHT_ROWS, GATED, GELU)
            tl.store(FLAGS_AT + tl.program_id(0), 0)
