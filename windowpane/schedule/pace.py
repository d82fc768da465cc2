"""How much of a prompt a step takes while others decode: as much as keeps the step within the time that was asked for.

What a step with n prompt tokens takes is not a line. A few tokens are nearly free while weights are being read, and
many cost the same each; the cost of each grows with the past that it attends to. So each chunk is sized by the last
one, on the safe side of any such curve: a larger chunk is taken to cost as much per token as that one did in all, and
a smaller one to lie on the line between that one and a step without a prompt.
"""

from __future__ import annotations

FIRST_TOKENS = 256  # prompt tokens of a step before anything has been measured
FEWEST_TOKENS = 16  # prompt tokens that a step takes however short the time
MOST_GROWTH = 4.0  # of a chunk over the longest before it, so that one fast step does not lead to a long one
FOLLOW = 0.5  # weight of the latest step without a prompt in the moving average of such steps
AIM = 0.9  # share of the time asked for: the cost of a chunk grows with its past, and steps vary
TELLING = 0.5  # chunks below this share of the allowed tokens (a prompt's last one) do not size later chunks


class Pace:
    """Chunks of prompts sized so that a step that others decode in takes at most about `step_seconds`.

    Where decoding alone takes most of that time, a step may take twice as long as decoding: a prompt would hardly
    advance otherwise.
    """

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._base = 0.0  # seconds of a step without a prompt
        self._last: tuple[int, float] | None = None  # tokens and seconds of a step with one
        self._most_tokens = FIRST_TOKENS / MOST_GROWTH  # of a step so far

    def tokens(self) -> int:
        """Prompt tokens for the next step."""
        allowed = MOST_GROWTH * self._most_tokens
        if self._last is not None:
            allowed = min(allowed, self._within(max(AIM * self.step_seconds, 2 * self._base), *self._last))
        return max(FEWEST_TOKENS, int(allowed))

    def _within(self, seconds: float, tokens: int, took: float) -> float:
        """Tokens that a step of so many seconds has time for, if one of `tokens` took `took`."""
        base = min(self._base, took)
        if took <= seconds:
            return tokens * seconds / took
        return tokens * max(seconds - base, 0.0) / (took - base)

    def observe(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step with so many decoding sequences and prompt tokens took so long."""
        seconds = max(seconds, 1e-9)
        if prompt_tokens == 0:
            self._base = seconds if self._base == 0.0 else self._base + FOLLOW * (seconds - self._base)
            return
        if self._last is None or prompt_tokens >= TELLING * self.tokens() or seconds > self.step_seconds:
            self._last = (prompt_tokens, seconds)
        if decoding:
            self._most_tokens = max(self._most_tokens, prompt_tokens)
