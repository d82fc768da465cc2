"""`plan` in one place: a model, flags and a device in; what fits, why, and what others would say out.

The layout and capacity come from the code that lays out the real arena; nothing here estimates KV.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from windowpane.kv.caches import RECURRENT, Cache, Kept, ShardingError, StateCache, StatePart, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.decoded_past import decoded_past_bytes
from windowpane.kv.formats import FORMATS
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats, rollback_for
from windowpane.kv.retention import Full, Window
from windowpane.models.adapters import adapter_bytes
from windowpane.models.blocks import on_rank
from windowpane.models.running import why_not_run
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import sharding_problem, weight_bytes
from windowpane.plan.config import ConfigError, EngineConfig
from windowpane.plan.gates import Gate, gate
from windowpane.plan.hardware import Gpu, parse_gpus
from windowpane.plan.memory import Budget, Device, activation_bytes, delta_bytes, prefill_scratch_bytes
from windowpane.plan.peers import all as all_peers
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting
from windowpane.plan.quality import Fit, assignments
from windowpane.plan.sizes import format_bytes

# From here on vLLM's server takes 8,192 tokens a step instead of 2,048; A100s it leaves at 2,048.
LARGE_CARD_BYTES = 70 * 2**30
MOST_RANKS = 64

AnyCache = TypeVar("AnyCache", TokenCache, Cache)


class PlanError(ConfigError):
    """The plan cannot be honoured. The message says by how much, and what would fit."""


class WeightsTooLarge(PlanError):
    """What must be in memory before any KV leaves no room for KV."""


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
    adapter_bytes: int = 0

    @property
    def per_sequence(self) -> Capacity:
        """Bytes per sequence and per token: they do not depend on how much memory there is."""
        return self.capacity(0)

    @property
    def host(self) -> Capacity:
        """The host memory of one rank, which holds restore points in the same pages."""
        return Capacity(self.layout, self.config.offloading_bytes // self.ranks)

    @property
    def rollback_tokens(self) -> int:
        """Tokens that a sequence may take back, for which windows and chunks hold as many more."""
        return rollback_for(self.config.draft_tokens, self.layout)

    def capacity(self, kv_bytes: int) -> Capacity:
        return Capacity(self.layout, kv_bytes, self.rollback_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sizing on a device, and what the same flags give elsewhere.

    `budget` is None when only KV bytes (or no device at all) were given; `capacity` is None when no KV bytes are known.
    `max_model_len_note` says how the length was chosen; it is empty where the user chose it. `peers` is empty for CPUs:
    the formulas are those of other engines' CUDA builds.
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

    @property
    def why_not_run(self) -> str | None:
        """Why the engine cannot run the model on the device; None where it can."""
        is_gpu = self.device is not None and not self.device.is_cpu and self.device.name != ""
        return why_not_run(self.sizing.spec, on_gpu=is_gpu)


def make_plan(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    gpu: str | None = None,
    gpu_memory_bytes: int | None = None,
    concurrency: int | None = None,
) -> Plan:
    """Plan one model on one kind of device. Raises PlanError, or a flag's own ValueError, when it cannot be done."""
    _check_concurrency(config, concurrency)
    ranks, device = _device(config, gpu, gpu_memory_bytes)
    asked_dtype = kv_choice(spec, config)
    if config.fit is not None:
        config, concurrency = _least_lossy(spec, config, ranks, device)
    sizing = size_up(spec, config, ranks, on_cpu=device is not None and device.is_cpu)
    gates = _gates(sizing, device)
    try:
        budget, capacity = fit(sizing, device)
    except WeightsTooLarge as error:
        raise PlanError(f"{error}. {_more_cards(sizing, gpu, gpu_memory_bytes)}") from None
    max_model_len, note = _max_model_len(spec, config, capacity, concurrency or 1)
    # Formats that --fit chose are ours alone: the others are shown with what was asked for, which is `auto`.
    compared = replace(sizing, config=replace(config, kv_cache_dtype=asked_dtype))
    peers = _peers(compared, device, capacity.kv_bytes, max_model_len) if capacity else ()
    return Plan(sizing, device, budget, capacity, max_model_len, note, gates, peers)


