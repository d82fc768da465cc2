"""Quantized weights in registers: what the units, scales and zero points of a block mean, for kernels."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

# What kernels know kinds of weights by.
INT4, FP8, MXFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"int4": INT4.value, "fp8": FP8.value, "mxfp4": MXFP4.value}

# Two units of int4 to a register: a mask and a magic exponent turn their values q into 128 + q (bfloat16) or 1024 + q
# (float16), exactly.
TAKE_INT4 = "\nlop3.b32 t0, $4, 0x000f000f, {magic}, 0xea;\n" + "".join(
    f"shr.u32 t{span}, $4, {4 * span};\nlop3.b32 t{span}, t{span}, 0x000f000f, {{magic}}, 0xea;\n" for span in (1, 2, 3)
)
# Adding the last operands takes that and the zero points away.
_TAKE_AWAY = "".join(f"\nfma.rn.{{kind}} ${span}, t{span}, one, ${5 + span};" for span in range(4))
_INT4 = "{{ .reg .b32 t0, t1, t2, t3, one; mov.b32 one, {one};" + TAKE_INT4 + _TAKE_AWAY + "\n}}"
_INT4_BFLOAT16 = tl.constexpr(_INT4.format(one="0x3f803f80", magic="0x43004300", kind="bf16x2"))
_INT4_FLOAT16 = tl.constexpr(_INT4.format(one="0x3c003c00", magic="0x64006400", kind="f16x2"))

# Two units of E2M1 codes: a shift and a mask put the sign to the top of a half register and the three other bits where
# bfloat16 has the end of its exponent and the top of its mantissa; those of the last code lie in three places.
_MXFP4_SPANS = (
    "and.b32 t, $4, 0x81c081c0;\n",
    "shl.b32 t, $4, 3;\nand.b32 t, t, 0x81c081c0;\n",
    "shl.b32 t, $4, 6;\nand.b32 t, t, 0x81c081c0;\n",
    """shr.u32 t, $4, 6;
