"""The operations a decoder is made of, in plain torch for any device and dtype. `modeling/cpu.py` has faster ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from windowpane.attention.mask import Mask
from windowpane.attention.reference import attend, attend_decoding
from windowpane.attention.scores import Scores
from windowpane.device.pages import LayerPages
from windowpane.device.step import Step
from windowpane.lowering.packed import Weight, linear
from windowpane.lowering.rope import rotate

Angles = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A plain layer: it owns K and V, nobody shares them, and nothing comes between attention and MLP."""

    input_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    pre_mlp_norm: torch.Tensor | None  # with post_mlp_norm: blocks are normed before and after
    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    scalar: torch.Tensor | None
    query_heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    head_norms: bool
    v_norm: bool
    activation: str
    eps: float
    scores: Scores


DecodingLayer = Callable[[torch.Tensor, Step, Angles | None], torch.Tensor]


class Ops:
    """Norms are computed in float32, whatever the dtype."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """RMS norm of the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return hidden + self.norm(x, weight, eps)

    def heads(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, angles: Angles | None
    ) -> torch.Tensor:
        """[rows, heads, dim]: normed where `eps` is given, turned by the rows' angles where those are."""
        if eps is not None:
            x = self.norm(x, weight, eps)
        if angles is None:
            return x
        cos, sin = angles
        return rotate(x.float(), cos[:, None], sin[:, None]).to(x.dtype)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: tuple[Weight, torch.Tensor | None],
        down: tuple[Weight, torch.Tensor | None],
        activation: str,
    ) -> torch.Tensor:
        """Weights come with their biases."""
        return self.linear(self.gated(self.linear(x, *gate_up), activation), *down)

    def attend_decoding(
        self,
        stored: LayerPages,
        step: Step,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: Mask,
        scores: Scores,
    ) -> torch.Tensor:
        """Decoding tokens over their past in pages and themselves: all [sequences, heads, dim]."""
        past, _, counts = stored.decoding_past(step, mask)
        past_keys, past_values = (x.to(queries.dtype) for x in past)
        return attend_decoding(queries, past_keys, past_values, counts, keys, values, scores)

    def decoding_layer(self, parts: LayerParts, stored: LayerPages) -> DecodingLayer | None:
        """The whole layer at once for steps that only decode: (hidden, step, angles) → hidden. None: part by part."""
        return None

    def attend_chunk(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first_key: int,
        mask: Mask,
        scores: Scores,
    ) -> torch.Tensor:
        """Tokens of one chunk over their past and each other; see `attend`."""
        return attend(queries, positions, keys, values, first_key, mask, scores)

    def write_decoding(self, stored: LayerPages, step: Step, rows: list[torch.Tensor]) -> None:
        stored.write_decoding(step, rows)
