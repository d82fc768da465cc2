"""Reading a vLLM start-up log: the few lines that decide KV memory, wherever they stand and whatever wraps them.

Settings come from the engine's own config line, else from its list of non-default arguments, else from the command that
was pasted; figures from the sentences that vLLM prints. A text may hold several starts: each is read by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from windowpane.doctor.flags import argument_settings, command_settings, engine_settings, nested
from windowpane.doctor.text import records
from windowpane.plan.sizes import parse_bytes, parse_tokens


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
    """What one start says; None where it is silent. `kv_cache_dtype` and `model` are as vLLM writes them.

    `needed_kv` is what one request is charged where that is too much. `block_size` is the flag and `block_tokens` what
    it became. `speculative_tokens` are drafted per step
    (0: known to be none). `hybrid_manager` is False where vLLM keeps every token in every layer.
    """

    version: str | None = None
    model: str | None = None
    dtype: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    hybrid_manager: bool | None = None
    mamba_cache_mode: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    block_size: int | None = None
    block_tokens: int | None = None
    speculative_method: str | None = None
    speculative_tokens: int | None = None
    gpu: str | None = None
    gpu_memory_utilization: float | None = None
    available_kv: Rounded | None = None
    needed_kv: Rounded | None = None
    num_blocks: int | None = None
    reported_tokens: int | None = None
    concurrency: str | None = None

    @property
    def runs(self) -> bool:
        """Whether the log shows an engine that got as far as its figures."""
        return self.reported_tokens is not None or self.concurrency not in (None, "0.00")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an engine: its facts, and its text on one line."""

    facts: LogFacts
    line: str


@dataclass(frozen=True, slots=True)
class Log:
    """`starts` are in the order of the text and at least one. `reports` are tokens that the text gives for releases,
    as in a table of two of them.
    """

    starts: tuple[Start, ...]
    reports: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Draft:
    """A start as it is read."""

    engine: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    command: dict[str, str] = field(default_factory=dict)
    arguments_text: str = ""
    banner: bool = False
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    memories: list[Rounded] = field(default_factory=list)
    failed: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def has_settings(self) -> bool:
        return bool(self.engine or self.arguments or self.command)

    @property
    def has_figures(self) -> bool:
        return bool(self.tokens or self.lengths) or any("KV cache memory" in text for text in self.texts)

    def is_over(self, tokens: list[int], lengths: list[int], memories: list[Rounded]) -> bool:
        """Whether such figures can only be of another start: ranks differ a little, and before any total is printed."""
        if (tokens and self.tokens and not _alike([*self.tokens, *tokens])) or len({*self.lengths, *lengths}) > 1:
            return True
        sizes = [memory.middle for memory in (*self.memories, *memories)]
        return bool(memories and self.memories and (self.tokens or self.failed)) and not _alike(sizes)


def read_log(text: str) -> Log:
    """Every start that the text shows; one that may be empty, where it shows none. Nothing in a text raises."""
    drafts = [_Draft()]
    reports: dict[str, int] = {}
    for record in records(text):
        _place(record.text, record.lines, drafts)
        if (uncut := record.uncut_text) is not None:
            _place(uncut, (), drafts)
        for line in record.lines:
            reports.update(_release_report(line))
    whole = " ".join(t for draft in drafts for t in draft.texts)
    starts = [_facts(draft, whole) for draft in _joined(drafts)]
    return Log(tuple(starts), tuple(reports.items()))


def is_vllm_log(log: Log) -> bool:
    return bool(log.reports) or any(getattr(s.facts, name) is not None for s in log.starts for name in _TELLING)


def looked_for() -> list[str]:
    return list(_LOOKED_FOR)


def _place(text: str, lines: Iterable[str], drafts: list[_Draft]) -> None:
    """Read one record into the start that it belongs to, which may be a new one."""
    draft = drafts[-1]
    began = bool(draft.engine or draft.arguments or draft.tokens)
    engine, arguments, tokens = engine_settings(text), argument_settings(text), _all(_TOKENS, text, _whole)
    lengths, memories = _all(_LENGTH, text, _whole), _all(_KV_MEMORY, text, _size)
    pasted = () if engine or arguments else (*lines, text) if "LLM(" in text else lines
    commands = [found for line in pasted if (found := command_settings(line))]
    banner = bool(_BANNER.search(text))
    if engine:
        again = draft.engine and not _same(draft.engine, engine)
        draft = _next(drafts) if again or (draft.tokens and not draft.engine) else draft
        draft.engine = draft.engine or engine
    elif arguments:
        draft = _next(drafts) if began and draft.arguments != arguments else draft
        draft.arguments, draft.arguments_text = arguments, text
    elif commands or (banner and not draft.banner):
        draft = _next(drafts) if began else draft
        draft.command = commands[-1] if commands else draft.command
        draft.banner = draft.banner or banner
    elif draft.is_over(tokens, lengths, memories):
        draft = _next(drafts)
    draft.tokens += tokens
    draft.lengths += lengths
    draft.memories += memories
    draft.failed = draft.failed or bool(_FAILED.search(text))
    draft.texts.append(text)


