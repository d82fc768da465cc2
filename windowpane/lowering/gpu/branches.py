"""Two branches of one input: one launch makes the norms that they read, one adds what they give."""

from __future__ import annotations

from typing import Any

import torch

from windowpane.lowering.gpu.kernels.branch_norms import MOST_NORMS, add_branches, rms_norms
from windowpane.lowering.gpu.mixers import MIXERS, GpuContext, GpuExperts, GpuStepState
from windowpane.lowering.gpu.states import STATE_MIXERS
from windowpane.lowering.reference.mixers import Branch, make_mixer
from windowpane.models.blocks import RMS, Norm, Sum

Read = tuple[Norm | None, torch.Tensor | None]


class GpuSum:
    def __init__(self, described: Sum, context: GpuContext) -> None:
        own = context.parameters, context.ops
        self._branches: list[Any] = [
            Branch(block, make_mixer(block.mixer, context, ALL_MIXERS), *own) for block in described.branches
        ]
        self._pdl = context.pdl
        # Of each branch, the norms of the input that it reads; None is the input itself.
        self._reads = [_reads_of(branch) for branch in self._branches]
        found = [read for reads in self._reads for read in reads if read[0] is not None]
        after = [branch.described.after for branch in self._branches]
        norms = [norm for norm in (*(norm for norm, _ in found), *after) if norm is not None]
        self._eps = norms[0].eps if norms else 0.0
        self._is_fused = (
            len(self._branches) == 2
            and len(found) <= MOST_NORMS
            and all(norm.kind == RMS and norm.eps == self._eps for norm in norms)
            and all(branch.described.multiplier == 1.0 for branch in self._branches)
        )
        self._weights = [weight for _, weight in found]

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        if not self._is_fused:
            total: torch.Tensor = self._branches[0](x, state)
            for branch in self._branches[1:]:
                total = total + branch(x, state)
            return total
        normed = iter(rms_norms(x, self._weights, self._eps, pdl=self._pdl) if self._weights else ())
        made = []
        for branch, reads in zip(self._branches, self._reads, strict=True):
            inputs = [x if norm is None else next(normed) for norm, _ in reads]
            is_routed = isinstance(branch.mixer, GpuExperts)
            made.append((branch.mixer.mix if is_routed else branch.mixer)(*inputs, state))
        after = [(branch.described.after is not None, branch.after) for branch in self._branches]
        return add_branches(made, after, self._eps, pdl=self._pdl)

    def keep(self, x: torch.Tensor, state: GpuStepState) -> None:
        for branch in self._branches:
            branch.keep(x, state)


def _reads_of(branch: Branch) -> list[Read]:
    """Experts have an input for their router as well, and norms of their own where the branch has none."""
    if not isinstance(branch.mixer, GpuExperts):
        return [(branch.described.before, branch.before)]
    if branch.described.before is not None:
        return [(branch.described.before, branch.before)] * 2
    return branch.mixer.reads


ALL_MIXERS: dict[type, Any] = {**MIXERS, **STATE_MIXERS, Sum: GpuSum}
