"""What a rank does with each order of rank 0's. Orders come in the order in which rank 0 makes its own calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from windowpane.device.transfer import to_device
from windowpane.parallel.job import RankJob, RankReport
from windowpane.parallel.messages import (
    AddAdapter,
    Answer,
    Draft,
    Forward,
    Join,
    Load,
    Loaded,
    Order,
    PromptLogits,
    Ready,
    RemoveAdapter,
    Start,
    TakeSampled,
)
from windowpane.parallel.process_group import ProcessGroup, join_store, own_address
from windowpane.runners.plain import Runner, StepOutput
from windowpane.schedule.batch import Batch
from windowpane.weights import LoadedWeights

if TYPE_CHECKING:
    from windowpane.runners.cuda import CudaRunner


class Rank:
    """One rank other than 0: its group and, once it was told which, its part of a model."""

    def __init__(self, join: Join) -> None:
        self._device = torch.device(join.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = join_store(join.host, join.port)
        self._group = ProcessGroup(join.place, join.backend, store, own_address(join.host))
        self._job: RankJob | None = None
        self._runner: Runner | CudaRunner | None = None
        self._weights: LoadedWeights = {}
        self._last: Batch | None = None
        self._output: StepOutput | None = None

    @torch.inference_mode()
    def do(self, order: Order) -> Answer | None:
        match order:
            case Load(job):
                self._runner = None  # a model that ran before makes room
                self._job, self._weights = job, job.load(self._device, self._group.place)
                return Loaded()
            case Start():
                assert self._job is not None
                self._runner = self._job.make_runner(self._weights, self._device, self._group)
                self._job.rehearse(self._runner)
                return Ready(RankReport.of(self._runner))
            case Forward(batch, all_logits_slots):
                assert self._runner is not None
                self._last = batch
                self._output = self._runner.forward(batch, all_logits_slots=all_logits_slots)
            case TakeSampled():
                assert self._runner is not None and self._last is not None
                slots = to_device(self._last.sampling_slots, self._device)
                tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
                self._runner.take_sampled(slots, self._group.broadcast(tokens))
            case PromptLogits(slot, rows):
                assert self._output is not None
                self._output.prompt_logits[slot](rows)
            case Draft(known):
                assert self._runner is not None and self._runner.drafter is not None
                self._runner.drafter.draft(known)
            case AddAdapter(number, path):
                assert self._job is not None and self._runner is not None and self._runner.adapters is not None
                adapters = self._runner.adapters
                adapters.know(number, self._job.read_adapter(path, adapters, self._group.place))
            case RemoveAdapter(number):
                assert self._runner is not None and self._runner.adapters is not None
                self._runner.adapters.forget(number)
            case Join():
                raise RuntimeError("this rank has joined its group already")
        return None
