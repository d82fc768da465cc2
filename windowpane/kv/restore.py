"""Restore points: where a new request can take up what earlier ones computed, and what is worth keeping for that.

A hit is only where *every* group can resume. Full groups can anywhere before a restore point, windows only at it (or
anywhere before it while nothing has slid out of sight), states only at it; `KVManager.longest_resume` says so in one
place. Points are kept at the ends of messages, prompts and answers, and where two prompts were seen to part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windowpane.kv.index import PointIndex
from windowpane.kv.manager import KVManager
from windowpane.kv.prefixes import Tokens
from windowpane.kv.retention import MIN_PREFIX_TOKENS
from windowpane.kv.sharing import RestorePoint

HIDDEN_ROWS = 256  # final hidden states kept, one row each


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found: a sequence can begin with the first `length` tokens of `point`.

    With `hidden_row`, not even the last token has to be computed; who fetches such a point takes the row from it.
    `branch` is how far the prompt is known beyond what can be resumed: a restore point there would serve the next
    request.

    A point `on_host` has to be fetched first, and where there is no room for that, there is `instead`. With `arrives`
    it is being fetched already: whoever waits for it can resume there.
    """

    length: int = 0
    point: RestorePoint | None = None
    hidden_row: int | None = None
    branch: int = 0
    miss: str | None = None
    on_host: RestorePoint | None = None
    instead: Hit | None = None
    arrives: bool = False


@dataclass(slots=True)
class CacheStats:
    """In tokens: what prompts asked for and what they found. `evictions` are restore points given up for room."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    restore_points: int = 0
    cached_bytes: int = 0


class RestorePoints:
    """The restore points of one manager, by token content and key (a tenant's salt; an adapter's name would join it).

    What is not text enters as tokens of its own: an image as numbers below 0 made from its content.
    """

    def __init__(self, manager: KVManager, hidden_rows: int = HIDDEN_ROWS) -> None:
        self.manager = manager
        self.index = PointIndex()
        self._free_hidden = list(range(hidden_rows - 1, -1, -1))
        self._queries = self._hits = 0
        # Whoever keeps copies of them hears of every one that is entered or given up.
        self.on_add: Callable[[RestorePoint], None] = lambda point: None
        self.on_drop: Callable[[RestorePoint], None] = lambda point: None
        self.spare_hidden: Callable[[], int | None] = lambda: None  # a row of theirs that can be had
        manager.use_for_restoring(self.index.worth, self._dropped)

    # -- finding ---------------------------------------------------------------------------------------------------

    def look_up(self, key: str, tokens: Tokens, *, may_skip_last: bool) -> Hit:
        """The longest beginning of `tokens` that can be resumed. At least one token is left to compute.

        `may_skip_last`: the last one too may be skipped where its final hidden state is kept.
        """
        found = self.index.find(key, tokens)
        common, point = found.common, found.exact
        if common < MIN_PREFIX_TOKENS:
            return Hit(miss="no earlier request began with these tokens")
        if may_skip_last and point is not None and point.hidden_row is not None and not point.pending:
            return Hit(len(tokens), point, point.hidden_row)
        length, point = found.longest(len(tokens) - 1, self.manager.longest_resume)
        if length < MIN_PREFIX_TOKENS:
            return Hit(branch=common, miss=f"{common} tokens are known, but no restore point was kept among them")
        return Hit(length, point, branch=common if common > length else 0)

    def count(self, prompt_tokens: int, hit_tokens: int) -> None:
        """One request was admitted."""
        self._queries += prompt_tokens
        self._hits += hit_tokens

    @property
    def stats(self) -> CacheStats:
        books = self.manager.books
        return CacheStats(self._queries, self._hits, books.evictions, len(books.points), self.manager.cached_bytes)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def is_kept(self, key: str, tokens: Tokens) -> bool:
        """Whether there is a restore point at the end of exactly these tokens."""
        return self.index.find(key, tokens).exact is not None

    def add(self, key: str, tokens: Tokens, point: RestorePoint, hidden_row: int | None = None) -> bool:
        """Enter a restore point at the end of these tokens.

        One that is there already stays, and `point` is dropped, unless only the new one has its final hidden state.
        """
        assert len(tokens) == point.length
        earlier = self.index.find(key, tokens).exact
        if earlier is not None:
            if hidden_row is None or earlier.hidden_row is not None or earlier.pending:
                self.give_back_hidden(hidden_row)
                self.manager.drop(point)
                return False
            self.manager.drop(earlier)
        point.hidden_row = hidden_row
        self.index.put(key, tokens, point)
        self.on_add(point)
        return True

    def is_worth_its_room(self, before: int, length: int) -> bool:
        """Whether a new point at `length` tokens, the next after one at `before`, may push out what is worth least."""
        tail_bytes = self.manager.tail_bytes(before, length)
        if self.manager.free_bytes >= tail_bytes:
            return True
        books = self.manager.books
        victim = books.victim()
        score = None if victim is None else books.score(victim)
        return score is None or (length - before) / tail_bytes >= score

    def take_hidden(self) -> int | None:
        """A row for a final hidden state; the least recently used restore point that has one gives it up."""
        if self._free_hidden:
            return self._free_hidden.pop()
        if (row := self.spare_hidden()) is not None:
            return row
        for point in self.manager.books.points:
            if point.hidden_row is not None and not point.pending:
                row, point.hidden_row = point.hidden_row, None
                return row
        return None

    def give_back_hidden(self, row: int | None) -> None:
        if row is not None:
            self._free_hidden.append(row)

    def clear(self) -> None:
        """Forget everything: a step failed, and what it was to write may be anywhere."""
        for point in self.manager.restore_points:
            self.manager.drop(point)

    # -- what the books ask ----------------------------------------------------------------------------------------

    def _dropped(self, point: RestorePoint) -> None:
        if point in self.index:
            self.index.remove(point)
            self.on_drop(point)
            self.give_back_hidden(point.hidden_row)


def prompt_marks(ends: Sequence[int], branch: int, hit: int, prompt_tokens: int, *, few: bool) -> list[int]:
    """Where inside a prompt restore points are wanted: at the ends of messages, and where others part from it.

    `few`: a snapshot of states takes much room, so only the first and the last message's end are worth one, or, where
    no message ends are known, the branch. Others share the system prompt; the next turn shares all up to the last
    message, also where the template drops reasoning from the answer behind it.
    """
    marks = sorted(set(ends))
    if few:
        marks = sorted({*marks[:1], *marks[-1:]}) or [branch]
    elif branch:
        marks = sorted({*marks, branch})
    return [mark for mark in marks if max(hit + 1, MIN_PREFIX_TOKENS) <= mark < prompt_tokens]
