"""KV formats at work: rows of numbers to stored bytes and back, in plain torch on any device. The yardstick of kernels.

A coded row is a line of 16-bit words. Word j holds dims j, W + j, 2W + j, … (W words; two 8-bit or four 4-bit codes
each, lowest bits first), so that a kernel takes whole words apart into pieces of consecutive dims and never moves
single bytes between threads:

    int8, dim 8     word 0: dims 0 | 4   word 1: 1 | 5   word 2: 2 | 6   word 3: 3 | 7
    int4, dim 8     word 0: dims 0 | 2 | 4 | 6   word 1: 1 | 3 | 5 | 7

Codes of `fp8` formats are E4M3 or E5M2 numbers, made and read with integer arithmetic alone. int8 codes are stored plus
128; the scale is the largest magnitude of a row over 127. int4 rows span their own smallest and largest value:
x = base + step * code, both bfloat16, base rounded down and step up so that no value is cut off.

Scales keep 16 significant bits, so that scale * code is exact in float32 and a row that went through its format once is
coded the same again: what is attended as present and what is then stored are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windowpane.kv.formats import KVFormat

WORD_BITS = 16
INT8_MOST = 127
INT8_BIAS = 128
INT4_MOST = 15
SCALE_DROPPED_BITS = 8
BFLOAT16_DROPPED_BITS = 16
LEAST_SHARE = 1e-6  # of the largest dim's mean square: dims that are never used are not blown up without end
TINIEST_SCALE = 2.0**-100  # rows of zeros have a scale too, and its logarithm is a number


@dataclass(frozen=True, slots=True)
class Minifloat:
    """An 8-bit float without infinities: what is larger than `most` is stored as `most`."""

    mantissa_bits: int
    bias: int
    most: float

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 codes, rounded to nearest, ties to even."""
        x = x.float().clamp(-self.most, self.most)
        magnitude = x.abs()
        drop = 23 - self.mantissa_bits
        bits = magnitude.view(torch.int32)
        rounded = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) >> drop
        normal = rounded - ((127 - self.bias) << self.mantissa_bits)
        subnormal = torch.round(magnitude * 2.0 ** (self.bias - 1 + self.mantissa_bits)).to(torch.int32)
        codes = torch.where(magnitude < 2.0 ** (1 - self.bias), subnormal, normal)
        return (codes | (torch.signbit(x).to(torch.int32) << 7)).to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """float32. Exponent and mantissa are put where float32 has them; a power of two makes up for its bias."""
        wide = codes.to(torch.int32)
        bits = ((wide & 0x7F) << (23 - self.mantissa_bits)) | ((wide & 0x80) << 24)
        return bits.view(torch.float32) * 2.0 ** (127 - self.bias)


E4M3 = Minifloat(mantissa_bits=3, bias=7, most=448.0)
E5M2 = Minifloat(mantissa_bits=2, bias=15, most=57344.0)
MINIFLOATS = {"fp8_e4m3": E4M3, "fp8_per_token_head": E4M3, "fp8_e5m2": E5M2}


def needs_layer_scale(fmt: KVFormat) -> bool:
    """Whether one scale serves all rows of a layer, so that it must be known before the first of them is stored."""
    return fmt.family == "fp8" and not fmt.scale_bytes


