"""Random weights as vLLM's `--load-format dummy` makes them, for figures beside those of vLLM.

How long a large product takes on a GPU at its power limit hangs on the numbers: zeros take less power than random bits,
and the clock stays higher. vLLM draws floating-point weights, norms too, from ±0.001 and leaves packed integers
as they were allocated (`initialize_dummy_weights`), which for the codes and scales of MXFP4 is zero (`Mxfp4MoEMethod`).
"""

from __future__ import annotations

from typing import Any

import torch

from windowpane.lowering.packed import PackedWeight
from windowpane.weights import dummy

LARGEST = 1e-3


def draw_as_vllm() -> None:
    """From here on, in models that are loaded with random weights."""
    own_tensor, own_packed = dummy.random_tensor, dummy.random_packed

    def random_tensor(*args: Any, **named: Any) -> torch.Tensor:
        out = own_tensor(*args, **named)
        return out.uniform_(-LARGEST, LARGEST) if out.is_floating_point() else out

    def random_packed(*args: Any, **named: Any) -> PackedWeight:
        out = own_packed(*args, **named)
        out.units.zero_()
        if not out.scales.is_floating_point():
            out.scales.zero_()
        return out

    dummy.random_tensor, dummy.random_packed = random_tensor, random_packed
