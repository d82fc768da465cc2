"""The last minute in numbers, and the last 15 minutes: tokens a second, time to first token, prefix hits, memory.
Counted in the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from windowpane.engine.engine import Engine, TokenOutput
from windowpane.schedule.request import Request

HISTORY_S = 60
TREND_S = 900
BUCKET_S = 10  # of a trend
RATE_S = 3  # a rate is taken over this long: short enough to follow, long enough not to flicker


@dataclass(slots=True)
class _Second:
    """What happened within one second. Prompts count when their first token comes."""

    at: int
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    held_bytes: tuple[int, ...] | None = None  # live and cached, by group


class Meter:
    """Tell it of every request that arrives, of every step, and of every request that ends without a last token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.finished = 0
        self._clock = clock
        self._started = clock()
        self._seconds: list[_Second] = []
        self._arrivals: dict[Request, float] = {}
        self._waiting_for_first: set[Request] = set()

    def arrived(self, request: Request, at_s: float) -> None:
        """`at_s` is when it reached the server, by this meter's clock: the wait before the engine sees it counts."""
        self._arrivals[request] = at_s
        self._waiting_for_first.add(request)

    def stepped(self, outputs: Iterable[TokenOutput]) -> None:
        """What one step gave."""
        now = self._clock()
        second = self._second(now)
        for output in outputs:
            request = output.request
            if output.token is not None:
                second.output_tokens += 1
                self.output_tokens += 1
                if request in self._waiting_for_first:
                    self._first_token(request, now, second)
            if output.finish_reason is not None:
                self.ended(request)

    def ended(self, request: Request) -> None:
        """A request is over, however it ended. Saying so twice does no harm."""
        if self._arrivals.pop(request, None) is not None:
            self._waiting_for_first.discard(request)
            self.finished += 1

    def remember(self, engine: Engine) -> None:
        """What memory holds: once a second while there are steps, and when the last of them is done."""
        second = self._second(self._clock())
        if second.held_bytes is None or not engine.has_work:
            held = map(engine.manager.group_bytes, range(len(engine.manager.layout.groups)))
            second.held_bytes = tuple(h.live + h.cached for h in held)

    def document(self) -> dict[str, Any]:
        """The `rates` part of /stats."""
        now = self._clock()
        last = self._last_seconds(now, HISTORY_S)
        recent = last[-RATE_S:]
        recent_s = min(RATE_S - 1 + now % 1, max(now - self._started, 1.0))
        waits = [ttft for second in last for ttft in second.ttft_s]
        return {
            "uptime_s": round(now - self._started, 1),
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "finished_requests": self.finished,
            "output_tokens_per_s": round(sum(s.output_tokens for s in recent) / recent_s, 1),
            "ttft_ms": {"p50": _ms(_percentile(waits, 50)), "p95": _ms(_percentile(waits, 95)), "requests": len(waits)},
            "hit_rate": _hit_rate(last),
            "history": {
                "output_tokens": [s.output_tokens for s in last],
                "ttft_ms": [_ms(median(s.ttft_s)) if s.ttft_s else None for s in last],
                "hit_rate": [_hit_rate([s]) for s in last],
            },
        }

    def trends(self, groups: int) -> dict[str, Any]:
        """The last 15 minutes in buckets, the oldest first; memory stays as it was until it is known to have changed.

        The buckets lie on multiples of their length, so that a bucket that is over changes no more.
        """
        now = self._clock()
        behind_s = int(now) % BUCKET_S + 1
        last = self._last_seconds(now, TREND_S - BUCKET_S + behind_s)
        before = [s.held_bytes for s in self._seconds if s.at < last[0].at and s.held_bytes is not None]
        held = before[-1] if before else (0,) * groups
        memory, rates, waits = [], [], []
        for start in range(0, len(last), BUCKET_S):
            bucket = last[start : start + BUCKET_S]
            held = next((s.held_bytes for s in reversed(bucket) if s.held_bytes is not None), held)
            memory.append(held)
            rates.append(round(sum(s.output_tokens for s in bucket) / len(bucket), 1))
            ttft_s = [ttft for second in bucket for ttft in second.ttft_s]
            waits.append(_ms(median(ttft_s)) if ttft_s else None)
        return {
            "bucket_s": BUCKET_S,
            "output_tokens_per_s": rates,
            "ttft_ms": waits,
            "held_bytes": [list(group) for group in zip(*memory, strict=True)],
        }

    def _first_token(self, request: Request, now: float, second: _Second) -> None:
        self._waiting_for_first.discard(request)
        second.ttft_s.append(now - self._arrivals[request])
        second.prompt_tokens += len(request.prompt)
        second.cached_tokens += request.cached_tokens
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.cached_tokens

    def _second(self, now: float) -> _Second:
        """The present second; older ones than the history are dropped as new ones begin."""
        if not self._seconds or self._seconds[-1].at != int(now):
            self._seconds.append(_Second(int(now)))
            del self._seconds[: -TREND_S - 1]
        return self._seconds[-1]

    def _last_seconds(self, now: float, count: int) -> list[_Second]:
        """The last `count` seconds, oldest first, the present one last; empty where nothing happened."""
        by_time = {second.at: second for second in self._seconds[-count - 1 :]}
        return [by_time.get(at) or _Second(at) for at in range(int(now) - count + 1, int(now) + 1)]


def _hit_rate(seconds: list[_Second]) -> float | None:
    prompt_tokens = sum(s.prompt_tokens for s in seconds)
    return round(sum(s.cached_tokens for s in seconds) / prompt_tokens, 4) if prompt_tokens else None


def _percentile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
