"""The packed form itself: units, products in tiles, slices, stacks and permutations of one weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from windowpane.lowering import packed as quantized
from windowpane.lowering.packed import (
    PackedWeight,
    pack_mxfp4,
    pack_units,
    pack_zeros,
    permute_inputs,
    permute_outputs,
    stack,
    unpack_units,
)
from windowpane.models.packing import MXFP4_BITS, PackedForm


def int4(outputs: int, inputs: int, group: int | None, *, zeros: bool) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight and its matrix."""
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    groups = 1 if group is None else inputs // group
    scales = torch.rand(outputs, groups) + 0.5
    points = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    group_of = torch.arange(inputs) // (group or inputs)
    middle = points[:, group_of].float() if zeros else torch.full((1, 1), 8.0)
    packed = PackedWeight(
        "int4", inputs, group, 1, pack_units(values, "int4"), scales, pack_zeros(points) if zeros else None
    )
    return packed, (values.float() - middle) * scales[:, group_of]


def fp8(outputs: int, inputs: int, block: tuple[int, int]) -> tuple[PackedWeight, torch.Tensor]:
    values = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1])) + 0.5
    matrix = values.float() * scales.repeat_interleave(block[0], 0)[:outputs].repeat_interleave(block[1], 1)[:, :inputs]
    return PackedWeight("fp8", inputs, block[1], block[0], pack_units(values.view(torch.uint8), "fp8"), scales), matrix


