"""What a step takes: a roofline. A step reads weights and KV and does arithmetic, and the slower of the two decides.

    bytes   weights once (of experts those that the step's tokens visit), and the KV that each row or chunk can see
    FLOPs   2 × parameters in use × tokens, 2 × vocabulary × hidden per sampled token, and attention
    time    max(bytes / bandwidth, FLOPs / peak), each at the share of its data sheet that is reached, + an overhead
            for each layer's launches and for the step

Shares and overheads are what this engine was measured to reach on an H200 (docs/performance.md): 4.2 of 4.8 TB/s, 762
of 989 TFLOP/s in prefill's matrix products and about 490 in its attention. Ranks work in parallel, and what they say to
one another is not counted; neither are activations, which weigh little beside both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.caches import StateCache, TokenCache
from windowpane.kv.layout import Layout
from windowpane.kv.retention import Chunk, Cross, Full, Retention, State, Window
from windowpane.models.config import Config
from windowpane.models.quantization import STORED_BYTES
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import text_tensors, weight_breakdown
from windowpane.plan.hardware import Gpu
from windowpane.plan.planner import Sizing

REACHED_BANDWIDTH = 0.87
REACHED_FLOPS = 0.77
REACHED_ATTENTION_FLOPS = 0.5
LAYER_OVERHEAD_S = 25e-6  # about ten launches, the gaps between them and what is not at the roof
STEP_OVERHEAD_S = 100e-6  # inputs, logits and sampling; the host's own work is hidden behind the step before

_EXPERTS_VISITED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")

Work = float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Kind:
    """All layers of one retention: bytes of one visible token (or of the state), and FLOPs to attend to one."""

    retention: Retention
    visible_bytes: float
    visible_flops: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step on one rank."""

    bandwidth_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    overhead_s: float
    dense_bytes: int
    expert_bytes: int
    experts_share: float
    token_flops: float
    prefill_share: float
    sample_flops: float
    kinds: tuple[_Kind, ...]

    def decode_kv(self, lengths: NDArray[np.int64]) -> tuple[Work, Work]:
        """(bytes, FLOPs) of attention for one token of each of these sequences, which hold `lengths` tokens.

        `lengths` is [sequences], or [steps, sequences] for several steps.
        """
        total_bytes: Work = 0.0 if lengths.ndim == 1 else np.zeros(lengths.shape[:-1])
        total_flops = total_bytes
        for kind in self.kinds:
            visible: Any  # an int, or one for each step
            match kind.retention:
                case Full():
                    visible = np.add.reduce(lengths, axis=-1)
                case Window(tokens=window):
                    visible = np.add.reduce(np.minimum(lengths, window), axis=-1)
                case Chunk(tokens=chunk):
                    visible = np.add.reduce(lengths % chunk, axis=-1)
                case Cross(tokens=tokens):
                    visible = tokens * lengths.shape[-1]
                case State():
                    visible = 2 * lengths.shape[-1]  # read and written
            total_bytes = total_bytes + visible * kind.visible_bytes
            total_flops = total_flops + visible * kind.visible_flops
        return total_bytes, total_flops

    def chunk_kv(self, start: int, stop: int) -> tuple[float, float]:
        """(bytes, FLOPs) of attention for the tokens [start, stop) of a prompt: its past is read once, tile by tile."""
        count = stop - start
        total_bytes = total_flops = 0.0
        for kind in self.kinds:
            match kind.retention:
                case Full():
                    read, pairs = stop, _triangle(start, stop)
                case Window(tokens=window):
                    edge = min(max(start, window), stop)  # from here on every token sees a whole window
                    read, pairs = min(stop, count + window), _triangle(start, edge) + (stop - edge) * window
                case Chunk(tokens=chunk):
                    read, pairs = min(stop, count + chunk), count * min(stop, chunk) / 2
                case Cross(tokens=tokens):
                    read, pairs = tokens, count * tokens
                case State():
                    read, pairs = 2, count
            total_bytes += read * kind.visible_bytes
            total_flops += pairs * kind.visible_flops
        return total_bytes, total_flops

    def seconds(
        self, decoding: int, prefilling: int, sampled: int, kv_bytes: Work, kv_flops: Work
    ) -> NDArray[np.float64]:
        """Of a step with so many tokens, or of several that differ in their KV; prompt tokens run only the layers that
        later tokens can see.
        """
        tokens = decoding + prefilling
        visited = 1 - (1 - self.experts_share) ** tokens if self.expert_bytes else 0.0
        moved = self.dense_bytes + visited * self.expert_bytes + kv_bytes
        work = (decoding + self.prefill_share * prefilling) * self.token_flops + sampled * self.sample_flops
        computing = work / self.flops_per_s + kv_flops / self.attention_flops_per_s
        return np.maximum(moved / self.bandwidth_bytes_per_s, computing) + self.overhead_s


