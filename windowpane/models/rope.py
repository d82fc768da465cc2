"""Rotary position embedding as configs describe it: which angle each pair of dimensions is rotated by, per position.

Fields are read as transformers' config classes read them (`tests/models/test_rope_fields.py` compares every family);
what transformers itself fails on, or would drop without a word, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from windowpane.models.config import Config, ModelError

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
    text: Config, head_dim: int, max_position: int, theta: float = 10_000.0, partial: float | None = None
) -> Rope:
    """The one rotation of a family whose layers all rotate alike; `theta` is the config class's own.

    `partial`: this architecture can rotate a part of each head, this one where the config does not say.
    """
    if partial is not None:
        text = Config({"partial_rotary_factor": partial, **text.fields}, text.where)
    return rope_of(one_section(text, max_position, theta), head_dim, max_position, part_of_head=partial is not None)


def read_ropes(
    text: Config, head_dim: int, max_position: int, thetas: Mapping[str, tuple[str, float]]
) -> dict[str, Rope]:
    """Rotations by layer type, for families that had `rope_scaling` before: it concerned the first of `thetas`.

    `thetas` names, per type, the older field of its theta and what the config class takes without it.
    """
    key = "rope_parameters"
    outer = text.section(key) if text.has(key) else Config({}, f"{text.where}{key}.")
    if outer.fields and not outer.fields.keys() & thetas.keys():
        raise ModelError(f"{text.where}{key} must be given by layer type: {', '.join(thetas)}")
    scaled = next(iter(thetas)) if text.has("rope_scaling") else None
    if scaled and text.has(key) and not outer.has(scaled):
        raise ModelError(f"{text.where}rope_scaling changes {outer.where}{scaled}, which is missing: put it there")
    found = {}
    for kind, (older, theta) in thetas.items():
        fields: dict[str, object] = {"rope_type": DEFAULT}
        if outer.has(kind):
            fields = dict(outer.section(kind).fields)
        if kind == scaled:
            fields.update(text.section("rope_scaling").fields)
        fields.setdefault("original_max_position_embeddings", max_position)
        section = section_of_type(text, outer, kind, fields, text.fields.get(older, theta))
        found[kind] = rope_of(section, head_dim, max_position)
    return found


def section_of_type(
    text: Config, outer: Config, kind: str, fields: Mapping[str, object], theta: object = None
) -> Config:
    """A layer type's section, completed; transformers looks for `truncate` beside the types, and not in them."""
    truncate = outer.fields.get("truncate", True)
    return _with_older(text, {**fields, "truncate": truncate}, f"{outer.where}{kind}.", theta)


def one_section(text: Config, max_position: int, theta: float, original: int | None = None) -> Config:
    """`rope_scaling` or else `rope_parameters`, completed from the fields beside it.

    `original` is the config class's own `original_max_position_embeddings`, where it has one.
    """
    scaling, parameters = (
        text.section(key).fields if text.has(key) else {} for key in ("rope_scaling", "rope_parameters")
    )
    where = f"{text.where}{'rope_scaling' if scaling else 'rope_parameters'}."
    for key in ("rope_theta", "partial_rotary_factor"):
        if scaling and key in parameters and key not in scaling and key not in text.fields:
            lost = f"{key} {parameters[key]}"
            raise ModelError(
                f"{text.where}rope_scaling replaces rope_parameters, and so {lost}: put it into rope_scaling"
            )
    fields = dict(scaling or parameters)
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelError(f"{where[:-1]} is given by layer type, but all layers of this architecture rotate alike")
    key = "original_max_position_embeddings"
    if key in text.fields or original is not None:
        fields[key] = text.fields.get(key, original)  # beside the section it wins over one in it
    fields.setdefault(key, max_position)
    return _with_older(text, fields, where, text.fields.get("rope_theta", theta))


def _with_older(text: Config, fields: Mapping[str, object], where: str, theta: object) -> Config:
    """A section with what older configs have beside it, unless it has its own."""
    older: dict[str, object] = {} if theta is None else {"rope_theta": theta}
    if text.has("partial_rotary_factor"):
        older["partial_rotary_factor"] = text.fields["partial_rotary_factor"]
    return Config({**older, **fields}, where)


