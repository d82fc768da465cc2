"""Which release and settings give a log's figures exactly.

What the log says is taken as it is. What it leaves open is tried: each value of each open setting, the likeliest first,
over every number of blocks that the printed memory (rounded to 0.01 GiB) may stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from windowpane.doctor.log import LogFacts
from windowpane.kv.caches import Cache, StateCache, StatePart, TokenCache
from windowpane.kv.retention import Chunk, Full, Window
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import EngineConfig
from windowpane.plan.hardware import Gpu, parse_gpus
from windowpane.plan.memory import Device
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import MAMBA_CACHE_MODES, Setting
from windowpane.plan.peers.vllm_releases import HISTORY, Release, neighbours
from windowpane.plan.planner import Sizing, peer_setting, rank_problem, size_up, vllm_batched_tokens
from windowpane.plan.sizes import format_bytes

# vLLM's defaults for max_num_batched_tokens: most cards, serving on large ones, offline on large ones.
DEFAULT_BATCHED_TOKENS = (2048, 8192, 16_384)
_RANKS = (1, 2, 4, 8)
_MLA_BLOCK_TOKENS = (64, 16, 32, 128)  # each latent-attention kernel has its own
_CONV_KERNELS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size", "short_conv_kernel_size")
_DRAFTS = (1, 2, 3, 4, 5)  # tried where nothing else fits and the log does not say that there are none
_OTHER_BLOCKS = (32, 64, 128)  # some platforms' attention kernels insist on these; tried last
_ANY_KV_BYTES = 2**45  # stands for memory that the log does not name
_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Explanation:
    """A release and flags under which vLLM's formulas give the log's figures; `assumed` is what the log leaves open and
    the figures decide (where they are exact) or what was taken (where there are none to compare). `alternatives` are
    changes of two settings and more that give the same figures, as four ranks with bf16 do for two with fp8.
    """

    release: Release
    setting: Setting
    sizing: Sizing
    report: PeerReport
    exact: bool
    assumed: tuple[str, ...]
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Open:
    """One setting, the values to try, and how they are called. A `default` goes without saying: it is the first.

    `assumed` is what to say where all values fit, but nothing in the log told of the setting.
    """

    values: tuple[Any, ...]
    title: str
    default: bool = False
    assumed: str | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`choice` is the place of each value among those of its setting; `groups` is None where vLLM would not start."""

    choice: tuple[int, ...]
    release: Release
    setting: Setting
    sizing: Sizing
    groups: tuple[vllm.Group, ...] | None

    @property
    def charged_blocks(self) -> int:
        in_flight = vllm.in_flight_tokens(self.setting, self.release, self.setting.async_scheduling)
        return sum(vllm.request_blocks(g, self.setting, in_flight, self.release) for g in self.groups or ())


def explain(facts: LogFacts, spec: ModelSpec, kv_cache_dtype: str) -> Explanation:
    """The first candidate that gives every figure exactly; else the likeliest one, marked as not exact."""
    settings = _open_settings(facts, spec, kv_cache_dtype)
    candidates = list(_candidates(facts, spec, settings))
    first = candidates[0]
    found = _matches(candidates, facts)
    if not found and facts.runs and facts.speculative_tokens is None:
        settings[-1] = replace(settings[-1], values=_DRAFTS, assumed="a drafter of one more layer (MTP or EAGLE)")
        candidates = list(_candidates(replace(facts, speculative_method="mtp"), spec, settings))
        found = _matches(candidates, facts)
    if not found and facts.runs and not (facts.block_tokens or facts.block_size):
        settings = _open_settings(facts, spec, kv_cache_dtype)
        settings[-2] = replace(settings[-2], values=_OTHER_BLOCKS, default=False)
        candidates = list(_candidates(facts, spec, settings))
        found = _matches(candidates, facts)
    if not found:
        first = next((c for c in candidates if _charges(c, facts)), first)
        report = vllm.report(first.setting, first.release, first.setting.async_scheduling)
        matters = [s for s in settings if len(s.values) > 1 and not s.default]
        if not first.release.charges_batches_in_flight:
            matters = [s for s in matters if "async" not in s.title]
        taken = tuple(s.title.format(_label(s, 0)) for s in matters)
        return Explanation(first.release, first.setting, first.sizing, report, False, taken)
    best = next(c for c in candidates if c.choice in found)
    setting = replace(best.setting, kv_cache_bytes=found[best.choice] * vllm.block_bytes(best.groups or ()))
    report = vllm.report(setting, best.release, setting.async_scheduling)
    decided = list(_decided(settings, best.choice, {c.choice for c in candidates}, set(found)))
    if facts.available_kv is None:
        decided.append(f"{format_bytes(setting.kv_cache_bytes)} of KV memory")
    others = tuple(_alternatives(settings, best.choice, found))
    return Explanation(best.release, setting, best.sizing, report, True, tuple(decided), others)


