"""`plan` in one place: a model, flags and a device in; what fits, why, and what others would say out.

The layout and capacity come from the code that lays out the real arena; nothing here estimates KV.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windowpane.config import ConfigError, EngineConfig
from windowpane.kv.caches import Cache, ShardingError, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.kv.retention import Full, Window
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import weight_bytes
from windowpane.plan.gates import Gate, gate
from windowpane.plan.hardware import parse_gpus
from windowpane.plan.memory import Budget, Device, activation_bytes
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.sizes import format_bytes

LARGE_CARD_BYTES = 70 * 2**30  # from here on vLLM's server takes 8,192 tokens a step instead of 2,048


class PlanError(ConfigError):
    """The plan cannot be honoured. The message says by how much, and what would fit."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a model needs on one rank, whatever the device holds. Ranks are equal."""

    spec: ModelSpec
    config: EngineConfig
    ranks: int
    compute_dtype: str
    weights_bytes: int
    activation_bytes: int
    layout: Layout

    @property
    def per_sequence(self) -> Capacity:
        """Bytes per sequence and per token: they do not depend on how much memory there is."""
        return Capacity(self.layout, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sizing on a device, and what the same flags give elsewhere.

    `budget` is None when only KV bytes (or no device at all) were given; `capacity` is None when no KV bytes are known.
    """

    sizing: Sizing
    device: Device | None
    budget: Budget | None
    capacity: Capacity | None
    max_model_len: int
    max_model_len_note: str
    gates: dict[str, Gate]
    peers: tuple[PeerReport, ...]

    @property
    def kv_bytes(self) -> int | None:
        return self.capacity.kv_bytes if self.capacity else None


def make_plan(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    gpu: str | None = None,
    gpu_memory_bytes: int | None = None,
    concurrency: int | None = None,
) -> Plan:
    """Plan one model on one kind of device. Raises PlanError, or a flag's own ValueError, when it cannot be done."""
    if concurrency is not None and concurrency < 1:
        raise PlanError(f"--concurrency must be at least 1, not {concurrency}")
    ranks, device = _device(config, gpu, gpu_memory_bytes)
    sizing = size_up(spec, config, ranks, on_cpu=device is not None and device.is_cpu)
    gates = _gates(sizing, device)
    budget, capacity = fit(sizing, device)
    max_model_len, note = _max_model_len(spec, config, capacity, concurrency or 1)
    peers = _peers(sizing, device, capacity.kv_bytes, max_model_len) if capacity else ()
    return Plan(sizing, device, budget, capacity, max_model_len, note, gates, peers)


def size_up(spec: ModelSpec, config: EngineConfig, ranks: int, *, on_cpu: bool = False) -> Sizing:
    compute_dtype = "float32" if on_cpu else spec.dtype
    caches = rank_caches(spec, config, ranks)
    formats = resolve_formats(config.kv_cache_dtype, group_caches(caches), compute_dtype)
    layout = plan_layout(caches, formats, compute_dtype, block_tokens=config.block_tokens, slab_bytes=config.slab_bytes)
    weights = weight_bytes(replace(spec, dtype=compute_dtype), ranks)
    activations = activation_bytes(spec, config, ranks, compute_dtype)
    return Sizing(spec, config, ranks, compute_dtype, weights, activations, layout)


def fit(sizing: Sizing, device: Device | None) -> tuple[Budget | None, Capacity | None]:
    """How the device's memory divides, and the KV capacity that leaves (or that the user fixed)."""
    config = sizing.config
    budget = None if device is None else Budget.of(device, config.gpu_memory_utilization, sizing.weights_bytes, sizing.activation_bytes)
    if config.kv_cache_memory_bytes is not None:
        return budget, Capacity(sizing.layout, config.kv_cache_memory_bytes)
    if budget is None or device is None:
        return None, None
    if budget.kv_bytes > 0:
        return budget, Capacity(sizing.layout, budget.kv_bytes)
    fixed = budget.weights_bytes + budget.activation_bytes + budget.runtime_bytes
    raise PlanError(
        f"{device.name} gives {format_bytes(budget.usable_bytes)} of its {format_bytes(budget.device_bytes)} "
        f"(--gpu-memory-utilization {config.gpu_memory_utilization:g}), but each of {sizing.ranks} rank(s) needs "
        f"{format_bytes(fixed)} before any KV: {format_bytes(budget.weights_bytes)} weights, "
        f"{format_bytes(budget.activation_bytes)} activations, {format_bytes(budget.runtime_bytes)} runtime. "
        "Use more or larger cards (--gpu), a quantized checkpoint, or fewer tokens a step (--max-num-batched-tokens)"
    )


def rank_caches(spec: ModelSpec, config: EngineConfig, ranks: int) -> list[Cache]:
    """The caches of one rank under these flags."""
    try:
        caches = [cache.shard(ranks) for cache in spec.caches]
    except ShardingError as error:
        works = [n for n in (1, 2, 4, 8, 16) if _shards(spec.caches, n)]
        raise PlanError(f"{error}; --tensor-parallel-size works with {', '.join(map(str, works))}") from None
    if config.swa_full:
        caches = [
            replace(c, retention=Full()) if isinstance(c, TokenCache) and isinstance(c.retention, Window) else c
            for c in caches
        ]
    return caches


def _shards(caches: Sequence[Cache], ranks: int) -> bool:
    try:
        for cache in caches:
            cache.shard(ranks)
    except ShardingError:
        return False
    return True


def _device(config: EngineConfig, gpu: str | None, memory_bytes: int | None) -> tuple[int, Device | None]:
    """(tensor-parallel ranks, the device of one rank)."""
    if gpu is None:
        if memory_bytes is not None:
            return config.tensor_parallel_size or 1, Device("the card", memory_bytes)
        return config.tensor_parallel_size or 1, None
    if gpu.lower() == "cpu":
        total = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return config.tensor_parallel_size or 1, Device("this CPU", total, is_cpu=True)
    count, card = parse_gpus(gpu)
    ranks = config.tensor_parallel_size or count
    if ranks > count:
        raise PlanError(f"--tensor-parallel-size {ranks} needs {ranks} cards; write --gpu {ranks}x{card.name}")
    return ranks, Device(card.title, memory_bytes or card.memory_bytes, card.capability)


def _gates(sizing: Sizing, device: Device | None) -> dict[str, Gate]:
    """The verdict per token group; a refusal ends the plan. With no card named, only the checkpoint can refuse."""
    verdicts = {}
    spec = sizing.spec
    for group in sizing.layout.groups:
        if group.kv_format is None:
            continue
        verdict = gate(
            group.kv_format.name, device.capability if device else None, spec.weight_scheme, spec.kv_cache_scheme
        )
        if verdict.verdict == "refused":
            raise PlanError(
                f"--kv-cache-dtype {group.kv_format.name} for {group.name}: {verdict.why}; {verdict.instead}"
            )
        if device and (device.capability or device.is_cpu):
            verdicts[group.name] = verdict
    return verdicts


def _max_model_len(spec: ModelSpec, config: EngineConfig, capacity: Capacity | None, sequences: int) -> tuple[int, str]:
    """The length to plan for, and a word on how it was chosen."""
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise PlanError(
            f"--max-model-len {asked:,} is beyond what {spec.name} was made for; its limit is {spec.max_position:,}"
        )
    length = asked or spec.max_position
    if capacity is None:
        return length, "as asked" if asked else "the model's own limit"
    longest = capacity.longest(sequences)
    if longest is None or longest >= length:
        return length, "as asked" if asked else "the model's own limit"
    many = "one sequence" if sequences == 1 else f"{sequences} sequences"
    if asked is not None or longest < 1:
        need = capacity.slabs_for(sequences, length) * capacity.layout.slab_bytes
        way_out = f"The longest that fits is --max-model-len {longest}" if longest else "No length fits"
        raise PlanError(
            f"{many} of {length:,} tokens need {format_bytes(need)} of KV per rank and there are "
            f"{format_bytes(capacity.kv_bytes)}. {way_out}; or give more memory, or a smaller --kv-cache-dtype"
        )
    return longest, f"the longest at which {many} fit; the model's own limit is {spec.max_position:,}"


def _peers(sizing: Sizing, device: Device | None, kv_bytes: int, max_model_len: int) -> tuple[PeerReport, ...]:
    """What vLLM would do with the same KV bytes and flags."""
    spec, config = sizing.spec, sizing.config
    large = device is not None and device.memory_bytes >= LARGE_CARD_BYTES
    return vllm.reports(
        vllm.Setting(
            caches=tuple(cache.shard(sizing.ranks) for cache in spec.caches),
            kv_cache_dtype=config.kv_cache_dtype,
            compute_dtype=sizing.compute_dtype,
            kv_cache_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens or (8192 if large else 2048),
            mamba_cache_mode="align" if config.enable_prefix_caching else "none",
            quantized_checkpoint=spec.weight_scheme is not None,
            capability=device.capability if device else None,
        )
    )