def rope_of(section: Config, head_dim: int, max_position: int, *, part_of_head: bool = False) -> Rope:
    """The rotation that a completed section describes. Each kind reads its own fields and no others.

    `part_of_head`: this architecture can rotate a part of each head by every kind, not by `proportional` alone.
    """
    kind = kind_of(section)
    rope = Rope(kind, head_dim, _above(section, "rope_theta", 1))
    if kind not in KINDS:
        return rope  # it can be planned, and is refused by whoever runs it
    if part_of_head or kind != DEFAULT:
        rope = replace(rope, partial=_partial(section, rope, part_of_head or kind == PROPORTIONAL))
    if rope.rotary_dim % 2:
        raise ModelError(f"{section.where[:-1]}: {rope.rotary_dim} dims of each head rotate, which is no even number")
    if kind in (LINEAR, LLAMA3) or (kind == PROPORTIONAL and "factor" in section.fields):
        rope = replace(rope, factor=_above(section, "factor", 0))
    if kind == LLAMA3:
        low = _above(section, "low_freq_factor", 0)
        high = section.number("high_freq_factor")
        if not high >= low:  # Llama 4 has both alike: nothing is blended
            raise ModelError(f"{section.where}high_freq_factor is {high:g}, but must be at least {low:g}")
        original = section.integer("original_max_position_embeddings")
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high, original_positions=original)
    if kind in (YARN, LONG):
        rope = _stretched(section, rope, max_position)
    return rope


def _stretched(section: Config, rope: Rope, max_position: int) -> Rope:
    """YaRN and long rope: both know a factor, the length it starts from, and a factor of attention."""
    original = section.integer("original_max_position_embeddings", minimum=2)
    # Long rope may leave the factor out; either may say null.
    inferred = section.fields.get("factor", None if rope.kind == LONG else 0) is None
    factor = max_position / original if inferred else _above(section, "factor", 0)
    rope = replace(rope, factor=factor, original_positions=original)
    if rope.kind == LONG:
        rope = replace(rope, short_factors=_factors(section, rope, "short_factor"))
        rope = replace(rope, long_factors=_factors(section, rope, "long_factor"))
    else:
        rope = replace(
            rope,
            beta_fast=section.number("beta_fast", 32.0) or 32.0,
            beta_slow=section.number("beta_slow", 1.0) or 1.0,
            truncate=section.flag("truncate", "truncate" not in section.fields),  # null is false to transformers
        )
    return replace(rope, attention_factor=section.number("attention_factor", _attention_factor(section, rope)))


def kind_of(section: Config) -> str:
    key = "rope_type" if "rope_type" in section.fields else "type"
    if key not in section.fields:
        return DEFAULT
    kind = section.text(key)
    if kind is None:
        raise section.wrong_type(key, "a string")
    return kind


def _partial(section: Config, rope: Rope, allowed: bool) -> float:
    key = "partial_rotary_factor"
    partial = _above(section, key, 0) if key in section.fields else 1.0
    if partial > 1 or (not allowed and int(rope.head_dim * partial) != rope.head_dim):
        whole = "at most 1" if allowed else f"1: with rope_type {rope.kind}, this architecture rotates whole heads"
        raise ModelError(f"{section.where}{key} is {partial:g}, but must be {whole}")
    return partial


def _above(section: Config, key: str, bound: float) -> float:
    value = section.number(key)
    if not value > bound:
        raise ModelError(f"{section.where}{key} is {value:g}, but must be above {bound:g}")
    return value


def _factors(section: Config, rope: Rope, key: str) -> tuple[float, ...]:
    factors, pairs = section.numbers(key) or (), rope.rotary_dim // 2
    if len(factors) != pairs:
        raise ModelError(f"{section.where}{key} has {len(factors)} factors for {pairs} pairs")
    return factors


def _attention_factor(section: Config, rope: Rope) -> float:
    """What transformers infers where the config does not say."""
    if rope.factor <= 1:
        return 1.0
    if rope.kind == LONG:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))
    weights = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    if all(weights):
        above, below = (0.1 * weight * math.log(rope.factor) + 1.0 for weight in weights)
        return above / below
    return 0.1 * math.log(rope.factor) + 1.0