def _least_lossy(spec: ModelSpec, config: EngineConfig, ranks: int, device: Device | None) -> tuple[EngineConfig, int]:
    """Flags with the formats that --fit leads to, and how many sequences it asks for."""
    wanted = Fit.parse(config.fit or "")
    on_cpu = device is not None and device.is_cpu
    config = replace(
        config,
        max_model_len=config.max_model_len or wanted.length,
        max_num_seqs=max(config.max_num_seqs, wanted.sequences),
    )
    plain = size_up(spec, config, ranks, on_cpu=on_cpu)
    most = 0
    for choice in assignments(plain.layout.groups, plain.compute_dtype, lambda name: _is_allowed(spec, name)):
        chosen = replace(config, kv_cache_dtype=choice, fit=None)
        _, capacity = fit(size_up(spec, chosen, ranks, on_cpu=on_cpu), device)
        if capacity is None:
            raise PlanError("--fit needs to know how much memory there is: add --gpu or --kv-cache-memory-bytes")
        held = capacity.sequences(wanted.length)
        if held >= wanted.sequences:
            return chosen, wanted.sequences
        most = max(most, held)
    way_out = f"at most {most} do; write --fit {most}x{wanted.length}" if most else "not one does"
    raise PlanError(
        f"--fit {config.fit}: in no KV format do {wanted.sequences} sequences of {wanted.length:,} tokens fit, "
        f"{way_out}, or give more memory"
    )


def _is_allowed(spec: ModelSpec, format_name: str) -> bool:
    return gate(format_name, None, spec.weight_scheme, spec.kv_cache_scheme).verdict != "refused"


def kv_choice(spec: ModelSpec, config: EngineConfig) -> str:
    """`--kv-cache-dtype`; `auto` is what the checkpoint has KV scales for, and stays `auto` where it has none."""
    scheme = spec.kv_cache_scheme
    if config.kv_cache_dtype != "auto" or scheme is None:
        return config.kv_cache_dtype
    if scheme not in FORMATS:
        raise PlanError(
            f"{spec.name} asks for KV in {scheme}, which is not known here; choose another with --kv-cache-dtype, for "
            f"example {spec.dtype} or fp8_per_token_head"
        )
    return scheme


def size_up(spec: ModelSpec, config: EngineConfig, ranks: int, *, on_cpu: bool = False) -> Sizing:
    compute_dtype = "float32" if on_cpu else spec.dtype
    config = replace(config, kv_cache_dtype=kv_choice(spec, config)) if config.fit is None else config
    if config.mamba_ssm_cache_dtype != "auto" and not any(p.name == RECURRENT for p in _state_parts(spec)):
        raise PlanError(
            f"--mamba-ssm-cache-dtype {config.mamba_ssm_cache_dtype}: {spec.name} has no recurrent states; leave it out"
        )
    if config.enable_return_routed_experts:
        try:
            spec = spec.with_routes()
        except ValueError as error:
            raise PlanError(f"--enable-return-routed-experts: {error}; leave it out") from None
    try:
        caches: list[Kept] = [*rank_caches(spec.caches, config, ranks), *((spec.routes,) if spec.routes else ())]
        weights = weight_bytes(replace(spec, dtype=compute_dtype), ranks)
    except ShardingError as error:
        works = [str(n) for n in range(1, MOST_RANKS + 1) if rank_problem(spec, n) is None]
        problem = rank_problem(spec, ranks) or error
        raise PlanError(f"{problem}; --tensor-parallel-size works with {', '.join(works)}") from None
    formats = resolve_formats(config.kv_cache_dtype, group_caches(caches), compute_dtype)
    layout = plan_layout(caches, formats, compute_dtype, block_tokens=config.block_tokens, slab_bytes=config.slab_bytes)
    activations = activation_bytes(spec, config, ranks, compute_dtype)
    if not on_cpu:
        activations += decoded_past_bytes(layout, compute_dtype, config.max_model_len or spec.max_position)
        activations += delta_bytes(spec, ranks, compute_dtype)
    adapters = _adapter_bytes(spec, config, ranks, compute_dtype)
    return Sizing(spec, config, ranks, compute_dtype, weights, activations, layout, adapters)


def _adapter_bytes(spec: ModelSpec, config: EngineConfig, ranks: int, dtype: str) -> int:
    """Bytes of all slots for adapters on one rank."""
    if config.adapter_room is None:
        return 0
    if spec.decoder is None:
        raise PlanError(f"--enable-lora: {spec.name} can be planned but not run yet; leave it out")
    return adapter_bytes(on_rank(spec.decoder, ranks), config.adapter_room, dtype)


def _state_parts(spec: ModelSpec) -> Iterator[StatePart]:
    return (part for cache in spec.state_caches for part in cache.parts)