def _matches(candidates: Sequence[_Candidate], facts: LogFacts) -> dict[tuple[int, ...], int]:
    """Choices that give the log's figures, with their number of blocks."""
    return {c.choice: blocks for c in candidates if (blocks := _matching_blocks(c, facts)) is not None}


def _charges(candidate: _Candidate, facts: LogFacts) -> bool:
    """Whether one request is charged what a log says that it would need, where the engine did not start."""
    if facts.needed_kv is None or not candidate.groups:
        return False
    charged_bytes = candidate.charged_blocks * vllm.block_bytes(candidate.groups)
    return facts.needed_kv.low <= charged_bytes <= facts.needed_kv.high


def _decided(
    settings: Sequence[_Open], best: tuple[int, ...], tried: set[tuple[int, ...]], found: set[tuple[int, ...]]
) -> Iterator[str]:
    """What the figures say about each open setting; nothing where every value of it gives them."""
    for at, setting in enumerate(settings):
        others = [i for i in range(len(setting.values)) if (*best[:at], i, *best[at + 1 :]) in tried]
        fitting = [i for i in others if (*best[:at], i, *best[at + 1 :]) in found]
        if len(fitting) < len(others) and not (setting.default and best[at] == 0):
            yield setting.title.format(" or ".join(_label(setting, i) for i in fitting))
        elif setting.assumed is not None:
            yield setting.assumed


def _alternatives(settings: Sequence[_Open], best: tuple[int, ...], found: Iterable[tuple[int, ...]]) -> Iterator[str]:
    """Changes of several settings at once, the fewest first; a change that contains another one is left out."""
    changes = sorted(
        {
            tuple((at, i) for at, i in enumerate(choice) if at > 0 and i != best[at])  # releases go without saying
            for choice in found
        },
        key=lambda change: (len(change), change),
    )
    shown: list[set[tuple[int, int]]] = [set(change) for change in changes if len(change) == 1]
    for change in changes:
        if len(change) > 1 and not any(less <= set(change) for less in shown):
            shown.append(set(change))
            yield " with ".join(settings[at].title.format(_label(settings[at], i)) for at, i in change)


def _label(setting: _Open, at: int) -> str:
    value = setting.values[at]
    if isinstance(value, Release):
        return value.covers
    if value == "fp8_e4m3":
        return "fp8"  # e5m2 is as large
    if isinstance(value, bool):
        return "" if value else "no "
    return f"{value:,}" if isinstance(value, int) else str(value)


def _open_settings(facts: LogFacts, spec: ModelSpec, kv_cache_dtype: str) -> list[_Open]:
    """Every setting that figures depend on, with its one value where the log has it."""
    retentions = {cache.retention for cache in spec.caches}
    slides = any(isinstance(r, Window | Chunk) for r in retentions)
    chunks = any(isinstance(r, Chunk) for r in retentions)
    mixed = slides and Full() in retentions
    latent = any(isinstance(c, TokenCache) and not c.value_dim for c in spec.caches)
    runs = facts.runs
    ranks = tuple(n for n in _RANKS if rank_problem(spec, n) is None) if runs else (1,)
    dtypes = (kv_cache_dtype, "fp8_e4m3") if runs and kv_cache_dtype == "auto" else (kv_cache_dtype,)
    # Chunked local attention runs without the hybrid manager unless an environment variable asks for it.
    manager = (not chunks, chunks) if mixed else (True,)
    given_block = facts.block_tokens or facts.block_size
    return [
        _Open(neighbours(facts.version) if facts.version else tuple(reversed(HISTORY)), "vLLM {}"),
        _Open(_one(facts.tensor_parallel_size) or ranks, "tensor_parallel_size {}"),
        _Open(dtypes, "kv_cache_dtype {}", default=True),
        _Open(_steps(facts) if slides else (1,), "max_num_batched_tokens {}"),
        _Open(_one(facts.async_scheduling) or ((True, False) if slides else (True,)), "{}async scheduling"),
        _Open(_state_modes(facts, spec), "mamba_cache_mode {}"),
        _Open(_one(facts.hybrid_manager) or manager, "{}hybrid KV cache manager", default=True),
        _Open(
            _one(given_block) or (_MLA_BLOCK_TOKENS if latent and runs else (16,)), "blocks of {} tokens", default=True
        ),
        _Open((facts.speculative_tokens or 0,), "{} drafts a step (MTP)"),
    ]


