"""Kernels of recurrent states, compiled for real layers from what the engine would launch. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.test_formats_compile import CPU, SHARED_BYTES, ints, numbers, record
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.attention.segments import ChunkQueries
from windowpane.device import tables
from windowpane.lowering.gpu.kernels import causal_convolution, delta, delta_chunks, gated, mamba2
from windowpane.lowering.gpu.kernels.delta import DeltaShape, decode_delta
from windowpane.lowering.gpu.kernels.delta_chunks import chunk_delta, delta_workspace_bytes
from windowpane.lowering.gpu.kernels.mamba2 import Mamba2Layer
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces
from windowpane.models.families.mamba import Mamba
from windowpane.schedule.step import Segment

SHAPES = {
    "nemotron 3 nano": (Mamba(64, 64, 8, 128, 4, "float32"), {"norms_groups": True}),
    "granite 4 small": (Mamba(128, 64, 1, 128, 4, "float32"), {}),
    "falcon-h1 34b": (Mamba(32, 128, 2, 256, 4, "float32"), {"norms_first": True, "multipliers": (1.1,) * 5}),
}
# Chunks that leave some are few: one for each beginning that prompts share.
SPILLED_BY_SNAPSHOTS = 512


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


def with_memory_filled(run: Callable[[], Any]) -> Any:
    """Run it where memory that nobody wrote is not zero."""
    torch.use_deterministic_algorithms(True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


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
    for snapshots in (None, ints(7)):
        mamba2.chunk_mamba2(made, places, ints(2, 6), 300, 3, layer, out, snapshots, pdl=True)
        for kernel in kernels:
            spilled = SPILLED_BY_SNAPSHOTS if snapshots is not None and kernel is kernels[1] else 8
            assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) <= spilled, kernel.kernel.fn.__name__
            assert kernel.compiled.metadata.shared <= SHARED_BYTES[90]
        assert "async_copy" in kernels[1].compiled.asm["ttgir"], "a chunk is read while the one before it is computed"
    in_one_slot = places._replace(aside=torch.zeros(8, 4096, dtype=torch.bfloat16))
    mamba2.decode_mamba2(made, in_one_slot, layer, out)
    mamba2.chunk_mamba2(made, in_one_slot, ints(2, 6), 300, 3, layer, out)


def test_kernels_of_the_delta_rule_compile_with_snapshots_and_states_in_one_slot(monkeypatch, tmp_path):
    """Heads of Qwen3.5, fewer of them."""
    kernels = [record(monkeypatch, delta_chunks, name, 90) for name in ("convolve_kernel", "pass_kernel")]
    others = [record(monkeypatch, delta_chunks, name, 90) for name in ("solve_kernel", "gated_norm_kernel")]
    decoding = record(monkeypatch, delta, "_decode_kernel", 90)
    key_heads, heads, dim, width = 4, 8, 128, 4
    arena, tail = torch.zeros(1024, dtype=torch.bfloat16), dim * (width - 1)
    tails = [StatePart(arena, 0, 128, n, tail) for n in (key_heads, key_heads, heads)]
    matrix = StatePart(torch.zeros(1024), 8192, 64, heads, dim * dim)
    conv, of_heads = torch.zeros((2 * key_heads + heads) * dim, width), torch.zeros(heads)
    weights = (tails, matrix, conv, of_heads, of_heads, torch.zeros(dim))
    made, out = numbers(300, len(conv) + heads * (dim + 2)), numbers(300, heads * dim)
    shape = DeltaShape.of(tails, matrix, conv, key_heads)
    workspace = torch.zeros(delta_workspace_bytes(shape, torch.bfloat16), dtype=torch.uint8)
    segment = Segment(0, 0, 300, 0, 0, 300)
    segments = ChunkQueries(torch.tensor([segment], dtype=torch.int32), (segment,), {})
    places = StatePlaces(ints(1), ints(1), ints(1))
    in_one_slot = places._replace(aside=torch.zeros(1, 4096, dtype=torch.bfloat16))
    for where, snapshots in ((places, None), (places, ints(7)), (in_one_slot, ints(7))):
        chunk_delta(made, where, segments, *weights, out, workspace, key_heads=key_heads, eps=1e-6, snapshots=snapshots)
        for kernel in (*kernels, *others):
            spilled = SPILLED_BY_SNAPSHOTS if snapshots is not None and kernel is kernels[1] else 0
            assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) <= spilled, kernel.kernel.fn.__name__
        assert "async_copy" in kernels[1].compiled.asm["ttgir"], "a chunk is read while the one before it is computed"
    for where in (places, in_one_slot):
        decode_delta(made[:1], where, *weights, out[:1], key_heads=key_heads, eps=1e-6)
        assert stack_bytes(decoding.compiled.asm["cubin"], tmp_path) <= 8


def test_what_else_hybrid_models_launch_compiles(monkeypatch):
    convolving = record(monkeypatch, causal_convolution, "_convolution_kernel", 90)
    tail = StatePart(torch.zeros(1024, dtype=torch.bfloat16), 0, 128, 2048, 2)
    places, conv = StatePlaces(ints(8), ints(8), ints(8)), torch.zeros(2048, 3)
    made, out = numbers(8, 3 * 2048), numbers(8, 2048)
    for decoding, segments, longest in ((8, None, 1), (6, ints(2, 6), 300), (0, ints(8, 6), 5)):
        convolving.compiled = None
        causal_convolution.short_convolution(made, places, decoding, segments, longest, tail, conv, None, out, pdl=True)
        assert convolving.compiled is not None
    convolving.compiled, in_one_slot = None, places._replace(aside=torch.zeros(8, 4096, dtype=torch.bfloat16))
    causal_convolution.short_convolution(
        made, in_one_slot, 6, ints(2, 6), 300, tail, conv, None, out, ints(7)
    )  # fmt: skip
    assert convolving.compiled is not None
    looking_up = record(monkeypatch, tables, "_state_pages_kernel", 90)
    tables.DeviceTables([(8, 2, 30)], CPU).state_pages(0, ints(8), ints(8))
    assert looking_up.compiled is not None
    found = with_memory_filled(lambda: tables.DeviceTables([(8, 1, 30)], CPU).state_pages(0, ints(8), ints(8)))
    assert not any(pages.any() for pages in found), "torch indexes tails by pages that were not looked up yet"
    gating_rows = record(monkeypatch, gated, "_row_gate_kernel", 90)
    gated.times_row_gate(out, out, numbers(1, 2048), pdl=True)
    assert gating_rows.compiled is not None
    gating = record(monkeypatch, gated, "_pointwise_kernel", 90)
    for launch in (lambda: gated.times_sigmoid(out, made[:, 2048:], pdl=True), lambda: gated.relu2(out, pdl=True)):
        gating.compiled = None
        launch()
        assert gating.compiled is not None
