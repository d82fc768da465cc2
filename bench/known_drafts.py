"""Drafts for measurements and checks: right as often as they are told to be, and verified whatever they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windowpane.device.transfer import to_device
from windowpane.drafts.drafter import Asking, Drafter, HostKnows, ModelDrafter, waits_for_step
from windowpane.drafts.speculator import Speculator
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampled
from windowpane.schedule.request import Request, Tokens


class KnownAnswers(HostKnows):
    """Knows what each request will answer; each token that it drafts is right with a probability of `share`.

    `always_most` False drafts any number up to that, and so shows every shape of step.
    """

    is_free = False

    def __init__(
        self, answer: Callable[[Request], Sequence[int]], share: float = 0.7, *, always_most: bool = False
    ) -> None:
        self._answer, self._share, self._always_most = answer, share, always_most
        self._rng = np.random.default_rng(1)
        self._answers: dict[Request, Sequence[int]] = {}

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        return [self.behind(a.request, len(a.request.output), a.most) for a in asking]

    def behind(self, request: Request, come: int, most: int) -> Tokens:
        """Drafts behind the first `come` tokens of its answer."""
        count = most if self._always_most else int(self._rng.integers(0, most + 1))
        if request not in self._answers:
            self._answers[request] = self._answer(request)
        right = np.array(self._answers[request][come : come + count], dtype=np.int32)
        wrong = self._rng.random(len(right)) >= self._share
        return np.where(wrong, np.where(right > 0, right - 1, 1), right).astype(np.int32)

    def kind_of(self, request: Request) -> int:
        return 0

    def forget(self, request: Request) -> None:
        self._answers.pop(request, None)


class Overheard(HostKnows):
    """Asks a model for drafts, notes what it says behind how many of a request's tokens, and passes on others."""

    is_free = False

    def __init__(self, model: Drafter, others: Drafter) -> None:
        self._model, self._others = model, others
        self.said: dict[tuple[str, int], list[int]] = {}

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        said = self._model.propose(asking)
        if not waits_for_step(asking):
            for a, tokens in zip(asking, self._model.tell(said), strict=True):
                self.said[a.request.id, a.request.known_tokens] = tokens.tolist()
        return self._others.propose(asking)

    def kind_of(self, request: Request) -> int:
        return 0

    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: Tensor) -> bool:
        return self._model.begin(slots, drafts, sampled)

    def forget(self, request: Request) -> None:
        self._model.forget(request)
        self._others.forget(request)


class Told(ModelDrafter):
    """Says what a model's drafts are, and so waits for them."""

    @property
    def rows_ahead(self) -> int:
        return 0

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        return self.tell(super().propose(asking))


class Eager(Speculator):
    """Verifies whatever is proposed."""

    def drafts(self, asking: Sequence[Asking], sequences: int, *, is_ahead: bool = False) -> dict[int, Tokens]:
        proposed = self.drafter.ahead(asking) if is_ahead else self.drafter.propose(asking)
        return {a.slot: tokens for a, tokens in zip(asking, proposed, strict=True) if len(tokens)}


def sample_drafts(engine: Engine, rate: float) -> None:
    """Let each draft be what is sampled in its place with this probability, and something else otherwise: random
    weights often repeat the last token, which may be what was drafted.
    """
    sampler, sample, chance = engine.sampler, engine.sampler.sample, np.random.default_rng(2)

    def sampled(*given: Any) -> Sampled:
        found, drafted = sample(*given), given[4]
        if drafted:
            rows, last = [row - 1 for row in drafted], [int(drafts[-1]) for drafts in drafted.values()]
            wrong = (chance.random(len(rows)) >= rate).tolist()
            at, tokens, more = (to_device(x, sampler.device, torch.int64) for x in (rows, last, wrong))
            drafts = getattr(engine.runner.drafter, "drafts", None)
            tokens = tokens if drafts is None else drafts.resolved(tokens)
            found.tokens[at] = (tokens + more) % sampler.vocab_size
        return found

    sampler.sample = sampled  # type: ignore[method-assign]