def _one(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,)


def _steps(facts: LogFacts) -> tuple[int, ...]:
    if facts.max_num_batched_tokens:
        return (facts.max_num_batched_tokens,)
    card = card_of(facts.gpu)
    default = vllm_batched_tokens(_device(card))
    return (default, *(tokens for tokens in DEFAULT_BATCHED_TOKENS if tokens != default))


def _state_modes(facts: LogFacts, spec: ModelSpec) -> tuple[str, ...]:
    if not any(isinstance(cache, StateCache) for cache in spec.caches):
        return ("none",)
    if facts.mamba_cache_mode in MAMBA_CACHE_MODES:
        return (facts.mamba_cache_mode,)
    if facts.enable_prefix_caching is False:
        return ("none",)
    # Releases up to 0.11 switch prefix caching off for states, whatever was asked for.
    return ("align", "none", "all") if facts.enable_prefix_caching else ("none", "align", "all")


def _candidates(facts: LogFacts, spec: ModelSpec, settings: Sequence[_Open]) -> Iterator[_Candidate]:
    """Every combination that differs in something, those nearest to the defaults first."""
    spec = _with_dtypes(spec, facts)
    sizings: dict[tuple[int, str], Sizing] = {}
    bases: dict[tuple[Any, ...], Setting] = {}
    groups: dict[tuple[Any, ...], tuple[vllm.Group, ...] | None] = {}
    places = product(*(range(len(s.values)) for s in settings))
    for choice in sorted(places, key=lambda chosen: (sum(at > 0 for at in chosen), chosen)):
        release, ranks, dtype, step, in_flight, mode, manager, block, drafts = (
            s.values[at] for s, at in zip(settings, choice, strict=True)
        )
        if choice[4] and not release.charges_batches_in_flight:
            continue  # async scheduling changes nothing there
        kept = (ranks, dtype, manager, drafts)
        if (ranks, dtype) not in sizings:
            config = EngineConfig(max_model_len=facts.max_model_len, kv_cache_dtype=dtype)
            sizings[ranks, dtype] = size_up(spec, config, ranks)
        sizing = sizings[ranks, dtype]
        if kept not in bases:
            bases[kept] = _base(facts, sizing, manager, drafts)
        setting = replace(
            bases[kept],
            max_num_batched_tokens=step,
            async_scheduling=in_flight,
            mamba_cache_mode=mode,
            base_block_tokens=block,
        )
        formed = (*kept, mode, block, release.group_factor, release.pads_odd_pages, release.kv_dtypes)
        if formed not in groups:
            groups[formed] = _groups(setting, release)
        yield _Candidate(choice, release, setting, sizing, groups[formed])


def _base(facts: LogFacts, sizing: Sizing, manager: bool, drafts: int) -> Setting:
    """One rank's caches as vLLM keeps them."""
    kv_bytes = facts.available_kv.middle if facts.available_kv else _ANY_KV_BYTES
    length = facts.max_model_len or sizing.spec.max_position
    setting = peer_setting(sizing, _device(card_of(facts.gpu)), kv_bytes, length)
    caches = _with_drafts(_kept(setting.caches, manager), sizing.spec, replace(facts, speculative_tokens=drafts))
    return replace(setting, caches=caches, draft_tokens=drafts)


def _groups(setting: Setting, release: Release) -> tuple[vllm.Group, ...] | None:
    try:
        return vllm.form_groups(setting, release)
    except vllm.Refusal:
        return None


