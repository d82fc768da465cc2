"""Experts of many rows on Hopper (Gluon): MXFP4 weights, and bf16 ones where rows are many.

A tile is 256 outputs of one expert by a block of its pairs, 128 of the outputs to each of two warp groups: 64 of a gate
and the 64 that it gates, so that both are in the same thread's registers. One warp brings weights by TMA, another one
the inputs, which lie by expert. There is one program to a multiprocessor; program p takes tiles p, p + programs and so
on, and what it needs for the next one is brought while it ends the last.

Of MXFP4, a warp group turns the units of 64 outputs into an operand in registers while the tensor cores multiply the
one before it. Scales are read by the threads that need them, a step ahead: a word has those of a block for one output,
and the words of the next blocks lie in the same sector.
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

from windowpane.lowering.gpu.kernels.experts_activation import CLAMPED, GELU, is_gated
from windowpane.lowering.gpu.kernels.unpacking import TAKE_MXFP4_BFLOAT16, four_of

# The second half of a tile, where it is not what the first one gates.
_HALF = gl.constexpr(128)
# How a warp group stores [pairs, 64 outputs]: each thread 8 outputs of a pair.
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# A product with the scale is exact: it is a power of two.
_DECODE = gl.constexpr(TAKE_MXFP4_BFLOAT16)
# The four scales of a word as bfloat16, each in both halves of a register: byte e becomes the bits e << 7.
_SPREAD = gl.constexpr("""{
.reg .b32 high, low;
shr.u32 high, $4, 1;
and.b32 high, high, 0x7f7f7f7f;
and.b32 low, $4, 0x01010101;
shl.b32 low, low, 7;
prmt.b32 $0, low, high, 0x4040;
prmt.b32 $1, low, high, 0x5151;
prmt.b32 $2, low, high, 0x6262;
prmt.b32 $3, low, high, 0x7373;
}""")


@gluon.jit
def _place(item, count, tiles, GROUP_BLOCKS: gl.constexpr):
    """The block and tile of an item. Neighbouring blocks, mostly of one expert, take the same weights in turn."""
    group = item // (GROUP_BLOCKS * tiles)
    within = item - group * GROUP_BLOCKS * tiles
    size = gl.minimum(count - group * GROUP_BLOCKS, GROUP_BLOCKS)
    return group * GROUP_BLOCKS + within % size, within // size


@gluon.jit
def _fresh(at):
    """What an earlier kernel has written, past an L1 cache that may hold what was there before."""
    return gl.load(at, cache_modifier=".cg")


@gluon.jit
def _bring_weights(weights, w_tiles, share, shape, GATED: gl.constexpr, GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr):
    """Both halves of each tile, [128, columns] at a time."""
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    outputs, width = shape
    STAGES: gl.constexpr = w_tiles.type.shape[0] // 2
    COLUMNS: gl.constexpr = w_tiles.type.shape[2]
    if PDL:
        gdc_wait()
    count = _fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, tile = _place(item, count, tiles, GROUP_BLOCKS)
        first = _fresh(BLOCKS + block * 3) * outputs + tile * (_HALF if GATED else 2 * _HALF)
        second = first + (width if GATED else _HALF)
        for step in range(blocks):
            buf = i % STAGES
            mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
            mbarrier.expect(full.index(buf), 256 * COLUMNS * 2)
            column = step * COLUMNS
            tma.async_copy_global_to_shared(weights, [first, column], full.index(buf), w_tiles.index(2 * buf))
            tma.async_copy_global_to_shared(weights, [second, column], full.index(buf), w_tiles.index(2 * buf + 1))
            i += 1
        item += gl.num_programs(0)


@gluon.jit
def _bring_inputs(x, x_tiles, share, GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr):
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    COLUMNS: gl.constexpr = x_tiles.type.shape[2]
    if PDL:
        gdc_wait()
    count = _fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, _tile = _place(item, count, tiles, GROUP_BLOCKS)
        row = _fresh(BLOCKS + block * 3 + 1)
        for step in range(blocks):
            buf = i % STAGES
            mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
            mbarrier.expect(full.index(buf), ROWS * COLUMNS * 2)
            tma.async_copy_global_to_shared(x, [row, step * COLUMNS], full.index(buf), x_tiles.index(buf))
            i += 1
        item += gl.num_programs(0)


@gluon.jit
def _operand(units, tile, word, ROWS: gl.constexpr):
    """64 outputs by 128 inputs: what units [64, 32] and a word of scales for each output mean."""
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]), 2)
    u = units.index(tile).load(operand)
    spread = gl.inline_asm_elementwise(
        _SPREAD, "=&r,=&r,=&r,=&r,r", [word], dtype=four_of(gl.int32), is_pure=True, pack=1
    )
    s0, _u = gl.broadcast(gl.expand_dims(spread[0], 1), u)
    s1, _u = gl.broadcast(gl.expand_dims(spread[1], 1), u)
    s2, _u = gl.broadcast(gl.expand_dims(spread[2], 1), u)
    s3, _u = gl.broadcast(gl.expand_dims(spread[3], 1), u)
    w = gl.inline_asm_elementwise(
        _DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [u, s0, s1, s2, s3], dtype=four_of(gl.bfloat16), is_pure=True,
        pack=2,
    )  # fmt: skip
    # Input 32 · span + unit: registers change their names, nothing moves.
    spans = gl.join(gl.join(w[0], w[1]), gl.join(w[2], w[3]))
    return gl.convert_layout(gl.reshape(gl.permute(spans, (0, 3, 2, 1)), [64, 128]), operand)


@gluon.jit
def _gated(gate, up, limit, alpha, ACTIVATION: gl.constexpr):
    """As `experts_activation.gate_values`."""
    if ACTIVATION == CLAMPED:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)
    elif ACTIVATION == GELU:  # noqa: RET505 - all branches are compiled unless one is chosen here
        return gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _store(OUT, sums, staged, first, width, row, is_pair, out_stride):
    """Through shared memory, where outputs of a pair come to lie side by side."""
    staged.permute((1, 0)).store(sums.to(OUT.dtype.element_ty))
    m = first + gl.arange(0, 64, gl.SliceLayout(0, _STORED))
    to = OUT + row.to(gl.int64)[:, None] * out_stride + m[None, :]
    gl.store(to, staged.load(_STORED), mask=is_pair[:, None] & (m < width)[None, :])


@gluon.jit
def _finish(results, sums0, sums1, staged, place, first, shape, numbers, ACTIVATION: gl.constexpr):
    """Adds the biases of outputs from `first` on and of those half a tile on, applies the activation, and stores."""
    OUT, BIAS, PAIRS = results
    expert, begin, end = place
    outputs, width = shape
    out_stride, limit, alpha = numbers
    layout: gl.constexpr = sums0.type.layout
    GATED: gl.constexpr = is_gated(ACTIVATION)
    SECOND = width if GATED else _HALF
    if BIAS is not None:
        m = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
        biases = BIAS + expert * outputs
        sums0 += gl.load(biases + m, mask=m < width, other=0.0).to(gl.float32)[:, None]
        sums1 += gl.load(biases + m + SECOND, mask=m + SECOND < outputs, other=0.0).to(gl.float32)[:, None]
    at = begin + gl.arange(0, sums0.type.shape[1], gl.SliceLayout(1, _STORED))
    is_pair = at < end
    if GATED:
        gated = _gated(sums0, sums1, limit, alpha, ACTIVATION)
        _store(OUT, gated, staged, first, width, at, is_pair, out_stride)
    else:
        row = gl.load(PAIRS + at, mask=is_pair, other=0, cache_modifier=".cg")
        _store(OUT, sums0, staged, first, outputs, row, is_pair, out_stride)
        _store(OUT, sums1, staged, first + _HALF, outputs, row, is_pair, out_stride)


@gluon.jit
def _multiply_units(
    which: gl.constexpr, results, SCALES, tiles_of, share, shape, numbers, ACTIVATION: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """64 outputs of either half of the program's tiles."""
    unit_tiles, x_tiles, staged = tiles_of
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    outputs, width = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    GATED: gl.constexpr = is_gated(ACTIVATION)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_words: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2))
    units = unit_tiles._reinterpret(gl.int16, [STAGES * 4, 64, 32], gl.NVMMASharedLayout(64, 16, rank=2))
    if PDL:
        gdc_wait()
    count = _fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    zero = gl.full([64, ROWS], 0.0, gl.float32, layout)
    of_word = which * 64 + gl.arange(0, 64, of_words)
    while item < count * tiles:
        block, tile = _place(item, count, tiles, GROUP_BLOCKS)
        place = _fresh(BLOCKS + block * 3), _fresh(BLOCKS + block * 3 + 1), _fresh(BLOCKS + block * 3 + 2)
        expert = place[0]
        tile_first = tile * (_HALF if GATED else 2 * _HALF)
        SECOND = width if GATED else _HALF
        # Beyond the last output the last one's are read, and what they give is not stored.
        word0 = gl.minimum(tile_first + of_word, (width if GATED else outputs) - 1)
        word1 = gl.minimum(tile_first + SECOND + of_word, outputs - 1)
        at0 = SCALES + (expert * outputs + word0) * blocks
        at1 = SCALES + (expert * outputs + word1) * blocks
        s0 = gl.load(at0)
        s1 = gl.load(at1)
        sums0 = zero
        sums1 = zero
        mbarrier.wait(full.index(i % STAGES), i // STAGES % 2)
        w0 = _operand(units, i % STAGES * 4 + which, s0, ROWS)
        for step in range(blocks):
            # One product is in flight while the operand of the next is made ready.
            buf = i % STAGES
            following = gl.minimum(step + 1, blocks - 1)
            next_s0 = gl.load(at0 + following)
            next_s1 = gl.load(at1 + following)
            x = x_tiles.index(buf).permute((1, 0))
            product0 = warpgroup_mma(w0, x, sums0, is_async=True)
            w1 = _operand(units, buf * 4 + 2 + which, s1, ROWS)
            product1 = warpgroup_mma(w1, x, sums1, is_async=True)
            sums0, w0 = warpgroup_mma_wait(1, deps=[product0, w0])
            i += 1
            # After the last block, what was there before is decoded and never used.
            mbarrier.wait(full.index(i % STAGES), i // STAGES % 2, pred=step + 1 < blocks)
            w0 = _operand(units, i % STAGES * 4 + which, next_s0, ROWS)
            sums1, w1 = warpgroup_mma_wait(0, deps=[product1, w1])
            mbarrier.arrive(empty.index(buf), count=1)
            s1 = next_s1
        first = tile_first + which * 64
        _finish(results, sums0, sums1, staged.index(which), place, first, shape, numbers, ACTIVATION)
        item += gl.num_programs(0)


@gluon.jit
def _plain_block(
    which: gl.constexpr, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The first PAIRS of a block; `i` blocks of inputs came before. Both warp groups take turns at the tensor cores."""
    w_tiles, x_tiles, staged = tiles_of
    full, empty, _tiles, blocks, _BLOCKS, _COUNT = share
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIRS, 16])
    weights = w_tiles._reinterpret(gl.bfloat16, [STAGES * 4, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    zero = gl.full([64, PAIRS], 0.0, gl.float32, layout)
    sums0 = zero
    sums1 = zero
    for step in range(blocks):
        buf = (i + step) % STAGES
        mbarrier.wait(full.index(buf), (i + step) // STAGES % 2)
        x = x_tiles.index(buf).slice(0, PAIRS, 0).permute((1, 0))
        sums0 = warpgroup_mma(weights.index(buf * 4 + which), x, sums0, is_async=True)
        sums1 = warpgroup_mma(weights.index(buf * 4 + 2 + which), x, sums1, is_async=True)
        # Those of the block before have ended, and these follow them without a gap.
        sums0, sums1 = warpgroup_mma_wait(2, deps=[sums0, sums1])
        mbarrier.arrive(empty.index((i + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    sums0, sums1 = warpgroup_mma_wait(0, deps=[sums0, sums1])
    mbarrier.arrive(empty.index((i + blocks - 1) % STAGES), count=1)
    staging = staged.index(which).slice(0, PAIRS, 0)
    _finish(results, sums0, sums1, staging, place, first, shape, numbers, ACTIVATION)


@gluon.jit
def _multiply_plain(
    which: gl.constexpr, results, tiles_of, share, shape, numbers, ACTIVATION: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `_multiply_units`. An expert's last block has half the products where its pairs are at most half a block, and
    its last tile where outputs are.
    """
    _w_tiles, x_tiles, _staged = tiles_of
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    _outputs, width = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    if PDL:
        gdc_wait()
    count = _fresh(COUNT)
    item = gl.program_id(0)
    i = 0
    while item < count * tiles:
        block, tile = _place(item, count, tiles, GROUP_BLOCKS)
        place = _fresh(BLOCKS + block * 3), _fresh(BLOCKS + block * 3 + 1), _fresh(BLOCKS + block * 3 + 2)
        first = tile * (_HALF if is_gated(ACTIVATION) else 2 * _HALF) + which * 64
        if first >= width:  # of the last tile the other warp group has all outputs that are left
            for step in range(i, i + blocks):
                mbarrier.wait(full.index(step % STAGES), step // STAGES % 2)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
        elif place[2] - place[1] <= ROWS // 2:
            _plain_block(which, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION, ROWS // 2)
        else:
            _plain_block(which, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION, ROWS)
        i += blocks
        item += gl.num_programs(0)


# Numbers of tiles compile to nothing better, and each would take seconds.
@gluon.jit(do_not_specialize=["tiles", "blocks", "limit", "alpha"])
def mxfp4_experts_kernel(
    x, units, SCALES, OUT, BIAS, PAIRS, BLOCKS, COUNT, tiles, blocks, outputs, width, out_stride, limit, alpha,
    ROWS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, GROUP_BLOCKS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`tiles`: of outputs. `blocks`: of 128 inputs. `width`: results of a pair, outputs where nothing is gated."""
    if PDL:
        gdc_launch_dependents()
    unit_tiles = gl.allocate_shared_memory(gl.int16, [STAGES * 2, 128, 32], units.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 128], x.layout)
    staged = gl.allocate_shared_memory(OUT.dtype.element_ty, [2, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # weights and inputs
        mbarrier.init(empty.index(i), count=2)  # both warp groups read every block
    share, shape = (full, empty, tiles, blocks, BLOCKS, COUNT), (outputs, width)
    results, numbers, tiles_of = (OUT, BIAS, PAIRS), (out_stride, limit, alpha), (unit_tiles, x_tiles, staged)
    GATED: gl.constexpr = is_gated(ACTIVATION)
    gl.warp_specialize(
        [
            (_multiply_units, (0, results, SCALES, tiles_of, share, shape, numbers, ACTIVATION, GROUP_BLOCKS, PDL)),
            (_multiply_units, (1, results, SCALES, tiles_of, share, shape, numbers, ACTIVATION, GROUP_BLOCKS, PDL)),
            (_bring_weights, (units, unit_tiles, share, shape, GATED, GROUP_BLOCKS, PDL)),
            (_bring_inputs, (x, x_tiles, share, GROUP_BLOCKS, PDL)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "blocks", "limit", "alpha"])
def plain_experts_kernel(
    x, weights, OUT, BIAS, PAIRS, BLOCKS, COUNT, tiles, blocks, outputs, width, out_stride, limit, alpha,
    ROWS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mxfp4_experts_kernel`, for weights in bf16; `blocks` of 64 inputs."""
    if PDL:
        gdc_launch_dependents()
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 128, 64], weights.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 64], x.layout)
    staged = gl.allocate_shared_memory(OUT.dtype.element_ty, [2, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    share, shape = (full, empty, tiles, blocks, BLOCKS, COUNT), (outputs, width)
    results, numbers, tiles_of = (OUT, BIAS, PAIRS), (out_stride, limit, alpha), (w_tiles, x_tiles, staged)
    GATED: gl.constexpr = is_gated(ACTIVATION)
    gl.warp_specialize(
        [
            (_multiply_plain, (0, results, tiles_of, share, shape, numbers, ACTIVATION, GROUP_BLOCKS, PDL)),
            (_multiply_plain, (1, results, tiles_of, share, shape, numbers, ACTIVATION, GROUP_BLOCKS, PDL)),
            (_bring_weights, (weights, w_tiles, share, shape, GATED, GROUP_BLOCKS, PDL)),
            (_bring_inputs, (x, x_tiles, share, GROUP_BLOCKS, PDL)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
