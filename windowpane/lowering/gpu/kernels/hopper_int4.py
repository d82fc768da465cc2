"""Products of 17 and more rows with int4 weights of groups of 32 on Hopper (Gluon).

A program has a tile of 256 outputs by up to 128 rows, 128 of the outputs to each of two warp groups, and takes it a
block of 128 inputs at a time. One warp brings units and scales by TMA, another one the inputs: weights may come while
the kernel before still runs. A warp group turns the units of 64 outputs into an operand in registers while the tensor
cores multiply the one before it; its two halves have sums of their own, so that no product waits for another's.

Work is shared evenly whatever the shape (`hopper_tiled.Shares`): program p has a piece of one long list of (tile,
block), and a tile may lie in pieces of several. Those write what they found, and once all have, each adds a part of the
tile up, in the order of the list. No sum depends on timing. A program waits for others only after it has done all its
own blocks; since there are no more programs than multiprocessors, all of them run.

Inputs are read by TMA and sums past the L1 cache: where launches overlap, it may hold what the kernel before the one
before has read.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.hopper_sums import (
    add_part,
    piece_start,
    places_of,
    program_of,
    store_directly,
    store_tile,
)
from windowpane.lowering.gpu.kernels.unpacking import TAKE_INT4, four_of

# Taking 8 more than the magic number away is exact, and the product with the scale is rounded as in a dequantised
# matrix.
_DECODE = (
    "{{ .reg .b32 t0, t1, t2, t3, one, away; mov.b32 one, {one}; mov.b32 away, {away};"
    + TAKE_INT4
    + "".join(f"\nfma.rn.{{kind}} t{span}, t{span}, one, away;" for span in range(4))
    + "".join(f"\nmul.rn.{{kind}} ${span}, t{span}, ${5 + 2 * span};" for span in range(4))
    + "\n}}"
)
_DECODE_BFLOAT16 = gl.constexpr(_DECODE.format(one="0x3f803f80", away="0xc308c308", magic="0x43004300", kind="bf16x2"))
_DECODE_FLOAT16 = gl.constexpr(_DECODE.format(one="0x3c003c00", away="0xe408e408", magic="0x64006400", kind="f16x2"))

# The four scales of a block, each in both halves of a register.
_SPREAD = gl.constexpr("""{
.reg .b32 low, high;
mov.b64 {low, high}, $4;
prmt.b32 $0, low, low, 0x1010;
prmt.b32 $1, low, low, 0x3232;
prmt.b32 $2, high, high, 0x1010;
prmt.b32 $3, high, high, 0x3232;
}""")


@gluon.jit
def _bring_weights(units, scales, weight_tiles, share):
    """For each block of the piece. Scales come 16 bytes at a time, the least that TMA copies and from where it may
    begin: those of two blocks.
    """
    unit_tiles, scale_tiles = weight_tiles
    full, empty, tiles, blocks, work = share
    STAGES: gl.constexpr = unit_tiles.type.shape[0]
    first = piece_start(gl.program_id(0), gl.num_programs(0), work)
    last = piece_start(gl.program_id(0) + 1, gl.num_programs(0), work)
    for i in range(last - first):
        item = first + i
        output = item // blocks % tiles * 256
        block = item % blocks
        buf = i % STAGES
        mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
        mbarrier.expect(full.index(buf), 256 * 64 + 256 * 16)
        tma.async_copy_global_to_shared(units, [output, block * 32], full.index(buf), unit_tiles.index(buf))
        tma.async_copy_global_to_shared(scales, [output, block // 2 * 8], full.index(buf), scale_tiles.index(buf))


@gluon.jit
def _bring_inputs(x, more_x, input_tiles, share, EXTRA: gl.constexpr, PDL: gl.constexpr):
    x_tiles, more_x_tiles = input_tiles
    full, empty, tiles, blocks, work = share
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    if PDL:
        gdc_wait()
    first = piece_start(gl.program_id(0), gl.num_programs(0), work)
    last = piece_start(gl.program_id(0) + 1, gl.num_programs(0), work)
    for i in range(last - first):
        item = first + i
        row = item // (blocks * tiles) * (ROWS + EXTRA)
        column = item % blocks * 128
        buf = i % STAGES
        mbarrier.wait(empty.index(buf), i // STAGES % 2 ^ 1)
        mbarrier.expect(full.index(buf), (ROWS + EXTRA) * 128 * 2)
        tma.async_copy_global_to_shared(x, [row, column], full.index(buf), x_tiles.index(buf))
        if EXTRA != 0:
            tma.async_copy_global_to_shared(more_x, [row + ROWS, column], full.index(buf), more_x_tiles.index(buf))


@gluon.jit
def _operand(units, words, tile, block, DTYPE: gl.constexpr, ROWS: gl.constexpr):
    """64 outputs by 128 inputs: what units [64, 32] and scales, as words [64, 2] of which one is the block's, mean."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    # Each thread has the scales of the outputs it has units of.
    own: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 2]
    )
    u = units.index(tile).load(operand)
    even, odd = gl.split(words.index(tile).load(own))
    word = gl.convert_layout(gl.where(block % 2 == 0, even, odd), gl.SliceLayout(1, operand))
    spread = gl.inline_asm_elementwise(_SPREAD, "=r,=r,=r,=r,l", [word], dtype=four_of(gl.int32), is_pure=True, pack=1)
    s0, _u = gl.broadcast(gl.expand_dims(spread[0], 1), u)
    s1, _u = gl.broadcast(gl.expand_dims(spread[1], 1), u)
    s2, _u = gl.broadcast(gl.expand_dims(spread[2], 1), u)
    s3, _u = gl.broadcast(gl.expand_dims(spread[3], 1), u)
    DECODE: gl.constexpr = _DECODE_BFLOAT16 if DTYPE == gl.bfloat16 else _DECODE_FLOAT16  # noqa: SIM300
    w = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [u, s0, s1, s2, s3], dtype=four_of(DTYPE), is_pure=True, pack=2
    )
    # Input 32 · span + unit: registers change their names, nothing moves.
    spans = gl.join(gl.join(w[0], w[1]), gl.join(w[2], w[3]))
    return gl.convert_layout(gl.reshape(gl.permute(spans, (0, 3, 2, 1)), [64, 128]), operand)


