"""Experts of many rows on Hopper (Gluon) whose weights are in bf16.

What multiprocessors read from L2 limits this product, so a tile is as large as registers allow: 192 pairs of one
expert, 64 to each of three warp groups, by 256 outputs. Of a gated product these are 128 of a gate and the 128 that it
gates; both are then in the same thread's registers. One warp brings weights by TMA, another one the inputs, which lie
by expert. Warp groups beyond the last pair of a block multiply nothing, and their inputs are not brought. There is one
program to a multiprocessor; program p takes tiles p, p + programs and so on, and what it needs for the next one is
brought while it ends the last.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.experts_activation import is_gated
from windowpane.lowering.gpu.kernels.hopper_experts import fresh, gate_sums, place_of

# Boxes that are brought: of weights and inputs alike, so many rows of so many inputs.
_BOX = gl.constexpr(64)
_GROUPS = gl.constexpr(3)
_BOX_BYTES = gl.constexpr(64 * 64 * 2)
# How a warp group stores [pairs, 64 outputs]: each thread 8 outputs of a pair.
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _is_narrow(tile, width, GATED: gl.constexpr):
    """Whether half a tile has all outputs that are left."""
    HALF: gl.constexpr = _BOX if GATED else 2 * _BOX
    return width - tile * (2 * HALF) <= HALF


@gluon.jit
def _bring_weights(
    weights, w_boxes, share, shape, GATED: gl.constexpr, NARROW: gl.constexpr, GROUP_BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Of a tile 4 boxes at a time: two of a gate and two of what it gates, or outputs in order; of a narrow one 2."""
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    outputs, width = shape
    STAGES: gl.constexpr = w_boxes.type.shape[0] // 4
    if PDL:
        gdc_wait()
    count = fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, tile = place_of(item, count, tiles, GROUP_BLOCKS)
        first = fresh(BLOCKS + block * 3) * outputs + tile * (2 * _BOX if GATED else 4 * _BOX)
        # The box behind those of the first half: of a narrow tile it is the second one.
        half = 2
        if NARROW:
            half = gl.where(_is_narrow(tile, width, GATED), 1, 2)
        second = first + (width if GATED else half * _BOX)
        for step in range(blocks):
            buf = i % STAGES
            mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
            bar, at, column, is_wide = full.index(buf), 4 * buf, step * _BOX, half == 2
            mbarrier.expect(bar, 4 * _BOX_BYTES, pred=is_wide)
            if NARROW:
                mbarrier.expect(bar, 2 * _BOX_BYTES, pred=half == 1)
            tma.async_copy_global_to_shared(weights, [first, column], bar, w_boxes.index(at))
            tma.async_copy_global_to_shared(weights, [second, column], bar, w_boxes.index(at + half))
            tma.async_copy_global_to_shared(weights, [first + _BOX, column], bar, w_boxes.index(at + 1), pred=is_wide)
            tma.async_copy_global_to_shared(weights, [second + _BOX, column], bar, w_boxes.index(at + 3), pred=is_wide)
            i += 1
        item += gl.num_programs(0)


@gluon.jit
def _bring_inputs(x, x_boxes, share, GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr):
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    STAGES: gl.constexpr = x_boxes.type.shape[0] // _GROUPS
    if PDL:
        gdc_wait()
    count = fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, _tile = place_of(item, count, tiles, GROUP_BLOCKS)
        row = fresh(BLOCKS + block * 3 + 1)
        groups = gl.minimum((fresh(BLOCKS + block * 3 + 2) - row + (_BOX - 1)) // _BOX, _GROUPS)
        for step in range(blocks):
            buf = i % STAGES
            bar = full.index(buf)
            mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
            for group in gl.static_range(_GROUPS):
                mbarrier.expect(bar, (group + 1) * _BOX_BYTES, pred=groups == group + 1)
            for group in gl.static_range(_GROUPS):
                at = [row + group * _BOX, step * _BOX]
                to = x_boxes.index(_GROUPS * buf + group)
                tma.async_copy_global_to_shared(x, at, bar, to, pred=group < groups)
            i += 1
        item += gl.num_programs(0)


@gluon.jit
def _halves(values):
    """The first columns and the last ones; nothing moves."""
    HALF: gl.constexpr = values.type.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(values, [values.type.shape[0], 2, HALF]), (0, 2, 1)))


