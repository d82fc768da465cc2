"""Routing against plain torch, in Triton's interpreter and float32."""

from __future__ import annotations

from tests.kernels.interpreting import run_interpreted


def test_routing():
    run_interpreted("tests.kernels.interpreted_experts", "scorings", "ties", "rows_are_routed_alone_as_together")
