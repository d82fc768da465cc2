"""Rotary position embedding in torch. Dimension i of the first half of a head is paired with dimension i of the second;
a frequency of 0 leaves a pair as it is, so that partial rotation needs no special case.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from windowpane.models.rope import LINEAR, LLAMA3, LONG, PROPORTIONAL, YARN, Rope


def frequencies(rope: Rope, max_model_len: int) -> torch.Tensor:
    """float32 [head_dim / 2]. Where long factors exist, the longest length that is admitted decides for all."""
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    found = 1.0 / rope.theta**exponents
    if rope.kind == LINEAR:
        found = found / rope.factor
    elif rope.kind == LLAMA3:
        found = _stretch_slow_ones(rope, found)
    elif rope.kind == YARN:
        found = _yarn(rope, found)
    elif rope.kind == LONG:
        factors = rope.long_factors if max_model_len > rope.original_positions else rope.short_factors
        found = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    elif rope.kind == PROPORTIONAL:
        found[int(rope.partial * dim // 2) :] = 0.0
        found = found / rope.factor
    return F.pad(found, (0, rope.head_dim // 2 - len(found)))


def _stretch_slow_ones(rope: Rope, found: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: slow rotations are stretched by `factor`, fast ones kept, those between blended."""
    rotations = rope.original_positions * found / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * found / rope.factor + blend * found


def _yarn(rope: Rope, found: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): pairs that rotate often are kept, those that rotate rarely are stretched by `factor`."""

    def pair_with(rotations: float) -> float:
        periods = rope.original_positions / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(periods) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(len(found), dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return found / rope.factor * stretched + found * (1 - stretched)


def cos_and_sin(rope: Rope, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of angles [positions, pairs], float32; those of pairs that rotate times the rotation's attention factor."""
    factors = torch.ones(angles.shape[1], dtype=angles.dtype, device=angles.device)
    factors[: rope.rotary_dim // 2] = rope.attention_factor
    return (angles.cos() * factors).float(), (angles.sin() * factors).float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of x's last dimension by angles given as cos and sin of half its width, broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class RopeTables:
    """cos and sin by position; layers that rotate alike share one."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def at(self, rope: Rope, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [*positions, head_dim / 2], float32; tables grow as sequences do."""
        needed = int(positions.max()) + 1 if positions.numel() else 1
        if rope not in self._tables or len(self._tables[rope][0]) < needed:
            count = torch.arange(max(1024, 2 * needed), dtype=torch.float32)
            cos, sin = cos_and_sin(rope, count[:, None] * frequencies(rope, self._max_model_len))
            self._tables[rope] = cos.to(positions.device), sin.to(positions.device)
        cos, sin = self._tables[rope]
        return cos[positions], sin[positions]
