"""Kernels of adapters, compiled for Hopper from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_experts_compile import record
from tests.kernels.test_formats_compile import SHARED_BYTES
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.lowering.gpu.adapters import most_tiles, tile_rows
from windowpane.lowering.gpu.kernels import adapters
from windowpane.lowering.gpu.kernels.adapters import RowTiles, adapted_gated, empty_shrunk, expand, shrink

BF16, SLOTS = torch.bfloat16, 16


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (256, 16), (8192, 64)])
def test_projections_of_gemma_4_e4b(rows, rank, monkeypatch, tmp_path):
    names = ("shrink_kernel", "expand_kernel", "adapted_gated_kernel")
    kernels = [record(monkeypatch, adapters, name) for name in names]
    hidden, outputs, width = 2560, 3072, 10240
    tiles = most_tiles(rows, SLOTS)
    by_adapter = RowTiles(*(torch.zeros(size, dtype=torch.int32) for size in (tiles, (tiles, tile_rows(rows)))))
    a, b = torch.zeros(SLOTS, 3, rank, hidden, dtype=BF16), torch.zeros(SLOTS, outputs, rank, dtype=BF16)
    x, out = torch.zeros(rows, hidden, dtype=BF16), torch.zeros(rows, outputs, dtype=BF16)
    shrunk = empty_shrunk(a, by_adapter)
    shrink(x, a, by_adapter, shrunk, pdl=True)
    sections = torch.zeros(24, 3, dtype=torch.int32)
    expand(shrunk, b, sections, by_adapter, out, aligned=True, pdl=True)
    made, b = torch.zeros(rows, 2 * width, dtype=BF16), torch.zeros(SLOTS, 2 * width, rank, dtype=BF16)
    inner = made.new_empty(rows, width)
    adapted_gated(made, shrunk, b, (0, 1), by_adapter, inner, "gelu_pytorch_tanh", pdl=True)
    for kernel in kernels:
        (compiled,) = kernel.found
        assert rank == 1 or "global.b16" not in compiled.asm["ptx"], "values move one by one"
        assert "mma" in compiled.asm["ptx"], "products do not go to the tensor cores"
        assert kernel is not kernels[0] or "cp.async" in compiled.asm["ptx"], "loads do not run ahead"
        assert compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
