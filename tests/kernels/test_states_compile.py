"""Kernels of recurrent states, compiled for real layers from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_formats_compile import CPU, SHARED_BYTES, ints, numbers, record
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.device import tables
from windowpane.lowering.gpu.kernels import causal_convolution, gated, mamba2
from windowpane.lowering.gpu.kernels.mamba2 import Mamba2Layer
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces
from windowpane.models.families.mamba import Mamba

SHAPES = {
    "nemotron 3 nano": (Mamba(64, 64, 8, 128, 4, "float32"), {"norms_groups": True}),
    "granite 4 small": (Mamba(128, 64, 1, 128, 4, "float32"), {}),
    "falcon-h1 34b": (Mamba(32, 128, 2, 256, 4, "float32"), {"norms_first": True, "multipliers": (1.1,) * 5}),
}


def layer_of(name: str, dtype: torch.dtype) -> Mamba2Layer:
    sizes, rest = SHAPES[name]
    described = sizes.mixer("", 4096, 0, 1e-5, **rest)
    arena = torch.zeros(1024, dtype=dtype)
    tails = (StatePart(arena, 0, 128, 1, 1), StatePart(arena, 4096, 128, 1, 1))
    channels, heads = described.conv.shape[0], torch.zeros(described.heads)
    matrix = StatePart(torch.zeros(1024), 8192, 64, 1, 1)
    inner = torch.zeros(described.heads * described.head_dim)
    small = {"conv": torch.zeros(channels, 4), "conv_bias": torch.zeros(channels), "norm": inner}
    return Mamba2Layer(described, tails, matrix, rates=heads, dt_bias=heads, skip=heads, **small)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_of_mamba_2_keep_their_state_in_registers(name, monkeypatch, tmp_path):
    layer = layer_of(name, torch.bfloat16)
    kernels = [
        *(record(monkeypatch, mamba2, kernel, 90) for kernel in ("_decode_kernel", "_scan_kernel", "_norm_kernel")),
        record(monkeypatch, causal_convolution, "_convolution_kernel", 90),
    ]
    described = layer.described
    width = 2 * layer.inner + 2 * described.groups * described.state_dim + described.heads
    made, places = torch.zeros(8, width, dtype=torch.bfloat16), StatePlaces(ints(8), ints(8), ints(8))
    out = torch.zeros(8, layer.inner, dtype=torch.bfloat16)
    mamba2.decode_mamba2(made, places, layer, out, ints(8, 6), pdl=True)  # with drafts
    assert stack_bytes(kernels[0].compiled.asm["cubin"], tmp_path) <= 16
    mamba2.decode_mamba2(made, places, layer, out, pdl=True)
    mamba2.chunk_mamba2(made, places, ints(2, 6), 300, 3, layer, out, pdl=True)
    for kernel in kernels:
        assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) <= 8, kernel.kernel.fn.__name__
        assert kernel.compiled.metadata.shared <= SHARED_BYTES[90]


def test_what_else_hybrid_models_launch_compiles(monkeypatch):
    convolving = record(monkeypatch, causal_convolution, "_convolution_kernel", 90)
    tail = StatePart(torch.zeros(1024, dtype=torch.bfloat16), 0, 128, 2048, 2)
    places, conv = StatePlaces(ints(8), ints(8), ints(8)), torch.zeros(2048, 3)
    made, out = numbers(8, 3 * 2048), numbers(8, 2048)
    for decoding, segments, longest in ((8, None, 1), (6, ints(2, 6), 300), (0, ints(8, 6), 5)):
        convolving.compiled = None
        causal_convolution.short_convolution(made, places, decoding, segments, longest, tail, conv, None, out, pdl=True)
        assert convolving.compiled is not None
    looking_up = record(monkeypatch, tables, "_state_pages_kernel", 90)
    tables.DeviceTables([(8, 2, 30)], CPU).state_pages(0, ints(8), ints(8))
    assert looking_up.compiled is not None
    gating_rows = record(monkeypatch, gated, "_row_gate_kernel", 90)
    gated.times_row_gate(out, out, numbers(1, 2048), pdl=True)
    assert gating_rows.compiled is not None
    gating = record(monkeypatch, gated, "_pointwise_kernel", 90)
    for launch in (lambda: gated.times_sigmoid(out, made[:, 2048:], pdl=True), lambda: gated.relu2(out, pdl=True)):
        gating.compiled = None
        launch()
        assert gating.compiled is not None
