"""Coded rows in kernels: the formats of `windowpane.device.codecs`, made and read in registers.

A row is a line of 16-bit words; *plane* p of it is the p-th code of every word, W consecutive dims. A kernel loads
words and takes planes out of them, each an operand of a matrix product as it stands: no byte ever moves between
threads. 16-bit operands are made two at a time by the instructions below; there is no 8-bit float type among them, so
they run on any card with bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What a kernel is told of a format; 0 is a plain one.
E4M3, E5M2, INT8, INT4 = 1, 2, 3, 4
CODES = {
    "fp8_e4m3": E4M3,
    "fp8_per_token_head": E4M3,
    "fp8_e5m2": E5M2,
    "int8_per_token_head": INT8,
    "int4_per_token_head": INT4,
}
_E4M3, _E5M2, _INT8, _INT4 = tl.constexpr(E4M3), tl.constexpr(E5M2), tl.constexpr(INT8), tl.constexpr(INT4)

WORD_BYTES = 2
# Added and taken off again, it rounds a float32 to a whole number: beyond 2^23 there is nothing between them.
_ROUND = tl.constexpr(1.5 * 2.0**23)
_TINIEST_SCALE = tl.constexpr(2.0**-100)


def _integers(take: str, bias: int) -> str:
    """Two codes as float16, whose mantissa has 10 bits: 0x6400 | code is 1024 + code, and `bias` is taken off."""
    return f"{{ .reg .b32 t, c; {take} mov.b32 c, {bias * 0x10001}; sub.f16x2 $0, t, c; }}"


def _raw(take: str) -> str:
    return f"{{ .reg .b32 t; {take} mov.b32 $0, t; }}"


def _floats(move: str, sign: str, mask: int, power: int) -> str:
    """Two codes as bfloat16: exponent and mantissa (`move`, `mask`) to their places, and 2^power for the other bias.

    Exact, subnormals too. Minus 0 is what a fused multiply-add may add without a trace.
    """
    factor = ((127 + power) << 7) * 0x10001
    return (
        f"{{ .reg .b32 t, s, c, z; {move} {sign} and.b32 s, s, 0x80008000; lop3.b32 t, t, {mask * 0x10001}, s, 0xEA; "
        f"mov.b32 c, {factor}; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, c, z; }}"
    )


# Two codes behind the exponent of 1024. A high nibble stays in its place, and counts 16 times its number.
_BYTES = ("lop3.b32 t, $1, 0x00FF00FF, 0x64006400, 0xEA;", "prmt.b32 t, $1, 0x64006400, 0x5351;")
_NIBBLES = tuple(
    f"{byte} lop3.b32 t, t, {mask}, 0x64006400, 0xEA;"
    for byte in ("mov.b32 t, $1;", "shr.u32 t, $1, 8;")
    for mask in ("0x000F000F", "0x00F000F0")
)


def _high_nibble(take: str) -> str:
    """Divided by 16, and 64 taken off."""
    return f"{{ .reg .b32 t, c, z; {take} mov.b32 c, 0x2C002C00; mov.b32 z, 0xD400D400; fma.rn.f16x2 $0, t, c, z; }}"


def _e4m3(move: str) -> str:
    """Two codes, moved to the upper bytes, as float16: its exponent has a bit more, and a bias that is 8 higher."""
    return (
        f"{{ .reg .b32 t, s, c; {move} shr.u32 t, s, 1; and.b32 t, t, 0x3F803F80; "
        "lop3.b32 t, s, 0x80008000, t, 0xEA; mov.b32 c, 0x5C005C00; mul.rn.f16x2 $0, t, c; }"
    )


_INSTRUCTIONS = {
    E4M3: (_e4m3("shl.b32 s, $1, 8;"), _e4m3("mov.b32 s, $1;")),
    E5M2: (
        _floats("shl.b32 t, $1, 5;", "shl.b32 s, $1, 8;", 0x0FE0, 112),
        _floats("shr.u32 t, $1, 3;", "mov.b32 s, $1;", 0x0FE0, 112),
    ),
    INT8: tuple(_integers(take, 0x6480) for take in _BYTES),  # 1024 + 128
    INT4: tuple(_high_nibble(take) if place % 2 else _integers(take, 0x6400) for place, take in enumerate(_NIBBLES)),
}
# What is left when neither offset nor factor is taken off: a product with queries can do that for whole rows.
_RAW_INSTRUCTIONS = {INT8: tuple(map(_raw, _BYTES)), INT4: tuple(map(_raw, _NIBBLES))}
_OFFSETS = {INT8: 1152.0, INT4: 1024.0}


@triton.constexpr_function
def _instructions(code, place, raw):
    return (_RAW_INSTRUCTIONS if raw and code in _RAW_INSTRUCTIONS else _INSTRUCTIONS)[code][place]


@triton.constexpr_function
def _raw_factor(code, place, operand):
    return 16.0 if code == INT4 and place % 2 and operand == tl.float16 else 1.0


@triton.constexpr_function
def _raw_offset(code, operand):
    return _OFFSETS[code] if code in _OFFSETS and operand == tl.float16 else 0.0


def operand_type(code: int, activations: torch.dtype) -> tl.dtype:
    """What planes become: float32 for exactness, else the 16-bit type that holds all codes and is made fastest."""
    if activations == torch.float32:
        return tl.float32
    return tl.bfloat16 if code == E5M2 else tl.float16


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def plane(words, PLACE: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr, RAW: tl.constexpr = False):
    """The numbers of one plane, before scales: what int4 codes are above their base, what others are.

    RAW leaves them as they are made fastest, for a product with what `for_raw` made of queries.
    """
    if tl.float32 == OPERAND:
        BITS: tl.constexpr = 4 if CODE == _INT4 else 8
        numbers = number((words.to(tl.int32) >> (PLACE * BITS)) & ((1 << BITS) - 1), CODE)
    else:
        ASM: tl.constexpr = _instructions(CODE, PLACE, RAW)
        # A dtype that came as an argument is not taken.
        if tl.float16 == OPERAND:
            numbers = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            numbers = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return numbers


@triton.jit
def for_raw(q, PLACE: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr):
    """Queries [heads, dims] of one plane as operands for raw numbers, and what the product is to start from, [heads].

    A tile's product is short: float32 holds the offset's share and what is left without it. Values are summed over
    a whole past, so theirs is taken off first.
    """
    q = (q.to(tl.float32) * (1.0 / _raw_factor(CODE, PLACE, OPERAND))).to(OPERAND)
    return q, tl.sum(q.to(tl.float32), 1) * -_raw_offset(CODE, OPERAND)


@triton.jit
def halves_difference(a, b, c, d):
    """a b - c d in float16, two at a time."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.f16x2 t, $3, $4; neg.f16x2 t, t; fma.rn.f16x2 $0, $1, $2, t; }", "=r,r,r,r,r",
        [a, b, c, d], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def halves_sum(a, b):
    return tl.inline_asm_elementwise(
        "add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def number(code, CODE: tl.constexpr):
    """Codes (int32) as float32 numbers."""
    if CODE == _E4M3:
        found = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
    elif CODE == _E5M2:
        found = (((code & 0x7F) << 21) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**112
    elif CODE == _INT8:
        found = code.to(tl.float32) - 128.0
    else:
        found = code.to(tl.float32)
    return found


@triton.jit
def dims_of(
    row, FIRST: tl.constexpr, COUNT: tl.constexpr, ok, W: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    """Dims [FIRST, FIRST + COUNT) of rows of words, before scales."""
    d = FIRST + tl.arange(0, COUNT)[None, :]
    if FIRST // W == (FIRST + COUNT - 1) // W:
        numbers = plane(tl.load(row + (d - FIRST // W * W), mask=ok, other=0), FIRST // W, CODE, OPERAND)
    else:
        BITS: tl.constexpr = 4 if CODE == _INT4 else 8
        words = tl.load(row + d % W, mask=ok, other=0).to(tl.int32)
        numbers = number((words >> (d // W * BITS)) & ((1 << BITS) - 1), CODE).to(OPERAND)
    return numbers


@triton.jit
def scales_of(SCALES, at, ok, layer_scale, CODE: tl.constexpr, PER_ROW: tl.constexpr):
    """(scale, base) of rows: x = base + scale * number. Rows that are not there have a scale of 1."""
    if PER_ROW:
        bits = tl.load(SCALES + at, mask=ok, other=0x3F80 if CODE == _INT4 else 0x3F800000)
        scale = (bits << 16 if CODE == _INT4 else bits).to(tl.float32, bitcast=True)
        base = (bits & -65536 if CODE == _INT4 else bits * 0).to(tl.float32, bitcast=True)
    else:
        scale = tl.where(ok, layer_scale, 1.0)
        base = scale * 0.0
    return scale, base


@triton.jit
def to_basis(x, D: tl.constexpr):
    """Rows [n, D] times the Hadamard matrix of `codecs.basis_for`: sums and differences of neighbours, log2 D times."""
    STAGES: tl.constexpr = _log2(D)
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(x, [x.shape[0], D // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [x.shape[0], D])
    return x * D**-0.5


@triton.jit
def encode(x, layer_scale, D: tl.constexpr, W: tl.constexpr, CODE: tl.constexpr, PER_ROW: tl.constexpr):
    """Rows [n, D] of float32: words [n, W] (int32, of which 16 bits count), what their scale sections hold (int32 [n]),
    and what they are once decoded.
    """
    BITS: tl.constexpr = 4 if CODE == _INT4 else 8
    if CODE == _INT4:
        base = -_rounded_up(-tl.min(x, 1), 16)
        step = _rounded_up(tl.maximum(tl.div_rn(tl.max(x, 1) - base, 15.0), _TINIEST_SCALE), 16)
        codes = tl.minimum(_nearest(tl.div_rn(x - base[:, None], step[:, None])), 15.0).to(tl.int32)
        decoded = base[:, None] + step[:, None] * number(codes, CODE)
        bits = base.to(tl.int32, bitcast=True) | (step.to(tl.int32, bitcast=True) >> 16)
    else:
        MOST: tl.constexpr = 127.0 if CODE == _INT8 else (448.0 if CODE == _E4M3 else 57344.0)
        scale = tl.max(x, 1) * 0.0 + layer_scale
        if PER_ROW:
            scale = _rounded_up(tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), MOST), _TINIEST_SCALE), 8)
        units = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if CODE == _INT8:
            codes = (_nearest(units) + 128.0).to(tl.int32)
        elif CODE == _E4M3:
            codes = _minifloat(units, 3, 7, MOST)
        else:
            codes = _minifloat(units, 2, 15, MOST)
        decoded = number(codes, CODE) * scale[:, None]
        bits = scale.to(tl.int32, bitcast=True)
    PLANES: tl.constexpr = 16 // BITS
    shifts = (tl.arange(0, PLANES) * BITS)[None, :, None]
    words = tl.sum(tl.reshape(codes, [x.shape[0], PLANES, W]) << shifts, 1)
    return words, bits, decoded


@triton.jit
def _rounded_up(x, DROPPED: tl.constexpr):
    MASK: tl.constexpr = (1 << DROPPED) - 1
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(x > 0, bits + MASK, bits) & ~MASK).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x):
    """Ties to even, for numbers below 2^22."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _minifloat(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    DROPPED: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(tl.abs(x), MOST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    subnormal = _nearest(tl.minimum(magnitude, LEAST) * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32)
    code = tl.where(magnitude < LEAST, subnormal, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
