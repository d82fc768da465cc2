"""Products with quantized weights against the dequantised matrix, in Triton's interpreter and float32."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F

from tests.kernels.interpreting import run_interpreted
from windowpane.lowering.packed import PackedWeight, pack_units, pack_zeros

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from windowpane.lowering.gpu.kernels import packed
    from windowpane.lowering.gpu.kernels.packed import Launch, dequantize_into, packed_linear

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


def test_packed_kernels_agree_with_plain_torch_in_the_interpreter():
    run_interpreted("tests.kernels.test_packed_kernels")


def random_weight(
    kind: str, outputs: int, inputs: int, group: int | None = None, zeros: bool = False, scale_outputs: int = 1
) -> PackedWeight:
    top = 256 if kind == "fp8" else 16
    values = torch.randint(0, top, (outputs, inputs), dtype=torch.uint8)
    if kind == "fp8":
        values[(values & 0x7F) == 0x7F] = 0  # NaN
    groups = 1 if group is None else -(-inputs // group)
    scales = torch.rand(-(-outputs // scale_outputs), groups) + 0.5
    if kind == "mxfp4":
        scales = torch.randint(124, 130, (outputs, -(-inputs // 128) * 4), dtype=torch.uint8)
    packed = pack_zeros(torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)) if zeros else None
    return PackedWeight(kind, inputs, group, scale_outputs, pack_units(values, kind), scales, packed)


def weights() -> list[PackedWeight]:
    """Every scheme, whole and ragged blocks, and outputs that no tile divides."""
    return [
        random_weight("int4", 50, 384, 32),
        random_weight("int4", 50, 384, 32, zeros=True),
        random_weight("int4", 33, 320, 64, zeros=True),
        random_weight("int4", 70, 1152, 128),
        random_weight("int4", 16, 200, None, zeros=True),
        random_weight("int4", 20, 512, 256),
        random_weight("int4", 20, 288, 96, zeros=True),
        random_weight("mxfp4", 50, 384, 32),
        random_weight("mxfp4", 33, 288, 32),
        random_weight("fp8", 50, 384, None),
        random_weight("fp8", 50, 320, 128, scale_outputs=32),
        random_weight("fp8", 18, 72, None),
    ]


def check_few_rows() -> None:
    for weight in weights():
        matrix = weight.dequantize(torch.float32)
        launches = (None, Launch(16, 8, 2, 2), Launch(64, 16, 1, 2, 3), Launch(16, 8, 1, 2, 5))
        for rows, launch in zip((1, 3, 11, 2), launches, strict=True):
            x, out = strided(rows, weight.inputs), nans(rows, len(weight))
            bias = torch.randn(len(weight)) if rows == 3 else None
            packed_linear(x, weight, out, bias, launch=launch)
            close(out, F.linear(x, matrix, bias))


def check_tiles() -> None:
    for weight in weights():
        matrix = weight.dequantize(torch.float32)
        for rows, launch in ((17, Launch(64, 32, 4, 2)), (70, Launch(32, 64, 4, 2, programs=3))):
            x, out = strided(rows, weight.inputs), nans(rows, len(weight))
            bias = torch.randn(len(weight))
            packed_linear(x, weight, out, bias, launch=launch)
            close(out, F.linear(x, matrix, bias))


def check_scales_that_are_read_as_words() -> None:
    """16-bit scales of the usual groups: those of a block are one load, or those of two blocks."""
    for group, zeros in ((32, False), (32, True), (64, True), (128, True)):
        weight = random_weight("int4", 40, 768, group, zeros=zeros)
        weight = replace(weight, scales=(weight.scales / 64).half())
        matrix = weight.dequantize(torch.float32)
        for rows in (2, 20):
            x, out = strided(rows, 768).half(), nans(rows, 40).half()
            packed_linear(x, weight, out)
            want = F.linear(x.float(), matrix)
            torch.testing.assert_close(out.float(), want, rtol=4e-3, atol=4e-3 * float(want.abs().max()))


def check_gates() -> None:
    for name, activation in ACTIVATIONS.items():
        for rows, launch in ((1, None), (10, Launch(32, 16, 4, 2))):
            weight = random_weight("int4", 2 * 37, 384, 32, zeros=rows > 1)
            x, out = strided(rows, 384) / 20, nans(rows, 37)
            packed_linear(x, weight, out, activation=name, launch=launch)
            gate, up = F.linear(x, weight.dequantize(torch.float32)).chunk(2, -1)
            close(out, activation(gate) * up)


def check_slices_of_outputs_and_reordered_inputs() -> None:
    weight = random_weight("int4", 48, 384, 64, zeros=True)
    x = torch.randn(2, 384)
    part = weight[16:40]
    out = nans(2, 24)
    packed_linear(x, part, out)
    close(out, F.linear(x, weight.dequantize(torch.float32)[16:40]))
    shuffled = weight.permute_inputs(torch.randperm(384))
    assert shuffled.order is not None
    out = nans(2, 48)
    packed_linear(x, shuffled, out)
    close(out, F.linear(x, shuffled.dequantize(torch.float32)))


def check_slices_of_a_dequantized_matrix() -> None:
    assert packed.slice_outputs(5376, 6000) == 5376
    assert packed.slice_outputs(43008, 6241) == 6144
    assert packed.slice_outputs(5376, 1560) == 1408, "four slices, nearly even, of whole tiles"
    assert packed.slice_outputs(5376, 100) == 100
    assert packed.slice_outputs(5376, 0) == 1


def check_dequantized() -> None:
    for weight in weights():
        out = nans(*weight.shape)
        dequantize_into(weight, out)
        assert torch.equal(out, weight.dequantize(torch.float32))
    for group, zeros in ((32, False), (64, True), (128, True)):
        weight = random_weight("int4", 40, 768, group, zeros=zeros)
        weight = replace(weight, scales=(weight.scales / 64).half())
        halves = nans(*weight.shape).half()
        dequantize_into(weight, halves)
        assert torch.equal(halves, weight.dequantize(torch.float16)), "scales that are read as words"


def check_many_rows_go_through_slices_of_the_matrix() -> None:
    most, at_once = packed.MOST_ROWS, packed.DEQUANTIZED_BYTES
    packed.MOST_ROWS, packed.DEQUANTIZED_BYTES = 4, 10 * 384 * 4
    for weight in (weights()[1], random_weight("fp8", 50, 384, 128, scale_outputs=32)):
        x, bias = strided(5, 384), torch.randn(len(weight))
        close(packed.packed_product(x, weight, bias), F.linear(x, weight.dequantize(torch.float32), bias))
        assert packed.packed_product(x[:0], weight, None).shape == (0, len(weight))
    packed.MOST_ROWS, packed.DEQUANTIZED_BYTES = most, at_once


def strided(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width + 24)[:, :width]


def nans(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))


if __name__ == "__main__":
    # numpy's own warnings about the interpreter's ways do not matter here.
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
