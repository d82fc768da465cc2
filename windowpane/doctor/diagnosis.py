"""From a log's facts to an explanation: which release and flags give its figures, and what else would.

The figures of a log are checked, not believed: each release's formulas run over the memory the log names (rounded to
0.01 GiB, so over every number of blocks that it may stand for), and those that give exactly the reported tokens and
concurrency are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windowpane.doctor.failures import Case, Failure, find_failures, known_failures
from windowpane.doctor.log import LogError, LogFacts, flatten, is_vllm_log, looked_for, read_log
from windowpane.doctor.shapes import find_model
from windowpane.kv.caches import StateCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.formats import FORMATS
from windowpane.kv.retention import Chunk, Window
from windowpane.models.config import ModelError
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import EngineConfig
from windowpane.plan.hardware import Gpu, parse_gpus
from windowpane.plan.memory import Device
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import MAMBA_CACHE_MODES, Setting
from windowpane.plan.peers.vllm_releases import RELEASES, Release, release_of
from windowpane.plan.planner import Sizing, peer_setting, size_up, vllm_batched_tokens

# vLLM's defaults for max_num_batched_tokens: most cards, serving on large ones, offline on large ones.
DEFAULT_BATCHED_TOKENS = (2048, 8192, 16_384)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A release and flags under which vLLM's formulas give the log's figures; `assumed` is what the log leaves open."""

    release: Release
    setting: Setting
    report: PeerReport
    exact: bool
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lever:
    """A change, and what vLLM would do with it."""

    what: str
    report: PeerReport


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`explanation` is None where the log and flags do not say enough; `missing` says what for. `doubts` are reasons to
    distrust the figures.
    """

    facts: LogFacts
    spec: ModelSpec | None
    sizing: Sizing | None
    explanation: Explanation | None
    capacity: Capacity | None
    levers: tuple[Lever, ...]
    failures: tuple[Failure, ...]
    missing: tuple[str, ...]
    doubts: tuple[str, ...]


def diagnose(text: str, given: LogFacts) -> Diagnosis:
    """Explain a log. `given` are facts from flags, which win over the log's.

    Raises LogError where there is nothing to read, and ModelError where the model is unknown, unless the log names a
    known failure: that is explained all the same.
    """
    line, facts = flatten(text), _merge(read_log(text), given)
    failures = find_failures(line, Case(None, None))
    if not failures and not is_vllm_log(facts):
        looked = "\n  ".join([*looked_for(), *known_failures()])
        raise LogError(f"nothing of a vLLM start-up log was found. Looked for:\n  {looked}")
    missing = _missing(facts)
    if facts.model is None:
        return Diagnosis(facts, None, None, None, None, (), failures, missing, ())
    try:
        spec, doubt = find_model(facts.model)
        kv_cache_dtype = _our_dtype(facts.kv_cache_dtype)
    except (ModelError, LogError) as error:
        if not failures:
            raise
        return Diagnosis(facts, None, None, None, None, (), failures, missing, (str(error),))
    doubts = [*filter(None, [doubt]), *_doubts(facts)]
    config = EngineConfig(
        max_model_len=facts.max_model_len,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=facts.enable_prefix_caching is not False,
        async_scheduling=facts.async_scheduling is not False,
    )
    sizing = size_up(spec, config, facts.tensor_parallel_size or 1)
    if facts.available_kv is None or facts.available_kv.low <= 0:
        return Diagnosis(facts, spec, sizing, None, None, (), failures, missing, tuple(doubts))
    card = _card(facts.gpu)
    explanation = _explain(facts, sizing, card)
    if facts.reported_tokens is not None and not explanation.exact:
        doubts.append(
            "no release's formula gives exactly the log's figures: a drafter, another block size or flags that are "
            "not in the log change them"
        )
    capacity = Capacity(sizing.layout, explanation.setting.kv_cache_bytes)
    return Diagnosis(
        facts,
        spec,
        sizing,
        explanation,
        capacity,
        _levers(explanation),
        find_failures(line, Case(explanation.setting, explanation.report)),
        missing,
        tuple(doubts),
    )


def _merge(log: LogFacts, given: LogFacts) -> LogFacts:
    names = LogFacts.__dataclass_fields__
    return replace(log, **{n: value for n in names if (value := getattr(given, n)) is not None})


def _missing(facts: LogFacts) -> tuple[str, ...]:
    """What the explanation needs and the log does not say, with the flag that fills it."""
    wanted = {
        "model": "the model: --model",
        "available_kv": "KV memory per rank: --kv-cache-memory-bytes",
        "max_model_len": "the longest length: --max-model-len (the model's own limit is taken)",
        "version": "the release: --vllm-version",
        "tensor_parallel_size": "ranks: --tensor-parallel-size (1 is taken)",
        "max_num_batched_tokens": "the largest step: --max-num-batched-tokens",
    }
    return tuple(title for name, title in wanted.items() if getattr(facts, name) is None)


def _doubts(facts: LogFacts) -> Iterator[str]:
    if (facts.pipeline_parallel_size or 1) > 1:
        yield "pipeline parallelism splits the layers; these figures are for all of them on one stage"
    if facts.speculative:
        yield "the drafter of speculative_config has layers of its own, which are not counted here"
    if facts.version and release_of(facts.version) is RELEASES[0] and not facts.version.startswith("0.20"):
        yield f"{facts.version} is explained with the rules of 0.20.0, the oldest known here"


def _our_dtype(name: str | None) -> str:
    dtype = {None: "auto", "fp8": "fp8_e4m3"}.get(name, name or "auto")
    if dtype != "auto" and dtype not in FORMATS:
        raise LogError(f"no formula is known here for kv_cache_dtype {name}; known: auto, fp8, {', '.join(FORMATS)}")
    return dtype


def _card(name: str | None) -> Gpu | None:
    if name is None:
        return None
    try:
        return parse_gpus(name)[1]
    except ValueError:
        return None  # a card that is not in the table only leaves its defaults open


def _explain(facts: LogFacts, sizing: Sizing, card: Gpu | None) -> Explanation:
    """The candidate that gives the log's figures exactly; else the one of the log's own version."""
    assert facts.available_kv is not None
    device = Device(card.title, card.memory_bytes, card.capability) if card else None
    length = facts.max_model_len or sizing.spec.max_position
    base = peer_setting(sizing, device, facts.available_kv.middle, length)
    if facts.mamba_cache_mode in MAMBA_CACHE_MODES:
        base = replace(base, mamba_cache_mode=facts.mamba_cache_mode)
    candidates = list(_candidates(facts, base, device))
    for release, setting, assumed in candidates:
        for kv_bytes in _possible_bytes(facts, setting, release):
            report = vllm.report(replace(setting, kv_cache_bytes=kv_bytes), release, setting.async_scheduling)
            if _agrees(report, facts):
                exact = replace(setting, kv_cache_bytes=kv_bytes)
                return Explanation(release, exact, report, facts.reported_tokens is not None, assumed)
    release, setting, assumed = candidates[0]
    report = vllm.report(setting, release, setting.async_scheduling)
    return Explanation(release, setting, report, False, assumed)


def _candidates(
    facts: LogFacts, base: Setting, device: Device | None
) -> Iterator[tuple[Release, Setting, tuple[str, ...]]]:
    """Releases and flags that the log does not rule out, the likeliest first."""
    releases = [release_of(facts.version)] if facts.version else list(reversed(RELEASES))
    steps = [facts.max_num_batched_tokens] if facts.max_num_batched_tokens else []
    if not steps:
        default = vllm_batched_tokens(device)
        steps = [default, *(tokens for tokens in DEFAULT_BATCHED_TOKENS if tokens != default)]
    asyncs = [facts.async_scheduling] if facts.async_scheduling is not None else [True, False]
    for release in releases:
        for tokens in steps:
            for async_scheduling in asyncs if release.charges_batches_in_flight else asyncs[:1]:
                assumed = []
                if not facts.version:
                    assumed.append(f"vLLM {release.covers}")
                if not facts.max_num_batched_tokens:
                    assumed.append(f"max_num_batched_tokens {tokens:,}")
                if facts.async_scheduling is None and release.charges_batches_in_flight:
                    assumed.append("async scheduling" if async_scheduling else "no async scheduling")
                flags = replace(base, max_num_batched_tokens=tokens, async_scheduling=async_scheduling)
                yield release, flags, tuple(assumed)


def _possible_bytes(facts: LogFacts, setting: Setting, release: Release) -> Iterator[int]:
    """One number of bytes for every number of blocks that the printed memory may stand for."""
    assert facts.available_kv is not None
    block_bytes = vllm.report(setting, release, setting.async_scheduling).block_bytes
    if block_bytes is None or facts.reported_tokens is None:
        return
    if facts.num_blocks is not None:
        yield facts.num_blocks * block_bytes
        return
    middle = facts.available_kv.middle // block_bytes
    possible = range(facts.available_kv.low // block_bytes, facts.available_kv.high // block_bytes + 1)
    for blocks in sorted(possible, key=lambda n: abs(n - middle)):
        yield blocks * block_bytes


def _agrees(report: PeerReport, facts: LogFacts) -> bool:
    if report.concurrency is None or report.reported_tokens != facts.reported_tokens:
        return False
    return facts.concurrency is None or f"{report.concurrency:.2f}" == facts.concurrency


def _levers(explained: Explanation) -> tuple[Lever, ...]:
    """What would change the figures, each alone, in the order in which people can try it."""
    release, setting = explained.release, explained.setting
    retentions = {cache.retention for cache in setting.caches}
    slides = any(isinstance(r, Window | Chunk) and r.tokens < setting.max_model_len for r in retentions)
    changes: list[tuple[str, Setting]] = []
    if slides and setting.max_num_batched_tokens > DEFAULT_BATCHED_TOKENS[0]:
        changes.append(("--max-num-batched-tokens 2048", replace(setting, max_num_batched_tokens=2048)))
    if slides and release.charges_batches_in_flight and setting.async_scheduling:
        changes.append(("--no-async-scheduling", replace(setting, async_scheduling=False)))
    if any(isinstance(cache, StateCache) for cache in setting.caches) and setting.mamba_cache_mode != "none":
        changes.append(("--no-enable-prefix-caching", replace(setting, mamba_cache_mode="none")))
    if setting.kv_cache_dtype == "auto":
        old_card = setting.capability is not None and setting.capability < (8, 9)
        for dtype in ("int8_per_token_head",) if old_card else ("fp8_e4m3", "int8_per_token_head"):
            changes.append((f"--kv-cache-dtype {dtype}", replace(setting, kv_cache_dtype=dtype)))
    half = setting.max_model_len // 2
    changes.append((f"--max-model-len {half}", replace(setting, max_model_len=half)))
    levers = [Lever(what, vllm.report(other, release, other.async_scheduling)) for what, other in changes]
    for other in RELEASES:
        if other.covers != release.covers:
            levers.append(Lever(f"vLLM {other.version}", vllm.report(setting, other, setting.async_scheduling)))
    before = explained.report
    return tuple(
        lever
        for lever in levers
        if (lever.report.concurrency, lever.report.reported_tokens) != (before.concurrency, before.reported_tokens)
    )