@gluon.jit
def _multiply(
    which: gl.constexpr, results, BIAS, weight_tiles, input_tiles, buffer, share, shape, EXTRA: gl.constexpr,
    DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Half `which` of the program's tiles: 2 × 64 outputs."""
    out, OUT, SUMS, FLAGS = results
    unit_tiles, scale_tiles = weight_tiles
    x_tiles, more_x_tiles = input_tiles
    full, empty, tiles, blocks, work = share
    rows, outputs, out_stride = shape
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    ROWS: gl.constexpr = x_tiles.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    units = unit_tiles._reinterpret(gl.int16, [STAGES * 4, 64, 32], gl.NVMMASharedLayout(64, 16, rank=2))
    words = scale_tiles._reinterpret(gl.int64, [STAGES * 4, 64, 2], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    if PDL:
        gdc_wait()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = piece_start(program, programs, work)
    last = piece_start(program + 1, programs, work)
    TILE_ROWS: gl.constexpr = ROWS + EXTRA
    MORE: gl.constexpr = EXTRA if EXTRA else 16  # of none there are sums too, which cost nothing
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16])
    more_operand: gl.constexpr = gl.DotOperandLayout(0, more_layout, 2)
    zero = gl.full([64, ROWS], 0.0, gl.float32, layout)
    more_zero = gl.full([64, MORE], 0.0, gl.float32, more_layout)
    i = 0
    mbarrier.wait(full.index(0), 0)
    w0 = _operand(units, words, which * 2, first % blocks, DTYPE, ROWS)
    item = first
    while item < last:
        tile = item // blocks
        count = gl.minimum((tile + 1) * blocks, last) - item
        sums0 = zero
        sums1 = zero
        more0 = more_zero
        more1 = more_zero
        for _ in range(count):
            # One product is in flight while the operand of the next is made ready.
            buf = i % STAGES
            x = x_tiles.index(buf).permute((1, 0))
            s0 = warpgroup_mma(w0, x, sums0, is_async=True)
            if EXTRA != 0:
                more_x = more_x_tiles.index(buf).permute((1, 0))
                m0 = warpgroup_mma(gl.convert_layout(w0, more_operand), more_x, more0, is_async=True)
            w1 = _operand(units, words, buf * 4 + which * 2 + 1, (first + i) % blocks, DTYPE, ROWS)
            s1 = warpgroup_mma(w1, x, sums1, is_async=True)
            if EXTRA != 0:
                m1 = warpgroup_mma(gl.convert_layout(w1, more_operand), more_x, more1, is_async=True)
                more0, sums0, w0 = warpgroup_mma_wait(2, deps=[m0, s0, w0])
            else:
                sums0, w0 = warpgroup_mma_wait(1, deps=[s0, w0])
            i += 1
            # After the last block, what was there before is decoded and never used.
            mbarrier.wait(full.index(i % STAGES), i // STAGES % 2, pred=i < last - first)
            w0 = _operand(units, words, i % STAGES * 4 + which * 2, (first + i) % blocks, DTYPE, ROWS)
            if EXTRA != 0:
                more1, sums1, w1 = warpgroup_mma_wait(0, deps=[m1, s1, w1])
            else:
                sums1, w1 = warpgroup_mma_wait(0, deps=[s1, w1])
            mbarrier.arrive(empty.index(buf), count=1)
        output = tile % tiles * 256 + which * 128
        row = tile // tiles * TILE_ROWS
        if count == blocks:
            store_tile(out, buffer, sums0, BIAS, output, row, outputs, DTYPE)
            store_tile(out, buffer, sums1, BIAS, output + 64, row, outputs, DTYPE)
            if EXTRA != 0:
                row += ROWS
                store_directly(OUT, more0, BIAS, output, row, rows, outputs, out_stride, DTYPE)
                store_directly(OUT, more1, BIAS, output + 64, row, rows, outputs, out_stride, DTYPE)
        else:
            slot = program * 2 + gl.where(item == first, 0, 1)
            at = SUMS + (slot * 2 + which).to(gl.int64) * (128 * TILE_ROWS)
            places = places_of(ROWS)
            gl.store(at + places, sums0)
            gl.store(at + 64 * TILE_ROWS + places, sums1)
            if EXTRA != 0:
                more_places = 64 * ROWS + places_of(MORE)
                gl.store(at + more_places, more0)
                gl.store(at + 64 * TILE_ROWS + more_places, more1)
            gl.thread_barrier()
            gl.atomic_add(FLAGS + tile * 2 + which, 1, sem="release", scope="gpu")
        item += count
    tma.store_wait(0)
    # The tiles that are shared with the program before and with the one after, which may be the same one.
    for side in gl.static_range(2):
        if side == 0:
            tile = first // blocks
            is_shared = (last > first) & ((first % blocks != 0) | (last < (tile + 1) * blocks))
        else:
            tile = (last - 1) // blocks
            is_shared = (last > first) & (last % blocks != 0) & (tile != first // blocks)
        if is_shared:
            begin = program_of(tile * blocks, programs, work)
            end = program_of((tile + 1) * blocks - 1, programs, work)
            first_slot = begin * 2 + gl.where(piece_start(begin, programs, work) < tile * blocks, 1, 0)
            add_part(
                OUT, SUMS, BIAS, FLAGS + tile * 2 + which, program - begin, end - begin + 1, first_slot,
                tile % tiles * 256 + which * 128, tile // tiles * TILE_ROWS, rows, outputs, out_stride, which,
                TILE_ROWS, DTYPE,
            )  # fmt: skip


# Shapes compile to nothing better, and each would take seconds.
@gluon.jit(do_not_specialize=["tiles", "blocks", "work", "rows", "outputs", "out_stride"])
def int4_kernel(
    x, more_x, units, scales, out, OUT, SUMS, FLAGS, BIAS, tiles, blocks, work, rows, outputs, out_stride,
    ROWS: gl.constexpr, EXTRA: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`tiles`: of outputs, for every ROWS + EXTRA rows, both powers of two or EXTRA 0. `work`: blocks of all tiles."""
    if PDL:
        gdc_launch_dependents()
    unit_tiles = gl.allocate_shared_memory(gl.int16, [STAGES, 256, 32], units.layout)
    x_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, 128], x.layout)
    more_x_tiles = x_tiles
    if EXTRA != 0:
        more_x_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, EXTRA, 128], more_x.layout)
    buffers = gl.allocate_shared_memory(DTYPE, [2, ROWS // 2, 64], out.layout)
    scale_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 256, 8], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # weights and inputs
        mbarrier.init(empty.index(i), count=2)  # both warp groups read every block
    weights, inputs = (unit_tiles, scale_tiles), (x_tiles, more_x_tiles)
    share = (full, empty, tiles, blocks, work)
    results, shape = (out, OUT, SUMS, FLAGS), (rows, outputs, out_stride)
    gl.warp_specialize(
        [
            (_multiply, (0, results, BIAS, weights, inputs, buffers.index(0), share, shape, EXTRA, DTYPE, PDL)),
            (_multiply, (1, results, BIAS, weights, inputs, buffers.index(1), share, shape, EXTRA, DTYPE, PDL)),
            (_bring_weights, (units, scales, weights, share)),
            (_bring_inputs, (x, more_x, inputs, share, EXTRA, PDL)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