def row_words(fmt: KVFormat, dim: int) -> int:
    """16-bit words of a coded row."""
    return -(-dim * fmt.element_bits // WORD_BITS)


def encode(fmt: KVFormat, x: torch.Tensor, layer_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [..., dim] as words, int16 [..., words], and what stands in their scale section, int32 [...], if anything.

    A scale's 32 bits are one float32, or of int4 the bfloat16 step (low half) and base.
    """
    x = x.float()
    if fmt.name == "int4_per_token_head":
        return _encode_int4(x)
    if needs_layer_scale(fmt):
        return _pack(MINIFLOATS[fmt.name].encode(x / layer_scale), 8), None
    most = INT8_MOST if fmt.family == "int" else MINIFLOATS[fmt.name].most
    scale = _rounded_up(_shared_out(x.abs().amax(-1), most).clamp(min=TINIEST_SCALE), SCALE_DROPPED_BITS)
    units = x / scale[..., None]
    codes = MINIFLOATS[fmt.name].encode(units) if fmt.family == "fp8" else torch.round(units) + INT8_BIAS
    return _pack(codes, 8), scale.view(torch.int32)


def decode(
    fmt: KVFormat, words: torch.Tensor, scales: torch.Tensor | None, dim: int, layer_scale: float = 1.0
) -> torch.Tensor:
    """float32 [..., dim] of what `encode` made."""
    codes = _unpack(words, fmt.element_bits, dim)
    if scales is None:
        return MINIFLOATS[fmt.name].decode(codes) * layer_scale
    if fmt.name == "int4_per_token_head":
        step, base = (scales << 16).view(torch.float32), (scales & -(1 << 16)).view(torch.float32)
        return base[..., None] + step[..., None] * codes
    numbers = MINIFLOATS[fmt.name].decode(codes) if fmt.family == "fp8" else codes.float() - INT8_BIAS
    return numbers * scales.view(torch.float32)[..., None]


def basis_for(fmt: KVFormat, dims: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """The orthogonal matrix that K, V and queries are multiplied with before K and V are coded; None for none.

    A few dims of a row are often far larger than all others. Evenly spaced codes would spend themselves on them, and a
    float's error is largest where it is. A Hadamard matrix spreads every dim over all; it is its own inverse, and
    products of queries and keys do not change. A latent stays as it is, since K is rebuilt from its single dims, and so
    do formats with one scale per layer, which checkpoints are calibrated for.
    """
    if not (fmt.scale_bytes and len(dims) == 2 and dims[0] == dims[1] and dims[0] & (dims[0] - 1) == 0):
        return None
    matrix = torch.ones(1, 1)
    while len(matrix) < dims[0]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    basis: torch.Tensor = matrix / dims[0] ** 0.5
    return basis.to(device)


def balance_for(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What queries and keys are multiplied with before they are transformed, [2, KV heads, dim], from their mean
    squares in a warm-up pass, [KV heads, dim] each. One is the other's inverse.

    In its basis the error of a row is the same in every dim, as large as its dims are together; what it does to a score
    is as large as the query's dims are together. The fourth root makes the product of both least: a dim in which keys
    are huge and queries small no longer drowns the others. The two dims of a rotary pair have one factor, so that it is
    as good at any position.
    """
    queries, keys = (_by_pairs(x) for x in (queries, keys))
    balance = (queries / keys) ** 0.25
    kept = (keys.sum(-1) / (keys * balance.square()).sum(-1)).sqrt()  # the length of keys stays what it was
    balance *= kept[:, None]
    return torch.stack([1 / balance, balance])


def layer_scale_for(fmt: KVFormat, largest: float) -> float:
    """A scale for rows whose magnitudes reached `largest` in a warm-up pass.

    Half the range stays free for what later rows may bring: a float loses nothing by it but its smallest numbers.
    """
    return max(2.0 * largest / MINIFLOATS[fmt.name].most, TINIEST_SCALE)


def _by_pairs(squares: torch.Tensor) -> torch.Tensor:
    """Of both halves of a head together, and never 0."""
    halves = squares.view(len(squares), 2, -1).sum(1)
    halves = halves.clamp(min=TINIEST_SCALE).maximum(halves.amax(-1, keepdim=True) * LEAST_SHARE)
    return halves.repeat(1, 2)


def _encode_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    base = -_rounded_up(-x.amin(-1), BFLOAT16_DROPPED_BITS)
    step = _rounded_up(_shared_out(x.amax(-1) - base, INT4_MOST).clamp(min=TINIEST_SCALE), BFLOAT16_DROPPED_BITS)
    codes = torch.round((x - base[..., None]) / step[..., None]).clamp(max=INT4_MOST)
    return _pack(codes, 4), base.view(torch.int32) | (step.view(torch.int32) >> BFLOAT16_DROPPED_BITS)


def _shared_out(x: torch.Tensor, parts: float) -> torch.Tensor:
    """x / parts, rounded once. On a GPU torch multiplies with the inverse of a plain number, which may end just above
    the quotient; rounded up from there, a row that was coded once would have another scale the second time.
    """
    return x / torch.full((), parts, dtype=x.dtype, device=x.device)


def _rounded_up(x: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """The nearest number not below `x` whose last `dropped_bits` bits are 0."""
    bits, mask = x.contiguous().view(torch.int32), (1 << dropped_bits) - 1
    return torch.where(x > 0, bits + mask, bits).bitwise_and(~mask).view(torch.float32)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., dim] → int16 [..., words]; dims that a last word has no number for are 0."""
    per_word = WORD_BITS // bits
    words = -(-codes.shape[-1] // per_word)
    codes = torch.nn.functional.pad(codes.to(torch.int32), (0, words * per_word - codes.shape[-1]))
    pieces = codes.view(*codes.shape[:-1], per_word, words).unbind(-2)
    word = pieces[0]
    for place, piece in enumerate(pieces[1:], start=1):
        word = word | (piece << (place * bits))
    packed: torch.Tensor = word.to(torch.int16)  # the upper half wraps to negative numbers
    return packed


def _unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    wide = words.to(torch.int32)
    mask = (1 << bits) - 1
    pieces = [(wide >> (place * bits)) & mask for place in range(WORD_BITS // bits)]
    return torch.cat(pieces, -1)[..., :dim]