def _next(drafts: list[_Draft]) -> _Draft:
    drafts.append(_Draft())
    return drafts[-1]


def _same(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two config lines are of one start: every data-parallel engine prints its own, and so does a crash."""
    names = ("version", "model", "tensor_parallel_size", "max_model_len", "kv_cache_dtype", "speculative_config")
    return all(one.get(name) == other.get(name) for name in names)


def _alike(tokens: list[int]) -> bool:
    """Figures of ranks that differ a little in their free memory, not of two settings."""
    return max(tokens) - min(tokens) <= 0.05 * abs(min(tokens))


def _joined(drafts: list[_Draft]) -> list[_Draft]:
    """Starts, where figures that were pasted above their settings are one start with them."""
    joined: list[_Draft] = []
    for draft in drafts:
        before = joined[-1] if joined else None
        if before and before.has_figures and not before.has_settings and draft.has_settings and not draft.has_figures:
            draft.texts = before.texts + draft.texts
            draft.tokens, draft.lengths, draft.memories = before.tokens, before.lengths, before.memories
            joined[-1] = draft
        elif before and not before.has_settings and not before.has_figures:
            draft.texts = before.texts + draft.texts  # what stands before the first start belongs to it
            joined[-1] = draft
        else:
            joined.append(draft)
    return joined


def _facts(draft: _Draft, whole: str) -> Start:
    line = " ".join(draft.texts)
    found: dict[str, Any] = {}
    for name, (patterns, read) in _SENTENCES.items():
        values = next((caught for p in patterns if (caught := _all(p, line, read))), [])
        if values:
            found[name] = _smallest(values) if name in _SMALLEST else values[-1]
    settings = _settings(draft, line, whole)
    for name, read in _SETTINGS.items():
        value = _read(read, settings.get(name))
        if value is not None and (name not in found or name not in _PRINTED_WINS):
            found[name] = value
    found.setdefault("max_model_len", next(iter(_all(_FIRST_LENGTH, line, _whole)), None))
    if blocks := _read(_whole, settings.get("num_gpu_blocks_override")):
        found["num_blocks"] = blocks
    whole_list = bool(draft.arguments) and draft.arguments_text.endswith("}")
    if whole_list or (draft.command.get("model") and settings.get("model") == draft.command.get("model")):
        found.setdefault("tensor_parallel_size", 1)  # what is not in a list or command is vLLM's default
    drafter = nested(settings.get("speculative_config", ""))
    if drafter:
        found["speculative_method"] = drafter.get("method", "draft_model").strip("'\"")
        count = drafter.get("num_spec_tokens", drafter.get("num_speculative_tokens"))
        found["speculative_tokens"] = _read(_whole, count)
    elif draft.engine.get("speculative_config") == "None" or whole_list:
        found["speculative_tokens"] = 0  # the list of arguments is whole, or the engine says so itself
    if settings.get("disable_hybrid_kv_cache_manager") == "True":
        found["hybrid_manager"] = False
    found.setdefault("version", next(iter(_all(_VERSION_ELSEWHERE, whole, _version)), None))
    found.setdefault("gpu", next((gpu.strip() for gpu in _all(_GPU, whole, str)), None))
    if "available_kv" not in found and (given := settings.get("kv_cache_memory_bytes")):
        size = _read(parse_bytes, given)
        found["available_kv"] = None if size is None else Rounded(f"{given} (kv_cache_memory_bytes)", size, size)
    return Start(LogFacts(**found), line)


def _settings(draft: _Draft, line: str, whole: str) -> dict[str, str]:
    """Settings of one start, the engine's own first. A command counts only where it can be this start's own."""
    own = {**draft.arguments, **{n: v for n, v in draft.engine.items() if v not in ("None", "")}}
    command = draft.command
    if own.get("model") and command.get("model") and _last_part(own["model"]) != _last_part(command["model"]):
        command = {}
    if draft.arguments:
        command = {}  # they already list everything that is not a default
    settings = {**command, **own}
    if "model" not in settings or not _MODEL_NAME.fullmatch(settings["model"]):
        settings.pop("model", None)
        named = _all(_MODEL_ELSEWHERE, line, str) or _all(_MODEL_ELSEWHERE, whole, str)
        if named:
            settings["model"] = named[-1]
    return settings


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _all(pattern: re.Pattern[str], text: str, read: Callable[[str], Any]) -> list[Any]:
    """Everything that a pattern catches and that can be read."""
    values = (_read(read, next(filter(None, match.groups()), None)) for match in pattern.finditer(text))
    return [value for value in values if value is not None]


def _read(read: Callable[[str], Any], text: str | None) -> Any:
    if text is None or text in ("None", ""):
        return None
    try:
        return read(text)
    except (ValueError, OverflowError):
        return None


def _release_report(line: str) -> dict[str, int]:
    """`| v0.20.0 | ~55k tokens |`: the release and the tokens that a line of prose or of a table gives for it."""
    match = _RELEASE_ROW.search(line)
    if match is None or "|" not in line:
        return {}
    number, unit = match["tokens"].replace(",", ""), match["unit"]
    return {match["version"]: int(float(number) * {"k": 1e3, "M": 1e6, "": 1}[unit or ""])}


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _flag(text: str) -> bool:
    return text.lower() in ("true", "enabled", "1")


def _size(text: str) -> Rounded:
    """A printed size and the bytes that round to it: half a unit of the last decimal each way."""
    match = re.fullmatch(r"(-?)([\d.]+) ?([GMK]i?B)", text)
    if whole := re.fullmatch(r"(\d+) bytes", text):
        exact = int(whole[1])
        return Rounded(f"{exact / 2**30:.2f} GiB", exact, exact)
    if match is None:
        raise ValueError(text)
    sign, number, unit = match.groups()
    # Old releases wrote GB and meant 2**30 bytes.
    unit_bytes = parse_bytes(f"1{unit[0]}iB")
    decimals = len(number.partition(".")[2])
    size_bytes = int(float(number) * unit_bytes) * (-1 if sign else 1)
    half = unit_bytes // (2 * 10**decimals)
    return Rounded(f"{sign}{number} {unit[0]}iB", size_bytes - half, size_bytes + half)


def _size_of(value: Any) -> float:
    return value.low if isinstance(value, Rounded) else float(value)


def _smallest(values: list[Any]) -> Any:
    """The smallest, as exactly as it is given: memory may stand in the log rounded and in bytes."""
    least = min(values, key=_size_of)
    if not isinstance(least, Rounded):
        return least
    return min((v for v in values if least.low <= v.low and v.high <= least.high), key=lambda v: v.high - v.low)


def _version(text: str) -> str:
    return text.rstrip(".")


def _dtype(text: str) -> str:
    return text.removeprefix("torch.")


_BANNER = re.compile(r"█.*version \d|vLLM API server version \d")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_LENGTH = re.compile(r"[Mm]aximum concurrency for ([\d,]+) tokens(?: per |/)request|max seq len \(([\d,]+)\)")
_KV_MEMORY = re.compile(
    r"(?:[Aa]vailable KV cache memory:|Current kv cache memory in use is) (-?[\d.]+ ?[GMK]i?B|\d+ bytes)"
)
_FAILED = re.compile(r"No available memory for the cache blocks|KV cache is needed|CUDA out of memory|failed to start")
_GPU = re.compile(r"GPU 0: ((?:NVIDIA|AMD) [\w /-]+?)(?= GPU 1:| Nvidia| \(UUID|  |$)")
_VERSION_ELSEWHERE = re.compile(
    r"(?:vLLM API server|█) +version +v?(\d+\.\d+[\w.+]*)|vLLM [Vv]ersion\s*:\s*v?(\d+\.\d+[\w.+]*)"
    r"|\bvllm(?:==|-|: )v?(\d+\.\d+[\w.+]*)|vLLM:?\**:? ?`v?(\d+\.\d+[\w.+]*)"
    r"|\bvLLM: +v?(\d+\.\d+\.\d+[\w.+]*)|LLM engine \(v(\d+\.\d+[\w.+]*)\)"
)
_FIRST_LENGTH = re.compile(r"Using max model len ([\d,]+)")
_MODEL_NAME = re.compile(r"(?:\$\{?\w+\}?/)?[\w~./:@+-]+")
_MODEL_ELSEWHERE = re.compile(
    r"█ +model +([\w.-]+/[\w.-]+)|(?:^|\s)[*\s-]*\b(?:Model|MODEL)\**\s*:\s*\**\s*`?\[?([\w.-]+/?[\w.-]*\d[\w.-]*)"
    r"|huggingface\.co/([\w-]+/(?!gemma4\b)[\w.-]*\d[\w.-]*)"
)
_RELEASE_ROW = re.compile(
    r"\bv?(?P<version>0\.\d+\.\d+)\b.*?[~≈]?\s*\b(?P<tokens>\d[\d,]*(?:\.\d+)?)\s*(?P<unit>[kM])?\s+tokens"
)

_NUMBER = r"([\d,]+)"
_MEMORY = r"(-?[\d.]+ ?[GMK]i?B)"
_Reader = Callable[[str], Any]


def _sentences(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


# Facts by the sentences that vLLM prints; of several patterns the first that is found counts.
_SENTENCES: dict[str, tuple[tuple[re.Pattern[str], ...], _Reader]] = {
    "max_model_len": (
        _sentences(
            rf"[Mm]aximum concurrency for {_NUMBER} tokens(?: per |/)request",
            rf"max seq len \({_NUMBER}\)",
        ),
        _whole,
    ),
    "max_num_batched_tokens": (
        _sentences(rf"Chunked prefill is enabled with max_num_batched_tokens={_NUMBER}"),
        _whole,
    ),
    "kv_cache_dtype": (_sentences(r"Using (\w+) data type to store kv cache"), str),
    "async_scheduling": (_sentences(r"Asynchronous scheduling is (enabled|disabled)"), _flag),
    "hybrid_manager": (
        _sentences(r"(Hybrid KV cache manager is disabled|Turning off hybrid kv cache manager)"),
        lambda _: False,
    ),
    "mamba_cache_mode": (
        _sentences(r"Mamba cache mode is set to '(\w+)'", r"Mamba cache '(\w+)' mode is currently enabled"),
        str,
    ),
    "block_tokens": (_sentences(rf"Setting attention block size to {_NUMBER} tokens"), _whole),
    "block_size": (_sentences(rf"(?:Setting|Forcing) kv cache block size to {_NUMBER} for"), _whole),
    "available_kv": (
        _sentences(
            _KV_MEMORY.pattern,
            rf"reserved {_MEMORY} memory for KV Cache as specified by kv_cache_memory_bytes",
            rf"available KV cache memory \({_MEMORY}\)",
            rf"memory reserved for KV Cache is {_MEMORY}",
            rf"kv_cache_size={_MEMORY}",
        ),
        _size,
    ),
    "needed_kv": (_sentences(rf"{_MEMORY} KV cache is needed"), _size),
    "num_blocks": (
        _sentences(
            # CUDA graphs are profiled with a pool of their own first: what overrides 0 blocks is not the engine's.
            r"Overriding num_gpu_blocks=[1-9]\d* with num_gpu_blocks_override=(\d+)",
            r"(?<!Overriding )num_gpu_blocks(?: is:?|:|=) ?(\d+)",
            r"# (?:GPU|cuda) blocks: (\d+)",
            r"'num_gpu_blocks': (\d+)",
        ),
        _whole,
    ),
    "reported_tokens": ((_TOKENS,), _whole),
    "concurrency": (_sentences(r"[Mm]aximum concurrency for [\d,]+ tokens(?: per |/)request: ([\d.]+)x"), str),
}

# Facts by the names of vLLM's settings.
_SETTINGS: dict[str, _Reader] = {
    "version": str,
    "model": str,
    "dtype": _dtype,
    "tensor_parallel_size": _whole,
    "pipeline_parallel_size": _whole,
    "decode_context_parallel_size": _whole,
    "max_model_len": parse_tokens,
    "max_num_batched_tokens": parse_tokens,
    "kv_cache_dtype": _dtype,
    "quantization": str,
    "async_scheduling": _flag,
    "enable_prefix_caching": _flag,
    "mamba_cache_mode": str,
    "mamba_ssm_cache_dtype": _dtype,
    "gpu_memory_utilization": float,
    "block_size": _whole,
}
# What the engine printed once it was decided; a setting is only what was asked for.
_PRINTED_WINS = ("max_model_len", "max_num_batched_tokens", "async_scheduling", "mamba_cache_mode", "block_size")
# Of several ranks the smallest counts, as it does in vLLM.
_SMALLEST = ("available_kv", "num_blocks", "reported_tokens", "concurrency")
# Any of these makes a text a vLLM log; the rest also stands in other programs' output.
_TELLING = ("version", "available_kv", "reported_tokens", "concurrency", "tensor_parallel_size")
_LOOKED_FOR = (
    "the engine's config: `Initializing a V1 LLM engine (v0.26.0) with config: model='…', …`",
    "its arguments: `non-default args: {…}`, or a `vllm serve …` command",
    "the largest step: `Chunked prefill is enabled with max_num_batched_tokens=…`",
    "`Asynchronous scheduling is enabled`",
    "`Setting attention block size to … tokens`",
    "the card: `GPU 0: NVIDIA …`",
    "`Available KV cache memory: … GiB`",
    "`GPU KV cache size: … tokens`",
    "`Maximum concurrency for … tokens per request: …x`",
)
