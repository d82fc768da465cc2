"""How many drafts of which requests a step verifies: as many as are worth what they cost, and none where none are.

A draft is worth the chance that it is accepted, which is the product of the chances of all drafts up to it. Chances are
measured: per request, and where a request has shown little yet, over all of them; and per kind of guess where a drafter
has several. A drafter that is free is also asked in steps that verify nothing, and what it says is compared with what
the target samples; any other one is tried again from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windowpane.drafts.costs import StepCosts
from windowpane.drafts.drafter import Asking, Drafter
from windowpane.schedule.request import Request, Tokens

FIRST_CHANCE = 0.7  # of a draft, before anything was measured
TRUST = 2.0  # drafts of its own after which a request counts as much as all requests
FADE = 0.9  # weight of what was measured before, at each measurement
WORTH = 1.02  # tokens a second that a step with drafts must promise over one without
REFRESH = 64  # steps with drafts after which one without is measured again
TRY_AGAIN = 128  # steps without drafts after which costs and chances are measured again, with one for each request


@dataclass(slots=True)
class DraftStats:
    """Since the start: requests' steps with drafts, their drafts, those accepted, and these by their place."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chance:
    """Of a draft to be accepted, if all before it were."""

    hits: float = 0.0
    trials: float = 0.0

    def observe(self, accepted: int, drafts: int) -> None:
        """Nothing is known of drafts behind the first that was not accepted."""
        self.hits = self.hits * FADE + accepted
        self.trials = self.trials * FADE + min(accepted + 1, drafts)

    def given(self, prior: float) -> float:
        return (self.hits + TRUST * prior) / (self.trials + TRUST)


