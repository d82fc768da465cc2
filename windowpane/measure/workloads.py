"""The workloads, as rounds of requests: a round begins when every request of the one before has ended.

serve   many requests at once, prompt and answer lengths uniform in a range
turns   sessions with a long prompt, and then each the same prompt with some tokens more
b1      one request alone

Prompts are random tokens and answers have a forced length, so that speed is all that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windowpane.schedule.request import Request, SamplingParams, Tokens

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Workload:
    """`input_tokens` and `output_tokens` are lengths (lowest, highest). `more_tokens` are added in a second round."""

    name: str
    requests: int
    input_tokens: Range
    output_tokens: Range
    more_tokens: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"--requests must be at least 1, not {self.requests}")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.input_tokens[1] + self.more_tokens + self.output_tokens[1]

    def rounds(self, vocab_size: int, seed: int, temperature: float = 0.0) -> list[list[Request]]:
        rng = np.random.default_rng(seed)
        prompts = [_random_tokens(rng, vocab_size, _length(rng, self.input_tokens)) for _ in range(self.requests)]
        rounds = [prompts]
        if self.more_tokens:
            rounds.append([np.append(p, _random_tokens(rng, vocab_size, self.more_tokens)) for p in prompts])
        return [
            [self._request(f"{turn}.{i}", prompt, rng, temperature) for i, prompt in enumerate(prompts)]
            for turn, prompts in enumerate(rounds)
        ]

    def _request(self, name: str, prompt: Tokens, rng: np.random.Generator, temperature: float) -> Request:
        length = _length(rng, self.output_tokens)
        return Request(name, prompt, SamplingParams(max_tokens=length, temperature=temperature))


WORKLOADS = {
    "serve": Workload("serve", 256, (100, 1024), (100, 1024)),
    "turns": Workload("turns", 8, (32_768, 32_768), (64, 64), more_tokens=256),
    "b1": Workload("b1", 1, (128, 128), (128, 128)),
}


def parse_range(text: str) -> Range:
    """`512` or `100-1024`. Raises ValueError that shows what works."""
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise ValueError(f"cannot read the length {text!r}; write 512, or 100-1024 for a range") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"the length {text!r} must run from at least 1 upwards; write 512, or 100-1024 for a range")
    return bounds


def _random_tokens(rng: np.random.Generator, vocab_size: int, count: int) -> Tokens:
    return rng.integers(vocab_size, size=count, dtype=np.int32)


def _length(rng: np.random.Generator, bounds: Range) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))
