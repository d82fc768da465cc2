"""Workloads: endless, seeded streams of turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: its whole prompt (history included) and the length of its answer."""

    session: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Chat:
    """Multi-turn chat: every turn's prompt is the system prompt, all earlier turns and a new message.

    Messages and answers are log-normal (medians given); a session goes on after a turn with probability
    `another_turn`, and ends before it would exceed `max_tokens`. `sessions` of them are open at a time, and each turn
    comes from a random one.
    """

    sessions: int = 64
    system_tokens: int = 400
    message_tokens: int = 120
    answer_tokens: int = 250
    spread: float = 1.0
    another_turn: float = 0.85
    max_tokens: int = 32_768

    def turns(self, seed: int) -> Iterator[Turn]:
        rng = np.random.default_rng(seed)
        histories = [self.system_tokens] * self.sessions
        names = list(range(self.sessions))
        while True:
            at = int(rng.integers(self.sessions))
            message, answer = (self._length(rng, median) for median in (self.message_tokens, self.answer_tokens))
            if histories[at] + message + answer > self.max_tokens or rng.random() > self.another_turn:
                histories[at] = self.system_tokens
                names[at] = max(names) + 1
            prompt = min(histories[at] + message, self.max_tokens - answer)
            histories[at] = prompt + answer
            yield Turn(names[at], prompt, answer)

    def _length(self, rng: np.random.Generator, median: int) -> int:
        drawn = int(rng.lognormal(np.log(median), self.spread))
        return min(max(drawn, 1), self.max_tokens // 2 - self.system_tokens)
