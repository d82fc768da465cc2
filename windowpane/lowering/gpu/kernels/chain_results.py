"""Results that programs of a launch pass to each other, in bfloat16 (`chain_kernel`).

A result slot is filled with ones until it is written, so a reader can poll it: no result is all ones, since NaN is
rounded to 0x7FFF. No program counts arrivals and none fences: a fence would wait for weights in flight as well. Readers
rely on two-byte stores that become visible whole and without a fence. PTX does not promise it of plain stores; Hopper
does it.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from windowpane.lowering.gpu.kernels.chain_forms import PIECE_GROUPS
from windowpane.lowering.gpu.kernels.chain_inputs import ends_in, pieces_of, place_of

_PIECE_BYTES = PIECE_GROUPS * 32 * 2
_WORDS = 4  # of a thread's eight values of a piece, two and two beside each other
_SECOND_BYTES = 32  # from the first two to the others
_OF_THREAD = gl.constexpr(1 | 2 | 16)  # in which places of a thread's values differ


@gluon.constexpr_function
def _looking(pieces):
    """PTX that polls the slots that are not written yet. Operands: words that come out, words that go in, and eight
    times the place of a thread's first value.
    """
    words = _WORDS * pieces
    lines = ["{", ".reg .pred p;", ".reg .b32 t, u, missing;"]
    lines += [f"mov.b32 ${i}, ${words + i};" for i in range(words)]
    lines += ["AGAIN:", "mov.b32 missing, 0;"]
    for i in range(0, words, 2):
        a, b = f"${i}", f"${i + 1}"
        place = i // _WORDS * _PIECE_BYTES + i % _WORDS // 2 * _SECOND_BYTES
        # Whether one half of a word is all ones: then one more clears its uppermost bit.
        lines += [f"add.u32 t, {a}, 0x00010001;", f"lop3.b32 t, t, {a}, 0x80008000, 0x08;"]
        lines += [f"add.u32 u, {b}, 0x00010001;", f"lop3.b32 u, u, {b}, 0x80008000, 0x08;"]
        lines += ["or.b32 t, t, u;", "or.b32 missing, missing, t;", "setp.ne.u32 p, t, 0;"]
        lines += [f"@p ld.relaxed.gpu.global.v2.b32 {{{a}, {b}}}, [${2 * words} + {place}];"]
    return "\n".join([*lines, "setp.ne.u32 p, missing, 0;", "@p bra AGAIN;", "}"])


@gluon.constexpr_function
def _operands(pieces):
    return ",".join(["=&r"] * (_WORDS * pieces) + ["r"] * (_WORDS * pieces) + ["l"] * 8)


@gluon.constexpr_function
def _types(dtype, count):
    return (dtype,) * count


@gluon.jit
def settle(x, X):
    """Waits until all pieces x of X are written; returns their bits."""
    PIECES: gl.constexpr = len(x)
    first_of_thread = X + (place_of(0) & ~_OF_THREAD)
    return gl.inline_asm_elementwise(
        _looking(PIECES), _operands(PIECES), x + (first_of_thread,),  # noqa: RUF005
        dtype=_types(gl.int16, PIECES), is_pure=False, pack=8,
    )  # fmt: skip


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
