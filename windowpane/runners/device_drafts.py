"""Drafts that a device has made, or is about to make, and that the host sends a step to verify before it knows them.

The host passes on their *places*, which are numbers below all tokens. On the device the drafts stand in for them when
that step begins (`resolved`), and on the host when it has to know them, at the latest as the step lands (`tell`). By
then those of the next step may have been handed out too, where that step goes ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from windowpane.device.transfer import HostCopy
from windowpane.drafts.drafter import Asking, Known
from windowpane.lowering.gpu.step import NO_DRAFT
from windowpane.schedule.request import NO_TOKENS, Tokens

FIRST_PLACE = NO_DRAFT - 1


def has_places(tokens: Tokens) -> bool:
    return bool((tokens <= FIRST_PLACE).any())


class DeviceDrafts:
    """`made` [drafts, sequences] int32: a column for each sequence that drafts were last made for."""

    def __init__(self, most: int, slots: int, device: torch.device) -> None:
        self.made = torch.zeros(most, slots, dtype=torch.int32, device=device)
        self._handed_out: list[HostCopy | None] = [None, None]  # the last two times, in turn
        self._turn = 0

    def copy(self, columns: int) -> HostCopy:
        """On its way to the host, of drafts that are made by then; later ones may take their places."""
        return HostCopy(self.made[:, :columns].clone())

    def hand_out(
        self, asking: Sequence[Asking] | Sequence[Known], slots: Sequence[int], copy: HostCopy
    ) -> list[Tokens]:
        """The places of each one's drafts, where it has some: those of `slots` were made, one in each column.

        Those that were handed out the time before last must have been told.
        """
        self._turn ^= 1
        self._handed_out[self._turn] = copy
        columns = {slot: column for column, slot in enumerate(slots)}
        most, width = self.made.shape
        first = FIRST_PLACE - (self._turn * most + np.arange(most, dtype=np.int32)) * width
        return [first[: a.most] - columns[a.slot] if a.slot in columns else NO_TOKENS for a in asking]

    def resolved(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` on the device, with drafts in the stead of places."""
        at = (FIRST_PLACE - tokens).clamp(min=0) % self.made.numel()
        return torch.where(tokens <= FIRST_PLACE, self.made.view(-1)[at].to(tokens.dtype), tokens)

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        """As `resolved`, on the host, of one step's drafts: waits until they are there."""
        told = np.concatenate([NO_TOKENS, *drafts])
        is_place = told <= FIRST_PLACE
        if not is_place.any():
            return list(drafts)
        turn, at = np.divmod(FIRST_PLACE - told[is_place], self.made.numel())
        copy = self._handed_out[int(turn[0])]
        assert copy is not None
        told[is_place] = copy.array()[np.divmod(at, self.made.shape[1])]
        ends = np.cumsum([len(tokens) for tokens in drafts]).tolist()
        return [told[end - len(tokens) : end] for tokens, end in zip(drafts, ends, strict=True)]
