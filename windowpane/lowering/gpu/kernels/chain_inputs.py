"""Activations of one row as the tensor cores for bytes take them (`chain_kernel`)."""

# mypy: disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from windowpane.lowering.gpu.kernels.chain_forms import IS_LONG, MAGIC_VALUE, PIECE, PIECE_GROUPS

_ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def digits_of(x):
    """A piece of a product's inputs [groups, 32] as two digits each: seven bits, and seven more behind them; and what
    each group's digits stand for.

    What is no smaller than a 32nd of the largest of its group is held exactly, all else as finely as that. A group with
    an infinity or a NaN is NaN.
    """
    x = x.to(gl.float32)
    # The power of two that takes the largest to [32, 64). Operands are 16 times their weights.
    exponent = gl.maximum(gl.reduce(gl.abs(x), 1, _larger).to(gl.int32, bitcast=True) >> 23, 16)
    factor = ((exponent - 9) << 23).to(gl.float32, bitcast=True)
    factor = gl.where(exponent == 255, float("nan"), factor)
    up = ((259 - exponent) << 23).to(gl.float32, bitcast=True)
    scaled = x * gl.expand_dims(up, 1)
    first = scaled + MAGIC_VALUE
    second = scaled * 128.0 + (129.0 * MAGIC_VALUE - first * 128.0)  # exact in between
    both = gl.join(first.to(gl.int32, bitcast=True).to(gl.int8), second.to(gl.int32, bitcast=True).to(gl.int8))
    # Unit 16 · half + 8 · q + 2 · i + c goes to byte 16 · q + 4 · i + 2 · half + c.
    both = gl.reshape(both, [PIECE, 2, 2, 4, 2, 2])
    both = gl.reshape(gl.permute(both, (0, 5, 2, 3, 1, 4)), [2 * PIECE, 32])
    return both, gl.reshape(gl.join(factor, factor * 0.0078125), [2 * PIECE])


@gluon.jit
def hold(i, piece, inputs):
    """Digits of piece `i` for all warps."""
    digits, factors = inputs
    digits.index(i).store(piece[0])
    factors.index(i).store(piece[1])


@gluon.constexpr_function
def piece_layout():
    """Of its eight values a thread has four side by side and four that are 16 further on, so that their digits are
    eight bytes in a row.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0]],
        block_bases=[],
        shape=[PIECE_GROUPS, 32],
    )


@gluon.jit
def place_of(i):
    """Where the values of piece `i` are."""
    layout: gl.constexpr = piece_layout()
    group = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    unit = gl.arange(0, 32, gl.SliceLayout(0, layout))
    return i * (PIECE * 32) + (group[:, None] * 32 + unit[None, :])


@gluon.constexpr_function
def pieces_of(inputs):
    return -(-inputs // (32 * PIECE_GROUPS))


@gluon.constexpr_function
def ends_in(piece, inputs):
    """Whether there is less than all of a piece."""
    return (piece + 1) * 32 * PIECE_GROUPS > inputs


@gluon.jit
def load_pieces(X, INPUTS: gl.constexpr, STAY: gl.constexpr):
    """X [INPUTS] in pieces, and zeros behind it. What each step needs again may STAY in L2 while weights go past."""
    MODIFIER: gl.constexpr = "" if STAY else ".cg"
    POLICY: gl.constexpr = "evict_last" if STAY else ""
    found = ()
    for i in gl.static_range(pieces_of(INPUTS)):
        at = place_of(i)
        inside = None
        other = None
        if ends_in(i, INPUTS):
            inside = at < INPUTS
            other = 0
        x = gl.load(X + at, inside, other, cache_modifier=MODIFIER, eviction_policy=POLICY)
        found = found + (x,)  # noqa: RUF005
    return found


@gluon.jit
def store_pieces(X, pieces, INPUTS: gl.constexpr):
    for i in gl.static_range(pieces_of(INPUTS)):
        at = place_of(i)
        inside = None
        if ends_in(i, INPUTS):
            inside = at < INPUTS
        gl.store(X + at, pieces[i], inside)


@gluon.jit
def hold_pieces(x, inputs, INPUTS: gl.constexpr):
    for i in gl.static_range(pieces_of(INPUTS)):
        hold(i, digits_of(x[i]), inputs)


@gluon.jit
def inputs_of(inputs, step, FORM: gl.constexpr):
    """Of a step: operands for tensor cores, and what these stand for, block by block."""
    digits, factors = inputs
    PIECES: gl.constexpr = digits.type.shape[0]
    if FORM == IS_LONG:
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
    ROW: gl.constexpr = 1 if FORM == IS_LONG else 0
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
        z = (z.permute((0, 2, 1)) if FORM == IS_LONG else z.permute((1, 0))).load(operand)
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