def fit(sizing: Sizing, device: Device | None) -> tuple[Budget | None, Capacity | None]:
    """How the device's memory divides, and the KV capacity that leaves (or that the user fixed)."""
    config, kv_bytes = sizing.config, sizing.config.kv_cache_memory_bytes
    if device is None:
        return None, None if kv_bytes is None else sizing.capacity(kv_bytes)
    scratch_bytes = prefill_scratch_bytes(sizing.spec, config, sizing.layout, sizing.ranks, device)
    activations = sizing.activation_bytes + scratch_bytes
    budget = Budget.of(device, config.gpu_memory_utilization, sizing.weights_bytes, activations, sizing.adapter_bytes)
    if kv_bytes is None:
        if budget.kv_bytes <= 0:
            share = f" (--gpu-memory-utilization {config.gpu_memory_utilization:g})"
            raise _too_large(sizing, budget, f"{format_bytes(budget.usable_bytes)}{share}")
        return budget, sizing.capacity(budget.kv_bytes)
    room = budget.device_bytes - budget.before_kv_bytes
    if room <= 0:
        raise _too_large(sizing, budget, format_bytes(budget.device_bytes))
    if kv_bytes > room:
        raise PlanError(
            f"--kv-cache-memory-bytes {format_bytes(kv_bytes)} is more than the {format_bytes(room)} that a device of "
            f"{format_bytes(budget.device_bytes)} has left beside weights, activations and runtime"
        )
    return budget, sizing.capacity(kv_bytes)


def _too_large(sizing: Sizing, budget: Budget, usable: str) -> WeightsTooLarge:
    who = "it" if sizing.ranks == 1 else f"each of {sizing.ranks} ranks"
    runtime = f", {format_bytes(budget.runtime_bytes)} runtime" if budget.runtime_bytes else ""
    runtime += f", {format_bytes(budget.adapter_bytes)} adapters" if budget.adapter_bytes else ""
    return WeightsTooLarge(
        f"{sizing.spec.name} does not fit: {who} needs {format_bytes(budget.before_kv_bytes)} before any KV "
        f"({format_bytes(budget.weights_bytes)} weights, {format_bytes(budget.activation_bytes)} activations{runtime}) "
        f"and has {usable}"
    )


def _more_cards(sizing: Sizing, gpu: str | None, gpu_memory_bytes: int | None) -> str:
    """The way out when the weights do not fit: how many of these cards would hold them."""
    config = replace(sizing.config, tensor_parallel_size=None)
    if gpu is not None and gpu.lower() != "cpu":
        _, card = parse_gpus(gpu)
        for ranks in (2, 4, 8, 16):
            if ranks <= sizing.ranks or rank_problem(sizing.spec, ranks):
                continue
            try:
                _, capacity = fit(size_up(sizing.spec, config, ranks), _card(card, gpu_memory_bytes))
            except PlanError:
                continue
            if capacity is None or capacity.sequences(config.max_model_len or 1) == 0:
                continue
            also = f" --tensor-parallel-size {ranks}" if sizing.config.tensor_parallel_size else ""
            return f"It fits on --gpu {ranks}x{card.name}{also}"
    return "Use more memory, a quantized checkpoint, or a smaller --max-num-batched-tokens"


def rank_caches(caches: Iterable[AnyCache], config: EngineConfig, ranks: int) -> list[AnyCache]:
    """These caches as one rank keeps them under these flags."""
    return [_as_asked(cache.shard(ranks), config) for cache in caches]


def _as_asked(cache: AnyCache, config: EngineConfig) -> AnyCache:
    if isinstance(cache, StateCache):
        cache = replace(cache, slots=config.state_slots)
        dtype = config.mamba_ssm_cache_dtype
        return cache if dtype == "auto" else cache.with_recurrent_dtype(dtype)
    if config.swa_full and isinstance(cache, TokenCache) and isinstance(cache.retention, Window):
        return replace(cache, retention=Full())
    return cache


def rank_problem(spec: ModelSpec, ranks: int) -> str | None:
    """Why caches or weights do not divide over so many ranks; None if they do."""
    try:
        for cache in spec.caches:
            cache.shard(ranks)
    except ShardingError as error:
        return str(error)
    return sharding_problem(spec, ranks)


def _check_concurrency(config: EngineConfig, concurrency: int | None) -> None:
    if concurrency is None:
        return
    if concurrency < 1:
        raise PlanError(f"--concurrency must be at least 1, not {concurrency}")
    if concurrency > config.max_num_seqs:
        raise PlanError(
            f"--concurrency {concurrency} is more than --max-num-seqs {config.max_num_seqs} lets run; raise that too"
        )


