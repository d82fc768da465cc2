"""Multi-head latent attention: K and V of all heads are rebuilt from one vector per token, which every rank keeps."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config
from windowpane.models.parts import by_columns, by_rows, norms, whole, with_biases
from windowpane.models.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """`query_rank` None: queries come straight from the hidden state."""

    heads: int
    query_rank: int | None
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def cache(self, layer: int) -> TokenCache:
        """The latent and the one rotated key that all heads share, side by side in one vector."""
        return latent_cache(layer, self.latent_rank + self.rope_dim)

    def tensors(self, prefix: str, hidden: int) -> list[TensorSpec]:
        queries = self.heads * self.query_dim
        if self.query_rank is None:
            tensors = [by_rows(f"{prefix}q_proj.weight", queries, hidden, self.heads, "attention")]
        else:
            tensors = self._down(f"{prefix}q_a_proj.weight", self.query_rank, hidden)
            tensors += norms(prefix, ("q_a_layernorm",), self.query_rank)
            tensors.append(by_rows(f"{prefix}q_b_proj.weight", queries, self.query_rank, self.heads, "attention"))
        tensors += self._down(f"{prefix}kv_a_proj_with_mqa.weight", self.latent_rank + self.rope_dim, hidden)
        tensors += norms(prefix, ("kv_a_layernorm",), self.latent_rank)
        rebuilt = self.heads * (self.nope_dim + self.value_dim)
        tensors.append(by_rows(f"{prefix}kv_b_proj.weight", rebuilt, self.latent_rank, self.heads, "attention"))
        output = by_columns(f"{prefix}o_proj.weight", hidden, self.heads * self.value_dim, self.heads, "attention")
        return [*tensors, *(with_biases([output]) if self.bias else [output])]

    def _down(self, name: str, rows: int, columns: int) -> list[TensorSpec]:
        weight = whole(name, rows, columns, part="attention", linear=True)
        return with_biases([weight]) if self.bias else [weight]


def read_latent_attention(config: Config) -> LatentAttention:
    return LatentAttention(
        heads=config.integer("num_attention_heads"),
        query_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        latent_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        bias=config.flag("attention_bias", False),
    )


def latent_cache(layer: int, width: int) -> TokenCache:
    """One vector per token that belongs to no head: there is no pair, and ranks cannot split it."""
    return TokenCache(layer, Full(), 1, width, 0, latent=True, replicated=True)
