"""One step by value: what the scheduler hands to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.changes import Changes
from windowpane.schedule.request import NO_TOKENS, Tokens


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one sequence in one step that the host sends: a prompt's, or those of a sequence that decodes.

    `samples`: the last of them yields the first (or next) token. `keep_hidden` is the row in which to keep the final
    hidden state of the last one. A chunk of a prompt that is known to its end has no tokens: `hidden` is the row that
    has this state.

    `drafts` is None in a prompt. In a sequence that decodes, so many of the last tokens are drafts, and the token
    before them and each of them yields a token.
    """

    slot: int
    start: int
    tokens: Tokens
    samples: bool
    keep_hidden: int | None = None
    hidden: int | None = None
    drafts: int | None = None

    @property
    def draft_tokens(self) -> Tokens:
        return self.tokens[len(self.tokens) - (self.drafts or 0) :]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, as plain values. Decoding sequences come first: each computes the token its slot sampled last.

    The step samples one token for every decoding sequence and every chunk that `samples`, in that order, and one more
    for each draft. `state_slots` names the slot of the present state of each sequence and chunk, and `adapters` its
    adapter's slot on the device (0: none; empty where nobody has one). `placed_adapters`: before the step, these slots
    are filled with the adapters of these numbers.

    `unsettled` are the slots that have drafts in the step before, if that has not landed: this one `is_ahead`. Their
    positions are those that they have if all of these drafts are accepted; the device knows how many are not, and by so
    many the true positions lie before. A chunk whose first token the host does not know begins with
    `step.LAST_SAMPLED`.
    """

    step: int
    decode_slots: NDArray[np.int64]
    decode_positions: NDArray[np.int64]
    chunks: list[PromptChunk]
    state_slots: NDArray[np.int8]
    changes: Changes
    adapters: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    placed_adapters: tuple[tuple[int, int], ...] = ()
    unsettled: tuple[int, ...] = ()

    @property
    def is_ahead(self) -> bool:
        return bool(self.unsettled)

    @property
    def sampling_slots(self) -> NDArray[np.int64]:
        """Who samples a token in this step, in order."""
        chunks = [c.slot for c in self.chunks if c.samples]
        return np.concatenate([self.decode_slots, np.array(chunks, dtype=np.int64)])

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """How many tokens each of them samples: one, and one for each draft."""
        chunks = [1 + (c.drafts or 0) for c in self.chunks if c.samples]
        return np.concatenate([np.ones(len(self.decode_slots), dtype=np.int64), np.array(chunks, dtype=np.int64)])

    @property
    def drafts(self) -> list[Tokens]:
        """The drafts of each of them, in order; empty where the step has none at all."""
        if not any(c.drafts for c in self.chunks):
            return []
        return [NO_TOKENS] * len(self.decode_slots) + [c.draft_tokens for c in self.chunks if c.samples]

    @property
    def num_decoding(self) -> int:
        """Sequences that decode: one row each, or a chunk."""
        return len(self.decode_slots) + sum(c.drafts is not None for c in self.chunks)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks if c.drafts is None)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + sum(len(c.tokens) for c in self.chunks)


def wanted_rows(chunk: PromptChunk, all_logits_slots: frozenset[int]) -> int:
    """How many rows of logits a chunk asks for: those of its last tokens."""
    if chunk.slot in all_logits_slots and chunk.drafts is None:
        return len(chunk.tokens)
    return int(chunk.samples) + (chunk.drafts or 0)


def accepted(sampled: Sequence[int], drafts: Tokens) -> int:
    """How many of a sequence's drafts equal what was sampled in their place: those before the first that does not."""
    count = 0
    for token, draft in zip(sampled, drafts.tolist(), strict=False):
        if token != draft:
            break
        count += 1
    return count
