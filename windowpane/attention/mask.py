"""Which tokens a query sees. Without torch; how far a layer looks back is its retention's rule, and is asked there."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.retention import Chunk, Cross, Full, TokenRetention, Window


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens a query sees: those that `sees` looks back to, and, both ways, those of its own span.

    Spans are disjoint ranges of token positions (images). A step's chunk never cuts one, so a span is always present.
    """

    sees: Full | Window | Chunk
    spans: tuple[range, ...] = ()

    @classmethod
    def of(cls, retention: TokenRetention) -> Mask:
        """That of a decoder's layer, which sees what it keeps."""
        if isinstance(retention, Cross):
            raise ValueError(f"{retention.name}: encoder tokens are no part of the sequence")
        return cls(retention)

    def seen(self, position: int) -> range:
        """What the token at `position` sees. It is one range, since its past and its span both contain it."""
        first, stop = self.sees.first_visible(position), position + 1
        for span in self.spans:
            if position in span:
                first, stop = min(first, span.start), span.stop
        return range(first, stop)

    def first_visible(self, position: int) -> int:
        return self.seen(position).start

    @property
    def window_tokens(self) -> int | None:
        """For kernels that know full and window layers only: None for a full one."""
        if self.spans:
            raise ValueError(f"{self.spans[0]} sees both ways: kernels of GPUs attend full and window layers only")
        if isinstance(self.sees, Chunk):
            raise ValueError(f"{self.sees.name}: kernels of GPUs attend full and window layers only; run it on a CPU")
        return self.sees.tokens if isinstance(self.sees, Window) else None


CAUSAL = Mask(Full())
