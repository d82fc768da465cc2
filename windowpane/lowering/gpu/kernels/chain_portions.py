"""Portions of int4 weights: asked for, brought to registers and multiplied (`chain_kernel`)."""

# mypy: disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from windowpane.lowering.gpu.kernels.chain_forms import (
    ARE_AWAITED,
    ARE_HELD,
    AT_A_TURN,
    IS_GATED,
    IS_LONG,
    LONG,
    MAGIC,
    MAGIC_VALUE,
    PIECE,
    PORTIONS,
)
from windowpane.lowering.gpu.kernels.chain_inputs import digits_of, hold, inputs_of, place_of
from windowpane.lowering.gpu.kernels.chain_results import glance, settle

# The lower and the upper four bits of four bytes, each q as 16 · (q - 8).
_TAKE = gl.constexpr("""{
.reg .b32 t;
shl.b32 t, $2, 4;
lop3.b32 $0, t, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
}""")


@gluon.jit
def _rows_of(r, first, FORM: gl.constexpr, GATE: gl.constexpr):
    """Output, row of the weight and step of a portion's rows, for the first portion of all.

    Of gated ones, 8 of the gate and 8 of what they gate come in turn, as tensor cores leave both in one thread; the
    latter are GATE rows further on.
    """
    if FORM == IS_LONG:
        return first + r % 16, first + r % 16, r // 16
    if FORM == IS_GATED:
        n = first + r // 16 * 8 + r % 8
        return n, n + r // 8 % 2 * GATE, gl.zeros_like(r)
    return first + r, first + r, gl.zeros_like(r)


@gluon.jit
def prepare(U, S, first, last, steps, SHAPE: gl.constexpr, GATE: gl.constexpr):
    """Where the first portion of all lies, row by row, and which outputs and steps its rows are, once for units and
    once for scales; behind which output there is nothing; and how many steps of 256 inputs there are.
    """
    FORM: gl.constexpr = SHAPE[1]
    by_units: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    by_scales: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
    r = gl.arange(0, 128, gl.SliceLayout(1, by_units))
    n, row, step = _rows_of(r, first, FORM, GATE)
    c = gl.arange(0, 64, gl.SliceLayout(0, by_units))
    units_at = U + ((row * (steps * 64) + step * 64)[:, None] + c[None, :])
    r = gl.arange(0, 128, gl.SliceLayout(1, by_scales))
    n2, row, step2 = _rows_of(r, first, FORM, GATE)
    c = gl.arange(0, 8, gl.SliceLayout(0, by_scales))
    scales_at = S + ((row * (steps * 8) + step2 * 8)[:, None] + c[None, :])
    return units_at, n[:, None], step[:, None], scales_at, n2[:, None], step2[:, None], last, steps


@gluon.jit
def fetch(asked, ring, slot, turn, SHAPE: gl.constexpr):
    """Ask for the portions of a turn: a step of three parts of the outputs, or three steps of the only one. Three parts
    come with all their steps before the next three.
    """
    units, scales = ring
    units_at, n, step, scales_at, n2, step2, last, steps = asked
    FORM: gl.constexpr = SHAPE[1]
    PARTS: gl.constexpr = SHAPE[2]
    OUTPUTS: gl.constexpr = 16 if FORM == IS_LONG else 64 if FORM == IS_GATED else 128  # of a part
    STEP: gl.constexpr = 8 if FORM == IS_LONG else 1
    if PARTS == 1:
        part = 0
        first_step = turn * (PORTIONS * STEP)
    elif PARTS == PORTIONS:
        part = 0
        first_step = turn * STEP
    else:
        turns = (steps + (STEP - 1)) // STEP  # of three parts
        part = turn // turns * PORTIONS
        first_step = turn % turns * STEP
    units_at += part * OUTPUTS * (steps * 64) + first_step * 64
    scales_at += part * OUTPUTS * (steps * 8) + first_step * 8
    # From one portion of the turn to the next.
    MORE_OUTPUTS: gl.constexpr = 0 if PARTS == 1 else OUTPUTS
    MORE_STEPS: gl.constexpr = STEP if PARTS == 1 else 0
    for j in gl.static_range(PORTIONS):
        ok = n + (part * OUTPUTS + j * MORE_OUTPUTS) < last
        ok2 = n2 + (part * OUTPUTS + j * MORE_OUTPUTS) < last
        if SHAPE[0]:
            ok = ok & (step + (first_step + j * MORE_STEPS) < steps)
            ok2 = ok2 & (step2 + (first_step + j * MORE_STEPS) < steps)
        async_copy.async_copy_global_to_shared(
            units[j].index(slot), units_at + j * (MORE_OUTPUTS * (steps * 64) + MORE_STEPS * 64), mask=ok
        )
        async_copy.async_copy_global_to_shared(
            scales[j].index(slot), scales_at + j * (MORE_OUTPUTS * (steps * 8) + MORE_STEPS * 8), mask=ok2
        )


