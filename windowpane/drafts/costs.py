"""What steps cost with and without drafts, as measured: how drafts that cost more than they gain are left out."""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

FOLLOW = 0.3  # weight of the latest step in the moving averages
# Of a sequence's share of a plain step, for each draft before any was measured: low, so that some are.
FIRST_GUESS = 0.05
OUTLIER = 4.0  # extra plain steps' time beyond which a measurement is doubted (a kernel was compiled, say) …
DOUBTS = 3  # … so many times
STALE = 32  # steps with drafts after which a number of them that none of these steps had is not known any more


class StepCosts:
    """Seconds of steps by their decoding sequences, and what drafts add. Sizes are put together by powers of two."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._extra: dict[int, _Extra] = {}

    def plain(self, sequences: int) -> float | None:
        """Seconds of a step without drafts; None where none of about this size was measured."""
        return self._plain.get(sequences.bit_length())

    def extra(self, sequences: int, drafts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that so many drafts add to a step of so many sequences, one of which was measured without."""
        guess = FIRST_GUESS * self._plain[sequences.bit_length()] / sequences
        known = self._extra.get(sequences.bit_length())
        return drafts.astype(np.float64) * guess if known is None else known.at(drafts)

    def observe(self, sequences: int, drafts: int, seconds: float) -> None:
        size = sequences.bit_length()
        if not drafts:
            self._plain[size] = _followed(self._plain.get(size), seconds)
        elif size in self._plain:
            self._extra.setdefault(size, _Extra()).observe(drafts, seconds - self._plain[size], self._plain[size])


class _Extra:
    """Seconds that drafts add, by their number: between measured numbers on a line, beyond them in proportion."""

    def __init__(self) -> None:
        self._counts: list[int] = [0]
        self._seconds: dict[int, float] = {0: 0.0}
        self._doubts = self._steps = 0
        self._recent: set[int] = set()

    def at(self, drafts: NDArray[np.int64]) -> NDArray[np.float64]:
        seconds = [self._seconds[count] for count in self._counts]
        found = np.interp(drafts, self._counts, seconds)
        most = self._counts[-1]
        return np.where(drafts > most, seconds[-1] * drafts / max(most, 1), found)

    def observe(self, drafts: int, seconds: float, plain: float) -> None:
        if seconds > OUTLIER * plain and self._doubts < DOUBTS:
            self._doubts += 1
            return
        self._doubts = 0
        if drafts not in self._seconds:
            insort(self._counts, drafts)
        self._seconds[drafts] = _followed(self._seconds.get(drafts), max(seconds, 0.0))
        self._recent.add(drafts)
        self._steps += 1
        if self._steps % STALE == 0:  # one slow step would keep its number of drafts from ever being chosen again
            self._counts = sorted({0} | self._recent)
            self._seconds = {count: self._seconds[count] for count in self._counts}
            self._recent.clear()


def _followed(before: float | None, now: float) -> float:
    return now if before is None else before + FOLLOW * (now - before)
