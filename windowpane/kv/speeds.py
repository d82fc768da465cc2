"""Whether a beginning is fetched from a lower tier sooner than it is computed again, by what was measured so far."""

from __future__ import annotations

FIRST_BYTES_PER_SECOND = 10e9  # of a fetch, before any was measured
FETCH_SECONDS = 2e-3  # that every fetch takes beside its copy: one more step, and noticing that it has landed
FOLLOW = 0.3  # weight of the latest measurement in a moving average
FEWEST_BYTES = 2**20  # smaller copies say more of their overhead than of the bandwidth
FEWEST_TOKENS = 16


class Speeds:
    """Moving averages of the bandwidth of fetches and of the seconds that a token of a prompt takes."""

    def __init__(self) -> None:
        self.bytes_per_second = FIRST_BYTES_PER_SECOND
        self.seconds_per_token: float | None = None

    def is_fetched_sooner(self, tokens: int, copy_bytes: int) -> bool:
        """Until a prompt was computed, nobody knows how long that takes, and what is there is fetched."""
        if self.seconds_per_token is None:
            return True
        return FETCH_SECONDS + copy_bytes / self.bytes_per_second < tokens * self.seconds_per_token

    def fetched(self, copy_bytes: int, seconds: float) -> None:
        if copy_bytes >= FEWEST_BYTES and seconds > 0:
            self.bytes_per_second += FOLLOW * (copy_bytes / seconds - self.bytes_per_second)

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if prompt_tokens < FEWEST_TOKENS:
            return
        latest = seconds / prompt_tokens
        before = latest if self.seconds_per_token is None else self.seconds_per_token
        self.seconds_per_token = before + FOLLOW * (latest - before)
