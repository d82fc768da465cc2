"""Failures people report, by the words of the log: what happened, why, and the ways out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from windowpane.doctor.log import Log, LogFacts
from windowpane.kv.caches import TokenCache
from windowpane.models.spec import ModelSpec
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting
from windowpane.plan.peers.vllm_releases import release_of
from windowpane.plan.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """`key` is stable for programs; the rest is for people, in plain sentences."""

    key: str
    title: str
    cause: str
    ways_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What a failure is explained with, as far as it is known: the log's facts, the setting, and what the release would
    have done.
    """

    facts: LogFacts
    setting: Setting | None = None
    report: PeerReport | None = None


# What is explained in the same way although the engine runs.
NO_FAILURES = ("report_formula_changed", "hybrid_manager_disabled")

_Explain = Callable[[re.Match[str], Case], Failure]


def find_failures(line: str, case: Case) -> tuple[Failure, ...]:
    """The known failures in a flattened log, each once."""
    found: dict[str, Failure] = {}
    for _, pattern, explain in _KNOWN:
        match = re.search(pattern, line)
        if match:
            failure = explain(match, case)
            found.setdefault(failure.key, failure)
    return tuple(found.values())


def known_failures() -> list[str]:
    """The words that known failures are found by."""
    return [f"`{words}`" for words, _, _ in _KNOWN]


def report_formula_changed(log: Log, spec: ModelSpec | None) -> tuple[Failure, ...]:
    """Where a text compares the tokens of a release up to 0.20.0 with those of a later one."""
    said = dict(log.reports)
    said |= {
        s.facts.version: s.facts.reported_tokens for s in log.starts if s.facts.version and s.facts.reported_tokens
    }
    before = {v: tokens for v, tokens in said.items() if not release_of(v).reports_concurrency}
    after = {v: tokens for v, tokens in said.items() if release_of(v).reports_concurrency}
    if not before or not after or max(after.values()) < 1.5 * min(before.values()):
        return ()
    (old, few), (new, many) = min(before.items(), key=_second), max(after.items(), key=_second)
    cause = (
        f"{few:,} tokens in {old} and {many:,} in {new} are one memory in two formulas. Up to 0.20.0 the log line is "
        "blocks // groups × block size, as if every group kept every token; from 0.20.1 on it is concurrency × "
        "max_model_len, which counts a window or a state as what it is charged."
    )
    if spec is not None:
        kinds = {c.retention.kind for c in spec.caches}
        if kinds & {"window", "chunk", "state"}:
            cause += f" {spec.name} has {' and '.join(sorted(kinds))} layers, so the two differ."
    return (
        Failure(
            "report_formula_changed",
            "The jump in tokens is the log line alone",
            cause,
            (
                "compare `Maximum concurrency for … tokens per request`, whose formula did not change",
                "bytes per request are the same in both releases: no memory was gained, none was lost before",
            ),
        ),
    )


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _page_size(match: re.Match[str], case: Case) -> Failure:
    cause = (
        "vLLM puts all layers into one pool of equal pages. It makes pages equal by giving smaller ones longer blocks, "
        "which works only where every page divides the largest. Scales per token and head break that: 256 and 512 "
        "dimensions with a 4-byte scale take 520 and 1,032 bytes a head, and 1,032 is no multiple of 520."
    )
    if case.setting:
        pages = sorted(
            {
                (c.retention.name, vllm.BASE_BLOCK_TOKENS * vllm.bytes_per_token(c, case.setting.kv_dtype))
                for c in case.setting.caches
                if isinstance(c, TokenCache)
            },
            key=lambda page: -page[1],
        )
        if len(pages) > 1:
            sizes = ", ".join(f"{name} {size:,} B" for name, size in pages)
            cause += f" Here: {sizes}."
    newer: tuple[str, ...] = (
        "vLLM 0.24 or newer, which pads the odd page where the attention backend can read a padded one",
    )
    if "cannot be padded" in match[0]:
        newer = (
            "vLLM 0.29 or newer, which pads every page but those of latent attention (MLA)",
            "an attention backend that steps over padding (FLASH_ATTN, FLASHINFER) with 0.24 to 0.28",
        )
        cause = (
            "vLLM puts all layers into one pool of equal pages. Since 0.24 it pads a page that does not divide the "
            "largest, but only where the attention backend reads pages by their stride; here it does not, so neither "
            "longer blocks nor padding make the pages equal."
        ) + cause[cause.find(" Here:") :] * (" Here:" in cause)
    return Failure(
        "page_size_not_divisible",
        "Pages of different layers do not divide one another",
        cause,
        (
            *newer,
            "a KV dtype without scales: --kv-cache-dtype auto, or fp8 on SM 8.9 and newer",
            "Windowpane keeps a page size per kind of layer: nothing to divide, nothing padded",
        ),
    )


