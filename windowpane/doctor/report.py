"""The diagnosis as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text

from windowpane.doctor.diagnosis import Diagnosis, Explanation
from windowpane.doctor.failures import Failure
from windowpane.doctor.log import LogFacts
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.report import indented, plain_table, print_trimmed, section
from windowpane.plan.sizes import format_bytes


def print_diagnosis(console: Console, found: Diagnosis) -> None:
    print_trimmed(console, Group(*_parts(found)))


def _parts(found: Diagnosis) -> list[RenderableType]:
    parts: list[RenderableType] = [section("What the log says"), _facts(found.facts), ""]
    for failure in found.failures:
        parts += [section("A known failure"), *_failure(failure), ""]
    if found.explanation and found.explanation.report.groups:
        parts += [section("Where the bytes go in vLLM"), _groups(found.explanation.report), ""]
    if found.explanation:
        parts += [section("What the figures mean"), *map(indented, _meaning(found, found.explanation)), ""]
    parts += [section("What the model needs"), *map(indented, _needs(found)), ""] if found.sizing else []
    if found.explanation and found.levers:
        parts += [section("What would change it, each alone"), _levers(found, found.explanation), ""]
    if found.missing:
        parts += [section("Not in the log"), *(indented(Text(line, style="dim")) for line in found.missing), ""]
    parts += [Text(f"Note: {doubt}", style="dim") for doubt in found.doubts]
    if parts[-1] == "":
        parts.pop()
    return parts


def _facts(facts: LogFacts) -> RenderableType:
    table = plain_table("", "", left=("",))
    table.show_header = False
    rows = {
        "vLLM": facts.version,
        "model": facts.model,
        "card": facts.gpu,
        "tensor parallel": facts.tensor_parallel_size,
        "KV memory per rank": facts.available_kv.text if facts.available_kv else None,
        "KV dtype": facts.kv_cache_dtype,
        "longest length": _tokens(facts.max_model_len),
        "largest step": _tokens(facts.max_num_batched_tokens),
        "GPU KV cache size": _tokens(facts.reported_tokens),
        "concurrency": f"{facts.concurrency}×" if facts.concurrency else None,
        "attention block": _tokens(facts.block_tokens),
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(f"  {name}", str(value))
    return table


def _tokens(count: int | None) -> str | None:
    return None if count is None else f"{count:,} tokens"


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
    if report.error:
        yield Text(f"vLLM {report.covers} would not start: {report.error}.", style="bold")
        return
    if explained.exact:
        assumed = f", assuming {', '.join(explained.assumed)}" if explained.assumed else ""
        yield Text.assemble(
            (f"{facts.reported_tokens:,} tokens", "bold"),
            f" come out exactly with the rules of vLLM {report.covers}{assumed}.",
        )
    elif facts.reported_tokens is not None:
        yield Text(
            f"The log says {facts.reported_tokens:,} tokens; the rules of vLLM {report.release} give "
            f"{report.reported_tokens:,}.",
            style="yellow",
        )
    else:
        yield f"By the rules of vLLM {report.release} the log would say {report.reported_tokens:,} tokens."
    yield report.report_note
    yield report.charge_note
    assert report.concurrency is not None
    yield (f"So {report.concurrency:.2f} requests of {explained.setting.max_model_len:,} tokens fit at once.")


def _needs(found: Diagnosis) -> Iterator[str | Text]:
    sizing, capacity = found.sizing, found.capacity
    assert sizing is not None
    cost, length = sizing.per_sequence, found.facts.max_model_len or sizing.spec.max_position
    rank = "" if sizing.ranks == 1 else " on each rank"
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
