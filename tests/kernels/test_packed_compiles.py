"""The kernel for few rows of quantized weights, compiled from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_formats_compile import POINTERS, SHARED_BYTES, Recorder
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.lowering.gpu.kernels import split
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import PackedForm

CPU = torch.device("cpu")
SCHEMES = {
    "int4, groups of 32": PackedForm("int4", 1024, 5376, 32, 1, has_zeros=False, scale_dtype=None),
    "int4, groups of 128, zero points": PackedForm("int4", 1000, 5376, 128, 1, has_zeros=True, scale_dtype=None),
    "fp8 by blocks": PackedForm("fp8", 1024, 5376, 128, 128, has_zeros=False, scale_dtype="float32"),
}


class OnDevice(Recorder):
    """Of a launch on a GPU: there, values are decoded by instructions that the interpreter does not know."""

    def __getitem__(self, grid):
        launch = super().__getitem__(grid)
        return lambda *args, **named: launch(*args, **{**named, "USES_ASM": True})


@pytest.mark.parametrize(("rows", "gelu", "capability"), [(1, True, 90), (7, None, 80), (16, None, 90)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_rows(scheme, rows, gelu, capability, monkeypatch, tmp_path):
    monkeypatch.setitem(POINTERS, torch.int64, "*i64")
    kernel = OnDevice(split.split_kernel, capability)
    monkeypatch.setattr(split, "split_kernel", kernel)
    weight = PackedWeight.empty(SCHEMES[scheme], torch.bfloat16, CPU)
    x = torch.zeros(rows, weight.inputs, dtype=torch.bfloat16)
    out = torch.zeros(rows, len(weight) // (2 if gelu else 1), dtype=torch.bfloat16)
    split.split_product(x, weight, None, out, gelu, split.plan_split(rows))
    ptx = kernel.compiled.asm["ptx"]
    assert "mma.sync" in ptx
    assert "cp.async" in ptx, "units are on their way before they are needed"
    # More programs than run at once would be right, only slower.
    at_once = split.plan_split(rows).programs if capability == 90 and scheme == "int4, groups of 32" else 1
    assert kernel.compiled.metadata.shared * at_once <= SHARED_BYTES[capability]
    assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) == 0
