"""All int4 products between two layers' attention for one row, in one launch (Gluon).

From what was attended to the next layer's queries, keys and values there are four products with norms between them.
One after the other as launches, each would begin with empty hands: weights take longest to come when nobody has asked
for them yet. Here programs ask for the next product's weights while the one before ends, as these depend on nothing;
between products all programs wait for each other.

    attended → out → + norms → gate, up → activated → down → + norms → q, k, v of the next layer

There is a program for each multiprocessor, and it has whole outputs of every product to itself: no sum is shared
between programs, and none depends on timing. Weights come in portions of 128 rows by 256 inputs through a ring in
shared memory, three portions at a turn. Of a *tall* portion the rows are outputs, 16 to each of 8 warps; a *gated* one
has 64 of the gate and the same 64 of what it gates. Of a *long* one there are 16 outputs, and each warp has inputs of
its own; their sums meet at the end.

Reading is what takes time, but only as long as a weight costs little more than an instruction. Tensor cores for bytes
need two for eight weights: a mask leaves four of them. Activations become two digits of seven bits, with a power of two
for each group of 32 inputs, which is exact but for the smallest (`_hold`). Tensor cores have 8 columns for rows of
activations, and here is one row: each column has one digit of one of a block's four groups, so that a block's sums meet
their scales once. Sums start as a float32 whose lowest bits they are.

Programs meet at a counter. What they leave behind `out` and `down` goes without a fence, which would wait for all the
weights that are on their way as well: each value has a tag of its barrier beside it, and who finds another one looks
again.
"""

# mypy: disable-error-code="assignment,import-untyped,misc,no-redef,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.modeling.triton.gated import gate_times_up

TALL, GATED, LONG = 0, 1, 2
AT_A_TURN = 3
WARPS = 8
# Inputs are held in pieces of so many groups of 32: one step of a long portion.
PIECE_GROUPS = 64
AT_ONCE_GROUPS = 256  # of what other programs left
BARRIERS = 3  # of a launch

_GATED = gl.constexpr(GATED)
_LONG = gl.constexpr(LONG)
_AT_A_TURN = gl.constexpr(AT_A_TURN)
_PIECE = gl.constexpr(PIECE_GROUPS)
_AT_ONCE = gl.constexpr(AT_ONCE_GROUPS)
_BARRIERS = gl.constexpr(BARRIERS)

# The lower and the upper four bits of four bytes, each q as 16 · (q - 8).
_TAKE = gl.constexpr("""{
.reg .b32 t;
shl.b32 t, $2, 4;
lop3.b32 $0, t, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
}""")
# A float32 of which the lowest bits are an integer plus 2**22.
_MAGIC = gl.constexpr(0x4B400000)
_MAGIC_VALUE = gl.constexpr(12582912.0)


@gluon.jit
def _rows_of(r, first, FORM: gl.constexpr, GATE: gl.constexpr):
    """Output, row of the weight and step of a portion's rows, for the first portion of all.

    Of gated ones, 8 of the gate and 8 of what they gate come in turn, as tensor cores leave both in one thread; the
    latter are GATE rows further on.
    """
    if FORM == _LONG:
        return first + r % 16, first + r % 16, r // 16
    if FORM == _GATED:
        n = first + r // 16 * 8 + r % 8
        return n, n + r // 8 % 2 * GATE, gl.zeros_like(r)
    return first + r, first + r, gl.zeros_like(r)


