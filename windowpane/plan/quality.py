"""What each KV format costs in quality, as measured, and which assignment of formats to groups costs least and fits.

The figures are perplexity changes of Gemma 3 270M against float32 KV (`bench/kv_quality.py`, docs/kv-formats.md), with
all layers, or only full ones, in a format. Other models differ; the order of the formats is what is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from windowpane.config import ConfigError
from windowpane.kv.layout import Group
from windowpane.plan.sizes import parse_tokens

# Perplexity changes. Formats with one scale per layer are not candidates: they save 4 bytes a row and lose more.
FULL_LOSS = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
WINDOW_LOSS = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
CODED = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
FULL_LOSS |= dict(zip(CODED, (0.0005, 0.0003, 0.10), strict=True))
WINDOW_LOSS |= dict(zip(CODED, (0.0010, 0.0005, 0.15), strict=True))
# No real weights with latents were at hand. An error in a latent is in K and in V, and a latent is not coded in a basis
# of its own: it is taken to cost four times as much as the costlier figure of a pair.
LATENT_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Fit:
    """So many sequences of this length at once."""

    sequences: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Fit:
        sequences, _, length = text.lower().replace("×", "x").partition("x")
        try:
            count, tokens = int(sequences), parse_tokens(text[len(sequences) + 1 :])
        except ValueError:
            raise ConfigError(f"--fit {text!r} is not SEQUENCESxTOKENS; write --fit 16x131072 or 16x128K") from None
        if count < 1:
            raise ConfigError(f"--fit {text!r}: at least one sequence must fit; write --fit 1x{length}")
        return cls(count, tokens)


def loss(group: Group, format_name: str) -> float:
    """The perplexity that a group in this format is taken to cost."""
    full, window = FULL_LOSS[format_name], WINDOW_LOSS[format_name]
    if any(getattr(piece.cache, "latent", False) for piece in group.slices):
        return LATENT_FACTOR * max(full, window)
    return full if group.grows else window


def assignments(groups: Sequence[Group], compute_dtype: str, allowed: Callable[[str], bool]) -> Iterator[str]:
    """Choices for `--kv-cache-dtype`, least lossy first; equal ones in the order that leaves most groups alone."""
    kept = [g for g in groups if g.kv_format is not None]
    names = [compute_dtype, *(name for name in CODED if allowed(name))]
    choices = sorted(
        product(names, repeat=len(kept)),
        key=lambda choice: (
            sum(loss(g, name) for g, name in zip(kept, choice, strict=True)),
            sum(name != compute_dtype for name in choice),
        ),
    )
    for choice in choices:
        yield ",".join(f"{g.name}={name}" for g, name in zip(kept, choice, strict=True))
