"""What each KV format costs in quality, as measured, and which assignment of formats to groups costs least and fits.

The figures are divergences of Gemma 3 270M's next token from that with float32 KV, written by `bench/kv_quality.py` and
told in docs/kv-formats.md. Other models differ; the order of the formats is what is used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

from windowpane.kv.layout import Group
from windowpane.plan.config import ConfigError
from windowpane.plan.sizes import parse_tokens

FIGURES = "kv_quality.json"
# Formats with one scale per layer are not candidates: they save 4 bytes a row and lose more.
CODED = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
# No real weights with latents were at hand. An error in a latent is in K and in V, and a latent is not coded in a basis
# of its own: it is taken to cost four times as much as all layers of a model of pairs.
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


@cache
def _divergences() -> dict[str, float]:
    measured = json.loads(files(__package__).joinpath(FIGURES).read_text("utf-8"))["formats"]
    return {name: found["divergence"] for name, found in measured.items()}


def loss(group: Group, format_name: str) -> float:
    """The divergence that a group in this format is taken to cost; 0 for plain ones.

    Full layers' and windows' shares of it were measured in int4, where it is largest.
    """
    if format_name not in CODED:
        return 0.0
    measured = _divergences()
    if any(getattr(piece.cache, "latent", False) for piece in group.slices):
        return LATENT_FACTOR * measured[format_name]
    full, window = (measured[f"{kind}=int4_per_token_head"] for kind in ("full", "window"))
    return measured[format_name] * (full if group.grows else window) / (full + window)


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
