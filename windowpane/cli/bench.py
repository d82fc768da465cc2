"""`windowpane bench`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import WORKLOAD, EngineFlags, ModelToRun, Temperature, WorkloadSeed


def bench(
    model: ModelToRun = None,
    workload: Annotated[str, typer.Option(help="serve, turns or b1.", rich_help_panel=WORKLOAD)] = "b1",
    requests: Annotated[
        int | None, typer.Option(help="Requests at once (serve 256, turns 8, b1 1).", rich_help_panel=WORKLOAD)
    ] = None,
    input_len: Annotated[
        str | None, typer.Option(help="Prompt tokens, as in 512 or 100-1024.", rich_help_panel=WORKLOAD)
    ] = None,
    output_len: Annotated[
        str | None, typer.Option(help="Answer tokens, as in 64 or 100-1024.", rich_help_panel=WORKLOAD)
    ] = None,
    more_len: Annotated[
        int | None, typer.Option(help="Tokens that a second turn adds (turns 256).", rich_help_panel=WORKLOAD)
    ] = None,
    temperature: Temperature = 0.0,
    seed: WorkloadSeed = 0,
    *,
    flags: EngineFlags,
) -> None:
    """Measure speed on random prompts: tok/s, latencies, GB/s and the share of the roof. The last line is JSON."""
    with user_errors():
        from windowpane.measure.workloads import WORKLOADS, parse_range

        if workload not in WORKLOADS:
            raise UserError(f"unknown workload {workload!r}; there are {', '.join(WORKLOADS)}")
        chosen = {
            "requests": requests,
            "input_tokens": None if input_len is None else parse_range(input_len),
            "output_tokens": None if output_len is None else parse_range(output_len),
            "more_tokens": more_len,
        }
        changes: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        work = replace(WORKLOADS[workload], **changes)
        from windowpane.measure.report import run_bench, start_bench

        started = start_bench(model, work, {**flags.given(), "seed": seed})
    run_bench(started, work, temperature, seed)