@gluon.jit
def _sums(BIAS, expert, first, outputs, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """Of 64 pairs and no inputs yet: the biases of outputs from `first` on, or zeros."""
    sums = gl.full([64, COLUMNS], 0.0, gl.float32, layout)
    if BIAS is not None:
        m = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        sums += gl.load(BIAS + expert * outputs + m, mask=m < outputs, other=0.0).to(gl.float32)[None, :]
    return sums


@gluon.jit
def _store(OUT, sums, staged, first, width, row, is_pair, out_stride):
    """[pairs, 64 outputs] through shared memory, where outputs of a pair come to lie side by side."""
    staged.store(sums.to(OUT.dtype.element_ty))
    m = first + gl.arange(0, 64, gl.SliceLayout(0, _STORED))
    to = OUT + row.to(gl.int64)[:, None] * out_stride + m[None, :]
    gl.store(to, staged.load(_STORED), mask=is_pair[:, None] & (m < width)[None, :])


@gluon.jit
def _tile(
    which: gl.constexpr, i, results, boxes, share, place, tile, shape, numbers, ACTIVATION: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """A warp group's pairs of a tile of so many boxes of outputs; `i` blocks of inputs came before."""
    w_boxes, x_boxes, staged = boxes
    full, empty, _tiles, blocks, _blocks_at, _count_at = share
    OUT, BIAS, PAIRS = results
    outputs, width = shape
    out_stride, limit, alpha = numbers
    expert, begin, end = place
    STAGES: gl.constexpr = x_boxes.type.shape[0] // _GROUPS
    GATED: gl.constexpr = is_gated(ACTIVATION)
    COUNT: gl.constexpr = BOXES // 2  # of boxes that lie one behind another
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT * 64, 16])
    boxed: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    weights = w_boxes._reinterpret(gl.bfloat16, [STAGES * 4 // COUNT, COUNT * 64, 64], boxed)
    first = tile * (128 if GATED else 256)
    left = _sums(BIAS, expert, first, outputs, layout, COUNT * 64)
    right = _sums(BIAS, expert, first + (width if GATED else COUNT * 64), outputs, layout, COUNT * 64)
    for step in range(blocks):
        buf = (i + step) % STAGES
        mbarrier.wait(full.index(buf), (i + step) // STAGES % 2)
        x = x_boxes.index(buf * _GROUPS + which)
        w = buf * (4 // COUNT)
        left = warpgroup_mma(x, weights.index(w).permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(x, weights.index(w + 1).permute((1, 0)), right, is_async=True)
        # Those of the block before have ended, and these follow them without a gap.
        left, right = warpgroup_mma_wait(2, deps=[left, right])
        mbarrier.arrive(empty.index((i + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    mbarrier.arrive(empty.index((i + blocks - 1) % STAGES), count=1)
    at = begin + which * 64 + gl.arange(0, 64, gl.SliceLayout(1, _STORED))
    is_pair = at < end
    if GATED:
        y = gate_sums(left, right, limit, alpha, ACTIVATION)
        if COUNT == 1:
            _store(OUT, y, staged, first, width, at, is_pair, out_stride)
        else:
            y = _halves(y)
            _store(OUT, y[0], staged, first, width, at, is_pair, out_stride)
            _store(OUT, y[1], staged, first + 64, width, at, is_pair, out_stride)
    else:
        row = gl.load(PAIRS + at, mask=is_pair, other=0, cache_modifier=".cg")
        parts = (left, right) if COUNT == 1 else _halves(left) + _halves(right)
        for part in gl.static_range(BOXES):
            _store(OUT, parts[part], staged, first + part * 64, outputs, row, is_pair, out_stride)


@gluon.jit
def _multiply(
    which: gl.constexpr, results, boxes, share, shape, numbers, ACTIVATION: gl.constexpr, NARROW: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    _w_boxes, x_boxes, _staged = boxes
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    _outputs, width = shape
    STAGES: gl.constexpr = x_boxes.type.shape[0] // _GROUPS
    if PDL:
        gdc_wait()
    count = fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, tile = place_of(item, count, tiles, GROUP_BLOCKS)
        place = fresh(BLOCKS + block * 3), fresh(BLOCKS + block * 3 + 1), fresh(BLOCKS + block * 3 + 2)
        if place[1] + which * 64 >= place[2]:
            for step in range(i, i + blocks):
                mbarrier.wait(full.index(step % STAGES), step // STAGES % 2)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
        elif not NARROW:  # one of the next two branches is all that is compiled then
            _tile(which, i, results, boxes, share, place, tile, shape, numbers, ACTIVATION, 4)
        elif _is_narrow(tile, width, is_gated(ACTIVATION)):
            _tile(which, i, results, boxes, share, place, tile, shape, numbers, ACTIVATION, 2)
        else:
            _tile(which, i, results, boxes, share, place, tile, shape, numbers, ACTIVATION, 4)
        i += blocks
        item += gl.num_programs(0)


# Numbers of tiles compile to nothing better, and each would take seconds.
@gluon.jit(do_not_specialize=["tiles", "blocks", "limit", "alpha"])
def plain_experts_kernel(
    x, weights, OUT, BIAS, PAIRS, BLOCKS, COUNT, tiles, blocks, outputs, width, out_stride, limit, alpha,
    STAGES: gl.constexpr, ACTIVATION: gl.constexpr, NARROW: gl.constexpr, GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`tiles`: of outputs. `blocks`: of 64 inputs. `width`: results of a pair, outputs where nothing is gated.
    NARROW: the last tile may be half as wide.
    """
    if PDL:
        gdc_launch_dependents()
    w_boxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 64, 64], weights.layout)
    x_boxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * _GROUPS, 64, 64], x.layout)
    staged = gl.allocate_shared_memory(OUT.dtype.element_ty, [_GROUPS, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # weights and inputs
        mbarrier.init(empty.index(i), count=_GROUPS)  # each of which has read the weights
    share, shape = (full, empty, tiles, blocks, BLOCKS, COUNT), (outputs, width)
    results, numbers = (OUT, BIAS, PAIRS), (out_stride, limit, alpha)
    of_0, of_1, of_2 = (
        (w_boxes, x_boxes, staged.index(0)), (w_boxes, x_boxes, staged.index(1)), (w_boxes, x_boxes, staged.index(2)),
    )  # fmt: skip
    GATED: gl.constexpr = is_gated(ACTIVATION)
    gl.warp_specialize(
        [
            (_multiply, (0, results, of_0, share, shape, numbers, ACTIVATION, NARROW, GROUP_BLOCKS, PDL)),
            (_multiply, (1, results, of_1, share, shape, numbers, ACTIVATION, NARROW, GROUP_BLOCKS, PDL)),
            (_multiply, (2, results, of_2, share, shape, numbers, ACTIVATION, NARROW, GROUP_BLOCKS, PDL)),
            (_bring_weights, (weights, w_boxes, share, shape, GATED, NARROW, GROUP_BLOCKS, PDL)),
            (_bring_inputs, (x, x_boxes, share, GROUP_BLOCKS, PDL)),
        ],
        [4, 4, 1, 1], [160, 160, 24, 24],
    )  # fmt: skip
