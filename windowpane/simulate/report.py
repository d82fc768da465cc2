"""A simulation as people and programs read it."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from windowpane.plan.planner import Plan
from windowpane.plan.report import indented, plain_table, print_trimmed, section, where
from windowpane.plan.sizes import format_bytes
from windowpane.simulate.cluster import ClusterResult
from windowpane.simulate.policies import POLICIES
from windowpane.simulate.run import Result

SCHEMA_VERSION = 1
PERCENTILES = (50, 90, 99)


def print_results(console: Console, plan: Plan, traffic: str, results: list[Result]) -> None:
    config = plan.sizing.config
    assert plan.capacity is not None
    heading = Text.assemble((plan.sizing.spec.name, "bold"), f" · {where(plan.device, plan.sizing.ranks)} · {traffic}")
    setting = (
        f"{format_bytes(plan.capacity.kv_bytes)} of KV, up to {plan.max_model_len:,} tokens, steps of up to "
        f"{config.batched_tokens:,} tokens, at most {config.max_num_seqs} sequences"
    )
    notes = [f"{result.policy}: {POLICIES[result.policy].why}" for result in results]
    notes.append("times are those of a roofline model (docs/simulate.md), not measured")
    if any(result.refused for result in results):
        refused = ", ".join(f"{result.policy} {result.refused}" for result in results if result.refused)
        notes.append(f"requests refused because they can never fit: {refused}")
    parts = [heading, indented(Text(setting, style="dim")), "", section("How fast"), _speed(results), ""]
    parts += [section("How the memory was used"), _memory(results), ""]
    print_trimmed(console, Group(*parts, *(indented(Text(note, style="dim")) for note in notes)))


def _speed(results: list[Result]) -> Table:
    waiting = ("TTFT\np50", "\np90", "\np99", "ITL\np50", "\np99")
    table = plain_table("\n  policy", "simulated\ntime", "output\ntok/s", *waiting)
    for r in results:
        waits = [_time(r.ttft(percent)) for percent in PERCENTILES]
        table.add_row(
            f"  {r.policy}", _time(r.seconds), f"{r.output_per_s:,.0f}", *waits, _time(r.itl(50)), _time(r.itl(99))
        )
    return table


def _memory(results: list[Result]) -> Table:
    table = plain_table(
        "\n  policy",
        "sequences\nmean",
        "\nmost",
        "prompts\ncached",
        "tokens\nrecomputed",
        "\npreempted",
        "most KV\nlive",
    )
    for r in results:
        live = max((row[1] for row in r.samples.rows), default=0)
        table.add_row(
            f"  {r.policy}",
            f"{r.mean_running:.1f}",
            f"{r.most_running:,}",
            f"{r.hit_rate:.1%}",
            f"{r.recomputed_tokens:,}",
            f"{r.preemptions:,}",
            format_bytes(live),
        )
    return table


def print_cluster(console: Console, plan: Plan, traffic: str, results: list[ClusterResult]) -> None:
    """One row per router."""
    assert plan.capacity is not None
    replicas = f"{results[0].replicas:,} × {where(plan.device, plan.sizing.ranks)}"
    heading = Text.assemble((plan.sizing.spec.name, "bold"), f" · {replicas} · {traffic}")
    table = plain_table(
        "\n  router", "prompts\ncached", "TTFT\nmean", "\np50", "\np99", "output\ntok/s", "busiest\nreplica",
        "router µs\np50", "\np99", "digests\nB/s each", "processor\nfor digests",
    )  # fmt: skip
    for r in results:
        mean = sum(r.ttft_s) / max(1, len(r.ttft_s))
        waits = [_time(s) for s in (mean, r.ttft(50), r.ttft(99))]
        spent = [f"{1e6 * r.decision(percent):.0f}" for percent in (50, 99)]
        table.add_row(
            f"  {r.router}", f"{r.hit_rate:.1%}", *waits, f"{r.output_tokens / r.seconds:,.0f}",
            f"{r.busiest * r.replicas:.2f} ×", *spent, f"{r.digest_bytes_per_s:,.0f}", f"{r.digest_share:.1%}",
        )  # fmt: skip
    notes = [
        "busiest replica: how many times its equal share of the requests it answered",
        "times of replicas are those of a roofline model (docs/simulate.md); the router's are measured here",
    ]
    if any(r.refused for r in results):
        notes.append(f"requests refused because they can never fit: {results[0].refused}")
    print_trimmed(console, Group(heading, "", table, "", *(indented(Text(note, style="dim")) for note in notes)))


def cluster_document(plan: Plan, traffic: str, results: list[ClusterResult]) -> dict[str, Any]:
    """The same for programs. Described in docs/cluster.md."""
    return {**_setting(plan, traffic), "routers": [result.document() for result in results]}


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def document(plan: Plan, traffic: str, results: list[Result]) -> dict[str, Any]:
    """The same for programs, with bytes by state over time. Times are seconds. Described in docs/simulate.md."""
    return {**_setting(plan, traffic), "policies": [_policy(result) for result in results]}


def _setting(plan: Plan, traffic: str) -> dict[str, Any]:
    assert plan.capacity is not None
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plan.sizing.spec.name,
        "device": plan.device.name if plan.device else None,
        "tensor_parallel_size": plan.sizing.ranks,
        "kv_cache_bytes_per_rank": plan.capacity.kv_bytes,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": plan.sizing.config.batched_tokens,
        "max_num_seqs": plan.sizing.config.max_num_seqs,
        "traffic": traffic,
    }


def _policy(result: Result) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "requests": result.requests,
        "refused": result.refused,
        "seconds": result.seconds,
        "busy_seconds": result.busy_seconds,
        "steps": result.steps,
        "output_tokens": result.output_tokens,
        "output_tokens_per_s": result.output_per_s,
        "ttft_s": {f"p{p}": result.ttft(p) for p in PERCENTILES},
        "itl_s": {f"p{p}": result.itl(p) for p in PERCENTILES},
        "mean_running": result.mean_running,
        "most_running": result.most_running,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "hit_rate": result.hit_rate,
        "computed_tokens": result.computed_tokens,
        "recomputed_tokens": result.recomputed_tokens,
        "preemptions": result.preemptions,
        "arena_bytes": result.arena_bytes,
        "over_time": {
            "fields": ["second", "live", "cached", "stranded", "free", "running", "waiting"],
            "rows": [list(row) for row in result.samples.rows],
        },
    }
