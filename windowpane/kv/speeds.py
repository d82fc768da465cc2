"""How fast prompts are computed and beginnings fetched from a lower tier, by what was measured so far."""

from __future__ import annotations

FIRST_BYTES_PER_SECOND = 10e9  # of a fetch, before any was measured
FETCH_SECONDS = 2e-3  # that every fetch takes beside its copy: one more step, and noticing that it has landed
FOLLOW = 0.3  # weight of the latest measurement in a moving average
KEEP = 0.9  # of what earlier steps weigh, for each later one
FEWEST_BYTES = 2**20  # smaller copies say more of their overhead than of the bandwidth
FEWEST_TOKENS = 16
MOST_SLOWER = 4.0  # than its tokens took before that one step counts as: a machine may have held it up


class Speeds:
    """Of late. Steps weigh by their prompt tokens: one that decodes beside a few of them says little of prompts."""

    def __init__(self) -> None:
        self.bytes_per_second = FIRST_BYTES_PER_SECOND
        self._prompt_tokens = 0.0
        self._seconds = 0.0

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """None until a prompt was computed."""
        return self._prompt_tokens / self._seconds if self._seconds else None

    def is_fetched_sooner(self, tokens: int, copy_bytes: int) -> bool:
        """Until a prompt was computed, nobody knows how long that takes, and what is there is fetched."""
        speed = self.prompt_tokens_per_second
        return speed is None or FETCH_SECONDS + copy_bytes / self.bytes_per_second < tokens / speed

    def fetched(self, copy_bytes: int, seconds: float) -> None:
        if copy_bytes >= FEWEST_BYTES and seconds > 0:
            self.bytes_per_second += FOLLOW * (copy_bytes / seconds - self.bytes_per_second)

    def computed(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if prompt_tokens >= FEWEST_TOKENS:
            if speed := self.prompt_tokens_per_second:
                seconds = min(seconds, MOST_SLOWER * prompt_tokens / speed)
            self._prompt_tokens = KEEP * self._prompt_tokens + prompt_tokens
            self._seconds = KEEP * self._seconds + seconds