def cost_model(sizing: Sizing, layout: Layout, card: Gpu) -> CostModel:
    """The roofline of one rank. `layout` says what is read of a token: a policy may store K and V twice."""
    spec, ranks = sizing.spec, sizing.ranks
    weights = weight_breakdown(spec, ranks)
    head = spec.vocab_size * spec.hidden_size // ranks
    elements = {"experts": 0, "dense": 0}
    for tensor in text_tensors(spec):
        if tensor.part != "embedding":
            part = "experts" if tensor.part == "experts" else "dense"
            elements[part] += tensor.on_rank(ranks).elements
    share = _experts_share(spec.text) if elements["experts"] else 0.0
    owners = [cache.layer for cache in spec.caches]
    return CostModel(
        bandwidth_bytes_per_s=REACHED_BANDWIDTH * card.bandwidth_bytes_per_s,
        flops_per_s=REACHED_FLOPS * card.flops_per_s,
        attention_flops_per_s=REACHED_ATTENTION_FLOPS * card.flops_per_s,
        overhead_s=STEP_OVERHEAD_S + LAYER_OVERHEAD_S * spec.num_layers,
        # Of embeddings only the head is read; the table gives a row per token.
        dense_bytes=weights.total - weights.experts - weights.embedding + head * STORED_BYTES[spec.dtype],
        expert_bytes=weights.experts,
        experts_share=share,
        token_flops=2.0 * (elements["dense"] + share * elements["experts"]),
        prefill_share=(max(owners) + 1) / spec.num_layers,
        sample_flops=2.0 * head,
        kinds=_kinds(spec, layout, ranks),
    )


def _kinds(spec: ModelSpec, layout: Layout, ranks: int) -> tuple[_Kind, ...]:
    """Layers that share KV read it too: their share of a group's bytes comes on top."""
    kinds = []
    for group in layout.groups:
        caches = [s.cache for s in group.slices]
        if isinstance(group.retention, State):
            states = [c for c in caches if isinstance(c, StateCache)]
            state_bytes = float(group.stripes * group.page_bytes)
            flops = sum(4.0 * p.heads * p.elements_per_head for c in states for p in c.parts)
            kinds.append(_Kind(group.retention, state_bytes, flops))
            continue
        own = [c for c in caches if isinstance(c, TokenCache)]
        sharing = [c for c in spec.shared_caches if c.retention == group.retention]
        readers = 1 + len(sharing) / len(own)
        dims = sum(c.key_dim + (c.value_dim or c.key_dim) for c in (*own, *sharing))
        flops = 2.0 * spec.query_heads / ranks * dims
        kinds.append(_Kind(group.retention, readers * group.bytes_per_token, flops))
    return tuple(kinds)


def _experts_share(text: Config) -> float:
    """The share of a layer's experts that one token visits."""
    visited = next((text.integer(key) for key in _EXPERTS_VISITED if text.has(key)), 1)
    experts = next((text.integer(key) for key in _EXPERTS if text.has(key)), visited)
    return min(1.0, visited / experts)


def _triangle(start: int, stop: int) -> float:
    """Pairs of a token in [start, stop) and one that it sees, where it sees all before it."""
    return (start + stop) / 2 * (stop - start)
