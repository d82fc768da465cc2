"""The inline PTX that turns packed values into numbers, run in torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.ptx_in_torch import run_elementwise
from windowpane.lowering.gpu.kernels import unpacking
from windowpane.lowering.packed import e2m1_values, pack_units

CODES = torch.randint(0, 16, (3, 128), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
CODES[0, ::8] = torch.arange(16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_units_of_mxfp4_are_the_codes_of_32_inputs_each(dtype):
    text = unpacking._MXFP4_BFLOAT16 if dtype == torch.bfloat16 else unpacking._MXFP4_FLOAT16
    units = pack_units(CODES, "mxfp4")
    found = run_elementwise(text.value, "=r,=r,=r,=r,r", [units], (dtype,) * 4, 2)
    assert torch.equal(torch.cat(found, dim=1).float(), e2m1_values(CODES))


def test_scales_with_the_bias_in_them_make_the_same_numbers():
    units, exponents = pack_units(CODES, "mxfp4"), (-20, -1, 0, 1)
    both_halves = [(126 + 127 + e << 7) * 0x10001 for e in exponents]
    scales = [torch.full(units.shape, bits, dtype=torch.int32) for bits in both_halves]
    constraints = ",".join(["=&r"] * 4 + ["r"] * 9)
    found = run_elementwise(unpacking.TAKE_MXFP4_BFLOAT16, constraints, [units, *scales], (torch.bfloat16,) * 4, 2)
    want = e2m1_values(CODES).view(3, 4, 32) * 2.0 ** torch.tensor(exponents)[:, None]
    assert torch.equal(torch.stack(found, dim=1).float(), want)
