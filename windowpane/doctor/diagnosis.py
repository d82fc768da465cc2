"""From a log to an explanation: what it says, which release and settings give its figures, and what else would.

The figures of a log are checked, not believed, and where no known rule gives them that is said: nothing is then claimed
that the log itself does not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from windowpane.doctor.failures import Case, Failure, find_failures, known_failures, report_formula_changed
from windowpane.doctor.log import Log, LogError, LogFacts, Start, is_vllm_log, looked_for, read_log
from windowpane.doctor.search import DEFAULT_BATCHED_TOKENS, Explanation, counts_drafter, explain
from windowpane.doctor.shapes import find_model
from windowpane.kv.caches import StateCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.formats import FORMATS
from windowpane.kv.retention import Chunk, Window
from windowpane.models.config import ModelError
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import EngineConfig
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting
from windowpane.plan.peers.vllm_releases import RELEASES
from windowpane.plan.planner import PlanError, Sizing, size_up

_DTYPES = {None: "auto", "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "half": "float16"}


_OTHERS = {
    "SGLang": r"(?i:sglang)|KV Cache is allocated\. #tokens|mem-fraction-static",
    "llama.cpp": r"llama_kv_cache|llama-server|llama\.cpp|koboldcpp",
}


@dataclass(frozen=True, slots=True)
class Lever:
    """A change, and what vLLM would do with it."""

    what: str
    report: PeerReport


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of one start. `start` is its number of `starts`, from 1.

    `explanation` is None where the log and flags do not say enough, and where the engine runs in the log with figures
    that no known rule gives; `missing` says what would help. `doubts` are reasons to distrust the figures.
    """

    facts: LogFacts
    start: int
    starts: tuple[Start, ...]
    spec: ModelSpec | None = None
    sizing: Sizing | None = None
    explanation: Explanation | None = None
    capacity: Capacity | None = None
    levers: tuple[Lever, ...] = ()
    failures: tuple[Failure, ...] = ()
    missing: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def unexplained(self) -> bool:
        """Whether the engine runs in the log, and its figures are of rules that are not known here."""
        return self.facts.runs and self.explanation is None


def diagnose(text: str, given: LogFacts, start: int | None = None) -> Diagnosis:
    """Explain a log. `given` are facts from flags, which win over the log's; `start` chooses among several.

    Raises LogError where there is nothing to read or no such start, and ModelError where `given` names a model that
    there is not, unless the log names a known failure: that is explained all the same.
    """
    log = read_log(text)
    number = _chosen(log, start)
    facts, line = _merge(log.starts[number - 1].facts, given), log.starts[number - 1].line
    failures = find_failures(line, Case(facts))
    if not failures and not is_vllm_log(log):
        looked = "\n  ".join([*looked_for(), *known_failures()])
        other = next((f" (this looks like {name})" for name, words in _OTHERS.items() if re.search(words, text)), "")
        raise LogError(f"nothing of a vLLM start-up log was found{other}. Looked for:\n  {looked}")
    found = Diagnosis(facts, number, log.starts, failures=failures, missing=_missing(facts), doubts=(*_doubts(facts),))
    if facts.model is None:
        return replace(found, failures=(*failures, *report_formula_changed(log, None)))
    try:
        spec, doubt = find_model(facts.model, ask_hub=given.model is not None)
        kv_cache_dtype = _our_dtype(facts.kv_cache_dtype)
    except (ModelError, LogError) as error:
        if not failures and given.model is not None:
            raise
        return replace(found, doubts=(*found.doubts, str(error)))
    doubts = (*filter(None, [doubt]), *_doubts(facts, spec))
    found = replace(found, spec=spec, doubts=doubts, failures=(*failures, *report_formula_changed(log, spec)))
    return _explained(found, line, spec, kv_cache_dtype)


