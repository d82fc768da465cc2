"""`plan --plot`: where the bytes go, and how many sequences fit at which length, this engine beside the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windowpane.plan.memory import ArenaUse
from windowpane.plan.peers import all as all_peers
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.pictures import (
    BLUE,
    DASHES,
    GIB,
    GREEN,
    GREY,
    INK,
    LINES,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    figure,
    quiet,
    save,
    spread,
)
from windowpane.plan.planner import Plan, peer_setting
from windowpane.plan.report import tokens_label, where
from windowpane.plan.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "Windowpane"
KIND_COLOURS = {"full": BLUE, "window": ORANGE, "chunk": ORANGE, "sliding": ORANGE, "state": GREEN, "cross": PURPLE}
FEWEST_ROWS = 4  # so that two bars do not fill a panel


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: what one request of the longest length takes, by kind of layer, and (tokens, sequences) points."""

    name: str
    kind_bytes: dict[str, int]
    points: list[tuple[int, float]]


def draw_plan(plan: Plan, path: str) -> None:
    """Draw a plan with known memory to a PNG or SVG file."""
    assert plan.capacity is not None
    sizing, length = plan.sizing, plan.max_model_len
    place = f" on {where(plan.device, sizing.ranks)}" if plan.device else ""
    rank = " a rank" if sizing.ranks > 1 else ""
    formats = dict.fromkeys(g.kv_format.name for g in sizing.layout.groups if g.kv_format)
    made, parts = figure(
        11,
        [2.5, 4.6] if plan.budget else [4.6],
        f"{sizing.spec.name}{place}",
        f"{format_bytes(plan.capacity.kv_bytes)} of KV memory{rank}, kept in {' and '.join(formats)}",
    )
    if plan.budget:
        _draw_memory(parts[0].subplots(), plan)
    left, right = parts[-1].subplots(1, 2, width_ratios=[1, 1.2])
    engines = engines_of(plan)
    _draw_requests(left, engines, length)
    _draw_curve(right, engines)
    save(made, path)


def engines_of(plan: Plan) -> list[Engine]:
    """This engine and one setting of each other whose arithmetic is known."""
    capacity, length = plan.capacity, plan.max_model_len
    assert capacity is not None
    lengths = [n for n, _ in capacity.curve(length)]
    own: dict[str, int] = {}
    for group in plan.sizing.layout.groups:
        size = group.max_pages(length, plan.sizing.rollback_tokens) * group.page_bytes
        own[group.retention.kind] = own.get(group.retention.kind, 0) + size
    engines = [Engine(OURS, own, [(n, capacity.byte_ratio(n)) for n in lengths])]
    if not plan.peers:
        return engines
    by_length = {
        n: _one_each(all_peers.reports(peer_setting(plan.sizing, plan.device, capacity.kv_bytes, n))) for n in lengths
    }
    for engine in by_length[length]:
        points = [(n, peers[engine].concurrency) for n, peers in by_length.items() if engine in peers]
        last = by_length[length][engine]
        kinds: dict[str, int] = {}
        for peer_group in last.groups:
            kind = peer_group.name.split("-")[0].split()[0]
            kinds[kind] = kinds.get(kind, 0) + peer_group.bytes_per_request
        engines.append(Engine(last.name, kinds, [(n, c) for n, c in points if c is not None]))
    return engines


def _one_each(peers: tuple[PeerReport, ...]) -> dict[str, PeerReport]:
    """The row with the same flags, or an engine's first."""
    chosen: dict[str, PeerReport] = {}
    for peer in peers:
        if peer.groups and (peer.same_flags or (peer.engine not in chosen and peer.engine != "vLLM")):
            chosen[peer.engine] = peer
    return chosen


def _draw_memory(axes: Axes, plan: Plan) -> None:
    """The device's memory as one bar, the arena as it is when full."""
    budget, capacity = plan.budget, plan.capacity
    assert budget is not None and capacity is not None
    use = ArenaUse.of(capacity, plan.max_model_len)
    groups = {g.name: g.retention.kind for g in plan.sizing.layout.groups}
    parts = [
        ("weights", budget.weights_bytes, GREY),
        ("adapters", budget.adapter_bytes, "#CC79A7"),
        ("activations", budget.activation_bytes, SKY),
        ("runtime", budget.runtime_bytes, "#CFCFCF"),
        *((f"{name} KV", size, KIND_COLOURS[groups[name]]) for name, size in use.group_bytes.items()),
        ("free KV", use.free_bytes + use.stranded_bytes, "#F0E442"),
        ("left alone", budget.device_bytes - budget.before_kv_bytes - capacity.arena_bytes, "#EFEFEF"),
    ]
    shown = [(name, size, colour) for name, size, colour in parts if size > 0]
    at = 0.0
    for name, size, colour in shown:
        gib = size / GIB
        axes.barh(0, gib, left=at, color=colour, edgecolor="white", linewidth=1, height=0.8, label=_legend(name, gib))
        at += gib
    axes.set_xlim(0, at)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    many = "1 sequence" if use.sequences == 1 else f"{use.sequences:,} sequences"
    quiet(axes, f"Where the memory goes, with {many} of {plan.max_model_len:,} tokens", grid="x")
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} GiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False, fontsize=9, handlelength=1)


