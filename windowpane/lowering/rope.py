"""Rotary position embedding: which angle each pair of dimensions turns by, per position.

Dimension i of the first half of a head is paired with dimension i of the second half. A frequency of 0 leaves a pair
unturned, so partial rotation needs no special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from windowpane.models.config import Config
from windowpane.models.spec import ModelError

KINDS = ("default", "linear", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to rotate. Layers with equal ones share their table. `kind` None: no rotation at all (NoPE)."""

    kind: str | None
    head_dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    partial: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self) -> torch.Tensor:
        """float32 [head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).to(torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._stretch_slow_ones(frequencies)
        if self.kind == "proportional":
            turned = int(self.partial * self.head_dim // 2)
            frequencies[turned:] = 0.0
            return frequencies / self.factor
        return frequencies

    def _stretch_slow_ones(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: slow turns are stretched by `factor`, fast ones kept, those between blended."""
        wavelengths = 2 * math.pi / frequencies
        turns = self.original_positions / wavelengths
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies

    def table(self, positions: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [positions, head_dim / 2]."""
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * self.frequencies()
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of x's last dimension by angles given as cos and sin of half its width, broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def read_rope(text: Config, head_dim: int, layer_type: str, default: Rope, *, theta_key: str = "rope_theta") -> Rope:
    """The rotation of layers of one type, from `rope_parameters` (by type or for all) or the older flat fields.

    `default` is the config class's own, for configs that leave it out.
    """
    if text.has("rope_parameters"):
        section = text.section("rope_parameters")
        if section.has(layer_type):
            section = section.section(layer_type)
        return _read_section(section, head_dim, section.number("rope_theta", default.theta))
    theta = text.number(theta_key, default.theta)
    # Older configs scale the full layers only; a theta of their own is the mark of the local ones.
    if theta_key == "rope_theta" and text.has("rope_scaling"):
        return _read_section(text.section("rope_scaling"), head_dim, theta)
    return replace(default, theta=theta)


def _read_section(section: Config, head_dim: int, theta: float) -> Rope:
    kind = section.text("rope_type") or section.text("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"{section.where}rope_type: {kind!r} cannot be run yet; known: {', '.join(KINDS)}")
    return Rope(
        kind,
        head_dim,
        theta,
        factor=section.number("factor", 1.0),
        partial=section.number("partial_rotary_factor", 1.0),
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        original_positions=section.integer("original_max_position_embeddings", 8192),
    )
