"""A step that was sent off: who samples in it, and what comes back to the host once the device has computed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowpane.device.transfer import HostCopy, to_device
from windowpane.engine.sampler import LOGPROB_ROWS, TopLogprobs, top_logprobs
from windowpane.schedule.batch import accepted
from windowpane.schedule.request import Request, TokenLogprobs, Tokens


@dataclass(slots=True)
class SentStep:
    """A step on its way: who samples in it, whose memory it touches, and where its results will be."""

    sampling: list[Request]
    touched: list[Request]
    slots: NDArray[np.int64]  # of those that sample
    drafts: list[Tokens]  # of those that sample; empty where none has any
    decoding: int
    prompt_tokens: int
    follows: bool  # another step was on its way when this one was sent off
    routed_slots: dict[Request, int]  # of those that sample and want routed experts
    sent_at: float = field(default_factory=lambda: time.perf_counter())
    ended: Moment | None = None
    tokens: HostCopy | None = None
    logprobs: HostLogprobs | None = None
    logprob_rows: Sequence[int] = ()
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    error: BaseException | None = field(default_factory=lambda: RuntimeError("the step was never run"))
    stuck: dict[Request, Exception] = field(default_factory=dict)  # requests whose grammars could not go on
    matchers_advanced: bool = False
    device_knows_last: bool = False  # of each sequence, the last token that counts, though the step has drafts

    def seconds(self, before: Moment | None) -> float:
        """How long it took, now that its tokens are here; `before` is when the step before it ended."""
        if self.ended is not None and self.ended.at is not None:
            return self.ended.at - self.sent_at
        if self.ended is not None and self.follows and before is not None:
            return self.ended.seconds_since(before)
        return time.perf_counter() - self.sent_at

    def advance_matchers(self) -> None:
        """Tell the sampled tokens to the grammars of their requests, once; waits for them."""
        if self.tokens is not None and not self.matchers_advanced:
            self.matchers_advanced = True
            if any(r.matcher is not None for r in self.sampling):
                tokens = self.tokens.array()
                for request, row, n in zip(self.sampling, self.first_rows(), self.count_emitted(tokens), strict=True):
                    if request.matcher is not None and request not in self.stuck:
                        for token in tokens[row : row + n].tolist():
                            request.matcher.accept(token)

    def read_logprobs(self) -> dict[int, TokenLogprobs]:
        """Logprobs by row; those of prompts go to their requests."""
        for prompt in self.prompt_logprobs:
            prompt.store()
        for pooled in self.pooled:
            pooled.store()
        if self.logprobs is None or self.tokens is None:
            return {}
        tokens, requests = self.tokens.array(), self.row_requests()
        counts = [requests[row].params.logprobs or 0 for row in self.logprob_rows]
        read = self.logprobs.read([int(tokens[row]) for row in self.logprob_rows], counts)
        return dict(zip(self.logprob_rows, read, strict=True))

    # -- rows: a sequence has one, and one for each of its drafts ----------------------------------------------------

    def row_requests(self) -> list[Request]:
        """Whose each row is."""
        if not self.drafts:
            return self.sampling
        return [r for r, drafts in zip(self.sampling, self.drafts, strict=True) for _ in range(1 + len(drafts))]

    def first_rows(self) -> Sequence[int]:
        if not self.drafts:
            return range(len(self.sampling))
        counts = [0, *(1 + len(drafts) for drafts in self.drafts[:-1])]
        rows: list[int] = np.cumsum(counts).tolist()
        return rows

    def drafts_before_rows(self) -> dict[int, Tokens]:
        """The drafts that each row takes for granted, by row."""
        rows = zip(self.first_rows(), self.drafts, strict=False)
        return {row + count: drafts[:count] for row, drafts in rows for count in range(1, len(drafts) + 1)}

    def count_emitted(self, tokens: NDArray[np.int64]) -> list[int]:
        """How many tokens each sequence gains: its accepted drafts, and the token behind them."""
        if not self.drafts:
            return [1] * len(self.sampling)
        rows, sampled = zip(self.first_rows(), self.drafts, strict=True), tokens.tolist()
        return [1 + accepted(sampled[row : row + len(drafts)], drafts) for row, drafts in rows]


class Moment:
    """When a device has done all that it was sent so far. By its own clock if it has one: the host may notice late,
    while it sends off the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self.at: float | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self.at = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Once both are over, on a device with a clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostLogprobs:
    def __init__(self, logprobs: TopLogprobs) -> None:
        self.rows = len(logprobs.chosen)
        self._parts = [HostCopy(t) for t in (logprobs.chosen, logprobs.top, logprobs.top_tokens)]

    def read(self, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row: its token, and as many of the likeliest as that row asked for."""
        columns = zip(tokens, counts, *(part.array().tolist() for part in self._parts), strict=True)
        return [
            TokenLogprobs(token, chosen, tuple(zip(top_tokens[:count], top[:count], strict=True)))
            for token, count, chosen, top, top_tokens in columns
        ]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens from `start` on."""

    request: Request
    start: int
    slices: list[HostLogprobs]

    def store(self) -> None:
        """Add to the request what it does not have yet: a preempted one computes its prompt again, in other chunks."""
        known = self.request.prompt_logprobs
        start = self.start
        for logprobs in self.slices:
            tokens = self.request.prompt[start : start + logprobs.rows].tolist()
            if start <= len(known) < start + logprobs.rows:
                counts = [self.request.params.prompt_logprobs or 0] * len(tokens)
                known += logprobs.read(tokens, counts)[len(known) - start :]
            start += logprobs.rows


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a chunk from `start` on adds to its request's embedding."""

    request: Request
    start: int
    part: HostCopy

    @classmethod
    def of(cls, request: Request, start: int, hidden: Tensor) -> Pooled:
        rows = hidden.float()
        return cls(request, start, HostCopy(rows.sum(0) if request.pooling == "mean" else rows[-1]))

    def store(self) -> None:
        """A preempted request computes its prompt again, from the beginning."""
        request, part = self.request, self.part.array().astype(np.float32)
        adds = request.pooled is not None and self.start > 0 and request.pooling == "mean"
        request.pooled = request.pooled + part if adds and request.pooled is not None else part


def wants_prompt_logprobs(request: Request, start: int) -> bool:
    """Whether a chunk that begins at `start` predicts prompt tokens whose logprobs are wanted."""
    return request.params.prompt_logprobs is not None and start < len(request.prompt) - 1


def prompt_logprobs(request: Request, start: int, tokens: int, logits_of: Callable[[slice], Tensor]) -> PromptLogprobs:
    """Of the prompt tokens that a chunk of so many from `start` on predicts, in slices of rows to bound memory.

    The logits of token i predict token i + 1.
    """
    targets = request.prompt[start + 1 : start + 1 + tokens].astype(np.int64)
    slices = []
    for first in range(0, len(targets), LOGPROB_ROWS):
        some = targets[first : first + LOGPROB_ROWS]
        logits = logits_of(slice(first, first + len(some)))
        count = request.params.prompt_logprobs or 0
        slices.append(HostLogprobs(top_logprobs(logits, to_device(some, logits.device), count)))
    return PromptLogprobs(request, start + 1, slices)