def _explained(found: Diagnosis, line: str, spec: ModelSpec, kv_cache_dtype: str) -> Diagnosis:
    """The same with everything that the model's shapes add."""
    facts = found.facts
    config = EngineConfig(max_model_len=facts.max_model_len, kv_cache_dtype=kv_cache_dtype)
    try:
        sizing = size_up(spec, config, facts.tensor_parallel_size or 1)
    except PlanError as error:
        return replace(found, doubts=(*found.doubts, str(error)))
    memory = facts.available_kv
    if memory.low <= 0 if memory else not facts.runs:
        return replace(found, sizing=sizing)
    explanation = explain(facts, spec, kv_cache_dtype)
    if not explanation.exact and (facts.pipeline_parallel_size or 1) > 1:
        return replace(found, sizing=sizing)  # the memory is that of a stage, and which layers it has is not known
    if facts.runs and not explanation.exact:
        known = memory if facts.tensor_parallel_size else None
        doubts = (*found.doubts, _NOT_EXACT) if memory else found.doubts
        capacity = Capacity(sizing.layout, known.middle) if known else None
        return replace(found, sizing=sizing, capacity=capacity, doubts=doubts)
    others = [f for f in found.failures if f.key == "report_formula_changed"]
    return replace(
        found,
        sizing=explanation.sizing,
        explanation=explanation,
        capacity=Capacity(explanation.sizing.layout, explanation.setting.kv_cache_bytes),
        levers=_levers(explanation),
        failures=(*find_failures(line, Case(facts, explanation.setting, explanation.report)), *others),
    )


_NOT_EXACT = (
    "no release's formula gives exactly the log's figures: flags that are not in the log, another block size, a "
    "drafter, a plugin or a changed vLLM are at work; what vLLM charges for each group is then not known here"
)


def _chosen(log: Log, start: int | None) -> int:
    """The number of the start to explain: the one asked for, else the last that has figures or a known failure."""
    if start is not None:
        if not 1 <= start <= len(log.starts):
            raise LogError(f"--start {start}: the log shows {len(log.starts)} start(s); choose one from 1 on")
        return start
    telling = [n for n, s in enumerate(log.starts, 1) if s.facts.runs or find_failures(s.line, Case(s.facts))]
    with_memory = [n for n, s in enumerate(log.starts, 1) if s.facts.available_kv is not None]
    return (telling or with_memory or [len(log.starts)])[-1]


def _merge(log: LogFacts, given: LogFacts) -> LogFacts:
    names = LogFacts.__dataclass_fields__
    return replace(log, **{n: value for n in names if (value := getattr(given, n)) is not None})


def _missing(facts: LogFacts) -> tuple[str, ...]:
    """What the explanation needs and the log does not say, with the flag that fills it."""
    wanted = {
        "model": "the model: --model",
        "available_kv": "KV memory per rank: --kv-cache-memory-bytes",
        "max_model_len": "the longest length: --max-model-len (the limit of the model whose shapes are used is taken)",
        "version": "the release: --vllm-version",
        "tensor_parallel_size": "ranks: --tensor-parallel-size",
        "max_num_batched_tokens": "the largest step: --max-num-batched-tokens",
    }
    return tuple(title for name, title in wanted.items() if getattr(facts, name) is None)


def _doubts(facts: LogFacts, spec: ModelSpec | None = None) -> Iterator[str]:
    if (facts.pipeline_parallel_size or 1) > 1:
        yield "pipeline parallelism splits the layers; figures here are for all of them on one stage"
    if (facts.decode_context_parallel_size or 1) > 1:
        yield "decode context parallelism splits tokens over ranks, which is not counted here"
    if facts.speculative_method and spec is not None and not counts_drafter(facts, spec):
        yield f"the drafter ({facts.speculative_method}) may have layers of its own, which are not counted here"


def _our_dtype(name: str | None) -> str:
    dtype = _DTYPES.get(name, name or "auto")
    if dtype != "auto" and dtype not in FORMATS:
        raise LogError(f"no formula is known here for kv_cache_dtype {name}; known: auto, fp8, {', '.join(FORMATS)}")
    return dtype


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
    changes.append((f"--max-model-len {half}", replace(setting, max_model_len=max(half, 1))))
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
