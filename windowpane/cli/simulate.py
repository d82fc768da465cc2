"""`windowpane simulate`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windowpane.cli.errors import UserError
from windowpane.cli.flags import WORKLOAD, AsJson, Gpu, ModelShape, Plot, SimulateFlags, WorkloadSeed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from windowpane.plan.hardware import Gpu as Card
    from windowpane.plan.planner import Plan
    from windowpane.simulate.policies import Policy
    from windowpane.simulate.traffic import Session


def simulate(
    model: ModelShape,
    gpu: Gpu,
    workload: Annotated[
        str, typer.Option(help="chat, rag, agents, tools, serve, or a trace: FILE.jsonl.", rich_help_panel=WORKLOAD)
    ] = "chat",
    policy: Annotated[
        str,
        typer.Option(
            help="windowpane, window+chunk, window+2chunks, full, pair, whole-life, host-tier; several, or all.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "windowpane",
    hours: Annotated[float, typer.Option(help="Of traffic, where it comes at a rate.", rich_help_panel=WORKLOAD)] = 1.0,
    rate: Annotated[
        float | None, typer.Option(help="Sessions that begin in a second.", rich_help_panel=WORKLOAD)
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(help="So many sessions, instead of hours.", rich_help_panel=WORKLOAD)
    ] = None,
    seed: WorkloadSeed = 0,
    replicas: Annotated[
        int, typer.Option(min=1, help="So many engines like this one behind a router.", rich_help_panel=WORKLOAD)
    ] = 1,
    router: Annotated[
        str | None,
        typer.Option(
            help="With --replicas: restore-points, two-choices, round-robin; several, or all.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    *,
    flags: SimulateFlags,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Run traffic through the real scheduler and memory manager, with a roofline model in place of the GPU."""
    if gpu.lower() == "cpu":
        raise UserError("--gpu cpu: the simulator's times are those of a card; name one, as in h200 or 2x3090")
    if hours <= 0 or (rate is not None and rate <= 0) or (sessions is not None and sessions < 1):
        raise UserError("--hours and --rate must be above 0, and --sessions at least 1")
    from windowpane.models import load
    from windowpane.plan.config import config_of
    from windowpane.plan.hardware import parse_gpus
    from windowpane.plan.planner import make_plan
    from windowpane.simulate.policies import parse_policies
    from windowpane.simulate.traffic import built_in, read_trace

    try:
        is_trace = Path(workload).suffix == ".jsonl" or Path(workload).is_file()
        traffic = read_trace(workload) if is_trace else built_in(workload, seed, hours, rate, sessions)
        config = config_of(flags.given())
        ranks, card = parse_gpus(gpu)
        policies = parse_policies(policy, config.offloading_bytes // (config.tensor_parallel_size or ranks))
        plan = make_plan(load(model), config, gpu=gpu)
    except ValueError as error:
        raise UserError(error) from None
    if not traffic:
        raise UserError("no session begins in that time; give more --hours, a higher --rate, or --sessions")
    if replicas > 1 or router is not None:
        routers = _routers(router, policy, plot)
        _simulate_cluster(plan, card, policies[0], flags, traffic, workload, replicas, routers, seed, as_json)
        return
    from rich.console import Console

    from windowpane.simulate.run import Simulation

    assert plan.capacity is not None
    turns = sum(len(session.turns) for session in traffic)
    name = f"{workload}, {len(traffic):,} sessions, {turns:,} turns"
    results = []
    with _progress() as progress:
        for chosen in policies:
            task = progress.add_task(chosen.name, total=turns)
            simulation = Simulation(
                plan.sizing, card, plan.capacity.kv_bytes, plan.max_model_len, chosen, flags.enable_prefix_caching
            )
            results.append(simulation.run(traffic, partial(_advance, progress, task)))
    if not any(result.requests for result in results):
        shortest = min(session.first_tokens for session in traffic)
        raise UserError(
            f"no request of {workload} can ever fit: the shortest has {shortest:,} tokens with its answer, and one "
            f"sequence may have {plan.max_model_len:,}; give shorter requests, a longer --max-model-len, or more memory"
        )
    if plot is not None:
        from windowpane.simulate.plot import draw_results

        draw_results(plan, name, results, plot)
        typer.echo(f"drawn to {plot}", err=True)
    from windowpane.simulate.report import document, print_results

    if as_json:
        typer.echo(json.dumps(document(plan, name, results), indent=2))
        return
    print_results(Console(highlight=False), plan, name, results)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _routers(router: str | None, policy: str, plot: str | None) -> list[str]:
    from windowpane.simulate.cluster import ROUTERS

    if plot is not None or policy != "windowpane":
        raise UserError(
            "--replicas and --router compare routers of one policy, in a table: leave --plot and --policy out"
        )
    chosen = list(ROUTERS) if router == "all" else (router or ROUTERS[0]).split(",")
    for name in chosen:
        if name not in ROUTERS:
            raise UserError(f"--router {name!r} is not known; use {', '.join(ROUTERS)}, or all")
    return chosen


def _simulate_cluster(
    plan: Plan, card: Card, policy: Policy, flags: SimulateFlags, traffic: list[Session], workload: str,
    replicas: int, routers: list[str], seed: int, as_json: bool,
) -> None:  # fmt: skip
    """The same traffic through each router."""
    from rich.console import Console

    from windowpane.simulate.cluster import ClusterSimulation
    from windowpane.simulate.report import cluster_document, print_cluster
    from windowpane.simulate.run import Simulation

    assert plan.capacity is not None
    sizes = (plan.capacity.kv_bytes, plan.max_model_len)
    turns = sum(len(session.turns) for session in traffic)
    name = f"{workload}, {len(traffic):,} sessions, {turns:,} turns"
    results = []
    with _progress() as progress:
        for router in routers:
            task = progress.add_task(router, total=turns)
            simulation = ClusterSimulation(
                lambda: Simulation(plan.sizing, card, *sizes, policy, flags.enable_prefix_caching),
                replicas,
                router,
                seed,
            )
            results.append(simulation.run(traffic, partial(_advance, progress, task)))
    if not results[0].requests:
        raise UserError(f"no request of {workload} can ever fit: one sequence may have {plan.max_model_len:,} tokens")
    if as_json:
        typer.echo(json.dumps(cluster_document(plan, name, results), indent=2))
    else:
        print_cluster(Console(highlight=False), plan, name, results)


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)