def _matching_blocks(candidate: _Candidate, facts: LogFacts) -> int | None:
    """The number of blocks with which this candidate gives the log's figures; None if there is none."""
    if candidate.groups is None or (facts.reported_tokens is None and facts.concurrency is None):
        return None
    charged = candidate.charged_blocks
    for blocks in _possible_blocks(candidate, charged, facts):
        if facts.concurrency not in (None, f"{blocks / charged:.2f}"):
            continue
        tokens = vllm.reported_tokens(candidate.setting, candidate.release, candidate.groups, charged, blocks)
        if facts.reported_tokens in (None, tokens):
            return blocks
    return None


def _possible_blocks(candidate: _Candidate, charged: int, facts: LogFacts) -> Sequence[int]:
    """How many blocks there may be: by the log's own count, by its memory, or else by its tokens."""
    assert candidate.groups is not None
    if facts.num_blocks is not None:
        return (facts.num_blocks,)
    if memory := facts.available_kv:
        block_bytes = vllm.block_bytes(candidate.groups)
        possible = range(max(memory.low // block_bytes, 0), memory.high // block_bytes + 1)
        return sorted(possible, key=lambda n: abs(n - memory.middle // block_bytes))
    if facts.reported_tokens is None or facts.concurrency is None or facts.tensor_parallel_size is None:
        return ()  # one figure alone, or one of any number of ranks, says nothing about memory
    if candidate.release.reports_concurrency:
        about = facts.reported_tokens * charged // candidate.setting.max_model_len
        return range(about, about + 2)
    per_group = facts.reported_tokens // min(g.block_tokens for g in candidate.groups)
    return range(per_group * len(candidate.groups), (per_group + 1) * len(candidate.groups))


def _with_dtypes(spec: ModelSpec, facts: LogFacts) -> ModelSpec:
    """The model in the dtypes that the log names."""
    if facts.dtype in _STATE_DTYPES:
        spec = replace(spec, dtype=facts.dtype)
    state_dtype = facts.mamba_ssm_cache_dtype
    if state_dtype not in _STATE_DTYPES:
        return spec
    caches = tuple(
        replace(c, parts=tuple(p if _is_conv(p) else replace(p, dtype=state_dtype) for p in c.parts))
        if isinstance(c, StateCache)
        else c
        for c in spec.caches
    )
    return replace(spec, caches=caches)


def _kept(caches: Sequence[Cache], hybrid_manager: bool) -> tuple[Cache, ...]:
    """Without the hybrid manager every layer keeps every token."""
    if hybrid_manager:
        return tuple(caches)
    return tuple(
        replace(c, retention=Full()) if isinstance(c, TokenCache) and isinstance(c.retention, Window | Chunk) else c
        for c in caches
    )


def _with_drafts(caches: tuple[Cache, ...], spec: ModelSpec, facts: LogFacts) -> tuple[Cache, ...]:
    """With k drafted tokens convolutions remember k more columns, and the drafter of MTP is one more full layer."""
    drafts = facts.speculative_tokens or 0
    if not drafts:
        return caches
    columns = next((spec.text.integer(name) for name in _CONV_KERNELS if spec.text.has(name)), 4) - 1
    widened = tuple(
        replace(c, parts=tuple(_widened(p, columns, drafts) for p in c.parts)) if isinstance(c, StateCache) else c
        for c in caches
    )
    if not counts_drafter(facts, spec):
        return widened
    full = [c for c in caches if isinstance(c, TokenCache) and isinstance(c.retention, Full)]
    last = [c for c in full if c.layer == full[-1].layer] if full else []
    return (*widened, *(replace(c, layer=spec.num_layers) for c in last))


def counts_drafter(facts: LogFacts, spec: ModelSpec) -> bool:
    """Whether the drafter's own layers are known: those of MTP heads are; Gemma 4's drafter reads the model's KV."""
    return (facts.speculative_method or "").endswith("mtp") and spec.family != "gemma4"


def _widened(part: StatePart, columns: int, drafts: int) -> StatePart:
    if not _is_conv(part):
        return part
    return replace(part, elements_per_head=part.elements_per_head // columns * (columns + drafts))


def _is_conv(part: StatePart) -> bool:
    return part.name.startswith("conv")


def card_of(name: str | None) -> Gpu | None:
    if name is None:
        return None
    try:
        return parse_gpus(name)[1]
    except ValueError:
        return None  # a card that is not in the table only leaves its defaults open


def _device(card: Gpu | None) -> Device | None:
    return Device(card.title, card.memory_bytes, card.capability) if card else None
