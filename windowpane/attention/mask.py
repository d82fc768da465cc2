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
    def reach_tokens(self) -> int | None:
        """For kernels that look back only: the tokens of a window or of a chunk, None for a full layer."""
        if self.spans:
            raise ValueError(f"{self.spans[0]} sees both ways: kernels of GPUs only look back; run it on a CPU")
        return None if isinstance(self.sees, Full) else self.sees.tokens

    @property
    def is_windowed(self) -> bool:
        return isinstance(self.sees, Window)

    @property
    def is_chunked(self) -> bool:
        return isinstance(self.sees, Chunk)


CAUSAL = Mask(Full())
