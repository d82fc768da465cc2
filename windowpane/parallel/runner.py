"""The runner of several ranks: rank 0's own, with every call told to the others first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.drafts.drafter import HostKnows, Known
from windowpane.parallel.launch import Workers
from windowpane.parallel.messages import Draft, Forward, PromptLogits, TakeSampled
from windowpane.runners.interrupts import interrupts_later
from windowpane.runners.plain import StepOutput
from windowpane.schedule.batch import Batch
from windowpane.schedule.request import Tokens

if TYPE_CHECKING:
    from windowpane.runners.cuda import CudaRunner
    from windowpane.runners.plain import Runner


class ParallelRunner(HostKnows):
    """What the engine asks of a runner, asked of all ranks. Raises RanksLost once any of them has failed.

    Ranks draft together when all of them are told to, so drafts wait for the host.
    """

    def __init__(self, own: Runner | CudaRunner, workers: Workers) -> None:
        self._own = own
        self._workers = workers

    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int] = frozenset()) -> StepOutput:
        with self._in_step():
            self._workers.send(Forward(batch, all_logits_slots))
            output = self._own.forward(batch, all_logits_slots=all_logits_slots)
        prompt_logits: dict[int, Callable[[slice], torch.Tensor]] = {
            slot: partial(self._prompt_logits, slot, logits_of) for slot, logits_of in output.prompt_logits.items()
        }
        return replace(output, prompt_logits=prompt_logits)

    def take_sampled(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens go to the other ranks as they are on the device: nobody waits for them here."""
        with self._in_step():
            self._workers.send(TakeSampled())
            self._workers.group.broadcast(tokens)
            self._own.take_sampled(slots, tokens)

    @property
    def drafter(self) -> ParallelRunner | None:
        return None if self._own.drafter is None else self

    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        """Drafts of a model that all ranks have a part of."""
        assert self._own.drafter is not None
        with self._in_step():
            self._workers.send(Draft(known))
            # Other ranks are told tokens, not where this one has them.
            return self._own.drafter.tell(self._own.drafter.draft(known))

    def landed(self) -> list[tuple[int, float]]:
        """Of this rank. Steps tell the others, whose devices wait for their own copies."""
        return self._own.landed()

    def read_routes(self, slot: int, start: int, stop: int) -> Callable[[], NDArray[np.integer[Any]]]:
        """Every rank routes alike, so this one answers alone."""
        return self._own.read_routes(slot, start, stop)

    def _prompt_logits(self, slot: int, logits_of: Callable[[slice], torch.Tensor], rows: slice) -> torch.Tensor:
        with self._in_step():
            self._workers.send(PromptLogits(slot, rows))
            return logits_of(rows)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """From its first order to its last collective, a call ends well or takes the ranks with it: halfway through,
        the others would wait for ever.
        """
        with interrupts_later():
            try:
                yield
            except Exception as error:
                lost = self._workers.explain(error)
                raise lost from (error if lost is not error else None)
