"""A GPU's model that takes steps from the host, as `ReferenceModel` does: launch by launch, without graphs."""

from __future__ import annotations

import torch

from windowpane.device.pages import KVPages
from windowpane.kv.changes import NO_CHANGES
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import StepBuilder
from windowpane.schedule.step import Step


class SteppedGpuModel:
    """A drafter with KV of its own, whose rows are segments. It has the tables of its target."""

    def __init__(self, model: GpuModel, pages: KVPages) -> None:
        self._model, self._builder = model, StepBuilder(pages, model.tables, model.tilings)
        self.decoder, self.logits, self.passed_on = model.decoder, model.logits, model.passed_on

    def final_hidden(
        self, step: Step, tokens: torch.Tensor, pages: KVPages, before: torch.Tensor | None = None, *, keeps: bool
    ) -> torch.Tensor:
        """Rows that are kept belong to a step of the target, and read the pages that it reads. Those that are not come
        behind it, and find what it has written.
        """
        on_device = self._builder.mixed(step, None if keeps else NO_CHANGES, keeps=keeps)
        return self._model.final_hidden(on_device, tokens, before)
