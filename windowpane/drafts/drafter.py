"""What a drafter is: it guesses a sequence's next tokens, and the next step of the target model verifies them.

One step with drafts:

    propose(asking) ─► drafts ─► Scheduler.schedule(drafts) ─► the target computes 1 + d rows of each sequence
                                                                        │ every row's token is drawn as always
                                                                        ▼
                     a draft that equals the drawn token is accepted; at the first that does not, the rest is taken back

A wrong draft costs time and nothing else: answers are the same with any drafter and with none.

How to write one:

- `propose` is called when no step is in flight, so every request's tokens are known to the host: `request.tokens(0,
  request.known_tokens)`. Which of the last drafts were accepted follows from them. The target's KV holds the first
  `length` of them, which are all but the last one, or fewer where a recurrent state has to compute some again.
- A drafter that the host has to tell what was accepted is a `HostKnows`. One that finds out on the device may offer
  `rows_ahead`: then steps overlap as they do without drafts.
- A drafter with KV of its own declares caches like any layer. They are laid out in the same arena, grow with the
  sequence, and are shared, moved, truncated and kept in restore points with the target's pages, by the same tables
  (`slot`). Pages are there for `length` tokens: what is computed for tokens beyond that is the drafter's own until they
  are accepted.
- A drafter that is a model sees every step of the target from its runner, while pages and final hidden states are at
  hand: `runners/drafting.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from windowpane.schedule.request import NO_TOKENS, Request, Tokens


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that decodes, and how many tokens may be drafted for it (at least one)."""

    request: Request
    slot: int
    length: int
    most: int


@dataclass(frozen=True, slots=True)
class Known:
    """What a model drafts from, by value, as every rank is told: a slot's tokens from position `length` on."""

    slot: int
    length: int
    tokens: Tokens
    most: int

    @classmethod
    def of(cls, asked: Asking) -> Known:
        tokens = asked.request.tokens(asked.length, asked.request.known_tokens)
        return cls(asked.slot, asked.length, tokens, asked.most)


class Drafter(Protocol):
    """`is_free`: proposals cost next to nothing, so they are made in steps that verify none too, and compared with what
    the target says. `rows_ahead`: a step of up to so many rows can be sent off before the one before it has landed,
    which has drafts; 0 where the host has to know their fate.
    """

    is_free: bool

    @property
    def rows_ahead(self) -> int: ...

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        """Up to `most` tokens that may follow each request's known ones; none where there is no good guess."""

    def ahead(self, asking: Sequence[Asking]) -> list[Tokens]:
        """Drafts for a step that is sent off before the last one has landed: they were begun behind whatever that one
        accepts (`begin`). None where they were not.
        """

    def kind_of(self, request: Request) -> int:
        """Of what kind the last guess was, by any number: guesses of one kind are right about as often."""

    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: Any) -> bool:
        """A step is on its way that verifies these drafts: of each slot, `sampled`, a tensor on the device, has a token
        and one for each draft.

        The host knows later which of them count. What drafts on the device can find that out there, and begin. True
        where it has told the runner each slot's last token too; else the host does so later.
        """

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        """What these drafts are, of one step: `propose` may have given numbers below 0 in their stead, which only the
        model's runner understands. Waits for them.
        """

    def forget(self, request: Request) -> None:
        """The request is over."""


class DraftingModel(Protocol):
    """A model of a runner that drafts."""

    @property
    def rows_ahead(self) -> int: ...

    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        """Up to `most` tokens behind each one's known ones."""

    def ahead(self, asking: Sequence[Asking]) -> list[Tokens]:
        """See `Drafter.ahead`."""

    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: Any) -> bool:
        """See `Drafter.begin`."""

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        """See `Drafter.tell`."""


class HostKnows:
    """Of a drafter, or a model that drafts, whose drafts the host knows, as it knows first which of them count."""

    rows_ahead = 0

    def ahead(self, asking: Sequence[Asking]) -> list[Tokens]:
        return [NO_TOKENS] * len(asking)

    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: Any) -> bool:
        return False

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        return list(drafts)


class ModelDrafter:
    """The drafter of a model. Nothing is kept by request: whoever has its slot next begins anew."""

    is_free = False

    def __init__(self, model: DraftingModel) -> None:
        self.model = model

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        if waits_for_step(asking):
            return [np.zeros(a.most, dtype=np.int32) for a in asking]  # there would be drafts
        return self.model.draft([Known.of(a) for a in asking])

    @property
    def rows_ahead(self) -> int:
        return self.model.rows_ahead

    def ahead(self, asking: Sequence[Asking]) -> list[Tokens]:
        return self.model.ahead(asking)

    def kind_of(self, request: Request) -> int:
        return 0

    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: Any) -> bool:
        return self.model.begin(slots, drafts, sampled)

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        return self.model.tell(drafts)

    def forget(self, request: Request) -> None:
        pass


def waits_for_step(asking: Sequence[Asking]) -> bool:
    """Whether a step is in flight, which hides what a model would go on from."""
    return any(a.request.known_tokens <= a.length for a in asking)
