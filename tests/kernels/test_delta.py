"""Gated DeltaNet's kernels: against the reference in Triton's interpreter and float32, and compiled for Hopper.

`python3 -m bench.gpu_check delta` checks them at real sizes on a GPU.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.kernels.interpreting import run_interpreted
from tests.kernels.test_formats_compile import SHARED_BYTES, ints, record
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.attention.segments import ChunkQueries
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.lowering.gpu.kernels import delta, delta_chunks
from windowpane.lowering.gpu.kernels.delta import DeltaShape, decode_delta
from windowpane.lowering.gpu.kernels.delta_chunks import chunk_delta, delta_workspace_bytes
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces
from windowpane.schedule.step import Segment

BF16 = torch.bfloat16
QWEN = DeltaShape(16, 32, 128, 128, 4)  # Qwen3.5-35B-A3B


@pytest.mark.parametrize(
    "checks", [("decoding", "several", "strips"), ("segments", "correlated", "snapshots")], ids=" ".join
)
def test_states_move_as_in_the_reference(checks):
    run_interpreted("tests.kernels.interpreted_delta", *checks)


def layer_of(rows: int):
    """What both functions take first and last."""
    key_heads, heads, key_dim, value_dim, width = QWEN
    channels = 2 * key_heads * key_dim + heads * value_dim
    made = torch.zeros(rows, channels + heads * value_dim + 2 * heads, dtype=BF16)
    arena = torch.zeros(2**16, dtype=torch.uint8)
    unit, tail = OFFSET_UNIT_BYTES // 2, key_dim * (width - 1)
    tails = [
        StatePart(arena.view(BF16), i * key_heads * tail, unit, count, tail)
        for i, count in enumerate((key_heads, key_heads, heads))
    ]
    matrix = StatePart(arena.view(torch.float32), 4096, unit // 2, heads, key_dim * value_dim)
    weights = torch.zeros(channels, width), torch.zeros(heads), torch.zeros(heads), torch.zeros(value_dim)
    return made, (tails, matrix, *weights), torch.zeros(rows, heads * value_dim, dtype=BF16)


@pytest.mark.parametrize("several", [False, True], ids=["one row", "drafts"])
@pytest.mark.parametrize("rows", [1, 256])
def test_a_decoded_state_stays_in_registers(rows, several, monkeypatch, tmp_path):
    kernel = record(monkeypatch, delta, "_decode_kernel")
    made, layer, out = layer_of(rows)
    segments = ints(rows, len(Segment._fields)) if several else None
    decode_delta(made, StatePlaces(*[ints(rows)] * 3), *layer, out, key_heads=QWEN.key_heads, eps=1e-6, pdl=True,
                 segments=segments)  # fmt: skip
    ptx = kernel.compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx) and re.search(r"st\.global\S*\.v4", ptx)
    # The cap on registers that lets more programs run at once may cost a few addresses. So may rows behind the first:
    # launches that spill nothing take half again as long on an H200 (`bench.gpu_checks.states sweep drafts`).
    assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) <= (24 if several else 16)


def test_chunks_use_the_tensor_cores(monkeypatch, tmp_path):
    names = ("convolve", "solve", "pass", "gated_norm")
    kernels = {name: record(monkeypatch, delta_chunks, f"{name}_kernel") for name in names}
    segments = (Segment(0, 0, 256, 0, 0, 256),)
    made, layer, out = layer_of(256)
    workspace = torch.zeros(delta_workspace_bytes(QWEN, BF16, 256), dtype=torch.uint8)
    queries = ChunkQueries(torch.tensor(segments, dtype=torch.int32), segments, {})
    chunk_delta(made, StatePlaces(*[ints(1)] * 3), queries, *layer, out, workspace, key_heads=QWEN.key_heads, eps=1e-6,
                pdl=True)  # fmt: skip
    for name, kernel in kernels.items():
        assert ("wgmma" in kernel.compiled.asm["ptx"]) == (name in ("solve", "pass"))
        assert kernel.compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) == 0
    assert "cp.async" in kernels["pass"].compiled.asm["ptx"], "the next chunk is on its way"


@pytest.mark.parametrize(("key_dim", "value_dim", "warps"), [(16, 32, 2), (64, 32, 2), (64, 64, 4), (128, 128, 4)])
def test_small_heads_are_not_solved_by_four_warps(key_dim, value_dim, warps):
    """Triton compiles that wrongly for a GPU, which only a GPU shows: `python3 -m bench.gpu_check delta`."""
    shape = DeltaShape(2, 4, key_dim, value_dim, 4)
    assert delta_chunks.launch_for(shape, torch.bfloat16).solve_warps == warps


def test_a_workspace_below_one_chunk_is_refused():
    made, layer, out = layer_of(64)
    segments = (Segment(0, 0, 64, 0, 0, 64),)
    with pytest.raises(ValueError, match="too small for a chunk"):
        chunk_delta(made, StatePlaces(*[ints(1)] * 3), ChunkQueries(ints(1, 6), segments, {}), *layer, out,
                    torch.zeros(1000, dtype=torch.uint8), key_heads=QWEN.key_heads, eps=1e-6)  # fmt: skip