class Speculator:
    """Asks a drafter for up to `most` tokens of each request, and keeps the books of what came of them."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self.drafter = drafter
        self.most = most
        self.stats = DraftStats(accepted_by_position=[0] * most)
        self.costs = StepCosts()
        self._chances: dict[Request, _Chance] = {}
        self._overall = _Chance()
        self._kinds: dict[int, _Chance] = {}
        self._kind_of: dict[Request, int] = {}  # of what was proposed last
        self._unverified: dict[Request, tuple[int, Tokens]] = {}  # known tokens, and what may follow them
        self._verified_steps = 0  # since the last step without drafts
        self._plain_steps = 0  # since the last one with

    def drafts(self, asking: Sequence[Asking], sequences: int, *, is_ahead: bool = False) -> dict[int, Tokens]:
        """Drafts by slot, for a step in which so many sequences decode; none where they would not pay.

        `is_ahead`: the step is sent off before the one before it has landed, which has drafts.
        """
        plain = self.costs.plain(sequences)
        if plain is None or not asking or self._verified_steps >= REFRESH:
            return {}
        if not self._is_worth_asking(asking, sequences, plain):
            return {}
        proposed = self.drafter.ahead(asking) if is_ahead else self.drafter.propose(asking)
        if self.drafter.is_free:
            self._compare(asking, proposed)
        self._kind_of |= {a.request: self.drafter.kind_of(a.request) for a in asking}
        counts = self._choose(asking, proposed, sequences, plain)
        return {a.slot: tokens[:count] for a, tokens, count in zip(asking, proposed, counts, strict=True) if count}

    def verified(self, request: Request, drafts: int, accepted: int) -> None:
        """A step has verified so many drafts of a request, of which so many were accepted."""
        self._unverified.pop(request, None)
        self._observe(request, accepted, drafts)
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += drafts
        stats.accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_by_position[position] += 1

    def stepped(self, sequences: int, drafts: int, seconds: float | None) -> None:
        """A step of decoding sequences has landed; `seconds` is None where something else took part of its time."""
        self._verified_steps = self._verified_steps + 1 if drafts else 0
        self._plain_steps = 0 if drafts else self._plain_steps + 1
        if seconds is not None:
            self.costs.observe(sequences, drafts, seconds)

    def forget(self, request: Request) -> None:
        for kept in (self._chances, self._unverified, self._kind_of):
            kept.pop(request, None)
        self.drafter.forget(request)

    def _chance(self, request: Request) -> _Chance:
        return self._chances.setdefault(request, _Chance())

    def _observe(self, request: Request, accepted: int, drafts: int) -> None:
        kind = self._kinds.setdefault(self._kind_of.get(request, 0), _Chance())
        for chance in (self._chance(request), kind, self._overall):
            chance.observe(accepted, drafts)

    def _chances_of(self, asking: Sequence[Asking]) -> NDArray[np.float64]:
        """Of each request's next draft: what the request and the kind of guess have shown, each beside all of them."""
        prior = self._overall.given(FIRST_CHANCE)
        own = np.array([self._chance(a.request).given(prior) for a in asking])
        if len(self._kinds) < 2:
            return own
        known = [self._kinds.get(self._kind_of.get(a.request, 0), _Chance()) for a in asking]
        odds = _odds(own) * _odds(np.array([kind.given(prior) for kind in known])) / _odds(np.array(prior))
        found: NDArray[np.float64] = odds / (1 + odds)
        return found

    def _compare(self, asking: Sequence[Asking], proposed: Sequence[Tokens]) -> None:
        """What was proposed and not verified with what has come since; then take note of what is proposed now."""
        for a, tokens in zip(asking, proposed, strict=True):
            request = a.request
            known, drafts = self._unverified.pop(request, (0, None))
            if drafts is not None and (come := request.known_tokens - known):
                sampled = request.output[-come:]
                seen = min(come, len(drafts))
                alike = [s == d for s, d in zip(sampled, drafts[:seen].tolist(), strict=False)]
                accepted = alike.index(False) if False in alike else seen
                self._observe(request, accepted, seen)
            if len(tokens):
                self._unverified[request] = request.known_tokens, tokens

    def _is_worth_asking(self, asking: Sequence[Asking], sequences: int, plain: float) -> bool:
        """Whether drafts would pay if all that may be asked for were proposed, or it is time to try again.

        A free drafter is asked wherever drafts that are sure to be accepted would pay.
        """
        if self._plain_steps >= TRY_AGAIN:
            return True
        if self.drafter.is_free:
            counts = np.arange(1, sum(a.most for a in asking) + 1)
            rates = (sequences + counts) / (plain + self.costs.extra(sequences, counts))
            return bool(rates.max() >= WORTH * sequences / plain)
        whole = [np.zeros(a.most, dtype=np.int32) for a in asking]
        return bool(np.any(self._choose(asking, whole, sequences, plain)))

    def _choose(self, asking: Sequence[Asking], proposed: Sequence[Tokens], sequences: int, plain: float) -> list[int]:
        """How many of each request's drafts to verify, so that most tokens come in a second."""
        lengths = np.array([len(tokens) for tokens in proposed])
        if not lengths.any():
            return [0] * len(asking)
        chances = self._chances_of(asking)
        # A draft is never likelier than those before it, so the likeliest n are the first few of each request.
        likely = np.cumprod(np.repeat(chances[:, None], int(lengths.max()), axis=1), axis=1)
        likely[np.arange(likely.shape[1]) >= lengths[:, None]] = 0.0
        order = np.argsort(-likely, axis=None, kind="stable")[: int(lengths.sum())]
        gained = sequences + np.cumsum(likely.reshape(-1)[order])
        counts = np.arange(1, len(order) + 1)
        rates = gained / (plain + self.costs.extra(sequences, counts))
        best = int(rates.argmax())
        if rates[best] < WORTH * sequences / plain:
            if self.drafter.is_free or self._plain_steps < TRY_AGAIN:
                return [0] * len(asking)
            best = min(len(asking), len(order)) - 1
        chosen = order[: best + 1] // likely.shape[1]
        counted: list[int] = np.bincount(chosen, minlength=len(asking)).tolist()
        return counted


def _odds(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    sure = np.clip(chances, 1e-3, 1 - 1e-3)
    found: NDArray[np.float64] = sure / (1 - sure)
    return found
