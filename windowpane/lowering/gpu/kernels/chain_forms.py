"""The forms of weights on their way, for the launch that has all products between two layers' attention."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

TALL, GATED, LONG = 0, 1, 2
AT_A_TURN = 3  # portions
WARPS = 8
# Inputs are held in pieces of so many groups of 32: one step of a long portion.
PIECE_GROUPS = 64

# For kernels.
IS_GATED = gl.constexpr(GATED)
IS_LONG = gl.constexpr(LONG)
# A product's inputs: held before it begins, or written by earlier launches or awaited from programs of this one, and
# held piece by piece.
ARE_HELD = gl.constexpr(0)
ARE_THERE = gl.constexpr(1)
ARE_AWAITED = gl.constexpr(2)
PORTIONS = gl.constexpr(AT_A_TURN)
PIECE = gl.constexpr(PIECE_GROUPS)
# A float32 of which the lowest bits are an integer plus 2**22.
MAGIC = gl.constexpr(0x4B400000)
MAGIC_VALUE = gl.constexpr(12582912.0)
