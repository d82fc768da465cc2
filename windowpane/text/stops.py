"""Stop strings: text is cut before the first of them, and what may be the beginning of one is not shown yet."""

from __future__ import annotations

from collections.abc import Sequence

from windowpane.text.tokenizer import TextError


class StopStrings:
    """Filters one generation's text. What `push` and `finish` return, joined, never reaches into a stop string.

    The stop string that is complete first wins, and of several that end together the longest. So the result depends on
    the text alone, not on how it was cut into pieces, and the text ends as early as it can. With `include` the stop
    string itself is shown too.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise TextError("a stop string is empty, which would stop every text; leave it out")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """What can be shown now. Once `matched` is set, the text has ended and later pieces are dropped."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            return text[: end if self._include else start]
        open_at = self._first_open(text)
        self._held = text[open_at:]
        return text[:open_at]

    def finish(self) -> str:
        """The rest when the generation has ended: an unfinished stop string was ordinary text after all."""
        rest, self._held = self._held, ""
        return rest if self.matched is None else ""

    def _first_open(self, text: str) -> int:
        """Where the first unfinished stop string begins; the end of the text if there is none."""
        longest = max(map(len, self._stops), default=0)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
