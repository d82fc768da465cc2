"""Rotary position embedding as configs describe it: which angle each pair of dimensions is rotated by, per position."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from windowpane.models.config import Config

DEFAULT, LINEAR, LLAMA3, PROPORTIONAL, YARN, LONG = "default", "linear", "llama3", "proportional", "yarn", "longrope"
KINDS = (DEFAULT, LINEAR, LLAMA3, PROPORTIONAL, YARN, LONG)


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to rotate heads of `head_dim`. Layers with equal ones share their table.

    `partial` is the share of the dims that rotate: the first ones, or, for `proportional`, the fastest pairs of all.
    `interleaved`: a pair is two neighbouring dims, else dims half the rotated width apart. `attention_factor`
    multiplies cos and sin. `short_factors` and `long_factors` are long rope's, of which the longest sequence that the
    engine admits chooses one for all, so that cached keys never change their factor.
    """

    kind: str
    head_dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    partial: float = 1.0
    interleaved: bool = False
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_positions: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Dims that rotate: pairs lie within the first of them."""
        return self.head_dim if self.kind == PROPORTIONAL else int(self.head_dim * self.partial)

    def with_interleaved_pairs(self) -> Rope:
        return replace(self, interleaved=True)

    def dim_order(self) -> list[int] | None:
        """The order of a head's dims in which a pair is half a head apart, as every kernel has it; None: as it is.

        Where only some dims rotate, the others are paired too, and rotated by a frequency of 0.
        """
        rotary, dim = self.rotary_dim, self.head_dim
        if rotary == dim and not self.interleaved:
            return None
        pairs = [(2 * i, 2 * i + 1) if self.interleaved else (i, i + rotary // 2) for i in range(rotary // 2)]
        pairs += [(i, i + (dim - rotary) // 2) for i in range(rotary, rotary + (dim - rotary) // 2)]
        return [first for first, _ in pairs] + [second for _, second in pairs]


def read_rope(
    text: Config, head_dim: int, layer_type: str, default: Rope, *, theta_key: str = "rope_theta", scaled: bool = True
) -> Rope:
    """The rotation of layers of one type, from `rope_parameters` (by type or for all) or the older flat fields.

    `default` is the config class's own, for configs that leave it out. `scaled` False: older configs' `rope_scaling`
    does not concern this type.
    """
    if text.has("rope_parameters"):
        section = text.section("rope_parameters")
        if section.has(layer_type):
            section = section.section(layer_type)
        return _read_section(text, section, head_dim, section.number("rope_theta", default.theta))
    theta = text.number(theta_key, default.theta)
    # A theta of their own is the mark of Gemma 3's local layers, which are never scaled.
    if scaled and theta_key == "rope_theta" and text.has("rope_scaling"):
        return _read_section(text, text.section("rope_scaling"), head_dim, theta)
    return replace(default, theta=theta, partial=text.number("partial_rotary_factor", default.partial))


def _read_section(text: Config, section: Config, head_dim: int, theta: float) -> Rope:
    kind = section.text("rope_type") or section.text("type") or DEFAULT
    original = 8192  # of no account to other kinds
    if kind in (LLAMA3, YARN, LONG):
        original = section.integer("original_max_position_embeddings", _original_positions(text))
    factor = section.number("factor", 1.0)
    if kind in (YARN, LONG) and not section.has("factor"):
        factor = text.integer("max_position_embeddings") / original
    return Rope(
        kind,
        head_dim,
        theta,
        factor=factor,
        partial=section.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0)),
        attention_factor=section.number("attention_factor", _attention_factor(section, kind, factor, original)),
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        original_positions=original,
        short_factors=section.numbers("short_factor") or (),
        long_factors=section.numbers("long_factor") or (),
    )


def _original_positions(text: Config) -> int:
    """Phi-3 has it beside the section; without any, transformers takes the longest length."""
    return text.integer("original_max_position_embeddings", text.integer("max_position_embeddings", 8192))


def _attention_factor(section: Config, kind: str, factor: float, original: int) -> float:
    """What transformers infers where the config does not say."""
    if factor <= 1:
        return 1.0
    if kind == LONG:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if kind != YARN:
        return 1.0
    weights = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if all(weights):
        above, below = (0.1 * weight * math.log(factor) + 1.0 for weight in weights)
        return above / below
    return 0.1 * math.log(factor) + 1.0
