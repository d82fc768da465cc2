"""How much of a prompt a step takes while others decode: as much as keeps the step within the time that was asked for.

A step takes about `base` seconds, as one without a prompt does, and `per_token` more for each prompt token. Both are
followed as steps land: the second grows with the past that a prompt attends to, and no formula knows every machine.
"""

from __future__ import annotations

FIRST_TOKENS = 256  # taken before anything was measured
FEWEST_TOKENS = 16  # a prompt goes on, however short the time
MOST_GROWTH = 4.0  # of a chunk over all before it: one lucky measurement does not make a long step
FOLLOW = 0.5  # how much the last measurement counts against all before it


class Pace:
    """Chunks of prompts sized so that a step that others decode in takes about `step_seconds`."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._base: float | None = None
        self._per_token: float | None = None
        self._most_tokens = FIRST_TOKENS / MOST_GROWTH  # of a step so far

    def tokens(self) -> int:
        """Prompt tokens for the next step."""
        allowed = MOST_GROWTH * self._most_tokens
        if self._per_token is not None:
            allowed = min(allowed, (self.step_seconds - (self._base or 0.0)) / self._per_token)
        return max(FEWEST_TOKENS, int(allowed))

    def observe(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step with so many decoding sequences and prompt tokens took so long."""
        if prompt_tokens == 0:
            self._base = _follow(self._base, seconds, FOLLOW)
            return
        # A short chunk, such as a prompt's last one, is mostly base: what it costs a token says little.
        share = FOLLOW * min(1.0, prompt_tokens / self.tokens())
        self._per_token = _follow(self._per_token, max(seconds - (self._base or 0.0), 1e-9) / prompt_tokens, share)
        if decoding:
            self._most_tokens = max(self._most_tokens, prompt_tokens)


def _follow(believed: float | None, measured: float, share: float) -> float:
    return measured if believed is None else believed + share * (measured - believed)
