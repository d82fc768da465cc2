"""Reading a vLLM start-up log: the few lines that decide KV memory, wherever they stand and whatever wraps them.

Logs come with process prefixes, colours and timestamps, cut at a terminal's width or pasted from an issue; so every
fact is looked for in the text as a whole, with line breaks as blanks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windowpane.plan.sizes import parse_bytes

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# "(EngineCore_DP0 pid=123) INFO 05-01 12:00:00 [core.py:93] " before every line, and "[rank0]: " before tracebacks.
_PREFIX = re.compile(
    r"^\s*(?:\([\w.]+(?: pid=\d+)?\)\s*)?(?:\[rank\d+\]:\s*)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+(?:\.\d+)? (?:\[[\w./]+:\d+\]|[\w.]+\.py:\d+\])\s*)?",
    re.MULTILINE,
)


class LogError(ValueError):
    """The text has nothing of a vLLM log in it; the message lists what was looked for."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A size as a log prints it: what was rounded to it lies between `low` and `high`, both included."""

    text: str
    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a log says; None where it is silent. `kv_cache_dtype` and `model` are as vLLM writes them."""

    version: str | None = None
    model: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    mamba_cache_mode: str | None = None
    block_tokens: int | None = None
    speculative: bool | None = None
    gpu: str | None = None
    available_kv: Rounded | None = None
    num_blocks: int | None = None
    reported_tokens: int | None = None
    concurrency: str | None = None


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One fact: what to call it for people, the patterns that show it, and how to read what they catch."""

    title: str
    patterns: tuple[str, ...]
    read: Callable[[str], Any]


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _flag(text: str) -> bool:
    return text.lower() in ("true", "enabled")


def _size(text: str) -> Rounded:
    """A printed size and the bytes that round to it: half a unit of the last decimal each way."""
    number, unit = text.split()
    decimals = len(number.partition(".")[2])
    half = parse_bytes(f"1{unit}") // (2 * 10**decimals)
    size_bytes = parse_bytes(f"{number}{unit}")
    return Rounded(text, size_bytes - half, size_bytes + half)


def _given(name: str) -> tuple[str, ...]:
    """A setting as the engine's config line and the list of non-default arguments show it."""
    return (rf"\b{name}='?([\w./+-]+)", rf"'{name}': '?([\w./+-]+)")


_LOOKUPS: dict[str, _Lookup] = {
    "version": _Lookup(
        "the version: `version 0.26.0` or `Initializing a V1 LLM engine (v0.26.0)`",
        (r"LLM engine \(v([\w.+]+)\)", r"vLLM API server version ([\w.+]+)", r"\bversion ([0-9]+\.[0-9]+[\w.+]*)"),
        str,
    ),
    "model": _Lookup(
        "the model: `model='…'` or `'model_tag': '…'`",
        (
            r"\bmodel='([^']+)'",
            r"'model(?:_tag)?': '([^']+)'",
            r"\bmodel\s+([\w.-]+/[\w.-]+)",
            r"vllm serve ([\w./-]+)",
        ),
        str,
    ),
    "tensor_parallel_size": _Lookup("tensor_parallel_size", _given("tensor_parallel_size"), _whole),
    "pipeline_parallel_size": _Lookup("pipeline_parallel_size", _given("pipeline_parallel_size"), _whole),
    "max_model_len": _Lookup(
        "the longest length: `max_seq_len=…`, `Using max model len …`",
        (
            r"Maximum concurrency for ([\d,]+) tokens per request",
            r"max seq len \(([\d,]+)\)",
            r"\bmax_seq_len=(\d+)",
            r"Using max model len (\d+)",
            r"'max_model_len': (\d+)",
        ),
        _whole,
    ),
    "max_num_batched_tokens": _Lookup(
        "`max_num_batched_tokens=…`",
        (r"max_num_batched_tokens=(\d+)", r"'max_num_batched_tokens': (\d+)"),
        _whole,
    ),
    "kv_cache_dtype": _Lookup("kv_cache_dtype", _given("kv_cache_dtype"), str),
    "quantization": _Lookup("quantization", (r"\bquantization='?(?!None)([\w-]+)", r"'quantization': '([\w-]+)'"), str),
    "async_scheduling": _Lookup(
        "`Asynchronous scheduling is enabled`",
        (r"Asynchronous scheduling is (enabled|disabled)", *_given("async_scheduling")),
        _flag,
    ),
    "enable_prefix_caching": _Lookup("enable_prefix_caching", _given("enable_prefix_caching"), _flag),
    "mamba_cache_mode": _Lookup("mamba_cache_mode", _given("mamba_cache_mode"), str),
    "block_tokens": _Lookup(
        "`Setting attention block size to … tokens`",
        (r"Setting attention block size to ([\d,]+) tokens",),
        _whole,
    ),
    "speculative": _Lookup("speculative_config", (r"speculative_config=(?!None)(\w+)",), bool),
    "gpu": _Lookup(
        "the card: `GPU 0: NVIDIA …`", (r"GPU 0: (NVIDIA [\w -]+?)(?= GPU 1:| Nvidia| \(UUID|  |$)",), str.strip
    ),
    "available_kv": _Lookup(
        "`Available KV cache memory: … GiB`",
        (r"Available KV cache memory: (-?[\d.]+ [GMK]iB)", r"available KV cache memory \(([\d.]+ [GMK]iB)\)"),
        _size,
    ),
    "num_blocks": _Lookup(
        "`num_gpu_blocks`",
        (r"num_gpu_blocks(?: is|:|=) ?(\d+)", r"# GPU blocks: (\d+)", r"'num_gpu_blocks': (\d+)"),
        _whole,
    ),
    "reported_tokens": _Lookup("`GPU KV cache size: … tokens`", (r"KV cache size: ([\d,]+) tokens",), _whole),
    "concurrency": _Lookup(
        "`Maximum concurrency for … tokens per request: …x`",
        (r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x",),
        str,
    ),
}

# Any of these makes a text a vLLM log; the rest also stands in other programs' output.
_TELLING = ("version", "available_kv", "reported_tokens", "concurrency")


def flatten(text: str) -> str:
    """The log as one line, without colours and prefixes."""
    return " ".join(_PREFIX.sub("", _COLOURS.sub("", text)).split())


def read_log(text: str) -> LogFacts:
    """Every fact that can be found. Of several ranks' memory the smallest counts, as it does in vLLM."""
    line = flatten(text)
    found: dict[str, Any] = {}
    for name, lookup in _LOOKUPS.items():
        for pattern in lookup.patterns:
            caught = re.findall(pattern, line)
            if caught:
                values = [lookup.read(value) for value in caught]
                found[name] = min(values, key=lambda v: v.low) if name == "available_kv" else values[-1]
                break
    return LogFacts(**found)


def is_vllm_log(facts: LogFacts) -> bool:
    return any(getattr(facts, name) is not None for name in _TELLING)


def looked_for() -> list[str]:
    return [lookup.title for lookup in _LOOKUPS.values()]
