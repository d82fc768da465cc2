"""How attention scores become weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How scores become weights: q·k × scale, soft-capped (tanh(s / cap) × cap), a sink per query head beside them."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # float32 [query heads]: a logit that takes weight and gives no value

    @property
    def are_plain(self) -> bool:
        """A softmax of scaled products, and nothing else."""
        return self.softcap is None and self.sinks is None
