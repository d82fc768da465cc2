"""Prompt lookup: what followed the last few tokens where they stood before is what may follow them now.

It costs no weights, and guesses well where an answer repeats its prompt: edits, quotes, code, tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windowpane.drafts.drafter import Asking, HostKnows
from windowpane.schedule.request import NO_TOKENS, Request, Tokens

# A source goes on behind a token that was replaced while so many of the last tokens are its own.
ALIKE, OF_LAST = 2, 4


class NgramDrafter(HostKnows):
    """Looks up the last `longest` tokens, then fewer, down to `shortest`."""

    is_free = True

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._texts: dict[Request, _Text] = {}

    def propose(self, asking: Sequence[Asking]) -> list[Tokens]:
        return [self._propose(a.request, a.most) for a in asking]

    def kind_of(self, request: Request) -> int:
        """The longer the run that stood before, the likelier is what followed it."""
        return self._texts[request].run if request in self._texts else 0

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)

    def _propose(self, request: Request, most: int) -> Tokens:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.prompt)
        tokens = text.with_output(request.output)
        source, text.run = self._find(tokens, text.aligned)
        if source is None:
            return NO_TOKENS
        text.read_from(source)
        # A run that reaches the end of what is known repeats itself.
        return (
            np.resize(tokens[source:], most) if source + most > len(tokens) else tokens[source : source + most].copy()
        )

    def _find(self, tokens: Tokens, aligned: int | None) -> tuple[int | None, int]:
        """Behind the latest place where the longest run of last tokens stood before, and how long it is.

        Where no run stood before, an earlier source goes on, as if one of its tokens had been replaced.
        """
        end = len(tokens)
        found = np.flatnonzero(tokens[: end - 1] == tokens[-1])
        best: int | None = None
        run = 0
        for length in range(1, min(self._longest, end - 1) + 1):
            if length > 1:
                found = found[found >= length - 1]
                found = found[tokens[found - (length - 1)] == tokens[end - length]]
            if not len(found):
                break
            if length >= self._shortest:
                best, run = int(found[-1]) + 1, length
        return aligned if best is None else best, run


class _Text:
    """A request's tokens, prompt and answer, in one array that grows, and where its last drafts were read from."""

    def __init__(self, prompt: Tokens) -> None:
        self._tokens = np.empty(len(prompt) + 256, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._prompt_tokens = self._known = len(prompt)
        self.run = 0  # tokens that were found again when it was last looked up
        self._source: tuple[int, int] | None = None  # drafts for position `second` on were read from `first` on

    def with_output(self, output: Sequence[int]) -> Tokens:
        """All tokens that are known now."""
        new = output[self._known - self._prompt_tokens :]
        known = self._known + len(new)
        if known > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * known)
        self._tokens[self._known : known] = new
        self._known = known
        return self._tokens[:known]

    def read_from(self, source: int) -> None:
        self._source = source, self._known

    @property
    def aligned(self) -> int | None:
        """Where the last source would go on now, if that is known and it still resembles what has come since."""
        if self._source is None:
            return None
        source = self._source[0] + self._known - self._source[1]
        if not OF_LAST <= source < self._known:
            return None
        alike = self._tokens[source - OF_LAST : source] == self._tokens[self._known - OF_LAST : self._known]
        return source if np.count_nonzero(alike) >= ALIKE else None
