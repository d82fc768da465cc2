"""What fits: fixed bytes per sequence, bytes per token, sequences at a length, and the longest length.

Two figures answer different questions. The *byte ratio* says how many times the arena holds one sequence's pages; the
integer number of *sequences* counts whole slabs, as the arena hands them out when sequences share the last slab of a
group. The second is never above the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windowpane.kv.layout import Group, Layout
from windowpane.kv.retention import ceil_div

UNREACHABLE_TOKENS = 2**40  # a model whose groups do not grow has no longest length; searches stop here


@dataclass(frozen=True, slots=True)
class Capacity:
    """`kv_bytes` is what the device grants; the arena takes the whole slabs in it."""

    layout: Layout
    kv_bytes: int
    rollback_tokens: int = 0

    @property
    def num_slabs(self) -> int:
        return self.kv_bytes // self.layout.slab_bytes

    @property
    def arena_bytes(self) -> int:
        return self.num_slabs * self.layout.slab_bytes

    @property
    def fixed_bytes_per_sequence(self) -> int:
        """What a long sequence pays once: full windows and chunks, states, all encoder tokens."""
        fixed = (g for g in self.layout.groups if not g.grows)
        return sum(g.max_pages(UNREACHABLE_TOKENS, self.rollback_tokens) * g.page_bytes for g in fixed)

    @property
    def bytes_per_token(self) -> float:
        """What one more token costs, for ever. 0 when no layer sees everything."""
        return sum(g.bytes_per_token for g in self.layout.groups if g.grows)

    def pages(self, length: int) -> list[int]:
        """Pages per group that one sequence of `length` tokens owns at most."""
        return [g.max_pages(length, self.rollback_tokens) for g in self.layout.groups]

    def bytes_at(self, length: int) -> int:
        return sum(pages * g.page_bytes for pages, g in zip(self.pages(length), self.layout.groups, strict=True))

    def byte_ratio(self, length: int) -> float:
        """How many times the arena holds a sequence of this length; slab remainders are charged to the pages beside."""
        need = sum(p * self._page_share(g) for p, g in zip(self.pages(length), self.layout.groups, strict=True))
        return self.arena_bytes / need if need else 0.0

    def slabs_for(self, sequences: int, length: int) -> int:
        """Slabs that so many sequences of this length need when they share each group's last slab."""
        return sum(
            ceil_div(sequences * pages, self.layout.pages_per_slab(g))
            for pages, g in zip(self.pages(length), self.layout.groups, strict=True)
        )

    def sequences(self, length: int) -> int:
        """The whole number of sequences of this length that the arena can hold at once."""
        if self.bytes_at(length) == 0:
            return 0
        return _last_true(lambda n: self.slabs_for(n, length) <= self.num_slabs, 0, self.num_slabs * self._most_pages())

    def longest(self, sequences: int = 1) -> int | None:
        """The longest length at which so many sequences fit; 0 when none does, None when there is no limit."""
        if self.slabs_for(sequences, UNREACHABLE_TOKENS) <= self.num_slabs:
            return None
        return _last_true(lambda n: self.slabs_for(sequences, n) <= self.num_slabs, 0, UNREACHABLE_TOKENS)

    def curve(self, longest: int) -> list[tuple[int, int]]:
        """(tokens, sequences) at powers of two up to `longest`, which is always the last point."""
        lengths = [2**k for k in range(10, longest.bit_length()) if 2**k < longest]
        return [(n, self.sequences(n)) for n in [*lengths, longest]]

    def _page_share(self, group: Group) -> float:
        return self.layout.slab_bytes / self.layout.pages_per_slab(group)

    def _most_pages(self) -> int:
        return max(self.layout.pages_per_slab(g) for g in self.layout.groups)


def _last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] for which a monotone predicate holds (it is taken to hold at `low`)."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
