"""`windowpane simulate`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windowpane.cli.common import DEVICE, MEMORY, OUTPUT, SCHEDULING, WORKLOAD, UserError, check_plot_file

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def simulate(
    model: Annotated[str, typer.Argument(help="A model directory, a config.json, or a shipped name (see `models`).")],
    gpu: Annotated[str, typer.Option(help="Cards, as in h200 or 2x3090.", rich_help_panel=DEVICE)],
    workload: Annotated[
        str, typer.Option(help="chat, rag, agents, serve, or a trace: FILE.jsonl.", rich_help_panel=WORKLOAD)
    ] = "chat",
    policy: Annotated[
        str,
        typer.Option(
            help="windowpane, window+chunk, window+2chunks, full, pair, whole-life; several with commas, or all.",
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
    seed: Annotated[int, typer.Option(help="Of lengths, times and tokens.", rich_help_panel=WORKLOAD)] = 0,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks; one per card unless given.", rich_help_panel=DEVICE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a card that may be used.", rich_help_panel=MEMORY)
    ] = 0.9,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV bytes per rank, as in 11.54GiB, instead of a share.", rich_help_panel=MEMORY)
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, a format, or full=FORMAT,window=FORMAT.", rich_help_panel=MEMORY)
    ] = "auto",
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest sequence, as in 131072 or 128K.", rich_help_panel=SCHEDULING)
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences running at once.", rich_help_panel=SCHEDULING)
    ] = 256,
    max_num_batched_tokens: Annotated[
        str | None, typer.Option(help="Tokens of the largest step (8192).", rich_help_panel=SCHEDULING)
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep restore points.", rich_help_panel=SCHEDULING)
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (docs/simulate.md) instead.", rich_help_panel=OUTPUT)
    ] = False,
    plot: Annotated[
        str | None, typer.Option(help="Also draw it, to a .png or .svg file.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Run traffic through the real scheduler and memory manager, with a roofline model in place of the GPU."""
    check_plot_file(plot)
    if gpu.lower() == "cpu":
        raise UserError("--gpu cpu: the simulator's times are those of a card; name one, as in h200 or 2x3090")
    if hours <= 0 or (rate is not None and rate <= 0) or (sessions is not None and sessions < 1):
        raise UserError("--hours and --rate must be above 0, and --sessions at least 1")
    from windowpane.models import load
    from windowpane.plan.config import EngineConfig
    from windowpane.plan.hardware import parse_gpus
    from windowpane.plan.planner import make_plan
    from windowpane.plan.sizes import parse_bytes, parse_tokens
    from windowpane.simulate.policies import parse_policies
    from windowpane.simulate.traffic import built_in, read_trace

    try:
        policies = parse_policies(policy)
        is_trace = Path(workload).suffix == ".jsonl" or Path(workload).is_file()
        traffic = read_trace(workload) if is_trace else built_in(workload, seed, hours, rate, sessions)
        config = EngineConfig(
            max_model_len=None if max_model_len is None else parse_tokens(max_model_len),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=None if max_num_batched_tokens is None else parse_tokens(max_num_batched_tokens),
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes),
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        _, card = parse_gpus(gpu)
        plan = make_plan(load(model), config, gpu=gpu)
    except ValueError as error:
        raise UserError(error) from None
    if not traffic:
        raise UserError("no session begins in that time; give more --hours, a higher --rate, or --sessions")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from windowpane.simulate.run import Simulation

    assert plan.capacity is not None
    turns = sum(len(session.turns) for session in traffic)
    name = f"{workload}, {len(traffic):,} sessions, {turns:,} turns"
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for chosen in policies:
            task = progress.add_task(chosen.name, total=turns)
            simulation = Simulation(
                plan.sizing, card, plan.capacity.kv_bytes, plan.max_model_len, chosen, enable_prefix_caching
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


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)
