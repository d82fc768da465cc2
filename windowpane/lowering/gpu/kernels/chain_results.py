"""Results that programs of a launch pass to each other, in bfloat16 (`chain_kernel`).

A result slot is filled with ones until it is written, so a reader can poll it: no result is all ones, since NaN is
rounded to 0x7FFF. The value is its own flag and guards no other memory, so that nothing has to be released or acquired:
PTX asks only that both sides are *relaxed* operations of the whole GPU and of one size, here two bytes. Such a store is
seen whole, and in the end. No program fences: a fence would wait for weights in flight as well.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from windowpane.lowering.gpu.kernels.chain_forms import PIECE, PIECE_GROUPS
from windowpane.lowering.gpu.kernels.chain_inputs import ends_in, pieces_of, place_of

_PIECE_BYTES = PIECE_GROUPS * 32 * 2
_WORDS = 4  # of a thread's eight values of a piece, two and two beside each other
_SECOND_BYTES = 32  # from the first two to the others
_LEAVE = gl.constexpr("""{
.reg .pred p;
.reg .b16 h;
cvt.u16.u32 h, $2;
setp.ne.u32 p, $3, 0;
@p st.relaxed.gpu.global.b16 [$1], h;
mov.b32 $0, 0;
}""")
_OF_THREAD = gl.constexpr(1 | 2 | 16)  # in which places of a thread's values differ


@gluon.constexpr_function
def _looking(pieces, again):
    """PTX that looks at the slots that are not written yet, once or `again` until they are. Operands: words that come
    out, words that go in, and eight times the place of a thread's first value.
    """
    words = _WORDS * pieces
    lines = ["{", ".reg .pred p;", ".reg .b16 a, b, c, d;", ".reg .b32 t, u, missing;"]
    lines += [f"mov.b32 ${i}, ${words + i};" for i in range(words)]
    lines += ["AGAIN:", "mov.b32 missing, 0;"]
    for i in range(0, words, 2):
        a, b = f"${i}", f"${i + 1}"
        place = i // _WORDS * _PIECE_BYTES + i % _WORDS // 2 * _SECOND_BYTES
        # Whether one half of a word is all ones: then one more clears its uppermost bit.
        lines += [f"add.u32 t, {a}, 0x00010001;", f"lop3.b32 t, t, {a}, 0x80008000, 0x08;"]
        lines += [f"add.u32 u, {b}, 0x00010001;", f"lop3.b32 u, u, {b}, 0x80008000, 0x08;"]
        lines += ["or.b32 t, t, u;", "or.b32 missing, missing, t;", "setp.ne.u32 p, t, 0;"]
        # Four values of two bytes, as they are written: to PTX a load of words would race with their stores.
        lines += [f"@p ld.relaxed.gpu.global.v4.b16 {{a, b, c, d}}, [${2 * words} + {place}];"]
        lines += [f"@p mov.b32 {a}, {{a, b}};", f"@p mov.b32 {b}, {{c, d}};"]
    if again:
        lines += ["setp.ne.u32 p, missing, 0;", "@p bra AGAIN;"]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _operands(pieces):
    return ",".join(["=&r"] * (_WORDS * pieces) + ["r"] * (_WORDS * pieces) + ["l"] * 8)


@gluon.constexpr_function
def _types(dtype, count):
    return (dtype,) * count


@gluon.jit
def _look(x, X, AGAIN: gl.constexpr):
    PIECES: gl.constexpr = len(x)
    first_of_thread = X + (place_of(0) & ~_OF_THREAD)
    return gl.inline_asm_elementwise(
        _looking(PIECES, AGAIN), _operands(PIECES), x + (first_of_thread,),  # noqa: RUF005
        dtype=_types(gl.int16, PIECES), is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def settle(x, X):
    """Waits until all pieces x of X are written; returns their bits."""
    return _look(x, X, True)


@gluon.jit
def glance(X, i, count):
    """The bits of piece `i` of X [count] that are written by now; zeros behind them."""
    missing = gl.where(place_of(i) < count, -1, 0).to(gl.int16)
    return _look((missing,), X + i * (PIECE * 32), False)[0]


@gluon.jit
def leave(X, x, mask):
    """Writes results to their slots, for programs that poll these."""
    bits = x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32)
    gl.inline_asm_elementwise(_LEAVE, "=r,l,r,r", [X, bits, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take(X, WIDTH: gl.constexpr):
    """Waits for the result X [WIDTH] and returns it in pieces, with zeros behind it."""
    PIECES: gl.constexpr = pieces_of(WIDTH)
    x = ()
    for i in gl.static_range(PIECES):
        at = place_of(i)
        missing = gl.full(at.type.shape, -1, gl.int16, at.type.layout)
        if ends_in(i, WIDTH):
            missing = gl.where(at < WIDTH, -1, 0).to(gl.int16)
        x = x + (missing,)  # noqa: RUF005
    found = settle(x, X)
    x = ()
    for i in gl.static_range(PIECES):
        x = x + (found[i].to(gl.bfloat16, bitcast=True),)  # noqa: RUF005
    return x


@gluon.jit
def forget(X, first, last):
    """Marks this program's slots [first, last) of X as not written."""
    at = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    for start in range(first, last, 256):
        gl.store(X + start + at, gl.full([256], -1, gl.int16, at.type.layout), mask=start + at < last)
