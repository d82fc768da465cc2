"""A request: what was asked, and what has come of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the scheduler needs to know of sampling. A stop token ends the answer once `min_tokens` are there."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must lie between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")


@dataclass(slots=True, eq=False)
class Request:
    """Lower `priority` runs first. `arrival` is set by the scheduler and breaks ties."""

    id: str
    prompt: Tokens
    params: SamplingParams = SamplingParams()
    priority: int = 0

    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    arrival: int = -1
    preemptions: int = 0
    bypassed: int = 0

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.prompt, dtype=np.int32)
        if len(self.prompt) == 0:
            raise ValueError(f"request {self.id} has an empty prompt; a model needs at least one token (BOS)")

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def longest_kv(self) -> int:
        """Tokens in KV at the end of its life: the last one sampled is never computed."""
        return len(self.prompt) + self.params.max_tokens - 1

    def tokens(self, start: int, stop: int) -> Tokens:
        """Known tokens [start, stop) of prompt and output."""
        if stop <= len(self.prompt):
            return self.prompt[start:stop]
        known: Tokens = np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])
        return known[start:stop]
