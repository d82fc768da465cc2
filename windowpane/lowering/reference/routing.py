"""Which experts a token visits, from its logits: in float32, and ties go to the lower index."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windowpane.models.blocks import CHOSEN_SIGMOID, CHOSEN_SOFTMAX, SIGMOID, SOFTMAX, Router


@dataclass(frozen=True, slots=True)
class Routing:
    """For each row, its experts [rows, chosen] and their shares (float32), the best one first."""

    ids: torch.Tensor
    shares: torch.Tensor


def choose(
    router: Router, logits: torch.Tensor, correction: torch.Tensor | None, expert_scales: torch.Tensor | None
) -> Routing:
    """`logits` are float32 [rows, experts]."""
    scores = logits
    if router.scoring == SOFTMAX:
        scores = torch.softmax(logits, dim=-1)
    elif router.scoring == SIGMOID:
        scores = logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if router.groups > 1:
        ranked = _in_best_groups(router, ranked)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen]
    shares = scores.gather(1, ids)
    if router.scoring == CHOSEN_SOFTMAX:
        shares = torch.softmax(shares, dim=-1)
    elif router.scoring == CHOSEN_SIGMOID:
        shares = shares.sigmoid()
    if router.renormalizes:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    if expert_scales is not None:
        shares = shares * expert_scales[ids]
    return Routing(ids, shares * router.multiplier)


def _in_best_groups(router: Router, ranked: torch.Tensor) -> torch.Tensor:
    """Scores of experts outside the best groups are taken out of the choice."""
    grouped = ranked.view(len(ranked), router.groups, -1)
    of_group = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
    best = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen_groups]
    outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
