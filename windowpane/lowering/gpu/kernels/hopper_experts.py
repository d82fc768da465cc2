"""Experts of many rows on Hopper (Gluon): MXFP4 weights, and bf16 ones where rows are many.

A tile is a block of pairs of one expert by some outputs and as many that they gate, or by both halves in a row. Of bf16
it has 256 outputs, and each of two warp groups has half the pairs. Of MXFP4 each warp group has 64 outputs of either
half; there are three where pairs are few and leave the registers, else two. So a gate and what it gates are in the same
thread's registers. There is one program to a multiprocessor, and what it needs for its next tile is brought while it
ends the last.

Weights come by TMA, and so do inputs that lie by expert. In bf16, where registers are left for that, four warps bring
the inputs of gates row by row from where tokens lie. In bf16, too, whichever program is free takes the next tile: tiles
differ in time, and those that run side by side read the same weights. In MXFP4 tiles are equal, and with few pairs so
short that asking for the next would take longer than it gains: program p takes tiles p, p + programs and so on.

Of MXFP4, a warp group turns the units of 64 outputs into an operand in registers while the tensor cores multiply the
one before it. Scales are read by the threads that need them, a step ahead: a word has those of a block for one output,
and the words of the next blocks lie in the same sector.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.experts_activation import CLAMPED, GELU, is_gated
from windowpane.lowering.gpu.kernels.unpacking import TAKE_MXFP4_BFLOAT16, four_of

LARGEST_SCALE = 128  # the byte of the largest scale of MXFP4 that the kernel takes
_PLAIN_OUTPUTS = gl.constexpr(256)  # of a tile
# How a warp group stores [pairs, outputs]: each thread 8 outputs of a pair.
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# A product with the scale is exact: it is a power of two.
_DECODE = gl.constexpr(TAKE_MXFP4_BFLOAT16)
# The four scales of a word times 2^126 as bfloat16, each in both halves of a register: byte e becomes the bits
# (e + 126) << 7, which has no room for scales above 2 (LARGEST_SCALE).
_SPREAD = gl.constexpr("""{
.reg .b32 high, low, biased;
add.u32 biased, $4, 0x7e7e7e7e;
shr.u32 high, biased, 1;
and.b32 high, high, 0x7f7f7f7f;
and.b32 low, biased, 0x01010101;
shl.b32 low, low, 7;
prmt.b32 $0, low, high, 0x4040;
prmt.b32 $1, low, high, 0x5151;
prmt.b32 $2, low, high, 0x6262;
prmt.b32 $3, low, high, 0x7373;
}""")


@gluon.jit
def _fresh(at):
    """What an earlier kernel has written, past an L1 cache that may hold what was there before."""
    return gl.load(at, cache_modifier=".cg")


@gluon.jit
def _place(BLOCKS, item, count, tiles, GROUP_BLOCKS: gl.constexpr):
    """Expert, first pair, end of the expert's pairs, and tile of an item; those of the last one for any behind it.

    Neighbouring blocks, mostly of one expert, take the same weights in turn.
    """
    item = gl.maximum(gl.minimum(item, count * tiles - 1), 0)
    group = item // (GROUP_BLOCKS * tiles)
    within = item - group * GROUP_BLOCKS * tiles
    size = gl.maximum(gl.minimum(count - group * GROUP_BLOCKS, GROUP_BLOCKS), 1)
    at = BLOCKS + (group * GROUP_BLOCKS + within % size) * 3
    return _fresh(at), _fresh(at + 1), _fresh(at + 2), within // size


@gluon.jit
def _bring(
    x, weights, PAIRS, tiles_of, items, share, shape, GATED: gl.constexpr, CHOSEN: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Takes tiles and says which, and brings their weights, both halves, and inputs.

    `x` describes rows that lie by expert, unless CHOSEN pairs have a row in common: then it is rows of tokens, as
    (pointer, eighths of their stride, eighths of their inputs).
    Items are told before the first block of inputs is there, and read before it is given back. Each has at least one
    block, so as many items as there are stages, and one, are never told without having been read.
    """
    w_tiles, x_tiles, _staged = tiles_of
    full, empty, tiles, blocks, BLOCKS, COUNT = share
    outputs, width = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    INPUTS: gl.constexpr = x_tiles.type.shape[2]
    BOXES: gl.constexpr = w_tiles.type.shape[0] // STAGES
    BOX: gl.constexpr = w_tiles.type.shape[1]
    HALF: gl.constexpr = BOX * BOXES // 2
    UNITS: gl.constexpr = w_tiles.type.shape[2]
    IS_PLAIN: gl.constexpr = UNITS == INPUTS
    # Copies row by row say by themselves that they have landed.
    BY_ROWS: gl.constexpr = CHOSEN > 0
    X_BYTES: gl.constexpr = 0 if BY_ROWS else x_tiles.type.shape[1] * INPUTS * 2
    W_BYTES: gl.constexpr = BOXES * BOX * UNITS * 2
    if PDL:
        gdc_wait()
    count = _fresh(COUNT)
    item = gl.program_id(0)
    following_place = _place(BLOCKS, item, count, tiles, GROUP_BLOCKS)
    i = 0
    n = 0
    while item < count * tiles:
        expert, begin, end, tile = following_place
        if IS_PLAIN:
            following = gl.atomic_add(COUNT + (1 if GATED else 2), 1, sem="relaxed", scope="gpu") + gl.num_programs(0)
        else:
            following = item + gl.num_programs(0)
        # On its way while this item's weights are brought.
        following_place = _place(BLOCKS, following, count, tiles, GROUP_BLOCKS)
        _tell(items, n % (STAGES + 1), expert, begin, end, tile)
        if BY_ROWS:
            rows, columns = _inputs_of(x, PAIRS, begin, end, x_tiles.type.shape[1], INPUTS, CHOSEN)
        is_half = _is_half(tile, width, HALF, GATED) & IS_PLAIN
        first = expert * outputs + tile * (HALF if GATED else 2 * HALF)
        second = first + (width if GATED else gl.where(is_half, HALF // 2, HALF))
        for step in range(blocks):
            buf = i % STAGES
            bar = full.index(buf)
            mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
            if is_half:
                mbarrier.expect(bar, X_BYTES + W_BYTES // 2)
                tma.async_copy_global_to_shared(weights, [first, step * UNITS], bar, w_tiles.index(BOXES * buf))
                tma.async_copy_global_to_shared(weights, [second, step * UNITS], bar, w_tiles.index(BOXES * buf + 1))
            else:
                mbarrier.expect(bar, X_BYTES + W_BYTES)
                for box in gl.static_range(BOXES // 2):
                    at = w_tiles.index(BOXES * buf + box), w_tiles.index(BOXES * buf + BOXES // 2 + box)
                    tma.async_copy_global_to_shared(weights, [first + box * BOX, step * UNITS], bar, at[0])
                    tma.async_copy_global_to_shared(weights, [second + box * BOX, step * UNITS], bar, at[1])
            if BY_ROWS:
                is_input = (columns + step * INPUTS < x[2] * 8)[None, :]
                async_copy.async_copy_global_to_shared(x_tiles.index(buf), rows + step * INPUTS, mask=is_input)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [begin, step * INPUTS], bar, x_tiles.index(buf))
            i += 1
        item = following
        n += 1
    mbarrier.wait(empty.index(i % STAGES), i // STAGES % 2 ^ 1)
    _tell(items, n % (STAGES + 1), -1, 0, 0, 0)
    mbarrier.arrive(full.index(i % STAGES), count=_arrivals(BY_ROWS))


@triton.constexpr_function
def _arrivals(by_rows):
    """At the barrier of a block that is there: one of weights, and one of each thread that copies rows."""
    return 1 + 128 if by_rows else 1


@gluon.jit
def _inputs_of(x, PAIRS, begin, end, ROWS: gl.constexpr, INPUTS: gl.constexpr, CHOSEN: gl.constexpr):
    """Where a block's rows begin, [pairs, columns], and the columns. Rows behind the last pair are the first of all."""
    X, stride, _inputs = x
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // INPUTS, INPUTS // 8], [4, 1], [1, 0])
    at = begin + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    row = gl.load(PAIRS + at, mask=at < end, other=0, cache_modifier=".cg") // CHOSEN
    columns = gl.arange(0, INPUTS, gl.SliceLayout(0, layout))
    return X + row.to(gl.int64)[:, None] * (stride * 8) + columns[None, :], columns


@gluon.jit
def _tell(items, at, expert, begin, end, tile):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    items.index(at * 4).store(gl.full([1], expert, gl.int32, layout))
    items.index(at * 4 + 1).store(gl.full([1], begin, gl.int32, layout))
    items.index(at * 4 + 2).store(gl.full([1], end, gl.int32, layout))
    items.index(at * 4 + 3).store(gl.full([1], tile, gl.int32, layout))


@gluon.jit
def _told(items, n, i, full, STAGES: gl.constexpr):
    """Item `n` of this program, where `i` blocks of inputs came before: the expert, or -1 behind the last item, the
    first pair and the end of the expert's pairs, and the tile.
    """
    mbarrier.wait(full.index(i % STAGES), i // STAGES % 2)
    at = n % (STAGES + 1) * 4
    return _scalar(items, at), _scalar(items, at + 1), _scalar(items, at + 2), _scalar(items, at + 3)


@gluon.jit
def _scalar(items, at):
    return gl.sum(items.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _is_half(tile, width, HALF: gl.constexpr, GATED: gl.constexpr):
    """Whether a tile, the last one, has at most half the outputs of others."""
    if GATED:
        return width - tile * HALF <= HALF // 2
    else:  # noqa: RET505 - all branches are compiled unless one is chosen here
        return width - tile * (2 * HALF) <= HALF


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
def _store(OUT, values, staged, first, width, row, is_pair, out_stride):
    """Through shared memory, where outputs of a pair come to lie side by side."""
    OUTPUTS: gl.constexpr = values.type.shape[1]
    staging = staged.slice(0, OUTPUTS, 1)
    staging.store(values.to(OUT.dtype.element_ty))
    m = first + gl.arange(0, OUTPUTS, gl.SliceLayout(0, _STORED))
    to = OUT + row.to(gl.int64)[:, None] * out_stride + m[None, :]
    gl.store(to, staging.load(_STORED), mask=is_pair[:, None] & (m < width)[None, :])


@gluon.jit
def _rows_of(PAIRS, begin, end, COUNT: gl.constexpr, GATED: gl.constexpr):
    """Where the results of so many pairs go, and which of them there are."""
    at = begin + gl.arange(0, COUNT, gl.SliceLayout(1, _STORED))
    is_pair = at < end
    if GATED:
        return at, is_pair
    else:  # noqa: RET505 - all branches are compiled unless one is chosen here
        return gl.load(PAIRS + at, mask=is_pair, other=0, cache_modifier=".cg"), is_pair


@gluon.jit
def _finish(results, sums0, sums1, staged, expert, rows, first, distance, shape, numbers, ACTIVATION: gl.constexpr):
    """Adds the biases of outputs from `first` on and of those `distance` behind, applies the activation, and stores.

    Both sums are [pairs, outputs].
    """
    OUT, BIAS, _PAIRS = results
    row, is_pair = rows
    outputs, width = shape
    out_stride, limit, alpha = numbers
    if BIAS is not None:
        m = first + gl.arange(0, sums0.type.shape[1], gl.SliceLayout(0, sums0.type.layout))
        biases = BIAS + expert * outputs
        sums0 += gl.load(biases + m, mask=m < width, other=0.0).to(gl.float32)[None, :]
        sums1 += gl.load(biases + m + distance, mask=m + distance < outputs, other=0.0).to(gl.float32)[None, :]
    if is_gated(ACTIVATION):
        gated = _gated(sums0, sums1, limit, alpha, ACTIVATION)
        _store(OUT, gated, staged, first, width, row, is_pair, out_stride)
    else:
        _store(OUT, sums0, staged, first, outputs, row, is_pair, out_stride)
        _store(OUT, sums1, staged, first + distance, outputs, row, is_pair, out_stride)


@gluon.jit
def _pass_over(i, full, empty, blocks, STAGES: gl.constexpr):
    """A tile of which this warp group has nothing: the tensor cores are the other one's."""
    for step in range(i, i + blocks):
        mbarrier.wait(full.index(step % STAGES), step // STAGES % 2)
        mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def _units_tile(
    which: gl.constexpr, i, results, SCALES, tiles_of, share, place, tile_first, shape, numbers,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """64 outputs of either half of a tile by a block of pairs; `i` blocks of inputs came before."""
    unit_tiles, x_tiles, staged = tiles_of
    full, empty, _tiles, blocks, _BLOCKS, _COUNT = share
    expert, begin, end = place
    outputs, width = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    GATED: gl.constexpr = is_gated(ACTIVATION)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    of_words: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2))
    BOXES: gl.constexpr = unit_tiles.type.shape[0] // STAGES
    GROUPS: gl.constexpr = BOXES // 2
    first = tile_first + which * 64
    SECOND = width if GATED else GROUPS * 64
    # Beyond the last output the last one's are read, and what they give is not stored.
    of_word = gl.arange(0, 64, of_words)
    word0 = gl.minimum(first + of_word, (width if GATED else outputs) - 1)
    word1 = gl.minimum(first + SECOND + of_word, outputs - 1)
    at0 = SCALES + (expert * outputs + word0) * blocks
    at1 = SCALES + (expert * outputs + word1) * blocks
    s0 = gl.load(at0)
    s1 = gl.load(at1)
    sums0 = gl.full([64, ROWS], 0.0, gl.float32, layout)
    sums1 = sums0
    w0 = _operand(unit_tiles, i % STAGES * BOXES + which, s0, ROWS)
    for step in range(blocks):
        # One product is in flight while the operand of the next is made ready.
        buf = i % STAGES
        following = gl.minimum(step + 1, blocks - 1)
        next_s0 = gl.load(at0 + following)
        next_s1 = gl.load(at1 + following)
        x = x_tiles.index(buf).permute((1, 0))
        product0 = warpgroup_mma(w0, x, sums0, is_async=True)
        w1 = _operand(unit_tiles, buf * BOXES + GROUPS + which, s1, ROWS)
        product1 = warpgroup_mma(w1, x, sums1, is_async=True)
        sums0, w0 = warpgroup_mma_wait(1, deps=[product0, w0])
        i += 1
        # After the last block, what was there before is decoded and never used.
        mbarrier.wait(full.index(i % STAGES), i // STAGES % 2, pred=step + 1 < blocks)
        w0 = _operand(unit_tiles, i % STAGES * BOXES + which, next_s0, ROWS)
        sums1, w1 = warpgroup_mma_wait(0, deps=[product1, w1])
        mbarrier.arrive(empty.index(buf), count=1)
        s1 = next_s1
    rows = _rows_of(results[2], begin, end, ROWS, GATED)
    sums0, sums1 = gl.permute(sums0, (1, 0)), gl.permute(sums1, (1, 0))
    _finish(results, sums0, sums1, staged.index(which), expert, rows, first, SECOND, shape, numbers, ACTIVATION)


@gluon.jit
def _multiply_units(
    which: gl.constexpr, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """64 outputs of either half of the program's tiles. Of a last tile a warp group may have none."""
    full, empty, _tiles, blocks, _BLOCKS, _COUNT = share
    outputs, width = shape
    STAGES: gl.constexpr = tiles_of[1].type.shape[0]
    TILE: gl.constexpr = tiles_of[0].type.shape[0] // STAGES * 64
    GATED: gl.constexpr = is_gated(ACTIVATION)
    if PDL:
        gdc_wait()
    i = 0
    n = 0
    expert, begin, end, tile = _told(items, n, i, full, STAGES)
    while expert >= 0:
        place, first = (expert, begin, end), tile * (TILE // 2 if GATED else TILE)
        if first + which * 64 >= (width if GATED else outputs):
            _pass_over(i, full, empty, blocks, STAGES)
        else:
            _units_tile(which, i, results, SCALES, tiles_of, share, place, first, shape, numbers, ACTIVATION)
        i += blocks
        n += 1
        expert, begin, end, tile = _told(items, n, i, full, STAGES)


@gluon.jit
def _halves(sums):
    """The first outputs and the last, each in the registers where they are."""
    PAIRS: gl.constexpr = sums.type.shape[0]
    OUTPUTS: gl.constexpr = sums.type.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    first, second = gl.split(gl.permute(gl.reshape(sums, [PAIRS, 2, OUTPUTS]), (0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def _plain_tile(
    which: gl.constexpr, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Half the pairs of a block by OUTPUTS; `i` blocks of inputs came before."""
    w_tiles, x_tiles, staged = tiles_of
    full, empty, _tiles, blocks, _BLOCKS, _COUNT = share
    expert, begin, end = place
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    PAIRS: gl.constexpr = x_tiles.type.shape[1] // 2
    GATED: gl.constexpr = is_gated(ACTIVATION)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    weights = w_tiles._reinterpret(gl.bfloat16, [STAGES, _PLAIN_OUTPUTS, 64], shared)
    pairs = x_tiles._reinterpret(gl.bfloat16, [STAGES * 2, PAIRS, 64], shared)
    rows = _rows_of(results[2], begin, end, PAIRS, GATED)
    sums = gl.full([PAIRS, OUTPUTS], 0.0, gl.float32, layout)
    for step in range(blocks):
        buf = (i + step) % STAGES
        mbarrier.wait(full.index(buf), (i + step) // STAGES % 2)
        if GATED:
            # Inputs came row by row, which is another way to shared memory than that of TMA and the tensor cores.
            fence_async_shared()
        w = weights.index(buf).slice(0, OUTPUTS, 0).permute((1, 0))
        sums = warpgroup_mma(pairs.index(2 * buf + which), w, sums, is_async=True)
        # That of the block before has ended, and this one follows it without a gap.
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty.index((i + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((i + blocks - 1) % STAGES), count=1)
    sums0, sums1 = _halves(sums)
    distance = shape[1] if GATED else OUTPUTS // 2
    _finish(results, sums0, sums1, staged.index(which), expert, rows, first, distance, shape, numbers, ACTIVATION)


@gluon.jit
def _multiply_plain(
    which: gl.constexpr, results, tiles_of, items, share, shape, numbers, ACTIVATION: gl.constexpr, PDL: gl.constexpr
):
    """Half the pairs of the program's tiles. Of an expert's last block the second warp group may have none."""
    _w_tiles, x_tiles, _staged = tiles_of
    full, empty, _tiles, blocks, _BLOCKS, _COUNT = share
    _outputs, width = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    PAIRS: gl.constexpr = x_tiles.type.shape[1] // 2
    GATED: gl.constexpr = is_gated(ACTIVATION)
    HALF: gl.constexpr = _PLAIN_OUTPUTS // 2
    if PDL:
        gdc_wait()
    i = 0
    n = 0
    expert, begin, end, tile = _told(items, n, i, full, STAGES)
    while expert >= 0:
        place = expert, begin + which * PAIRS, end
        first = tile * (HALF if GATED else _PLAIN_OUTPUTS)
        if place[1] >= end:
            _pass_over(i, full, empty, blocks, STAGES)
        elif _is_half(tile, width, HALF, GATED):
            _plain_tile(which, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION, HALF)
        else:
            _plain_tile(which, i, results, tiles_of, share, place, first, shape, numbers, ACTIVATION, _PLAIN_OUTPUTS)
        i += blocks
        n += 1
        expert, begin, end, tile = _told(items, n, i, full, STAGES)


# Numbers of tiles compile to nothing better, and each would take seconds.
@gluon.jit(do_not_specialize=["tiles", "blocks", "limit", "alpha"])
def mxfp4_experts_kernel(
    x, units, SCALES, OUT, BIAS, PAIRS, BLOCKS, COUNT, tiles, blocks, outputs, width, out_stride, limit, alpha,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`tiles`: of outputs. `blocks`: of 128 inputs. `width`: results of a pair, outputs where nothing is gated."""
    if PDL:
        gdc_launch_dependents()
    unit_tiles = gl.allocate_shared_memory(gl.int16, [STAGES * 2 * GROUPS, 64, 32], units.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    staged = gl.allocate_shared_memory(OUT.dtype.element_ty, [GROUPS, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    items = gl.allocate_shared_memory(gl.int32, [(STAGES + 1) * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)  # all warp groups read every block
    share, shape = (full, empty, tiles, blocks, BLOCKS, COUNT), (outputs, width)
    results, numbers, tiles_of = (OUT, BIAS, PAIRS), (out_stride, limit, alpha), (unit_tiles, x_tiles, staged)
    GATED: gl.constexpr = is_gated(ACTIVATION)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_units, (0, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
                (_multiply_units, (1, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
                (_bring, (x, units, PAIRS, tiles_of, items, share, shape, GATED, 0, GROUP_BLOCKS, PDL)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply_units, (0, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
                (_multiply_units, (1, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
                (_multiply_units, (2, results, SCALES, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
                (_bring, (x, units, PAIRS, tiles_of, items, share, shape, GATED, 0, GROUP_BLOCKS, PDL)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "blocks", "limit", "alpha"])
def plain_experts_kernel(
    x, X, x_stride, inputs, weights, OUT, BIAS, PAIRS, BLOCKS, COUNT, tiles, blocks, outputs, width, out_stride, limit,
    alpha, CHOSEN: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `mxfp4_experts_kernel`, for weights in bf16; `blocks` of 64 inputs."""
    if PDL:
        gdc_launch_dependents()
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 64, 64], weights.layout)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    staged = gl.allocate_shared_memory(OUT.dtype.element_ty, [2, ROWS // 2, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    items = gl.allocate_shared_memory(gl.int32, [(STAGES + 1) * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=_arrivals(CHOSEN > 0))
        mbarrier.init(empty.index(i), count=2)
    share, shape = (full, empty, tiles, blocks, BLOCKS, COUNT), (outputs, width)
    results, numbers, tiles_of = (OUT, BIAS, PAIRS), (out_stride, limit, alpha), (w_tiles, x_tiles, staged)
    GATED: gl.constexpr = is_gated(ACTIVATION)
    source = (X, x_stride, inputs) if CHOSEN > 0 else x
    gl.warp_specialize(
        [
            (_multiply_plain, (0, results, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
            (_multiply_plain, (1, results, tiles_of, items, share, shape, numbers, ACTIVATION, PDL)),
            (_bring, (source, weights, PAIRS, tiles_of, items, share, shape, GATED, CHOSEN, GROUP_BLOCKS, PDL)),
        ],
        [4, 4], [224, 56],
    )  # fmt: skip
