"""Experts chosen uniformly at random, for benchmarks: random weights send most tokens to a few experts, which trained
ones do not.

`route_uniformly` replaces the launch that chooses, so that a step has as many launches as before and the logits are
still computed; what is chosen hangs on the logits' bits alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels import routing
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped


@triton.jit
def uniform_kernel(
    LOGITS, IDS, SHARES, rows, EXPERTS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, CHOSEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program: a row."""
    wait_if_overlapped(PDL)
    row, expert = tl.program_id(0), tl.arange(0, PADDED)
    logits = tl.zeros([PADDED], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(LOGITS + (split * rows + row) * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    bits = logits.to(tl.int32, bitcast=True)
    drawn = tl.randint(tl.xor_sum(bits ^ (expert * 40503), 0), expert).to(tl.int32, bitcast=True)
    score = tl.where(expert < EXPERTS, drawn & 0x7FFFFFFF, -1)
    for place in tl.static_range(CHOSEN):
        best = tl.min(tl.where(score == tl.max(score, 0), expert, PADDED), 0)
        tl.store(IDS + row * CHOSEN + place, best)
        tl.store(SHARES + row * CHOSEN + place, 1.0 / CHOSEN)
        score = tl.where(expert == best, -1, score)


class _Choice:
    """Stands where `routing.choose_kernel` does."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(
            logits: torch.Tensor, bias: Any, correction: Any, scales: Any, ids: torch.Tensor, shares: torch.Tensor,
            *rest: Any, EXPERTS: int, PADDED: int, SPLITS: int, CHOSEN: int, PDL: bool, **others: Any,
        ) -> None:  # fmt: skip
            uniform_kernel[grid](
                logits, ids, shares, len(ids), EXPERTS=EXPERTS, PADDED=PADDED, SPLITS=SPLITS, CHOSEN=CHOSEN, PDL=PDL,
                num_warps=1, launch_pdl=PDL,
            )  # fmt: skip

        return launch


def route_uniformly() -> None:
    """From here on, in models that are not captured yet."""
    routing.choose_kernel = _Choice()


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many of a layer's experts so many rows visit, on average."""
    return experts * (1 - (1 - chosen / experts) ** rows)
