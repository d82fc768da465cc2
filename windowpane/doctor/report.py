"""The diagnosis as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text

from windowpane.doctor.diagnosis import Diagnosis
from windowpane.doctor.document import bytes_per_reported_token
from windowpane.doctor.failures import NO_FAILURES, Failure
from windowpane.doctor.log import LogFacts
from windowpane.doctor.search import Explanation
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.report import indented, plain_table, print_trimmed, section
from windowpane.plan.sizes import format_bytes

MOST_ALTERNATIVES = 3


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    print_trimmed(console, Group(*_parts(found)))


def _parts(found: Diagnosis) -> list[RenderableType]:
    parts: list[RenderableType] = [section("What the log says"), _facts(found), ""]
    if len(found.starts) > 1:
        parts += [section("Starts in this log"), _starts(found), ""]
    for failure in found.failures:
        parts += [section("Worth knowing" if failure.key in NO_FAILURES else "A known failure"), *_failure(failure), ""]
    if found.explanation and found.explanation.report.groups:
        parts += [section("Where the bytes go in vLLM"), _groups(found.explanation.report), ""]
    if found.explanation:
        parts += [section("What the figures mean"), *map(indented, _meaning(found, found.explanation)), ""]
    elif found.unexplained:
        parts += [section("What the figures mean"), *map(indented, _unexplained(found)), ""]
    parts += [section("What the model needs"), *map(indented, _needs(found)), ""] if found.sizing else []
    if found.explanation and found.levers:
        parts += [section("What would change it, each alone"), _levers(found, found.explanation), ""]
    if found.missing:
        parts += [section("Not in the log"), *(indented(Text(line, style="dim")) for line in found.missing), ""]
    parts += [Text(f"Note: {doubt}", style="dim") for doubt in found.doubts]
    if parts[-1] == "":
        parts.pop()
    return parts


def _facts(found: Diagnosis) -> RenderableType:
    facts, per_token = found.facts, bytes_per_reported_token(found)
    table = plain_table("", "", left=("",))
    table.show_header = False
    rows = {
        "vLLM": facts.version,
        "model": facts.model,
        "card": facts.gpu,
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "tensor parallel": facts.tensor_parallel_size,
        "pipeline parallel": facts.pipeline_parallel_size if facts.pipeline_parallel_size != 1 else None,
        "KV memory per rank": facts.available_kv.text if facts.available_kv else None,
        "KV dtype": facts.kv_cache_dtype,
        "longest length": _tokens(facts.max_model_len),
        "largest step": _tokens(facts.max_num_batched_tokens),
        "GPU KV cache size": _tokens(facts.reported_tokens),
        "concurrency": f"{facts.concurrency}×" if facts.concurrency else None,
        "memory / tokens reported": None if per_token is None else f"{per_token:,.0f} B per rank",
        "attention block": _tokens(facts.block_tokens),
        "blocks": facts.num_blocks,
        "drafts": _drafts(facts),
        "states kept": facts.mamba_cache_mode,
        "prefix caching": _on(facts.enable_prefix_caching),
        "async scheduling": _on(facts.async_scheduling),
        "hybrid KV cache manager": _on(facts.hybrid_manager),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(f"  {name}", str(value))
    return table


def _tokens(count: int | None) -> str | None:
    return None if count is None else f"{count:,} tokens"


def _on(flag: bool | None) -> str | None:
    return None if flag is None else "on" if flag else "off"


def _drafts(facts: LogFacts) -> str | None:
    if facts.speculative_method is None:
        return "none" if facts.speculative_tokens == 0 else None
    count = "" if facts.speculative_tokens is None else f", {facts.speculative_tokens} a step"
    return f"{facts.speculative_method}{count}"


def _starts(found: Diagnosis) -> RenderableType:
    table = plain_table("  start", "vLLM", "model", "KV memory", "tokens", left=("  start", "vLLM", "model"))
    for number, start in enumerate(found.starts, 1):
        facts = start.facts
        mark = "  → " if number == found.start else "    "
        memory = facts.available_kv.text if facts.available_kv else "–"
        tokens = "–" if facts.reported_tokens is None else f"{facts.reported_tokens:,}"
        name = (facts.model or "–").rsplit("/", 1)[-1]
        table.add_row(f"{mark}{number}", facts.version or "–", name, memory, tokens)
    return Group(table, indented(Text("--start N explains another one", style="dim")))


def _failure(failure: Failure) -> Iterator[RenderableType]:
    yield indented(Text(failure.title, style="bold red"))
    yield indented(failure.cause)
    for way in failure.ways_out:
        yield indented(Text(f"→ {way}"))


def _groups(report: PeerReport) -> RenderableType:
    table = plain_table("  group", "layers", "block tokens", "blocks a request", "bytes a request")
    for group in report.groups:
        padded = f" + {group.padded_layers} empty" if group.padded_layers else ""
        table.add_row(
            f"  {group.name}",
            f"{group.layers}{padded}",
            f"{group.block_tokens:,}",
            f"{group.blocks_per_request:,}",
            format_bytes(group.bytes_per_request),
        )
    assert report.num_blocks is not None and report.block_bytes is not None
    pool = f"{report.num_blocks:,} blocks of {format_bytes(report.block_bytes)}, which every group draws from"
    return Group(table, indented(Text(pool, style="dim")))


def _meaning(found: Diagnosis, explained: Explanation) -> Iterator[str | Text]:
    facts, report = found.facts, explained.report
    assumed = f", assuming {', '.join(explained.assumed)}" if explained.assumed else ""
    if report.error:
        unnamed = "" if facts.version else "The log names no release. "
        yield Text(f"{unnamed}vLLM {report.covers} would not start: {report.error}.", style="bold")
        return
    if explained.exact:
        figure = (
            f"{facts.concurrency} requests" if facts.reported_tokens is None else f"{facts.reported_tokens:,} tokens"
        )
        release = "" if any(a.startswith("vLLM") for a in explained.assumed) or not facts.version else _of(explained)
        settings = f" with {', '.join(explained.assumed)}" if explained.assumed else ""
        yield Text.assemble((figure, "bold"), f" come out exactly{release}{settings}.")
        if explained.alternatives:
            yield f"They also do with {'; or with '.join(explained.alternatives[:MOST_ALTERNATIVES])}."
    else:
        yield f"By the rules of vLLM {report.release} the log would say {report.reported_tokens:,} tokens{assumed}."
    yield report.report_note
    yield report.charge_note
    assert report.concurrency is not None
    yield (f"So {report.concurrency:.2f} requests of {explained.setting.max_model_len:,} tokens fit at once.")


def _of(explained: Explanation) -> str:
    return f" by the rules of vLLM {explained.report.covers}"


def _unexplained(found: Diagnosis) -> Iterator[str | Text]:
    """Only what the log itself says, and what would be needed to say more."""
    facts = found.facts
    if facts.concurrency is not None and facts.max_model_len is not None:
        yield Text.assemble(
            "The log itself says that ",
            (f"{facts.concurrency} requests", "bold"),
            f" of {facts.max_model_len:,} tokens fit at once.",
        )
    elif facts.reported_tokens is not None:
        yield f"The log itself says {facts.reported_tokens:,} tokens."
    if facts.available_kv is None:
        yield "How they come about is not known here: the log does not say how much memory KV has."
    elif found.spec is None:
        yield "How they come about is not known here: the shapes of the model are not."
    else:
        yield Text(
            "No rule known here gives these figures, so nothing is said about groups and charges.", style="yellow"
        )


def _needs(found: Diagnosis) -> Iterator[str | Text]:
    sizing, capacity = found.sizing, found.capacity
    assert sizing is not None
    cost, length = sizing.per_sequence, found.facts.max_model_len or sizing.spec.max_position
    rank = "" if sizing.ranks == 1 else " on each rank"
    if found.explanation is None and found.facts.tensor_parallel_size is None:
        rank = " with all heads on one rank"
    fixed = f"{format_bytes(cost.fixed_bytes_per_sequence)} once + " if cost.fixed_bytes_per_sequence else ""
    yield (
        f"A sequence of {sizing.spec.name} needs {fixed}{cost.bytes_per_token:,.0f} B per token{rank}: "
        f"{format_bytes(cost.bytes_at(length))} for {length:,} tokens."
    )
    if capacity is None:
        return
    ours, charged = cost.bytes_at(length), found.explanation.report.bytes_per_request if found.explanation else None
    if charged:
        yield f"vLLM charges {format_bytes(charged)} for it, {charged / ours:.2f} × as much."
    ratio, whole = capacity.byte_ratio(length), capacity.sequences(length)
    yield Text(f"The same memory holds {ratio:.2f} of them in Windowpane ({whole} whole).", style="bold")


def _levers(found: Diagnosis, explained: Explanation) -> RenderableType:
    table = plain_table("  change", "concurrency", "reported tokens")
    for what, report in [("as it is", explained.report), *((lever.what, lever.report) for lever in found.levers)]:
        table.add_row(f"  {what}", _times(report), _reported(report))
    return Group(table, indented(Text("concurrency counts requests of max_model_len tokens", style="dim")))


def _times(report: PeerReport) -> str:
    return "–" if report.concurrency is None else f"{report.concurrency:.2f}×"


def _reported(report: PeerReport) -> str:
    return "does not start" if report.reported_tokens is None else f"{report.reported_tokens:,}"
