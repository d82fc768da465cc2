"""Where a device's memory goes before any KV: weights, the activations of the largest step, and the runtime itself.

The activation estimate counts the tensors that are alive together at the widest point of one layer, for
`max_num_batched_tokens` tokens, plus the logits of `max_num_seqs` tokens and their drafts:

    per token   3 × hidden                      residual stream, normed input, layer output
              + the wider of                    (they are never alive at the same time)
                  2 × query width + 2 × KV width    q, attention output, k, v; both again beside gates of heads
                  recurrent states                  their projection, Mamba-2's convolution, the mixer's output
                  3 × MLP width                     gate, up, their product
                  experts × (width + hidden)        of those that a token visits: their products and results
                    + hidden                        and what stands beside them
    drafter     the same of its layers, where they are wider, and
                  2 × the target's hidden           where it takes the hidden states of all rows
    logits      vocabulary × 4 bytes × 2        fp32 logits and the sampler's copy; whole on every rank
    adapters    8 × parts × rank × 4 bytes      A · x of a step's rows; and of experts the pairs, taken apart
    quantized   64 MiB                          the slice of a weight that is dequantised at a time
    coded KV    one layer's longest past        decoded for chunks that attend it
    Gated DeltaNet  strips of 4,096 tokens      what chunks know without the state (`kv.delta_workspace`)

On a Hopper GPU the scratch of its prefill kernels comes on top (`attention.hopper.sizes`): most of it the rotated dims
of a latent's keys, 1 KiB per token of the longest sequence for Gemma 4 31B, for all layers together.

Other widths are per rank. The engine prints what it measures beside this estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.delta_workspace import delta_workspace_bytes
from windowpane.kv.formats import KVFormat, dtype_bytes
from windowpane.kv.hopper_scratch import CAPABILITY, ELEMENT_TYPE, Heads, scratch_bytes
from windowpane.kv.layout import Layout
from windowpane.kv.retention import Chunk, Window, ceil_div
from windowpane.models.adapters import SHRUNK_SPLITS, AdapterShape, adaptable
from windowpane.models.blocks import Decoder, Experts, GatedDeltaNet, GatedMLP, Mamba2, each, on_rank
from windowpane.models.packing import DEQUANTIZED_BYTES
from windowpane.models.quantization import Quantization
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import EngineConfig

# CUDA context, libraries' workspaces and captured graphs. A round figure; measured at start-up by the engine.
GPU_RUNTIME_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device. `capability` is None for a CPU, and for a card of which only the memory is known.

    Such a card's name is empty.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    is_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one rank. `kv_bytes` may be negative: then the weights do not fit and the caller says so."""

    device_bytes: int
    usable_bytes: int
    weights_bytes: int
    activation_bytes: int
    runtime_bytes: int
    adapter_bytes: int = 0

    @classmethod
    def of(
        cls, device: Device, utilization: float, weights_bytes: int, activation_bytes: int, adapter_bytes: int = 0
    ) -> Budget:
        runtime_bytes = 0 if device.is_cpu else GPU_RUNTIME_BYTES
        usable_bytes = int(device.memory_bytes * utilization)
        return cls(device.memory_bytes, usable_bytes, weights_bytes, activation_bytes, runtime_bytes, adapter_bytes)

    @property
    def kv_bytes(self) -> int:
        return self.usable_bytes - self.before_kv_bytes

    @property
    def before_kv_bytes(self) -> int:
        return self.weights_bytes + self.adapter_bytes + self.activation_bytes + self.runtime_bytes


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """Every byte of the arena while it holds as many sequences of one length as it can."""

    sequences: int
    group_bytes: dict[str, int]
    stranded_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, capacity: Capacity, length: int) -> ArenaUse:
        layout = capacity.layout
        sequences = capacity.sequences(length)
        pages = [sequences * count for count in capacity.pages(length)]
        slabs = sum(ceil_div(n, layout.pages_per_slab(g)) for n, g in zip(pages, layout.groups, strict=True))
        group_bytes = {g.name: n * g.page_bytes for n, g in zip(pages, layout.groups, strict=True)}
        stranded_bytes = slabs * layout.slab_bytes - sum(group_bytes.values())
        return cls(sequences, group_bytes, stranded_bytes, (capacity.num_slabs - slabs) * layout.slab_bytes)


