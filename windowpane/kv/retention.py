"""Which past tokens a layer can still be asked for.

Each retention answers four questions, and every other module asks them here:

- `first_visible(position)`: the oldest token that the token at `position` attends to;
- `held(length, rollback_tokens)`: the half-open range of past tokens that must be in pages once `length` tokens are
  computed;
- `max_pages(length, block_tokens, rollback_tokens)`: the most pages that range can touch on the way to `length` tokens;
- `longest_resume(length, limit)`: the longest length up to `limit` at which what is held at `length` tokens suffices to
  go on.

`rollback_tokens` is the number of computed tokens that may still be taken back (drafts that are not accepted); it is 0
without drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

# The shortest beginning that one sequence takes over from another. Anything shorter is computed about as fast as it is
# found, and every prompt shares its first token with every other.
MIN_PREFIX_TOKENS = 16


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


class LooksBack(Protocol):
    """All that reading the past asks of a retention, or of an attention mask."""

    def first_visible(self, position: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Full:
    """Every past token, for as long as the sequence lives."""

    kind = "full"

    @property
    def name(self) -> str:
        return "full"

    def first_visible(self, position: int) -> int:
        return 0

    def held(self, length: int, rollback_tokens: int = 0) -> range:
        return range(length)

    def max_pages(self, length: int, block_tokens: int, rollback_tokens: int = 0) -> int:
        return ceil_div(length, block_tokens)

    def longest_resume(self, length: int, limit: int) -> int:
        return min(length, limit)


@dataclass(frozen=True, slots=True)
class Routes(Full):
    """Every past token, as `Full`: of the experts that tokens visited, which are a group of their own."""

    @property
    def name(self) -> str:
        return "routed-experts"


@dataclass(frozen=True, slots=True)
class Window:
    """The last `tokens` tokens, the asking token included: it sees `tokens - 1` past ones."""

    tokens: int
    kind = "window"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a window must be at least 1 token, not {self.tokens}")

    @property
    def name(self) -> str:
        return f"window-{self.tokens}"

    def first_visible(self, position: int) -> int:
        return max(0, position - self.tokens + 1)

    def held(self, length: int, rollback_tokens: int = 0) -> range:
        return range(self.first_visible(max(0, length - rollback_tokens)), length)

    def max_pages(self, length: int, block_tokens: int, rollback_tokens: int = 0) -> int:
        held_tokens = self.tokens - 1 + rollback_tokens
        if length <= held_tokens:
            return ceil_div(length, block_tokens)
        if held_tokens == 0:
            return 0
        # The held range starts anywhere in a page once the sequence has slid; the first few slides may not straddle
        # yet.
        straddling = ceil_div(held_tokens - 1, block_tokens) + 1
        return min(ceil_div(length, block_tokens), straddling)

    def longest_resume(self, length: int, limit: int) -> int:
        """A shorter length would see tokens that have slid out of sight by `length`, unless none has."""
        if limit >= length or self.tokens == 1 or self.held(length).start == 0:
            return min(length, limit)
        return 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of the asking token's own chunk: positions are cut at multiples of `tokens`."""

    tokens: int
    kind = "chunk"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a chunk must be at least 1 token, not {self.tokens}")

    @property
    def name(self) -> str:
        return f"chunk-{self.tokens}"

    def first_visible(self, position: int) -> int:
        return position // self.tokens * self.tokens

    def held(self, length: int, rollback_tokens: int = 0) -> range:
        return range(self.first_visible(max(0, length - rollback_tokens)), length)

    def max_pages(self, length: int, block_tokens: int, rollback_tokens: int = 0) -> int:
        held_tokens = self.tokens - 1 + rollback_tokens
        if length <= held_tokens or held_tokens == 0:
            return ceil_div(min(length, held_tokens), block_tokens)
        # Chunks start inside a page unless blocks divide them; the worst start is one common divisor before a page's
        # end.
        worst_start = block_tokens - math.gcd(self.tokens, block_tokens)
        return min(ceil_div(length, block_tokens), ceil_div(worst_start + held_tokens, block_tokens))

    def longest_resume(self, length: int, limit: int) -> int:
        """A sequence can go on anywhere in the last chunk, or where a chunk begins, which needs no past token."""
        if limit >= self.held(length).start:
            return min(length, limit)
        return self.first_visible(limit)


@dataclass(frozen=True, slots=True)
class State:
    """One fixed-size recurrent state. Nothing per token; in two slots the state before an in-flight token survives, in
    one it is overwritten.
    """

    slots: int = 2
    kind = "state"

    def __post_init__(self) -> None:
        if self.slots not in (1, 2):
            raise ValueError(f"a state is kept in 1 or 2 slots, not {self.slots}")

    @property
    def name(self) -> str:
        return "state"

    def longest_resume(self, length: int, limit: int) -> int:
        return length if limit >= length else 0


@dataclass(frozen=True, slots=True)
class Cross:
    """`tokens` encoder tokens, written once."""

    tokens: int
    kind = "cross"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"cross attention must keep at least 1 encoder token, not {self.tokens}")

    @property
    def name(self) -> str:
        return f"cross-{self.tokens}"

    def max_pages(self, length: int, block_tokens: int, rollback_tokens: int = 0) -> int:
        return ceil_div(self.tokens, block_tokens)

    def longest_resume(self, length: int, limit: int) -> int:
        return min(length, limit)


TokenRetention = Full | Window | Chunk | Cross
Retention = TokenRetention | State