@gluon.jit
def _load_portion(units, scales, slot, FORM: gl.constexpr):
    """Units as operands and scales as the sums need them, for each half of both blocks and for each block."""
    STAGES: gl.constexpr = units.type.shape[0]
    if FORM == IS_LONG:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
        pairs: gl.constexpr = gl.zeros([8, 16, 8], gl.float32, layout).reshape([8, 16, 4, 2]).type.layout
        bytes = units._reinterpret(gl.int8, [STAGES, 8, 16, 128], gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
        scales = scales._reinterpret(gl.bfloat16, [STAGES, 8, 16, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
        pairs: gl.constexpr = gl.zeros([128, 8], gl.float32, layout).reshape([128, 4, 2]).type.layout
        bytes = units._reinterpret(gl.int8, [STAGES, 128, 128], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    LAST: gl.constexpr = 2 if FORM == IS_LONG else 1
    found = ()
    for half in gl.static_range(4):
        own = bytes.index(slot).slice(half * 32, 32, dim=LAST).load(gl.DotOperandLayout(0, layout, 4))
        found = found + (own,)  # noqa: RUF005
    for block in gl.static_range(2):
        own = scales.index(slot).slice(block * 4, 4, dim=LAST).load(gl.SliceLayout(LAST + 1, pairs))
        found = found + (own,)  # noqa: RUF005
    return found


@gluon.jit
def _add_portion(sums, x, factors, portion, FORM: gl.constexpr):
    """`x` and `factors`: the tensor cores' other operands and what they stand for."""
    for block in gl.static_range(2):
        c = gl.full(sums.type.shape, MAGIC, gl.int32, sums.type.layout)
        for half in gl.static_range(2):
            low, high = gl.inline_asm_elementwise(
                _TAKE, "=&r,=&r,r", [portion[block * 2 + half]], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
            )
            c = mma_v2(low, x[block * 4 + half * 2], c)
            c = mma_v2(high, x[block * 4 + half * 2 + 1], c)
        scale = _for_columns(portion[4 + block].to(gl.float32), sums, FORM)
        sums += (c.to(gl.float32, bitcast=True) - MAGIC_VALUE) * (scale * factors[block])
    return sums


@gluon.jit
def _for_columns(scales, sums, FORM: gl.constexpr):
    """A block's scales […, 4] for pairs of columns."""
    if FORM == IS_LONG:
        pairs = gl.reshape(sums, [8, 16, 4, 2])
        scales, _p = gl.broadcast(gl.expand_dims(scales, 3), pairs)
        return gl.convert_layout(gl.reshape(scales, [8, 16, 8]), sums.type.layout, assert_trivial=True)
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        pairs = gl.reshape(sums, [128, 4, 2])
        scales, _p = gl.broadcast(gl.expand_dims(scales, 2), pairs)
        return gl.convert_layout(gl.reshape(scales, [128, 8]), sums.type.layout, assert_trivial=True)


@gluon.jit
def _piece(source, i, SHAPE: gl.constexpr):
    """Of a product's inputs that are not held yet, and zeros behind them."""
    if SHAPE[3] == ARE_HELD:
        return 0
    elif SHAPE[3] == ARE_AWAITED:  # noqa: RET505 - all branches are compiled unless one is chosen here
        return glance(source[0], i, source[1])
    else:
        X, count = source
        at = place_of(i)
        return gl.load(X + at, mask=at < count, other=0, cache_modifier=".cg")


@gluon.jit
def _digits(source, piece, i, SHAPE: gl.constexpr):
    if SHAPE[3] == ARE_HELD:
        return 0
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        if SHAPE[3] == ARE_AWAITED:
            piece = settle((piece,), source[0] + i * (PIECE * 32))[0]
        return digits_of(piece.to(gl.bfloat16, bitcast=True))


@gluon.jit
def _turn(
    asked, following, ring, inputs, digits, step, i, before, turns, SHAPE: gl.constexpr, NEXT_SHAPE: gl.constexpr
):
    """The portions of turn `i` in registers; their places in the ring go to the turn that is STAGES further on. What
    the product takes at this step is held meanwhile, unless all is.
    """
    units, scales = ring
    STAGES: gl.constexpr = units[0].type.shape[0]
    slot = (before + i) % STAGES
    async_copy.wait_group(STAGES - 1)
    gl.thread_barrier()  # portions are there for all
    portions = ()
    for j in gl.static_range(PORTIONS):
        portions = portions + (_load_portion(units[j], scales[j], slot, SHAPE[1]),)  # noqa: RUF005
    if SHAPE[3] != ARE_HELD:
        hold(step, digits, inputs)
    gl.thread_barrier()  # their places are free
    ahead = i + STAGES
    if ahead < turns:
        fetch(asked, ring, slot, ahead, SHAPE)
    elif NEXT_SHAPE[2] > 0:
        fetch(following, ring, slot, ahead - turns, NEXT_SHAPE)
    async_copy.commit_group()
    return portions


@gluon.jit
def product(
    asked, following, ring, inputs, source, before, group, turns, SHAPE: gl.constexpr, NEXT_SHAPE: gl.constexpr
):
    """The sums of a group of this program's outputs, which are three parts or the only one. The product has so many
    turns, those before it had `before`. A next product without parts is none. `source`: inputs that are not held yet,
    as bits, and how many.
    """
    FORM: gl.constexpr = SHAPE[1]
    PARTS: gl.constexpr = SHAPE[2]
    if FORM == IS_LONG:
        zero = gl.zeros([8, 16, 8], gl.float32, gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
    else:
        zero = gl.zeros([128, 8], gl.float32, gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))
    if PARTS == 1:
        total = zero
        for i in range(turns):
            portions = _turn(asked, following, ring, inputs, 0, i, i, before, turns, SHAPE, NEXT_SHAPE)
            for j in gl.static_range(PORTIONS):
                x, factors = inputs_of(inputs, i * PORTIONS + j, FORM)
                total = _add_portion(total, x, factors, portions[j], FORM)
        return (total,)
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        own_turns = turns // (PARTS // PORTIONS)
        sums = (zero,) * PORTIONS
        digits = _digits(source, _piece(source, 0, SHAPE), 0, SHAPE)
        for step in range(own_turns):
            piece = _piece(source, step + 1, SHAPE)
            portions = _turn(
                asked, following, ring, inputs, digits, step, group * own_turns + step, before, turns, SHAPE, NEXT_SHAPE
            )
            x, factors = inputs_of(inputs, step, FORM)
            more = ()
            for j in gl.static_range(PORTIONS):
                more = more + (_add_portion(sums[j], x, factors, portions[j], FORM),)  # noqa: RUF005
            sums = more
            # Warps are apart here, and some multiply while others do this.
            digits = _digits(source, piece, step + 1, SHAPE)
        return sums


@gluon.constexpr_function
def groups_of(shape):
    """Of three parts, or the only one."""
    return max(shape[2] // AT_A_TURN, 1)


@gluon.constexpr_function
def shape_of(form, parts, ends, inputs=ARE_HELD):
    """Of a product, as its parts are asked for and multiplied; whether its inputs end within a turn of them, and where
    these come from.
    """
    return (ends, form, parts, inputs)


@gluon.constexpr_function
def ends_within_a_turn(inputs, form, parts):
    step = 256 * (8 if form == LONG else 1)
    return inputs % (step * (AT_A_TURN if parts == 1 else 1)) != 0


@gluon.constexpr_function
def turns_of(inputs, form, parts):
    steps = -(-inputs // (256 * (8 if form == LONG else 1)))
    return -(-steps // AT_A_TURN) if parts == 1 else steps * parts // AT_A_TURN
