"""The drafted part of a step: chunks that verify drafts, and what becomes of those that were not accepted.

A recurrent state exists before and behind a step only, so where a draft was not accepted, a sequence with states goes
back to the state before the step: it is *behind*, and computes its accepted tokens once more, with the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.manager import KVManager
from windowpane.kv.sharing import RestorePoint
from windowpane.schedule.batch import PromptChunk
from windowpane.schedule.request import FinishReason, Request, Tokens
from windowpane.schedule.step import LAST_SAMPLED


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The scheduler's book of a step whose tokens are not known yet."""

    step: int
    slots: NDArray[np.int64]  # all sequences in it
    sampling_slots: NDArray[np.int64]
    sampling: list[Request]
    last: NDArray[np.bool_]  # rows that sample the last token of a request's life
    verifying: dict[int, PromptChunk]  # by slot: those with drafts
    points: list[RestorePoint] = field(default_factory=list)  # restore points that it writes


class Verifying:
    """Sequences that compute several tokens in one step, by slot."""

    def __init__(self, manager: KVManager, running: Mapping[int, Request]) -> None:
        self._manager = manager
        self._running = running
        # Decoding sequences whose state is behind: their next step computes more known tokens than the last one.
        self.behind: set[int] = set()

    def room(self, slot: int, most: int, last_length: int) -> int:
        """How many drafts, `most` at most, the next step can verify for a sequence that decodes.

        While a step with drafts is in flight, all of these count as accepted.
        """
        length, behind = int(self._manager.lengths[slot]), 0
        if slot in self.behind:
            behind = self._running[slot].known_tokens - length - 1
        return max(0, min(most - behind, last_length - length - behind - 1))

    def chunk(self, slot: int, start: int, drafts: Tokens) -> PromptChunk:
        """The chunk of a sequence that computes several tokens: known ones, then drafts as far as it was extended."""
        request, length = self._running[slot], int(self._manager.lengths[slot])
        self.behind.discard(slot)
        is_known = request.known_tokens > start
        known = request.tokens(start, request.known_tokens) if is_known else np.array([LAST_SAMPLED])
        count = length - start - len(known)
        tokens = np.concatenate([known, drafts[:count]], dtype=np.int32)
        return PromptChunk(slot, start, tokens, samples=True, drafts=count)

    def take_accepted(
        self,
        step: StepInFlight,
        sampled: NDArray[np.int64],
        counts: Sequence[int] | NDArray[np.int64],
        hear: Callable[[Request, int], None],
        in_flight: NDArray[np.int64],
    ) -> list[int]:
        """Take in the accepted tokens of each request up to its end, and take back the drafts beyond them.

        `hear` is told what a request sampled that was over before, and what lies behind its end where the next step is
        `in_flight`, by slot: that step has gone on from all that was accepted. Returns the slots whose length has
        shrunk.
        """
        shrunk, first = [], 0
        for request, slot, count in zip(step.sampling, step.sampling_slots.tolist(), counts, strict=True):
            chunk = step.verifying.get(slot)
            drafts = (chunk and chunk.drafts) or 0
            if not 1 <= count <= 1 + drafts:
                raise ValueError(f"request {request.id} has {drafts} drafts in step {step.step}, not {count - 1}")
            taken, is_over = 0, request.finish_reason is not None
            for token in sampled[first : first + count].tolist():
                if is_over and request.finish_reason is None and not in_flight[slot]:
                    break
                taken += 1
                if is_over:
                    hear(request, token)
                    continue
                request.output.append(token)
                is_over = reason_to_end(request) is not None
            first += count
            if chunk is not None and taken <= drafts:
                self._take_back(chunk, drafts + 1 - taken)
                shrunk.append(slot)
        return shrunk

    def _take_back(self, chunk: PromptChunk, tokens: int) -> None:
        """The last so many tokens of a chunk were no part of the answer."""
        slot, manager = chunk.slot, self._manager
        if manager.has_state:
            manager.truncate(slot, chunk.start)  # there is no state between the one before the chunk and the one behind
            self.behind.add(slot)
        else:
            manager.truncate(slot, int(manager.lengths[slot]) - tokens)


def reason_to_end(request: Request) -> FinishReason | None:
    params, output = request.params, request.output
    # A grammar lets its stop tokens through before that only where nothing else may follow.
    must_stop = request.grammar is not None and output[-1] in request.grammar.stop_ids
    if output[-1] in params.stop_token_ids and (len(output) >= params.min_tokens or must_stop):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= params.max_tokens else None
