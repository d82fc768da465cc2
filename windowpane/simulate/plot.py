"""`simulate --plot`: bytes by state and sequences over time, and how long people wait, policy by policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windowpane.plan.pictures import BLUE, DASHES, GIB, INK, LINES, MARKERS, ORANGE, figure, quiet, save
from windowpane.plan.planner import Plan
from windowpane.plan.report import where
from windowpane.plan.sizes import format_bytes
from windowpane.simulate.report import PERCENTILES
from windowpane.simulate.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIVE, CACHED, STRANDED, FREE = BLUE, ORANGE, "#444444", "#EFEFEF"


def draw_results(plan: Plan, traffic: str, results: list[Result], path: str) -> None:
    assert plan.capacity is not None
    made, parts = figure(
        11,
        [3.0, 3.4],
        f"{plan.sizing.spec.name} on {where(plan.device, plan.sizing.ranks)}: {traffic}",
        f"{format_bytes(plan.capacity.kv_bytes)} of KV memory, steps of up to {plan.sizing.config.batched_tokens:,} "
        "tokens; simulated with a roofline model",
    )
    scale, unit = _time_unit(max(result.seconds for result in results))
    # The first, and beside it the one whose requests wait longest.
    others = sorted(results[1:], key=lambda result: -result.ttft(50))
    shown = [results[0], *others[:1]]
    panels = parts[0].subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, result in zip(panels, shown, strict=True):
        _draw_bytes(axes, result, scale, unit)
    panels[0].set_ylabel("GiB", fontsize=9, color=INK)
    left, right = parts[1].subplots(1, 2, width_ratios=[1.3, 1])
    _draw_running(left, results, scale, unit)
    _draw_waits(right, results)
    save(made, path)


def _time_unit(seconds: float) -> tuple[float, str]:
    for limit, scale, unit in ((180, 1, "s"), (10_800, 60, "min")):
        if seconds <= limit:
            return scale, unit
    return 3600, "h"


def _draw_bytes(axes: Axes, result: Result, scale: float, unit: str) -> None:
    columns = list(zip(*result.samples.rows, strict=True))
    times = [second / scale for second in columns[0]]
    series = [[size / GIB for size in column] for column in columns[1:5]]
    axes.stackplot(
        times,
        *series,
        labels=["live", "cached", "stranded", "free"],
        colors=[LIVE, CACHED, STRANDED, FREE],
        linewidth=0,
    )
    axes.set_xlim(times[0], times[-1] if times[-1] > times[0] else times[0] + 1)
    axes.set_ylim(0, result.arena_bytes / GIB)
    axes.set_xlabel(unit, fontsize=9, color=INK)
    quiet(axes, f"Where the KV bytes are: {result.policy}")
    axes.legend(loc="upper right", fontsize=9, ncols=4, handlelength=1, framealpha=0.9, edgecolor="white")


def _draw_running(axes: Axes, results: list[Result], scale: float, unit: str) -> None:
    for at, result in enumerate(results):
        times = [row[0] / scale for row in result.samples.rows]
        axes.plot(
            times,
            [row[5] for row in result.samples.rows],
            drawstyle="steps-post",
            color=LINES[at % len(LINES)],
            linestyle=DASHES[at % len(DASHES)],
            linewidth=2.2 if at == 0 else 1.5,
            label=f"{result.policy}  ({result.mean_running:.1f} on average)",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(unit, fontsize=9, color=INK)
    quiet(axes, "Sequences running")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _draw_waits(axes: Axes, results: list[Result]) -> None:
    """Time to first token: a row per policy, a mark per percentile."""
    rows = list(range(len(results)))[::-1]
    for at, percent in enumerate(PERCENTILES):
        waits = [result.ttft(percent) for result in results]
        axes.plot(waits, rows, marker=MARKERS[at], color=LINES[at], linestyle="", markersize=8, label=f"p{percent}")
    for row, result in zip(rows, results, strict=True):
        axes.plot([result.ttft(PERCENTILES[0]), result.ttft(PERCENTILES[-1])], [row, row], color="#BBBBBB", zorder=1)
    axes.set_yticks(rows, [f"{result.policy}\n{result.output_per_s:,.0f} tok/s" for result in results], fontsize=9)
    axes.set_ylim(-0.6, len(results) - 0.4)
    if all(result.ttft(PERCENTILES[0]) > 0 for result in results):
        axes.set_xscale("log", subs=[2, 5])
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("seconds to the first token", fontsize=9, color=INK)
    quiet(axes, "How long requests wait", grid="x")
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
