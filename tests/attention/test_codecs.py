"""Rows into bytes and back: error bounds, exact 8-bit floats, and that coding what was coded changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowpane.device import codecs
from windowpane.kv.formats import FORMATS, KVFormat

CODED = [fmt for fmt in FORMATS.values() if fmt.family != "float"]
LAYER_SCALE = 0.75


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """A few rows of any width, over many magnitudes, some of them with an outlier, an offset or nothing in them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dim = draw(st.sampled_from([1, 2, 3, 5, 16, 64, 80, 256]))
    x = torch.randn(4, dim, generator=generator) * 2.0 ** draw(st.integers(-20, 12))
    x[1] += x[1].abs().max() * draw(st.sampled_from([0, 1, -5]))
    x[2, 0] *= draw(st.sampled_from([1, 30]))
    x[3] = 0
    return x


def through(fmt: KVFormat, x: torch.Tensor) -> torch.Tensor:
    words, scales = codecs.encode(fmt, x, LAYER_SCALE)
    assert words.dtype == torch.int16 and words.shape[-1] * 2 <= fmt.row_bytes(x.shape[-1])
    assert (scales is not None) == (fmt.scale_bytes == 4)
    return codecs.decode(fmt, words, scales, x.shape[-1], LAYER_SCALE)


def largest_error(fmt: KVFormat, x: torch.Tensor) -> torch.Tensor:
    """What each number may be off by: half a step of its format, a hair more for the rounding of scales."""
    if fmt.name == "int8_per_token_head":
        return x.abs().amax(-1, keepdim=True) / 127 * 0.501 + 1e-30
    if fmt.name == "int4_per_token_head":
        low = x.amin(-1, keepdim=True)
        span = x.amax(-1, keepdim=True) - low
        return (span + low.abs() * 2**-7) / 15 * (0.5 + 2**-7) + 1e-29
    kind = codecs.MINIFLOATS[fmt.name]
    scale = LAYER_SCALE if not fmt.scale_bytes else (x.abs().amax(-1, keepdim=True) / kind.most).clamp(min=2.0**-100)
    relative, smallest = 2.0 ** -(kind.mantissa_bits + 1), 2.0 ** (1 - kind.bias - kind.mantissa_bits)
    return torch.maximum(x.abs() * relative, smallest / 2 * torch.as_tensor(scale)) * 1.001


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
@given(x=rows())
@settings(max_examples=60, deadline=None)
def test_no_number_is_further_off_than_half_a_step(fmt, x):
    if not fmt.scale_bytes:
        most = codecs.MINIFLOATS[fmt.name].most * LAYER_SCALE
        x = x.clamp(-most, most)  # beyond its layer's range a number is cut off
    assert ((through(fmt, x) - x).abs() <= largest_error(fmt, x)).all()


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
@given(x=rows())
@settings(max_examples=60, deadline=None)
def test_what_was_coded_once_is_coded_the_same_again(fmt, x):
    if fmt.name == "int4_per_token_head":
        x = x - (x.amin(-1, keepdim=True) + x.amax(-1, keepdim=True)) / 2  # rows about 0, as K and V are
    once = through(fmt, x)
    assert torch.equal(through(fmt, once), once)


@pytest.mark.parametrize("fmt", CODED, ids=lambda f: f.name)
def test_rows_of_zeros_stay_zeros(fmt):
    assert torch.equal(through(fmt, torch.zeros(3, 64)).abs(), torch.zeros(3, 64))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(codecs.E4M3, torch.float8_e4m3fn), (codecs.E5M2, torch.float8_e5m2)], ids=["E4M3", "E5M2"]
)
def test_eight_bit_floats_are_those_of_torch_bit_for_bit(ours, theirs):
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(theirs).float()
    finite = values.isfinite()
    assert torch.equal(ours.decode(codes)[finite], values[finite])
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 6, 100_000)
    ties = (values[finite].sort().values[1:] + values[finite].sort().values[:-1]) / 2
    for numbers in (x, ties, values[finite]):
        want = numbers.clamp(-ours.most, ours.most).to(theirs).view(torch.uint8)
        assert torch.equal(ours.encode(numbers), want)


def test_words_hold_dims_a_fixed_distance_apart():
    """What kernels rely on when they take words apart."""
    x = torch.arange(-8.0, 8.0)
    words, scale = codecs.encode(FORMATS["int8_per_token_head"], x)
    steps = torch.round(x / scale.view(torch.float32)).int() + 128
    assert ((words.int() & 0xFF) == steps[:8]).all() and (((words.int() >> 8) & 0xFF) == steps[8:]).all()
    words, _ = codecs.encode(FORMATS["int4_per_token_head"], x)
    for place in range(4):
        assert (((words.int() >> (4 * place)) & 0xF) == torch.arange(4 * place, 4 * place + 4)).all()