def mxfp4(outputs: int, inputs: int) -> tuple[PackedWeight, torch.Tensor]:
    """From what a checkpoint stores; the matrix as transformers reads it."""
    blocks = torch.randint(0, 256, (1, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 132, (1, outputs, inputs // 32), dtype=torch.uint8)
    matrix = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t().contiguous()
    return pack_mxfp4(blocks[0], scales[0]), matrix


def weights() -> list[tuple[PackedWeight, torch.Tensor]]:
    torch.manual_seed(1)
    return [
        *(int4(24, inputs, group, zeros=z) for inputs, group in ((256, 32), (192, 64), (200, None)) for z in (0, 1)),
        int4(24, 384, 128, zeros=True),
        mxfp4(24, 320),
        fp8(24, 320, (8, 128)),
        fp8(24, 96, (16, 32)),
    ]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "TILE_VALUES", 1000)


def test_a_unit_holds_inputs_32_apart() -> None:
    values = torch.randint(0, 16, (3, 200), dtype=torch.uint8)
    units = pack_units(values, "int4")
    assert units.shape == (3, 64) and units.dtype == torch.int16
    for place, column in enumerate((5, 37, 69, 101)):
        assert (units[1, 5].item() >> 4 * place) & 15 == values[1, column]
    assert (units[2, 32 + 7].item() >> 8) & 15 == values[2, 128 + 64 + 7]
    assert torch.equal(unpack_units(units, "int4")[:, :200], values)
    floats = torch.randint(0, 256, (3, 200), dtype=torch.uint8)
    units = pack_units(floats, "fp8")
    assert (units[1, 5].item() >> 16) & 255 == floats[1, 69]
    assert torch.equal(unpack_units(units, "fp8")[:, :200], floats)
    units = pack_units(values, "mxfp4")
    for column, (sign, (high, middle, low)) in zip((5, 37, 69, 101), MXFP4_BITS, strict=True):
        bits = [units[1, 5].item() >> place & 1 for place in (sign, high, middle, low)]
        assert bits == [values[1, column].item() >> bit & 1 for bit in (3, 2, 1, 0)]
    assert torch.equal(unpack_units(units, "mxfp4")[:, :200], values)


def test_products_in_tiles_are_those_of_the_whole_matrix() -> None:
    for packed, matrix in weights():
        assert torch.equal(packed.dequantize(torch.float32), matrix)
        x, bias = torch.randn(3, packed.inputs), torch.randn(24)
        torch.testing.assert_close(packed.linear(x, bias), F.linear(x, matrix, bias), rtol=1e-5, atol=1e-3)


def test_outputs_may_be_sliced_and_stacked() -> None:
    for (packed, matrix), (more, below) in zip(weights(), weights(), strict=True):
        joined = stack([packed[:17], more])
        assert isinstance(joined, PackedWeight)
        whole = torch.cat([matrix[:17], below])
        assert torch.equal(joined.dequantize(torch.float32), whole)
        assert torch.equal(joined[5:30].dequantize(torch.float32), whole[5:30])


def test_inputs_and_outputs_may_be_permuted() -> None:
    for packed, matrix in weights():
        order = torch.randperm(8)
        found = permute_outputs(packed, order)
        assert isinstance(found, PackedWeight)
        assert torch.equal(found.dequantize(torch.float32), matrix.view(3, 8, -1)[:, order].flatten(0, 1))
        for heads in (1, 2):
            order = torch.randperm(packed.inputs // heads)
            found = permute_inputs(packed, order)
            assert isinstance(found, PackedWeight)
            expected = matrix.view(24, heads, -1)[:, :, order].flatten(1)
            assert torch.equal(found.dequantize(torch.float32), expected)
            x = torch.randn(2, packed.inputs)
            torch.testing.assert_close(found.linear(x), x @ expected.t(), rtol=1e-5, atol=1e-3)
            again = permute_inputs(found, order)
            assert isinstance(again, PackedWeight)
            assert torch.equal(again.dequantize(torch.float32), expected.view(24, heads, -1)[:, :, order].flatten(1))


def test_groups_that_move_whole_need_no_order() -> None:
    packed, matrix = int4(8, 512, 32, zeros=True)
    # Rotary dims of a head of 256 to the front, as latent layers do: 64 + 64 of them.
    every = torch.arange(256)
    order = torch.cat([every[:64], every[128:192], every[64:128], every[192:]])
    found = permute_inputs(packed, order)
    assert isinstance(found, PackedWeight)
    assert found.order is None
    assert torch.equal(found.dequantize(torch.float32), matrix.view(8, 2, 256)[:, :, order].flatten(1))


def test_projections_of_other_orders_are_not_stacked() -> None:
    packed, _ = int4(8, 256, 64, zeros=False)
    first, second = (packed.permute_inputs(torch.randperm(256)) for _ in range(2))
    x = torch.randn(2, 256)
    joined = stack([first, second, first])
    expected = torch.cat([first.linear(x), second.linear(x), first.linear(x)], dim=1)
    assert torch.equal(quantized.product(x, joined), expected)
    assert isinstance(stack([first, first]), PackedWeight)


def test_a_form_says_what_is_held() -> None:
    form = PackedForm("int4", 24, 200, 64, has_zeros=True, has_order=True)
    held = PackedWeight.empty(form, torch.bfloat16, torch.device("cpu"))
    assert held.shape == (24, 200)
    # 2 blocks of 32 units, 4 groups of scales, their zero points in a word, and the order.
    assert held.nbytes == form.held_bytes("bfloat16") == 24 * (2 * 64 + 4 * 2 + 4) + 200 * 4


def test_experts_of_a_checkpoint_become_the_rows_of_one_weight() -> None:
    blocks = torch.randint(0, 256, (3, 8, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 5), dtype=torch.uint8)
    weight = pack_mxfp4(blocks, scales)
    form = PackedForm("mxfp4", 24, 160, 32)
    assert weight.nbytes == form.held_bytes("bfloat16") == 24 * (2 * 64 + 8), "scales of whole blocks"
    assert weight.shape == (24, 160) and form.problem is None
    for expert in range(3):
        alone = pack_mxfp4(blocks[expert], scales[expert]).dequantize(torch.bfloat16)
        assert torch.equal(weight[8 * expert : 8 * expert + 8].dequantize(torch.bfloat16), alone)
    part = weight.some_inputs(range(32, 128))
    assert torch.equal(part.dequantize(torch.float32), weight.dequantize(torch.float32)[:, 32:128])
    with pytest.raises(ValueError, match="not of one mxfp4 weight"):
        pack_mxfp4(blocks, scales[:, :, 1:])
    assert PackedForm("mxfp4", 24, 160, 64).problem is not None
