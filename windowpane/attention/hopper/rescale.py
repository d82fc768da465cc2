"""The running softmax's outputs times what a new largest score makes of them (Gluon).

A row's factor is 1 in every tile that has no larger score than the tiles before it, which after the first few is nearly
all of them. A warp whose rows all have the factor 1 multiplies nothing, and the result is the same to the bit.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TOGETHER = gl.constexpr(32)  # values that are multiplied at once, or not at all
# Whether a factor of a warp's rows is not 1: a thread has two.
_IS_ANY = gl.constexpr("""{
.reg .pred is_any;
setp.neu.f32 is_any, $2, 0f3F800000;
setp.neu.or.f32 is_any, $3, 0f3F800000, is_any;
vote.sync.any.pred is_any, is_any, 0xffffffff;
selp.b32 $0, 1, 0, is_any;
selp.b32 $1, 1, 0, is_any;
}""")


@triton.constexpr_function
def _multiply(count):
    """$i times $(2 · count + i), all of them unless $(3 · count) is 0, which a warp has in common."""
    products = "\n".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return f"{{\n.reg .pred is_any;\nsetp.ne.s32 is_any, ${3 * count}, 0;\n@!is_any bra ONE;\n{products}\nONE:\n}}"


@triton.constexpr_function
def _constraints(count):
    """Results are where the values were."""
    return ",".join([*["=f"] * count, *map(str, range(count)), *["f"] * count, *["r"] * count])


@gluon.jit
def rescaled(o, factor):
    """`o` [64, dims] of one warp group times `factor` [64]."""
    is_any = gl.inline_asm_elementwise(_IS_ANY, "=r,=r,f,f", [factor], dtype=gl.int32, is_pure=False, pack=2)
    factors, _o = gl.broadcast(gl.expand_dims(factor, 1), o)
    are_any, _o = gl.broadcast(gl.expand_dims(is_any, 1), o)
    return gl.inline_asm_elementwise(
        _multiply(_TOGETHER), _constraints(_TOGETHER), [o, factors, are_any], dtype=gl.float32, is_pure=False,
        pack=_TOGETHER,
    )  # fmt: skip
