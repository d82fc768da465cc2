"""Failures people report, by the words of the log: what happened, why, and the ways out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from windowpane.kv.caches import TokenCache
from windowpane.plan.peers import vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting
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
    """What a failure is explained with, as far as it is known: the setting, and what the release would have done."""

    setting: Setting | None
    report: PeerReport | None


_Explain = Callable[[re.Match[str], Case], Failure]


def find_failures(line: str, case: Case) -> tuple[Failure, ...]:
    """The known failures in a flattened log, each once."""
    found = []
    for _, pattern, explain in _KNOWN:
        match = re.search(pattern, line)
        if match:
            found.append(explain(match, case))
    return tuple(found)


def known_failures() -> list[str]:
    """The words that known failures are found by."""
    return [f"`{words}`" for words, _, _ in _KNOWN]


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
    return Failure(
        "page_size_not_divisible",
        "Pages of different layers do not divide one another",
        cause,
        (
            "vLLM 0.24 or newer, which pads the odd page instead",
            "a KV dtype without scales: --kv-cache-dtype auto, or fp8 on SM 8.9 and newer",
            "Windowpane keeps a page size per kind of layer: nothing to divide, nothing padded",
        ),
    )


def _fp8e4nv(match: re.Match[str], case: Case) -> Failure:
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


def _too_small(match: re.Match[str], case: Case) -> Failure:
    length, needed, available = int(match["length"].replace(",", "")), match["needed"], match["available"]
    cause = f"One request of {length:,} tokens would be charged {needed} of KV per rank, and there are {available}."
    ways = []
    report = case.report
    if report and report.groups:
        largest = max(report.groups, key=lambda g: g.bytes_per_request)
        cause += f" {report.charge_note or ''}".rstrip()
        ways.append(f"the largest charge is {format_bytes(largest.bytes_per_request)} for {largest.name} layers")
    estimated = match.groupdict().get("estimated")
    if estimated:
        ways.append(f"--max-model-len {estimated.replace(',', '')}, which vLLM itself says would fit")
    ways += [
        "--max-num-batched-tokens 2048, where layers slide: every window is charged the tokens in flight",
        "a smaller --kv-cache-dtype, more of the card (--gpu-memory-utilization), or more cards",
    ]
    return Failure("kv_cache_too_small", "The KV cache is too small for max_model_len", cause, tuple(ways))


def _no_memory(match: re.Match[str], case: Case) -> Failure:
    return Failure(
        "no_kv_memory",
        "Weights and activations leave nothing for KV",
        "What --gpu-memory-utilization grants is used up before any KV block is allocated.",
        (
            "a higher --gpu-memory-utilization, if nothing else runs on the card",
            "more cards (--tensor-parallel-size) or a quantized checkpoint",
            "a smaller --max-num-batched-tokens or --max-num-seqs: they size the activations and CUDA graphs",
        ),
    )


def _routed_experts(match: re.Match[str], case: Case) -> Failure:
    index, size = int(match["index"]), int(match["size"])
    cause = (
        "The buffer that records which experts a token visited is indexed by the slots of one attention group, so it "
        "must hold num_blocks × block size of that group. vLLM sized it by the token count of its log instead, which "
        f"divides the blocks by the number of groups: index {index:,} is beyond its {size:,} rows."
    )
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
_SIZE = r"[\d.]+ [GMK]iB"
_KNOWN: tuple[tuple[str, str, _Explain], ...] = (
    (
        "page size of the layer is not divisible",
        r"page size of the layer is not divisible by the maximum page size",
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
    ("No available memory for the cache blocks", r"No available memory for the cache blocks", _no_memory),
    (
        "index … is out of bounds, in routed_experts",
        # Only where the capturer is in the traceback: other arrays overflow too.
        r"routed_experts.*?index (?P<index>\d+) is out of bounds for axis 0 with size (?P<size>\d+)",
        _routed_experts,
    ),
)