@gluon.jit
def _prepare(U, S, first, INPUTS: gl.constexpr, FORM: gl.constexpr, GATE: gl.constexpr):
    """Where the first portion of all lies, row by row, and which outputs and steps its rows are, once for units and
    once for scales.
    """
    by_units: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    by_scales: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [8, 1], [1, 0])
    r = gl.arange(0, 128, gl.SliceLayout(1, by_units))
    n, row, step = _rows_of(r, first, FORM, GATE)
    c = gl.arange(0, 64, gl.SliceLayout(0, by_units))
    units_at = U + ((row * (INPUTS // 4) + step * 64)[:, None] + c[None, :])
    r = gl.arange(0, 128, gl.SliceLayout(1, by_scales))
    n2, row, step2 = _rows_of(r, first, FORM, GATE)
    c = gl.arange(0, 8, gl.SliceLayout(0, by_scales))
    scales_at = S + ((row * (INPUTS // 32) + step2 * 8)[:, None] + c[None, :])
    return units_at, n[:, None], step[:, None], scales_at, n2[:, None], step2[:, None]


@gluon.jit
def _fetch(source, units, scales, slot, turn, last, INPUTS: gl.constexpr, FORM: gl.constexpr, PARTS: gl.constexpr):
    """Ask for the portions of a turn: three parts of the outputs, or three steps of the only one."""
    units_at, n, step, scales_at, n2, step2 = source
    OUTPUTS: gl.constexpr = 16 if FORM == _LONG else 64 if FORM == _GATED else 128  # of a part
    STEP: gl.constexpr = 8 if FORM == _LONG else 1
    ENDS: gl.constexpr = INPUTS % (256 * STEP * (_AT_A_TURN if PARTS == 1 else 1)) != 0
    if PARTS == 1:
        part = 0
        first_step = turn * (_AT_A_TURN * STEP)
    else:
        part = turn % (PARTS // _AT_A_TURN) * _AT_A_TURN
        first_step = turn // (PARTS // _AT_A_TURN) * STEP
    units_at += part * (OUTPUTS * (INPUTS // 4)) + first_step * 64
    scales_at += part * (OUTPUTS * (INPUTS // 32)) + first_step * 8
    # From one portion of the turn to the next.
    MORE_OUTPUTS: gl.constexpr = 0 if PARTS == 1 else OUTPUTS
    MORE_STEPS: gl.constexpr = STEP if PARTS == 1 else 0
    for j in gl.static_range(_AT_A_TURN):
        ok = n + (part * OUTPUTS + j * MORE_OUTPUTS) < last
        ok2 = n2 + (part * OUTPUTS + j * MORE_OUTPUTS) < last
        if ENDS:
            ok = ok & (step + (first_step + j * MORE_STEPS) < INPUTS // 256)
            ok2 = ok2 & (step2 + (first_step + j * MORE_STEPS) < INPUTS // 256)
        async_copy.async_copy_global_to_shared(
            units[j].index(slot), units_at + j * (MORE_OUTPUTS * (INPUTS // 4) + MORE_STEPS * 64), mask=ok
        )
        async_copy.async_copy_global_to_shared(
            scales[j].index(slot), scales_at + j * (MORE_OUTPUTS * (INPUTS // 32) + MORE_STEPS * 8), mask=ok2
        )


@gluon.jit
def _load_portion(units, scales, slot, FORM: gl.constexpr):
    """Units as operands and scales as the sums need them, for each half of both blocks and for each block."""
    STAGES: gl.constexpr = units.type.shape[0]
    if FORM == _LONG:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
        pairs: gl.constexpr = gl.zeros([8, 16, 8], gl.float32, layout).reshape([8, 16, 4, 2]).type.layout
        bytes = units._reinterpret(gl.int8, [STAGES, 8, 16, 128], gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
        scales = scales._reinterpret(gl.bfloat16, [STAGES, 8, 16, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
        pairs: gl.constexpr = gl.zeros([128, 8], gl.float32, layout).reshape([128, 4, 2]).type.layout
        bytes = units._reinterpret(gl.int8, [STAGES, 128, 128], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    LAST: gl.constexpr = 2 if FORM == _LONG else 1
    found = ()
    for half in gl.static_range(4):
        found = found + (  # noqa: RUF005
            bytes.index(slot).slice(half * 32, 32, dim=LAST).load(gl.DotOperandLayout(0, layout, 4)),
        )
    for block in gl.static_range(2):
        found = found + (  # noqa: RUF005
            scales.index(slot).slice(block * 4, 4, dim=LAST).load(gl.SliceLayout(LAST + 1, pairs)),
        )
    return found


@gluon.jit
def _add_portion(sums, x, factors, portion, FORM: gl.constexpr):
    """`x` and `factors`: the tensor cores' other operands and what they stand for."""
    for block in gl.static_range(2):
        c = gl.full(sums.type.shape, _MAGIC, gl.int32, sums.type.layout)
        for half in gl.static_range(2):
            low, high = gl.inline_asm_elementwise(
                _TAKE, "=&r,=&r,r", [portion[block * 2 + half]], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
            )
            c = mma_v2(low, x[block * 4 + half * 2], c)
            c = mma_v2(high, x[block * 4 + half * 2 + 1], c)
        scale = _for_columns(portion[4 + block].to(gl.float32), sums, FORM)
        sums += (c.to(gl.float32, bitcast=True) - _MAGIC_VALUE) * (scale * factors[block])
    return sums


@gluon.jit
def _for_columns(scales, sums, FORM: gl.constexpr):
    """A block's scales […, 4] for pairs of columns."""
    if FORM == _LONG:
        pairs = gl.reshape(sums, [8, 16, 4, 2])
        scales, _p = gl.broadcast(gl.expand_dims(scales, 3), pairs)
        return gl.convert_layout(gl.reshape(scales, [8, 16, 8]), sums.type.layout, assert_trivial=True)
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        pairs = gl.reshape(sums, [128, 4, 2])
        scales, _p = gl.broadcast(gl.expand_dims(scales, 2), pairs)
        return gl.convert_layout(gl.reshape(scales, [128, 8]), sums.type.layout, assert_trivial=True)


@gluon.jit
def _inputs_of(inputs, step, FORM: gl.constexpr):
    """Of a step: operands for tensor cores, and what these stand for, block by block."""
    digits, factors = inputs
    PIECES: gl.constexpr = digits.type.shape[0]
    if FORM == _LONG:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
        operand: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
        flat: gl.constexpr = gl.SliceLayout(1, layout)
        own = digits._reinterpret(gl.int8, [PIECES, 8, 16, 32], gl.SwizzledSharedLayout(16, 4, 2, [2, 1, 0]))
        own_factors = factors._reinterpret(gl.float32, [PIECES, 8, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, operand)))[None, None, :]
        every = gl.zeros([8, 16, 8], gl.float32, layout)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
        operand: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
        flat: gl.constexpr = gl.SliceLayout(0, layout)
        own = digits._reinterpret(gl.int8, [PIECES * 8, 16, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0]))
        own_factors = factors._reinterpret(gl.float32, [PIECES * 8, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        column = gl.arange(0, 8, gl.SliceLayout(0, operand))[None, :]
        every = gl.zeros([128, 8], gl.float32, layout)
    ROW: gl.constexpr = 1 if FORM == _LONG else 0
    # A column's span of 32 inputs is in the lower or in the upper four bits of the first or of the second bytes of
    # units, and meets nothing elsewhere. Bytes 0 and 1 of a register are of a block's first half of units, 2 and 3 of
    # the second.
    span = column // 2
    first = gl.where(span // 2 == 0, 0x4140, 0x1404)
    second = gl.where(span // 2 == 0, 0x4342, 0x3424)
    x = ()
    factor = ()
    for block in gl.static_range(2):
        z = own.index(step).slice(block * 8, 8, dim=ROW)
        z = (z.permute((0, 2, 1)) if FORM == _LONG else z.permute((1, 0))).load(operand)
        for half in gl.static_range(2):
            for upper in gl.static_range(2):
                pick = gl.where(span % 2 == upper, first if half == 0 else second, 0x4444)
                pick, _z = gl.broadcast(pick, z)
                own_x = gl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, 0, $2;", "=r,r,r,r,r,r", [z, pick], dtype=gl.int8, is_pure=True, pack=4
                )
                x = x + (own_x,)  # noqa: RUF005
        f = gl.expand_dims(own_factors.index(step).slice(block * 8, 8, dim=ROW).load(flat), ROW)
        f, _e = gl.broadcast(f, every)
        factor = factor + (f,)  # noqa: RUF005
    return x, factor


@gluon.jit
def _turn(
    source, next_source, units, scales, i, last, next_last, BEFORE: gl.constexpr, INPUTS: gl.constexpr,
    FORM: gl.constexpr, PARTS: gl.constexpr, NEXT_INPUTS: gl.constexpr, NEXT_FORM: gl.constexpr,
    NEXT_PARTS: gl.constexpr,
):  # fmt: skip
    """The portions of turn `i` in registers; their places in the ring go to the turn that is STAGES further on."""
    STAGES: gl.constexpr = units[0].type.shape[0]
    TURNS: gl.constexpr = _turns(INPUTS, FORM, PARTS)
    slot = (BEFORE + i) % STAGES
    async_copy.wait_group(STAGES - 1)
    gl.thread_barrier()  # portions are there for all
    portions = ()
    for j in gl.static_range(_AT_A_TURN):
        portions = portions + (_load_portion(units[j], scales[j], slot, FORM),)  # noqa: RUF005
    gl.thread_barrier()  # their places are free
    ahead = i + STAGES
    if ahead < TURNS:
        _fetch(source, units, scales, slot, ahead, last, INPUTS, FORM, PARTS)
    elif NEXT_PARTS > 0:
        _fetch(next_source, units, scales, slot, ahead - TURNS, next_last, NEXT_INPUTS, NEXT_FORM, NEXT_PARTS)
    async_copy.commit_group()
    return portions


@gluon.jit
def _product(
    source, next_source, units, scales, inputs, last, next_last, BEFORE: gl.constexpr, INPUTS: gl.constexpr,
    FORM: gl.constexpr, PARTS: gl.constexpr, NEXT_INPUTS: gl.constexpr, NEXT_FORM: gl.constexpr,
    NEXT_PARTS: gl.constexpr,
):  # fmt: skip
    """The sums of this program's outputs, part by part. BEFORE: turns of the products before."""
    TURNS: gl.constexpr = _turns(INPUTS, FORM, PARTS)
    if FORM == _LONG:
        zero = gl.zeros([8, 16, 8], gl.float32, gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
    else:
        zero = gl.zeros([128, 8], gl.float32, gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))
    if PARTS == 1:
        total = zero
        for i in range(TURNS):
            portions = _turn(
                source, next_source, units, scales, i, last, next_last, BEFORE, INPUTS, FORM, PARTS, NEXT_INPUTS,
                NEXT_FORM, NEXT_PARTS,
            )  # fmt: skip
            for j in gl.static_range(_AT_A_TURN):
                x, factors = _inputs_of(inputs, i * _AT_A_TURN + j, FORM)
                total = _add_portion(total, x, factors, portions[j], FORM)
        return (total,)
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        TURNS_OF_STEP: gl.constexpr = PARTS // _AT_A_TURN
        sums = (zero,) * PARTS
        for step in range(TURNS // TURNS_OF_STEP):
            x, factors = _inputs_of(inputs, step, FORM)
            more = ()
            for t in gl.static_range(TURNS_OF_STEP):
                portions = _turn(
                    source, next_source, units, scales, step * TURNS_OF_STEP + t, last, next_last, BEFORE, INPUTS,
                    FORM, PARTS, NEXT_INPUTS, NEXT_FORM, NEXT_PARTS,
                )  # fmt: skip
                for j in gl.static_range(_AT_A_TURN):
                    total = _add_portion(sums[t * _AT_A_TURN + j], x, factors, portions[j], FORM)
                    more = more + (total,)  # noqa: RUF005
            sums = more
        return sums


@gluon.constexpr_function
def _turns(inputs, form, parts):
    """Of a product."""
    step = 8 if form == LONG else 1
    steps = -(-inputs // (256 * step))
    return -(-steps // AT_A_TURN) if parts == 1 else steps * parts // AT_A_TURN


@gluon.constexpr_function
def _next_power(x):
    return max(PIECE_GROUPS, 1 << (x - 1).bit_length())


@gluon.jit
def _hold(piece, x, inputs):
    """Inputs of a product [groups, 32] as two digits each: seven bits, and seven more behind them.

    What is no smaller than a 64th of the largest of its group is held exactly, all else as finely as that.
    """
    digits, factors = inputs
    GROUPS: gl.constexpr = x.type.shape[0]
    SAME: gl.constexpr = digits.type.shape[0] * _PIECE // GROUPS
    x = x.to(gl.float32)
    # The power of two that takes the largest to [32, 64). Operands are 16 times their weights.
    exponent = gl.maximum(gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23, 16)
    factor = ((exponent - 9) << 23).to(gl.float32, bitcast=True)
    up = ((259 - exponent) << 23).to(gl.float32, bitcast=True)
    scaled = x * gl.expand_dims(up, 1)
    first = scaled + _MAGIC_VALUE
    second = scaled * 128.0 + (_MAGIC_VALUE - (first - _MAGIC_VALUE) * 128.0)
    both = gl.join(
        first.to(gl.int32, bitcast=True).to(gl.int8),
        second.to(gl.int32, bitcast=True).to(gl.int8),
    )
    # Unit 16 · half + 8 · q + 2 · i + c goes to byte 16 · q + 4 · i + 2 · half + c.
    both = gl.reshape(both, [GROUPS, 2, 2, 4, 2, 2])
    both = gl.reshape(gl.permute(both, (0, 5, 2, 3, 1, 4)), [2 * GROUPS, 32])
    to = digits._reinterpret(gl.int8, [SAME, 2 * GROUPS, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0]))
    to.index(piece).store(both)
    to = factors._reinterpret(gl.float32, [SAME, 2 * GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    to.index(piece).store(gl.reshape(gl.join(factor, factor * 0.0078125), [2 * GROUPS]))


@gluon.constexpr_function
def _by_groups(groups):
    """Eight inputs of a group to a thread, such that their digits are eight bytes in a row."""
    bits = [2**i for i in range(6, groups.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], *([bit, 0] for bit in bits)],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[groups, 32],
    )


@gluon.jit
def _places(GROUPS: gl.constexpr):
    """Of so many groups of inputs."""
    layout: gl.constexpr = _by_groups(GROUPS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    unit = gl.arange(0, 32, gl.SliceLayout(0, layout))
    return group[:, None] * 32 + unit[None, :]


@gluon.jit
def _hold_all(X, inputs, INPUTS: gl.constexpr):
    """X [INPUTS], written by others before the barrier, and zeros behind it."""
    COUNT: gl.constexpr = (INPUTS // 32 + _AT_ONCE - 1) // _AT_ONCE
    at = _places(_AT_ONCE)
    found = ()
    for i in gl.static_range(COUNT):
        place = i * (_AT_ONCE * 32) + at
        found = found + (gl.load(X + place, mask=place < INPUTS, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
    for i in gl.static_range(COUNT):
        _hold(i, found[i], inputs)


@gluon.jit
def _add_all(a0, b0, c0, d0, e0, a1, b1, c1, d1, e1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1, e0 + e1


@gluon.jit
def _sums(AT, tag, inside, before, post_weight, COUNT: gl.constexpr):
    """What others left at `AT`, times its weight, and the sums that norms take; how many have another tag."""
    word = gl.load(AT, mask=inside, other=0, volatile=True)
    missing = gl.where(inside & (word & 0xFFFF != tag), 1.0, 0.0)
    x = gl.where(inside, word & -65536, 0).to(gl.float32, bitcast=True)
    weighted = x if post_weight is None else x * post_weight
    own, x2, both, hidden2, missing = gl.reduce(
        (
            gl.reshape(x * x, [COUNT]),
            gl.reshape(weighted * weighted, [COUNT]),
            gl.reshape(weighted * before, [COUNT]),
            gl.reshape(before * before, [COUNT]),
            gl.reshape(missing, [COUNT]),
        ),
        0,
        _add_all,
    )
    return weighted, own, x2, both, hidden2, missing


@gluon.jit
def _residual_norm(AT, tag, inside, hidden, post_weight, SCALAR, weight, eps, WIDTH: gl.constexpr):
    """hidden + x, normed before where there is a weight for it and times the scalar behind; and its own norm.

    Rounded like `norms.residual_norm`, but all sums are made at once: squares of a sum are those of its terms and twice
    their product.
    """
    dtype: gl.constexpr = hidden.dtype
    COUNT: gl.constexpr = hidden.type.shape[0] * 32
    before = hidden.to(gl.float32)
    weighted, own, x2, both, hidden2, missing = _sums(AT, tag, inside, before, post_weight, COUNT)
    while missing > 0.0:
        weighted, own, x2, both, hidden2, missing = _sums(AT, tag, inside, before, post_weight, COUNT)
    scale = 1.0 if post_weight is None else gl.rsqrt(own / WIDTH + eps)
    hidden = (before + (weighted * scale).to(dtype).to(gl.float32)).to(dtype)
    square = hidden2 + scale * (2 * both + scale * x2)
    if SCALAR is not None:
        factor = gl.load(SCALAR).to(gl.float32)
        hidden = (hidden.to(gl.float32) * factor).to(dtype)
        square *= factor * factor
    return hidden, (hidden.to(gl.float32) * gl.rsqrt(square / WIDTH + eps) * weight).to(dtype)


@gluon.jit
def _now(COUNT):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [COUNT], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def _arrive(COUNT):
    gl.thread_barrier()  # all of the program's results are there
    gl.atomic_add(COUNT, 1, sem="release", scope="gpu")


@gluon.jit
def _arrive_early(COUNT):
    """Results are on their way and have their tag: nothing waits for them, nor for weights on their way here."""
    gl.thread_barrier()
    gl.atomic_add(COUNT, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _await(COUNT, target):
    while _now(COUNT) < target:
        pass


@gluon.jit
def _tagged(x, tag):
    """bfloat16 in the upper half of a word, and a tag of the barrier in the lower half."""
    return x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16 | tag


@gluon.jit
def _store(OUT, sums, meeting, tag, first, last, FORM: gl.constexpr, PARTS: gl.constexpr):
    """With a `tag`, as words."""
    if FORM == _LONG:
        for t in gl.static_range(PARTS // _AT_A_TURN):
            # Warps' sums meet, of three parts at once.
            a = gl.sum(sums[t * _AT_A_TURN], 2)
            b = gl.sum(sums[t * _AT_A_TURN + 1], 2)
            c = gl.sum(sums[t * _AT_A_TURN + 2], 2)
            meeting.store(gl.join(gl.join(a, b), gl.join(c, c)))
            total = gl.sum(meeting.load(gl.BlockedLayout([8, 1, 1, 1], [1, 16, 2, 1], [1, 1, 1, 8], [3, 2, 1, 0])), 0)
            m = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout)))[:, None, None]
            even = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, total.type.layout)))[None, :, None]
            odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))[None, None, :]
            part = odd * 2 + even
            n = first + (t * _AT_A_TURN + part) * 16 + m
            result = total.to(gl.bfloat16) if tag is None else _tagged(total, tag)
            gl.store(OUT + n, result, mask=(n < last) & (part < _AT_A_TURN))
    else:
        for part in gl.static_range(PARTS):
            total = gl.sum(sums[part], 1)
            n = first + part * 128 + gl.arange(0, 128, total.type.layout)
            gl.store(OUT + n, total.to(gl.bfloat16), mask=n < last)


@gluon.jit
def _store_gated(OUT, sums, first, last, PARTS: gl.constexpr, GELU: gl.constexpr):
    for part in gl.static_range(PARTS):
        total = gl.reshape(gl.sum(sums[part], 1).to(gl.bfloat16), [8, 2, 8])
        gate, up = gl.split(gl.permute(total, (0, 2, 1)))
        warp = gl.arange(0, 8, gl.SliceLayout(1, gate.type.layout))[:, None]
        n = first + part * 64 + warp * 8 + gl.arange(0, 8, gl.SliceLayout(0, gate.type.layout))[None, :]
        gl.store(OUT + n, gate_times_up(gate, up, GELU), mask=n < last)


@gluon.jit
def _share(outputs):
    """This program's outputs."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return program * outputs // programs, (program + 1) * outputs // programs


@gluon.jit(do_not_specialize=["next_outputs"])
def chain_kernel(
    ATTENDED, HIDDEN, MIDDLE, OUT, INNER, DOWN, NEXT, OUT_U, OUT_S, GATE_U, GATE_S, DOWN_U, DOWN_S, NEXT_U, NEXT_S,
    POST_WEIGHT, PRE_WEIGHT, POST_MLP_WEIGHT, NEXT_WEIGHT, SCALAR, COUNT, next_outputs, eps,
    ATTENDED_WIDTH: gl.constexpr, WIDTH: gl.constexpr, INNER_WIDTH: gl.constexpr,
    PARTS: gl.constexpr, GATE_PARTS: gl.constexpr, NEXT_PARTS: gl.constexpr, NEXT_FORM: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr, GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """MIDDLE is the residual stream between attention and MLP, OUT, INNER and DOWN what products leave. NEXT becomes
    the next layer's projections, or without NEXT_U the last norm. COUNT counts arrivals, of this launch and all before.

    PARTS, GATE_PARTS and NEXT_PARTS are what a program has at most.
    """
    units = ()
    scales = ()
    for _ in gl.static_range(_AT_A_TURN):
        units = units + (  # noqa: RUF005
            gl.allocate_shared_memory(gl.int16, [STAGES, 128, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        )
        scales = scales + (  # noqa: RUF005
            gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        )
    inputs = (
        gl.allocate_shared_memory(gl.int8, [PIECES, 2 * _PIECE, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0])),
        gl.allocate_shared_memory(gl.float32, [PIECES, 2 * _PIECE], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    meeting = gl.allocate_shared_memory(gl.float32, [8, 16, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    WIDTH_GROUPS: gl.constexpr = _next_power(WIDTH // 32)
    OUT_TURNS: gl.constexpr = _turns(ATTENDED_WIDTH, _LONG, PARTS)
    GATE_TURNS: gl.constexpr = _turns(WIDTH, _GATED, GATE_PARTS)
    DOWN_TURNS: gl.constexpr = _turns(INNER_WIDTH, _LONG, PARTS)
    first, last = _share(WIDTH)
    inner_first, inner_last = _share(INNER_WIDTH)
    next_first, next_last = _share(next_outputs)
    if PDL:
        gdc_launch_dependents()
    source = _prepare(OUT_U, OUT_S, first, ATTENDED_WIDTH, _LONG, 0)
    for turn in gl.static_range(STAGES):
        _fetch(source, units, scales, turn, turn, last, ATTENDED_WIDTH, _LONG, PARTS)
        async_copy.commit_group()
    next_source = _prepare(GATE_U, GATE_S, inner_first, WIDTH, _GATED, INNER_WIDTH)
    at = _places(WIDTH_GROUPS)
    inside = at < WIDTH
    if PDL:
        gdc_wait()
    programs = gl.num_programs(0).to(gl.int64)
    target = _now(COUNT) // (_BARRIERS * programs) * (_BARRIERS * programs) + programs
    _hold_all(ATTENDED, inputs, ATTENDED_WIDTH)
    sums = _product(
        source, next_source, units, scales, inputs, last, inner_last, 0, ATTENDED_WIDTH, _LONG, PARTS, WIDTH, _GATED,
        GATE_PARTS,
    )  # fmt: skip
    tag = (target // programs).to(gl.int32) & 0xFFFF
    _store(OUT, sums, meeting, tag, first, last, _LONG, PARTS)
    _arrive_early(COUNT)

    source = next_source
    next_source = _prepare(DOWN_U, DOWN_S, first, INNER_WIDTH, _LONG, 0)
    # What does not depend on others is loaded before they are waited for. Norms' weights stay in L2, past which all
    # others stream.
    hidden = gl.load(HIDDEN + at, mask=inside, other=0.0, cache_modifier=".cg")
    post_weight = POST_WEIGHT
    if POST_WEIGHT is not None:
        post_weight = gl.load(POST_WEIGHT + at, mask=inside, other=0.0, eviction_policy="evict_last")
    weight = gl.load(PRE_WEIGHT + at, mask=inside, other=0.0, eviction_policy="evict_last")
    _await(COUNT, target)
    hidden, normed = _residual_norm(OUT + at, tag, inside, hidden, post_weight, None, weight, eps, WIDTH)
    _hold(0, normed, inputs)
    if gl.program_id(0) == 0:
        gl.store(MIDDLE + at, hidden, mask=inside)
    sums = _product(
        source, next_source, units, scales, inputs, inner_last, last, OUT_TURNS, WIDTH, _GATED, GATE_PARTS, INNER_WIDTH,
        _LONG, PARTS,
    )  # fmt: skip
    _store_gated(INNER, sums, inner_first, inner_last, GATE_PARTS, GELU)
    _arrive(COUNT)

    source = next_source
    if NEXT_PARTS > 0:
        next_source = _prepare(NEXT_U, NEXT_S, next_first, WIDTH, NEXT_FORM, 0)
    _await(COUNT, target + programs)
    _hold_all(INNER, inputs, INNER_WIDTH)
    sums = _product(
        source, next_source, units, scales, inputs, last, next_last, OUT_TURNS + GATE_TURNS, INNER_WIDTH, _LONG, PARTS,
        WIDTH, NEXT_FORM, NEXT_PARTS,
    )  # fmt: skip
    tag = (target // programs + 2).to(gl.int32) & 0xFFFF
    _store(DOWN, sums, meeting, tag, first, last, _LONG, PARTS)
    _arrive_early(COUNT)

    hidden = gl.load(MIDDLE + at, mask=inside, other=0.0, cache_modifier=".cg")
    post_weight = POST_MLP_WEIGHT
    if POST_MLP_WEIGHT is not None:
        post_weight = gl.load(POST_MLP_WEIGHT + at, mask=inside, other=0.0, eviction_policy="evict_last")
    weight = gl.load(NEXT_WEIGHT + at, mask=inside, other=0.0, eviction_policy="evict_last")
    _await(COUNT, target + 2 * programs)
    hidden, normed = _residual_norm(DOWN + at, tag, inside, hidden, post_weight, SCALAR, weight, eps, WIDTH)
    if gl.program_id(0) == 0:
        gl.store(HIDDEN + at, hidden, mask=inside)
    if NEXT_PARTS == 0:
        if gl.program_id(0) == 0:
            gl.store(NEXT + at, normed, mask=inside)
    else:
        _hold(0, normed, inputs)
        sums = _product(
            next_source, next_source, units, scales, inputs, next_last, 0, OUT_TURNS + GATE_TURNS + DOWN_TURNS, WIDTH,
            NEXT_FORM, NEXT_PARTS, WIDTH, NEXT_FORM, 0,
        )  # fmt: skip
        _store(NEXT, sums, meeting, None, next_first, next_last, NEXT_FORM, NEXT_PARTS)
    async_copy.wait_group(0)
