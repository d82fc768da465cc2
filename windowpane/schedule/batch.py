"""One step by value: what the scheduler hands to every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.changes import Changes
from windowpane.schedule.request import Tokens


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one sequence in one step. `samples`: the last of them yields the first (or next) token.

    `keep_hidden` is the row in which to keep the final hidden state of the last one. A chunk of a prompt that is known
    to its end has no tokens: `hidden` is the row that has this state.
    """

    slot: int
    start: int
    tokens: Tokens
    samples: bool
    keep_hidden: int | None = None
    hidden: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, as plain values. Decoding sequences come first: each computes the token its slot sampled last.

    The step samples one token for every decoding sequence and every chunk that `samples`, in that order. `state_slots`
    names the present one of the two states of each sequence and chunk. With drafts (`draft_rows`, None without), a
    decoding sequence also computes so many drafted tokens after its own, and samples one token more for each of them
    that is accepted.
    """

    step: int
    decode_slots: NDArray[np.int64]
    decode_positions: NDArray[np.int64]
    chunks: list[PromptChunk]
    state_slots: NDArray[np.int8]
    changes: Changes
    draft_rows: NDArray[np.int64] | None = None

    @property
    def sampling_slots(self) -> NDArray[np.int64]:
        """Who samples a token in this step, in order."""
        chunks = [c.slot for c in self.chunks if c.samples]
        return np.concatenate([self.decode_slots, np.array(chunks, dtype=np.int64)])

    @property
    def prompt_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def num_tokens(self) -> int:
        drafts = 0 if self.draft_rows is None else int(self.draft_rows.sum())
        return len(self.decode_slots) + drafts + self.prompt_tokens


def wanted_rows(chunk: PromptChunk, all_logits_slots: frozenset[int]) -> int:
    """How many rows of logits a chunk asks for: those of its last tokens."""
    return len(chunk.tokens) if chunk.slot in all_logits_slots else int(chunk.samples)
