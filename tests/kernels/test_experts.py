"""Experts and routing against plain torch, in Triton's interpreter and float32.

`python3 -m bench.gpu_check experts` checks the same compiled, at real sizes, on a GPU.
"""

from __future__ import annotations

import pytest

from tests.kernels.interpreting import run_interpreted


@pytest.mark.parametrize(
    "checks",
    [
        ("forms", "crowds", "sorting", "rows_alone_as_together"),
        ("activations", "ranks"),
        ("kinds", "halves", "real_widths"),
    ],
    ids=" ".join,
)
def test_experts(checks):
    run_interpreted("tests.kernels.interpreted_experts", *checks)
