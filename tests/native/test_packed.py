"""Weights as GGUF stores them: repacked without loss, multiplied as a plain reference says, the same in any batch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tests.native.compiled import compiled_library
from windowpane.lowering.cpu.ops import CpuOps
from windowpane.lowering.linear import Linear
from windowpane.lowering.packed import JoinedWeight
from windowpane.lowering.strips import StripWeight, packed_linear
from windowpane.models.ggml import F32, GGML_TYPES, StripForm
from windowpane.native import build

KINDS = [number for number in GGML_TYPES if number != F32]
INTEGER_KINDS = [number for number in KINDS if GGML_TYPES[number].scale_bytes]
NAMES = [GGML_TYPES[number].scheme for number in KINDS]
# Where a block holds float16 scales: those must be numbers, all other bytes may be anything.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


@pytest.fixture(autouse=True)
def kernels() -> None:
    compiled_library()


def stored(kind: int, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Random bytes of a type [outputs, row bytes]: every bit pattern of values and small scales."""
    random, found = np.random.default_rng(seed), GGML_TYPES[kind]
    if not found.scale_bytes:
        values = random.standard_normal((outputs, inputs), dtype=np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    blocks = random.integers(0, 256, (outputs, inputs // found.inputs, found.stored_bytes), dtype=np.uint8)
    for at in () if found.scheme == "MXFP4" else HALVES.get(found.scheme, (0,)):
        scales = random.standard_normal(blocks.shape[:2]).astype(np.float16) * np.float16(0.1)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if found.scheme == "MXFP4":
        blocks[..., 0] = random.integers(0, 140, blocks.shape[:2])
    return blocks.reshape(outputs, -1)


def packed(kind: int, outputs: int, inputs: int, seed: int = 0) -> tuple[StripWeight, torch.Tensor]:
    """A weight, and what gguf's own reader says that it means."""
    raw = stored(kind, outputs, inputs, seed)
    weight = StripWeight.empty(StripForm(kind, outputs, inputs))
    weight.fill(0, torch.from_numpy(raw))
    return weight, torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(kind)).astype(np.float32))


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """What kernels multiply instead of x: 32 inputs with one scale, in float64."""
    groups = x.view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros(()))
    return ((groups * inverse).round().double() * (largest / 127).double()).view(x.shape)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("outputs", [1, 16, 40])
def test_repacking_loses_nothing(kind: int, outputs: int) -> None:
    weight, expected = packed(kind, outputs, 512)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    which = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(weight.rows(which), expected[which])
    assert weight.nbytes == weight.form.held_bytes("float32")


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("rows", [1, 3, 8, 77])
def test_products_are_those_of_inputs_in_8_bits(kind: int, rows: int) -> None:
    weight, values = packed(kind, 40, 768)
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, 768), torch.randn(40)
    x[0, 32:64] = 0  # a group without a scale
    taken = in_8_bits(x) if kind in INTEGER_KINDS else x.double()
    expected = taken @ values.double().t()
    scale = (taken.abs() @ values.double().abs().t()).amax()
    assert (weight.linear(x).double() - expected).abs().max() <= 2e-6 * scale
    assert (weight.linear(x, bias).double() - expected - bias).abs().max() <= 2e-6 * scale


@pytest.mark.parametrize("kind", INTEGER_KINDS, ids=[GGML_TYPES[k].scheme for k in INTEGER_KINDS])
def test_whole_numbers_are_exact(kind: int) -> None:
    """Inputs of ±127 and weights at the ends of their range: nothing saturates, nothing is rounded."""
    raw = stored(kind, 16, 256)
    name, found = GGML_TYPES[kind].scheme, GGML_TYPES[kind]
    blocks = raw.reshape(16, -1, found.stored_bytes)
    one = np.float16(1).view(np.uint16)
    blocks[:] = np.where(np.arange(16)[:, None, None] % 2, 255, 0)  # the largest and the smallest values
    for at in () if name == "MXFP4" else HALVES.get(name, (0,)):
        blocks[..., at], blocks[..., at + 1] = one & 255, one >> 8
    if name == "MXFP4":
        blocks[..., 0] = 128  # doubled values
    weight = StripWeight.empty(StripForm(kind, 16, 256))
    weight.fill(0, torch.from_numpy(raw))
    values = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(kind)).astype(np.float32))
    signs = torch.randint(0, 2, (9, 256), generator=torch.Generator().manual_seed(1)) * 2 - 1
    for x in (torch.full((9, 256), 127.0), torch.full((9, 256), -127.0), signs * 127.0):
        assert torch.equal(weight.linear(x).double(), x.double() @ values.double().t())


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_row_has_the_same_bits_in_any_batch(kind: int) -> None:
    weight, _ = packed(kind, 50, 512)
    x = torch.randn(150, 512, generator=torch.Generator().manual_seed(2))
    together, threads = weight.linear(x), torch.get_num_threads()
    for rows in (1, 2, 3, 5, 8, 13, 64, 65):
        assert torch.equal(weight.linear(x[-rows:]), together[-rows:])
    try:
        torch.set_num_threads(1)
        assert torch.equal(weight.linear(x), together)
    finally:
        torch.set_num_threads(threads)


def test_projections_of_one_input_are_one_product() -> None:
    parts = [packed(kind, outputs, 256, kind)[0] for kind, outputs in ((6, 48), (8, 20), (1, 33), (12, 16))]
    # Rows further apart than they are long.
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))[:, :256]
    bias = torch.arange(117.0)
    apart = torch.cat([part.linear(x) for part in parts], 1)
    library = build.library()
    assert library is not None
    joined = Linear(JoinedWeight(tuple(parts)), bias)
    assert torch.equal(CpuOps(library).linear(x, joined), apart + bias)
    assert torch.equal(CpuOps(library).linear(x, joined[:48]), (apart + bias)[:, :48])
    assert torch.equal(packed_linear(x, parts[1:], None), apart[:, 48:])


def test_outputs_are_cut_at_strips() -> None:
    weight, values = packed(14, 50, 256)
    assert torch.equal(weight[16:48].dequantize(torch.float32), values[16:48])
    assert torch.equal(weight[32:].dequantize(torch.float32), values[32:])
    with pytest.raises(IndexError, match="cut through strips of 16"):
        weight[8:32]


@pytest.mark.parametrize("kind", INTEGER_KINDS, ids=[GGML_TYPES[k].scheme for k in INTEGER_KINDS])
def test_scales_that_are_no_numbers_are_found(kind: int) -> None:
    raw, found = stored(kind, 40, 512), GGML_TYPES[kind]
    weight = StripWeight.empty(StripForm(kind, 40, 512))
    weight.fill(0, torch.from_numpy(raw))
    assert weight.has_finite_scales
    if found.scheme == "MXFP4":
        return  # its scales are exponents, which all are numbers
    for at in HALVES.get(found.scheme, (0,)):
        damaged = raw.copy()
        damaged[37, -found.stored_bytes + at : len(damaged[37]) - found.stored_bytes + at + 2] = (0, 0x7C)  # infinity
        weight.fill(0, torch.from_numpy(damaged))
        assert not weight.has_finite_scales


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_outputs_are_permuted_without_loss(kind: int) -> None:
    weight, values = packed(kind, 40, 512)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(weight.permute_outputs(order).dequantize(torch.float32), values[order])