and.b32 t, t, 0x01800180;
shr.u32 s, $4, 5;
lop3.b32 t, s, 0x00400040, t, 0xea;
shl.b32 s, $4, 5;
lop3.b32 t, s, 0x80008000, t, 0xea;
""",
)
# Of float16 the exponent ends three bits higher.
_MXFP4_HIGHER = "and.b32 s, t, 0x01c001c0;\nshl.b32 s, s, 3;\nlop3.b32 t, t, 0x80008000, s, 0xea;\n"
# A product puts the exponent's bias right (subnormal numbers too: 0.5 is one), or with a scale that has that in it.
_MXFP4_BIASED = "fma.rn.{kind} ${span}, t, bias, none;\n"
_MXFP4_SCALED = "mul.rn.bf16x2 ${span}, t, ${scale};\n"


def _mxfp4_asm(kind: str, bias: str) -> str:
    spans = [
        code + (_MXFP4_HIGHER if kind == "f16x2" else "") + _MXFP4_BIASED.format(kind=kind, span=span)
        for span, code in enumerate(_MXFP4_SPANS)
    ]
    return "{ .reg .b32 t, s, bias, none; mov.b32 bias, " + bias + "; mov.b32 none, 0x80008000;" + "".join(spans) + "}"


# Four scales for two units each come behind the units, in both halves of a register, times 2^126.
TAKE_MXFP4_BFLOAT16 = (
    "{ .reg .b32 t, s;\n"
    + "".join(code + _MXFP4_SCALED.format(span=span, scale=5 + 2 * span) for span, code in enumerate(_MXFP4_SPANS))
    + "}"
)
_MXFP4_BFLOAT16 = tl.constexpr(_mxfp4_asm("bf16x2", "0x7e807e80"))
_MXFP4_FLOAT16 = tl.constexpr(_mxfp4_asm("f16x2", "0x74007400"))
# Turns the exponent of E2M1 (bias 1) into that of bfloat16 and float32.
_MXFP4_BIAS = tl.constexpr(2.0**126)

# Two units of fp8: a byte of each goes to the top of a half register, its sign stays there, exponent and mantissa move
# to where they belong, and a product puts the exponent's bias right.
_FP8_SPAN = """
prmt.b32 t, $4, $5, {bytes};
shr.u32 s, t, {shift};
and.b32 s, s, {mask};
lop3.b32 t, t, 0x80008000, s, 0xea;
fma.rn.{kind} ${span}, t, bias, none;
"""


def _fp8_asm(kind: str, shift: int, mask: str, bias: str) -> str:
    spans = [
        # Bytes 1 and 3 of the result matter; what comes along in the others is masked away.
        _FP8_SPAN.format(bytes=f"0x{4 + span}{span}{span}{span}", shift=shift, mask=mask, kind=kind, span=span)
        for span in range(4)
    ]
    head = f".reg .b32 t, s, bias, none; mov.b32 bias, {bias}; mov.b32 none, 0x80008000;"
    return "{" + head + "".join(spans) + "}"


_FP8_BFLOAT16 = tl.constexpr(_fp8_asm("bf16x2", 4, "0x07f007f0", "0x7b807b80"))
_FP8_FLOAT16 = tl.constexpr(_fp8_asm("f16x2", 1, "0x3f803f80", "0x5c005c00"))
# Turns the exponent of fp8 (bias 7) into that of bfloat16 and float32 (bias 127).
_FP8_BIAS = tl.constexpr(2.0**120)


@triton.constexpr_function
def four_of(dtype):
    return (dtype,) * 4


@triton.jit
def fetch(S, Z, block, groups, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Scales and zero points of a block as they are stored. `S` and `Z` point to each output's first.

    WORDS: groups of 32, 64 or 128 with 16-bit scales, which are read as a word: loads of at least 32 bits are issued
    ahead of their use. Otherwise there are four scales and four zero points. Beyond the last block the last is read
    again.
    """
    scales = ()
    zeros = ()
    if WORDS:
        # Groups of a block, and the first of them.
        COUNT: tl.constexpr = 128 // GROUP
        group = tl.minimum(block * COUNT, groups - COUNT)
        if GROUP == 128:
            scales += (tl.load(S + group // 2) >> group % 2 * 16,)
        else:
            scales += (tl.load(S + group // COUNT),)
        if Z is not None:
            zeros += (tl.load(Z + group // 8) >> group % 8 * 4,)
    else:
        # Whether all spans have their scale in common.
        SHARED: tl.constexpr = GROUP % 128 == 0
        for span in tl.static_range(4):
            if span == 0 or not SHARED:
                group = tl.minimum((block * 128 + span * 32) // GROUP, groups - 1)
                scale = tl.load(S + group)
                if Z is not None:
                    zero = tl.load(Z + group // 8) >> group % 8 * 4
            scales += (scale,)
            if Z is not None:
                zeros += (zero,)
    return scales, zeros


@triton.jit
def scale_of(
    scales, span: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr
):
    """The scale of one span, in the dtype it is held in; of mxfp4 in bfloat16 or float32 (2^-127 reads as 0)."""
    if KIND == MXFP4:
        exponent = scales[0] >> 8 * span & 255
        if DTYPE == tl.bfloat16:  # noqa: SIM300 - a parameter, whatever its case
            return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:  # noqa: RET505 - both branches are compiled unless one is chosen here
            return (exponent << 23).to(tl.float32, bitcast=True)
    elif WORDS:
        return (scales[0] >> 16 * (span * 32 // GROUP)).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        return scales[span]


@triton.jit
def zero_of(zeros, span: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    if WORDS:
        return zeros[0] >> 4 * (span * 32 // GROUP) & 15
    else:  # noqa: RET505 - as above
        return zeros[span] & 15


@triton.jit
def decode(
    u, zeros, DTYPE: tl.constexpr, HAS_ZEROS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    KIND: tl.constexpr, USES_ASM: tl.constexpr,
):  # fmt: skip
    """The four operands of a tile of units […, 32], without their scales."""
    BFLOAT16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300 - a parameter, whatever its case
    values = ()
    if USES_ASM and KIND == INT4:
        # -(128 + z), or -(1024 + z) in float16: the zero point is the lowest bits of the mantissa.
        MAGIC: tl.constexpr = 0xC300 if BFLOAT16 else 0xE400
        away = ()
        for span in tl.static_range(4):
            if HAS_ZEROS:
                bits = (zero_of(zeros, span, GROUP, WORDS) | MAGIC).to(tl.int16)
                away += (tl.broadcast_to(tl.expand_dims(bits.to(DTYPE, bitcast=True), -1), u.shape),)
            else:
                away += (tl.full(u.shape, -136.0 if BFLOAT16 else -1032.0, DTYPE),)
        values = tl.inline_asm_elementwise(
            _INT4_BFLOAT16 if BFLOAT16 else _INT4_FLOAT16, "=r,=r,=r,=r,r,r,r,r,r",
            [u, away[0], away[1], away[2], away[3]], dtype=four_of(DTYPE), is_pure=True, pack=2,
        )  # fmt: skip
    elif USES_ASM and KIND == MXFP4:
        values = tl.inline_asm_elementwise(
            _MXFP4_BFLOAT16 if BFLOAT16 else _MXFP4_FLOAT16, "=r,=r,=r,=r,r", [u],
            dtype=four_of(DTYPE), is_pure=True, pack=2,
        )  # fmt: skip
    elif USES_ASM:
        values = tl.inline_asm_elementwise(
            _FP8_BFLOAT16 if BFLOAT16 else _FP8_FLOAT16, "=r,=r,=r,=r,r,r", [u],
            dtype=four_of(DTYPE), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == MXFP4:
        for span in tl.static_range(4):
            unit = u.to(tl.int32)
            if span < 3:
                bits = (unit >> 15 - 3 * span & 1) << 31 | (unit >> 6 - 3 * span & 7) << 22
            else:
                bits = (unit >> 10 & 1) << 31 | (unit >> 13 & 3) << 23 | (unit >> 11 & 1) << 22
            values += ((bits.to(tl.float32, bitcast=True) * _MXFP4_BIAS).to(DTYPE),)
    elif KIND == INT4:
        for span in tl.static_range(4):
            q = (u.to(tl.int32) >> 4 * span & 15).to(tl.float32)
            if HAS_ZEROS:
                q -= tl.expand_dims(zero_of(zeros, span, GROUP, WORDS), -1).to(tl.float32)
            else:
                q -= 8.0
            values += (q.to(DTYPE),)
    else:
        for span in tl.static_range(4):
            byte = u >> 8 * span
            bits = (byte & 0x80) << 24 | (byte & 0x7F) << 20
            values += ((bits.to(tl.float32, bitcast=True) * _FP8_BIAS).to(DTYPE),)
    return values
