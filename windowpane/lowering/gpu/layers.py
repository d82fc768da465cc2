"""Residual blocks on a GPU: one launch adds a block's result to the residual stream and norms it for the next block."""

from __future__ import annotations

import torch

from windowpane.lowering.gpu.branches import ALL_MIXERS
from windowpane.lowering.gpu.kernels.norms import residual_norm
from windowpane.lowering.gpu.mixers import GpuContext, GpuStepState
from windowpane.lowering.reference.mixers import make_mixer
from windowpane.lowering.reference.ops import PLAIN
from windowpane.models.blocks import RMS, Block, Layer, Norm


class GpuBlock:
    """`following` is the norm of whatever reads the residual stream next, None where that reads it as it is.

    `scalar` multiplies the stream behind the last block of a layer.
    """

    def __init__(
        self, described: Block, context: GpuContext, following: Norm | None, scalar: torch.Tensor | None
    ) -> None:
        parameters = context.parameters
        self.described, self.following, self.scalar, self._pdl = described, following, scalar, context.pdl
        self.mixer = make_mixer(described.mixer, context, ALL_MIXERS)
        self.before, self.after = parameters.norm(described.before), parameters.norm(described.after)
        self.next_norm = parameters.norm(following)
        norms = [norm for norm in (described.after, following) if norm is not None]
        self._eps = norms[0].eps if norms else 0.0
        # The launch has one epsilon and RMS norms; anything else is left to plain torch.
        self._is_fused = all(norm.kind == RMS and norm.eps == self._eps for norm in norms)

    def __call__(
        self, hidden: torch.Tensor, normed: torch.Tensor, state: GpuStepState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind this block, updated in place, and what the next one reads."""
        return hidden, self.join(hidden, self.mixer(normed, state))

    def join(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        if self.described.multiplier != 1.0:
            mixed = mixed * self.described.multiplier
        if not self._is_fused:
            return self._join_plainly(hidden, mixed)
        normed = hidden if self.following is None else torch.empty_like(hidden)
        residual_norm(hidden, mixed, self.after, self.next_norm, self.scalar, self._eps, normed, pdl=self._pdl)
        return normed

    def _join_plainly(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        after = self.described.after
        hidden += mixed if after is None else PLAIN.norm(mixed, self.after, after)
        if self.scalar is not None:
            hidden *= self.scalar
        return hidden if self.following is None else PLAIN.norm(hidden, self.next_norm, self.following)


class GpuLayer:
    """`narrows_at`: the last block of all that keeps anything, so only wanted rows go on from it."""

    def __init__(self, described: Layer, context: GpuContext, following: Norm | None, narrows_at: int | None) -> None:
        self.described, self._narrows_at = described, narrows_at
        scalar = None if described.scalar is None else context.parameters.tensor(described.scalar)
        *first, last = described.blocks
        norms = [block.before for block in described.blocks[1:]]
        self.blocks = [GpuBlock(block, context, norm, None) for block, norm in zip(first, norms, strict=True)]
        self.blocks.append(GpuBlock(last, context, following, scalar))

    def __call__(
        self, hidden: torch.Tensor, normed: torch.Tensor, state: GpuStepState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for index, block in enumerate(self.blocks):
            wanted = state.step.wanted
            if index == self._narrows_at and wanted is not None and len(wanted) < len(hidden):
                block.mixer.keep(normed, state)
                state.narrow()
                # Behind the positions: attention looks those up before the launch ahead of it has ended.
                hidden, normed = hidden[wanted], normed[wanted]
                if not len(hidden):
                    return hidden, normed
            hidden, normed = block(hidden, normed, state)
        return hidden, normed