def _fp8e4nv(match: re.Match[str], case: Case) -> Failure:
    if _in_weight_kernel(match, case):
        return Failure(
            "fp8e4nv_in_weights",
            "This card cannot multiply the checkpoint's fp8 weights",
            "`fp8e4nv` is Triton's name for E4M3, whose conversion needs compute capability 8.9 (Ada) or newer. The "
            "kernel that failed multiplies weights: the KV cache has nothing to do with it, and no --kv-cache-dtype "
            "helps.",
            (
                "an INT4 or INT8 checkpoint (AWQ, GPTQ, w8a8), or the unquantized one",
                "a path that widens fp8 weights before multiplying (vLLM's Marlin: VLLM_TEST_FORCE_FP8_MARLIN=1)",
                "a card with compute capability 8.9 or newer",
            ),
        )
    return Failure(
        "fp8e4nv_not_supported",
        "This card cannot convert fp8 E4M3",
        "`fp8e4nv` is Triton's name for E4M3, whose conversion needs compute capability 8.9 (Ada) or newer. On SM 8.6 "
        "(RTX 3090, A6000, A10) Triton knows only fp8e4b15 and fp8e5.",
        (
            "--kv-cache-dtype fp8_e5m2, where the checkpoint is not quantized (vLLM refuses it otherwise)",
            "--kv-cache-dtype int8_per_token_head: as small, and runs on every card",
            "--kv-cache-dtype auto: twice the bytes, on every card",
            "Windowpane decodes E4M3 by bit operations where the card cannot",
        ),
    )


def _in_weight_kernel(match: re.Match[str], case: Case) -> bool:
    """Whether the traceback before the message is of a matrix product, or nothing else in the log asks for fp8 KV."""
    before = match.string[max(match.start() - 6000, 0) : match.start()]
    kernels = re.findall(
        r"reshape_and_cache|unified_attention|triton_attn|kv_cache|fused_moe|w8a8|scaled_mm|fp8_gemm", before
    )
    if kernels:
        return kernels[-1] in ("fused_moe", "w8a8", "scaled_mm", "fp8_gemm")
    weights_only = (case.facts.quantization or "").startswith(("fp8", "modelopt", "compressed"))
    return weights_only and case.facts.kv_cache_dtype in (None, "auto")


def _e5m2(match: re.Match[str], case: Case) -> Failure:
    return Failure(
        "fp8_e5m2_with_quantized_checkpoint",
        "fp8_e5m2 was refused because the checkpoint is quantized",
        "The message says fp8 checkpoints, but vLLM refuses fp8_e5m2 for every quantized one, INT4 (AWQ, GPTQ) too. "
        "How the weights are stored has nothing to do with K and V, which are computed before they are stored; only "
        "KV scales calibrated for another format would be in the way.",
        (
            "--kv-cache-dtype fp8_e4m3, on SM 8.9 and newer",
            "--kv-cache-dtype int8_per_token_head, on any card (0.20 and newer)",
            "an unquantized checkpoint",
            "Windowpane takes fp8_e5m2 with any checkpoint that carries no KV scales of its own",
        ),
    )


def _too_few_tokens(match: re.Match[str], case: Case) -> Failure:
    length, stored = (int(match[name].replace(",", "")) for name in ("length", "stored"))
    return Failure(
        "kv_cache_too_small",
        "The KV cache is too small for max_model_len",
        f"The pool holds {stored:,} tokens, and one request may have {length:,}.",
        (
            f"--max-model-len {stored}, which fits",
            "a smaller --kv-cache-dtype, more of the card (--gpu-memory-utilization), or more cards",
            "a smaller --max-num-batched-tokens: it sizes the activations, which are taken off before KV",
        ),
    )


