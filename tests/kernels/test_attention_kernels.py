"""The attention kernels in Triton's interpreter, in float32 at small sizes, against plain torch in float64.

`python3 -m bench.gpu_check` checks the same cases, compiled and at real sizes, on a GPU.
"""

from __future__ import annotations

import pytest

from tests.kernels.interpreting import run_interpreted

CHECKS = ("decode", "several", "prefill", "chunks", "write", "programs", "lone_rows", "far_pages", "replanning")


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_in_the_interpreter(check):
    run_interpreted("tests.kernels.interpreted_attention", check)
