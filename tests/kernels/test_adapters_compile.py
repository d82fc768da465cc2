"""Kernels of adapters, compiled for Hopper from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_experts_compile import record
from tests.kernels.test_formats_compile import SHARED_BYTES
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.lowering.gpu.adapters import most_tiles, tile_rows
from windowpane.lowering.gpu.kernels import adapters
from windowpane.lowering.gpu.kernels.adapters import RowTiles, expand, shrink

BF16, SLOTS = torch.bfloat16, 16


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (256, 16), (256, 64), (8192, 16)])
def test_q_k_and_v_of_gemma_4_e4b(rows, rank, monkeypatch, tmp_path):
    kernels = [record(monkeypatch, adapters, name) for name in ("shrink_kernel", "expand_kernel")]
    hidden, outputs = 2560, 3072
    tiles = torch.zeros(most_tiles(rows, SLOTS), 3, dtype=torch.int32)
    by_adapter = RowTiles(torch.zeros(rows, dtype=torch.int32), tiles, tile_rows(rows))
    x, out = torch.zeros(rows, hidden, dtype=BF16), torch.zeros(rows, outputs, dtype=BF16)
    a, b = torch.zeros(SLOTS, 3, rank, hidden, dtype=BF16), torch.zeros(SLOTS, outputs, rank, dtype=BF16)
    shrunk = shrink(x, a, by_adapter, pdl=True)
    expand(shrunk, b, torch.zeros(24, 3, dtype=torch.int32), by_adapter, out, pdl=True)
    for kernel in kernels:
        (compiled,) = kernel.found
        assert "mma" in compiled.asm["ptx"], "products do not go to the tensor cores"
        assert kernel is kernels[1] or "cp.async" in compiled.asm["ptx"], "loads do not run ahead"
        assert compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
