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

PANELS_A_ROW = 3
LIVE, CACHED, STRANDED, FREE = BLUE, ORANGE, "#444444", "#EFEFEF"


def draw_results(plan: Plan, traffic: str, results: list[Result], path: str) -> None:
    """Bytes of every policy that ran anything, on one time axis; below them all policies' sequences and waits."""
    assert plan.capacity is not None
    drawn = [result for result in results if result.samples.rows]
    rows = -(-len(drawn) // PANELS_A_ROW)
    made, parts = figure(
        11,
        [*[2.6] * (rows - 1), 3.0, 3.4],
        f"{plan.sizing.spec.name} on {where(plan.device, plan.sizing.ranks)}: {traffic}",
        f"{format_bytes(plan.capacity.kv_bytes)} of KV memory, steps of up to {plan.sizing.config.batched_tokens:,} "
        "tokens; simulated with a roofline model",
    )
    last_s = max(result.seconds for result in drawn)
    scale, unit = _time_unit(last_s)
    for row in range(rows):
        shown = drawn[PANELS_A_ROW * row : PANELS_A_ROW * (row + 1)]
        columns = min(PANELS_A_ROW, len(drawn))
        panels = parts[row].subplots(1, columns, squeeze=False, sharey=True)[0]
        for axes, result in zip(panels, shown, strict=False):
            _draw_bytes(axes, result, scale)
            axes.set_xlim(0, last_s / scale)
            axes.set_xlabel(unit, fontsize=9, color=INK)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        panels[0].set_ylabel("GiB", fontsize=9, color=INK)
        if row == rows - 1:  # below the panels, where it hides nothing
            columns = 4 if len(panels) < PANELS_A_ROW else 2
            panels[0].legend(frameon=False, fontsize=9, ncols=columns, loc="upper left", bbox_to_anchor=(0, -0.2))
    left, right = parts[rows].subplots(1, 2, width_ratios=[1.3, 1])
    _draw_running(left, drawn, scale, unit)
    left.set_xlim(0, last_s / scale)
    _draw_waits(right, drawn)
    save(made, path)


def _time_unit(seconds: float) -> tuple[float, str]:
    for limit, scale, unit in ((180, 1, "s"), (10_800, 60, "min")):
        if seconds <= limit:
            return scale, unit
    return 3600, "h"


def _draw_bytes(axes: Axes, result: Result, scale: float) -> None:
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
    axes.set_ylim(0, result.arena_bytes / GIB)
    quiet(axes, f"KV bytes: {result.policy}")


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