def activation_bytes(spec: ModelSpec, config: EngineConfig, ranks: int, compute_dtype: str) -> int:
    """The documented estimate above, in bytes per rank."""
    query_width = spec.query_heads * max((c.key_dim for c in spec.token_caches), default=0) // ranks
    kv_width = max((_kv_width(c.shard(ranks)) for c in spec.token_caches), default=0)
    attention = 2 * query_width + kv_width
    if spec.decoder is not None and any(a.gated for a in spec.decoder.attentions):
        attention *= 2  # gates come with q, k and v, which stay until they are used
    widest = max(attention, 3 * spec.widest_mlp // ranks, _experts_width(spec), _states_width(spec) // ranks)
    width = max(3 * spec.hidden_size + widest, _drafter_width(spec, ranks))
    tokens = config.batched_tokens * width * dtype_bytes(compute_dtype)
    sampled = min(config.max_num_seqs * (1 + config.draft_tokens), config.batched_tokens)
    logits = sampled * spec.vocab_size * 4 * 2
    dequantized = DEQUANTIZED_BYTES if isinstance(spec.quantization, Quantization) else 0
    return tokens + logits + dequantized + _adapted_bytes(spec, config, compute_dtype)


def _adapted_bytes(spec: ModelSpec, config: EngineConfig, compute_dtype: str) -> int:
    """What steps with adapters need beside that: A · x of a projection, and the pairs of experts taken apart."""
    room = config.adapter_room
    if room is None or spec.decoder is None:
        return 0
    parts = max((len(AdapterShape.of(one).part_outputs) for one in adaptable(spec.decoder, room)), default=0)
    shrunk = SHRUNK_SPLITS * parts * max(16, room.rank) * dtype_bytes("float32")
    experts = [e for e in each(spec.decoder.layers, Experts) if room.covers(e.gate_up) or room.covers(e.down)]
    pairs = max((e.router.chosen * (2 * spec.hidden_size + 3 * e.down.inputs) for e in experts), default=0)
    return config.batched_tokens * (shrunk + pairs * dtype_bytes(compute_dtype))


def delta_bytes(spec: ModelSpec, ranks: int, compute_dtype: str) -> int:
    """Workspace of the layer that needs most, since layers run in turn."""
    mixers = spec.decoder.state_mixers if spec.decoder is not None else ()
    found = [on_rank(mixer, ranks) for mixer in mixers if isinstance(mixer, GatedDeltaNet)]
    return max((delta_workspace_bytes(delta, dtype_bytes(compute_dtype)) for delta in found), default=0)


def _states_width(spec: ModelSpec) -> int:
    """What one token has in the mixer with a recurrent state that needs most."""
    widths = [0]
    for mixer in spec.decoder.state_mixers if spec.decoder is not None else ():
        convolved = mixer.conv.shape[0] if isinstance(mixer, Mamba2) else 0
        widths.append(sum(w.shape[0] for w in mixer.inputs.weights) + convolved + mixer.out.inputs)
    return max(widths)


def _experts_width(spec: ModelSpec) -> int:
    return 0 if spec.decoder is None else _pairs_width(spec.decoder)


def _pairs_width(decoder: Decoder) -> int:
    """Every rank has room for all pairs of a token and an expert, whoever holds the expert."""
    hidden = decoder.hidden_size
    found = each(decoder.layers, Experts)
    return max((e.router.chosen * (e.down.inputs + hidden) + hidden for e in found), default=0)


def _drafter_width(spec: ModelSpec, ranks: int) -> int:
    """What one token of a step has in a drafter that keeps KV of its own; others compute a row for each sequence."""
    if spec.drafter is None or not spec.drafter.decoder.caches:
        return 0
    decoder = spec.drafter.decoder
    attended = ((1 + a.gated) * (2 * a.query_width + _kv_width(a.cache)) for a in decoder.attentions)
    inner = (3 * mlp.down.inputs for mlp in each(decoder.layers, GatedMLP))
    widest = max(max(attended, default=0) // ranks, max(inner, default=0) // ranks, _pairs_width(decoder))
    beside = 2 * spec.hidden_size if decoder.join is not None else 0
    return beside + 3 * decoder.hidden_size + widest


def prefill_scratch_bytes(spec: ModelSpec, config: EngineConfig, layout: Layout, ranks: int, device: Device) -> int:
    """What the engine allocates at start for prefill on this device, at most: a length it chooses itself is shorter."""
    if device.capability is None or device.capability[0] != CAPABILITY:
        return 0
    layers = {
        Heads(s.cache.kv_heads, spec.query_heads // ranks, s.cache.key_dim, s.cache.latent, windowed, chunked)
        for group in layout.groups
        if group.kv_format is not None and _chunk_rows(group.kv_format, spec.dtype) == ELEMENT_TYPE
        for windowed, chunked in ((isinstance(group.retention, Window), isinstance(group.retention, Chunk)),)
        for s in group.slices
        if isinstance(s.cache, TokenCache) and s.cache.key_dim == s.cache.value_dim
    }
    return scratch_bytes(layers, config.max_model_len or spec.max_position)


def _chunk_rows(kv_format: KVFormat, compute_dtype: str) -> str:
    """What chunks read: pages as they are, or a coded past decoded for them."""
    return kv_format.name if kv_format.family == "float" else compute_dtype


def _kv_width(cache: TokenCache) -> int:
    return cache.kv_heads * (cache.key_dim + cache.value_dim)