def _device(config: EngineConfig, gpu: str | None, memory_bytes: int | None) -> tuple[int, Device | None]:
    """(tensor-parallel ranks, the device of one rank)."""
    ranks = config.tensor_parallel_size or 1
    if gpu is None:
        return ranks, None if memory_bytes is None else Device("", memory_bytes)
    if gpu.lower() == "cpu":
        # Ranks on one CPU share its memory.
        return ranks, Device("this CPU", (memory_bytes or _host_memory_bytes()) // ranks, is_cpu=True)
    count, card = parse_gpus(gpu, also=("cpu",))
    ranks = config.tensor_parallel_size or count
    if ranks > count:
        raise PlanError(f"--tensor-parallel-size {ranks} needs {ranks} cards; write --gpu {ranks}x{card.name}")
    return ranks, _card(card, memory_bytes)


def _card(card: Gpu, memory_bytes: int | None) -> Device:
    return Device(card.title, memory_bytes or card.memory_bytes, card.capability)


def _host_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise PlanError("this system does not say how much memory it has; give it with --gpu-memory") from None


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
        if device is not None and (device.capability or device.is_cpu):
            verdicts[group.name] = verdict
    return verdicts


def _max_model_len(spec: ModelSpec, config: EngineConfig, capacity: Capacity | None, sequences: int) -> tuple[int, str]:
    """The length to plan for, and a word on how it was chosen."""
    asked = config.max_model_len
    if asked is not None and asked > spec.max_position:
        raise PlanError(
            f"--max-model-len {asked:,} is beyond what {spec.name} was made for; its limit is {spec.max_position:,} "
            f"(max_position_embeddings in its config): write --max-model-len {spec.max_position} or leave it out"
        )
    length = asked or spec.max_position
    own_limit = "" if asked else "the model's own limit"
    if capacity is None:
        return length, own_limit
    longest = capacity.longest(sequences)
    if longest is None or longest >= length:
        return length, own_limit
    if asked is None and longest > 0:
        fit = "one sequence fits" if sequences == 1 else f"{sequences} sequences fit"
        return longest, f"the longest at which {fit}; the model's own limit is {spec.max_position:,}"
    need = capacity.slabs_for(sequences, length) * capacity.layout.slab_bytes
    many = "one sequence needs" if sequences == 1 else f"{sequences} sequences need"
    way_out = f"The longest that fits is --max-model-len {longest}; or give" if longest else "No length fits: give"
    raise PlanError(
        f"at {length:,} tokens {many} {format_bytes(need)} of KV per rank, and there are "
        f"{format_bytes(capacity.kv_bytes)}. "
        f"{way_out} more memory, or a smaller --kv-cache-dtype"
    )


def _peers(sizing: Sizing, device: Device | None, kv_bytes: int, max_model_len: int) -> tuple[PeerReport, ...]:
    """What others would do with the same KV bytes and flags; their formulas are those of CUDA builds."""
    if device is not None and device.is_cpu:
        return ()
    return all_peers.reports(peer_setting(sizing, device, kv_bytes, max_model_len))


def peer_setting(sizing: Sizing, device: Device | None, kv_bytes: int, max_model_len: int) -> Setting:
    """--swa-full has its counterparts (vLLM's --disable-hybrid-kv-cache-manager), so it holds for the peers too."""
    spec, config = sizing.spec, sizing.config
    return Setting(
        caches=tuple(rank_caches(spec.caches, config, sizing.ranks)),
        shared_caches=tuple(rank_caches(spec.shared_caches, config, sizing.ranks)),
        family=spec.family,
        kv_cache_dtype=config.kv_cache_dtype,
        compute_dtype=sizing.compute_dtype,
        kv_cache_bytes=kv_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or vllm_batched_tokens(device),
        batched_tokens_given=config.max_num_batched_tokens is not None,
        async_scheduling=config.async_scheduling,
        mamba_cache_mode="align" if config.enable_prefix_caching else "none",
        quantized_checkpoint=spec.weight_scheme is not None,
        capability=device.capability if device else None,
    )


def vllm_batched_tokens(device: Device | None) -> int:
    """The default of vLLM's server on this card."""
    large = device is not None and device.memory_bytes >= LARGE_CARD_BYTES and not device.name.startswith("A100")
    return 8192 if large else 2048