def _too_small(match: re.Match[str], case: Case) -> Failure:
    length, needed, available = int(match["length"].replace(",", "")), match["needed"], match["available"]
    # With pipeline stages the charge is of all layers, and the memory of the smallest stage.
    rank = " per rank" if (case.facts.pipeline_parallel_size or 1) == 1 else ""
    cause = f"One request of {length:,} tokens would be charged {needed} of KV{rank}, and there are {available}."
    ways = []
    report = case.report
    if report and report.groups:
        largest = max(report.groups, key=lambda g: g.bytes_per_request)
        cause += f" {report.charge_note or ''}".rstrip()
        ways.append(f"the largest charge is {format_bytes(largest.bytes_per_request)} for {largest.name} layers")
    estimated = match.groupdict().get("estimated")
    if estimated:
        ways.append(f"--max-model-len {estimated.replace(',', '')}, which vLLM itself says would fit")
    local = [c for c in case.setting.caches if c.retention.kind in ("window", "chunk")] if case.setting else None
    smaller_helps = (case.facts.max_num_batched_tokens or 8192) > 2048
    if local and smaller_helps:
        ways.append("--max-num-batched-tokens 2048: every window is charged the tokens in flight")
    elif local is None and smaller_helps:
        ways.append("--max-num-batched-tokens 2048, if layers slide: every window is charged the tokens in flight")
    ways.append("a smaller --kv-cache-dtype, more of the card (--gpu-memory-utilization), or more cards")
    return Failure("kv_cache_too_small", "The KV cache is too small for max_model_len", cause, tuple(ways))


def _no_memory(match: re.Match[str], case: Case) -> Failure:
    left = case.facts.available_kv
    short = f" It is {left.text.removeprefix('-')} short." if left is not None and left.high < 0 else ""
    return Failure(
        "no_kv_memory",
        "Weights and activations leave nothing for KV",
        f"What --gpu-memory-utilization grants is used up before any KV block is allocated.{short}",
        (
            "a higher --gpu-memory-utilization, if nothing else runs on the card",
            "more cards (--tensor-parallel-size) or a quantized checkpoint",
            "a smaller --max-num-batched-tokens or --max-num-seqs: they size the activations and CUDA graphs",
        ),
    )


def _manager_off(match: re.Match[str], case: Case) -> Failure:
    line = match.string
    if "failed to convert the KV cache specs" in line:
        cause = "The model has recurrent states, which cannot be kept as if they were full layers: vLLM does not start."
    else:
        cause = "Every layer keeps every token: windows save computation and no memory."
    if "kv-transfer-config" in line or "kv_transfer_config" in line:
        why = "because --kv-transfer-config names a connector that cannot move several groups"
    elif "chunked local attention" in line:
        why = "because chunked local attention is slower with it (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1)"
    elif re.search(r"disable.hybrid.kv.cache.manager", line):
        why = "because --disable-hybrid-kv-cache-manager was given"
    else:
        why = "by a flag or a platform that the log does not name"
    return Failure(
        "hybrid_manager_disabled",
        "The hybrid KV cache manager is off",
        f"It was switched off {why}. {cause}",
        (
            "a connector that supports it (a subclass of SupportsHMA), with --no-disable-hybrid-kv-cache-manager",
            "no --kv-transfer-config, where offloading is not needed",
            "Windowpane has one arena for all groups and nothing to switch off",
        ),
    )


def _out_of_memory(match: re.Match[str], case: Case) -> Failure:
    cause = f"CUDA had not the {match['wanted']} that were asked for."
    if match["total"]:
        cause += f" The card holds {match['total']}"
        cause += f", of which {match['free']} were free." if match["free"] else "."
    if case.facts.runs:
        cause += " KV memory was already set aside: graphs, activations or another process took what was left."
    else:
        cause += " It happened before KV memory was set aside: weights and activations alone are too large."
    return Failure(
        "cuda_out_of_memory",
        "CUDA ran out of memory",
        cause,
        (
            "a smaller --max-num-batched-tokens and --max-num-seqs: activations and CUDA graphs grow with them",
            "a lower --gpu-memory-utilization where KV memory was already set aside, as it leaves more for the rest",
            "more cards (--tensor-parallel-size), or a quantized checkpoint",
            "--enforce-eager, which needs no memory for CUDA graphs",
        ),
    )


def _not_free(match: re.Match[str], case: Case) -> Failure:
    return Failure(
        "less_free_than_asked",
        "Another process holds the card's memory",
        f"{match['free']} of {match['total']} GiB were free and --gpu-memory-utilization {match['share']} asks for "
        f"{match['wanted']} GiB. vLLM asks for a share of the whole card, not of what is free.",
        (
            f"--gpu-memory-utilization {_share(match['free'], match['total'])}, which fits beside what is running",
            "end what else runs on the card (nvidia-smi lists it); an engine that crashed may have left a process",
            "--kv-cache-memory-bytes, which fixes KV memory whatever else there is",
        ),
    )