def _legend(name: str, gib: float) -> str:
    return f"{name}  {gib:.2f} GiB"


def _draw_requests(axes: Axes, engines: list[Engine], length: int) -> None:
    """One request of the longest length, engine by engine."""
    names = [e.name for e in engines if e.kind_bytes]
    rows = list(range(len(names)))[::-1]
    labelled: set[str] = set()
    longest = max(sum(e.kind_bytes.values()) for e in engines if e.kind_bytes) / GIB
    for row, engine in zip(rows, (e for e in engines if e.kind_bytes), strict=True):
        at = 0.0
        for kind, size in sorted(engine.kind_bytes.items()):
            shown = "window" if kind == "sliding" else kind
            label = None if shown in labelled else f"{shown} layers"
            labelled.add(shown)
            axes.barh(row, size / GIB, left=at, color=KIND_COLOURS[kind], edgecolor="white", label=label, height=0.62)
            at += size / GIB
        axes.text(at + 0.015 * longest, row, _gib(at), va="center", fontsize=9, color=INK)
    axes.set_yticks(rows, names, fontsize=10)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_xlim(0, 1.25 * longest)
    axes.set_ylim(min(-0.6, len(names) - FEWEST_ROWS - 0.4), len(names) - 0.4)
    axes.set_xlabel("GiB", fontsize=9, color=INK)
    quiet(axes, f"Charged for {length:,} tokens", grid="x")
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=3, handlelength=1)


def _gib(value: float) -> str:
    return f"{value:.2f} GiB" if value >= 0.1 else f"{1024 * value:.0f} MiB"


def _draw_curve(axes: Axes, engines: list[Engine]) -> None:
    """Sequences against length, both on logarithmic axes; each line carries its name at its end."""
    drawn = [engine for engine in engines if engine.points]
    for at, engine in enumerate(drawn):
        lengths, counts = zip(*engine.points, strict=True)
        axes.plot(
            lengths,
            counts,
            color=LINES[at % len(LINES)],
            linestyle=DASHES[at % len(DASHES)],
            marker=MARKERS[at % len(MARKERS)],
            markersize=5,
            linewidth=2.6 if engine.name == OURS else 1.6,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    longest = max(n for engine in drawn for n, _ in engine.points)
    ticks = [n for n, _ in drawn[0].points]
    axes.set_xticks(ticks[:: max(1, math.ceil(len(ticks) / 8))], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: tokens_label(int(value)))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ends = spread([math.log10(engine.points[-1][1]) for engine in drawn], _label_gap(drawn))
    for at, (engine, y) in enumerate(zip(drawn, ends, strict=True)):
        axes.annotate(
            _end_label(engine, longest),
            (engine.points[-1][0], engine.points[-1][1]),
            xytext=(longest * 1.18, 10**y),
            textcoords="data",
            va="center",
            fontsize=9,
            color=LINES[at % len(LINES)],
            fontweight="bold" if engine.name == OURS else "normal",
            annotation_clip=False,
        )
    axes.axhline(1, color=VERMILION, linewidth=0.8, alpha=0.5)
    axes.text(ticks[0], 0.97, "one sequence: below, none fits", va="top", fontsize=8, color="#777777")
    axes.set_xlabel("tokens of each sequence", fontsize=9, color=INK)
    quiet(axes, "How many sequences fit at once", grid="both")
    axes.spines["right"].set_visible(False)


def _end_label(engine: Engine, longest: int) -> str:
    """The last figure, with its length where the engine does not start at the longest one."""
    length, count = engine.points[-1]
    return f"{engine.name}  {count:.2f}" + ("" if length == longest else f" at {tokens_label(length)}")


def _label_gap(drawn: list[Engine]) -> float:
    """The height of a label on the logarithmic axis: about a fifteenth of what is drawn."""
    counts = [math.log10(count) for engine in drawn for _, count in engine.points]
    return max(0.05, (max(counts) - min(counts)) / 15)