def _share(free: str, total: str) -> str:
    """A share of the card that is free now, rounded down with a little room."""
    return f"{max(int(float(free) / float(total) * 100) - 1, 1) / 100:.2f}"


def _routed_experts(match: re.Match[str], case: Case) -> Failure:
    cause = (
        "The buffer that records which experts a token visited is indexed by the slots of one attention group, so it "
        "must hold num_blocks × block size of that group. vLLM sized it by the token count of its log instead, which "
        "divides the blocks by the number of groups"
    )
    if match["index"]:
        cause += f": index {int(match['index']):,} is beyond its {int(match['size']):,} rows"
    cause += "."
    if case.report and case.report.num_blocks and len(case.report.groups) > 1:
        growing = max(case.report.groups, key=lambda g: g.blocks_per_request)
        slots = case.report.num_blocks * growing.block_tokens
        cause += f" With {case.report.num_blocks:,} blocks of {growing.block_tokens:,} tokens it needs {slots:,} rows."
    return Failure(
        "routed_experts_out_of_bounds",
        "Recording routed experts overflowed its buffer",
        cause,
        (
            "leave --enable-return-routed-experts out: the model then runs",
            "a release that sizes the buffer by the attention group (vLLM pull request 37118)",
            "--disable-hybrid-kv-cache-manager, at the price of windows that keep every token",
        ),
    )


_NUMBER = r"[\d,]+"
_SIZE = r"[\d.]+ ?[GMK]iB"
_KNOWN: tuple[tuple[str, str, _Explain], ...] = (
    (
        "page size … is not divisible by the maximum page size",
        r"page size (?:of the layer )?is not divisible by the maximum page size(?: and cannot be padded)?",
        _page_size,
    ),
    ("fp8e4nv not supported", r"fp8e4nv not supported", _fp8e4nv),
    (
        "fp8_e5m2 kv-cache is not supported with fp8 checkpoints",
        r"fp8_e5m2 kv-cache is not supported with fp8 checkpoints",
        _e5m2,
    ),
    (
        "KV cache is needed, which is larger than the available KV cache memory",
        rf"max seq len \((?P<length>{_NUMBER})\), \(?(?P<needed>{_SIZE}) KV cache is needed, which is larger than the "
        rf"available KV cache memory \((?P<available>{_SIZE})\)"
        rf"(?:\. Based on the available memory, the estimated maximum model length is (?P<estimated>{_NUMBER}))?",
        _too_small,
    ),
    (
        "max seq len … is larger than the maximum number of tokens that can be stored in KV cache",
        rf"max seq len \((?P<length>{_NUMBER})\) is larger than the maximum number of tokens that can be stored in KV "
        rf"cache \((?P<stored>{_NUMBER})\)",
        _too_few_tokens,
    ),
    (
        "No available memory for the cache blocks",
        r"No available memory for the cache blocks"
        r"|(?:Available KV cache memory:|reserved for KV Cache is) (?:-|0\.0+ )",
        _no_memory,
    ),
    (
        "index … is out of bounds, in routed_experts",
        # Only where the capturer is in the traceback: other arrays overflow too.
        r"(?i:routed_?experts).*?index (?P<index>\d+) is out of bounds for axis 0 with size (?P<size>\d+)",
        _routed_experts,
    ),
    (
        "num_blocks // num_groups, in routed_experts",
        r"(?i:routed_?experts).*?num_blocks\W+// num_groups(?P<index>)",
        _routed_experts,
    ),
    (
        "Hybrid KV cache manager is disabled",
        r"Hybrid KV cache manager is disabled|Turning off hybrid kv cache manager",
        _manager_off,
    ),
    (
        "CUDA out of memory",
        rf"CUDA out of memory\. Tried to allocate (?P<wanted>{_SIZE})"
        rf"(?:\. GPU \d+ has a total capacity of (?P<total>{_SIZE})(?: of which (?P<free>{_SIZE}) is free)?)?",
        _out_of_memory,
    ),
    (
        "Free memory on device … is less than desired GPU memory utilization",
        r"Free memory on device (?:\S+ )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired "
        r"GPU memory utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)",
        _not_free,
    ),
)
