"""`windowpane plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from windowpane.cli.errors import UserError
from windowpane.cli.flags import (
    OUTPUT,
    SCHEDULING,
    AsJson,
    DownloadDir,
    GpuMemory,
    GpuOrNone,
    ModelShape,
    PlanFlags,
    Plot,
    Revision,
)


def plan(
    model: ModelShape,
    revision: Revision = None,
    download_dir: DownloadDir = None,
    gpu: GpuOrNone = None,
    gpu_memory: GpuMemory = None,
    *,
    flags: PlanFlags,
    concurrency: Annotated[
        int | None, typer.Option(help="Sequences of that length that must fit at once.", rich_help_panel=SCHEDULING)
    ] = None,
    as_json: AsJson = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why layout and formats are what they are.", rich_help_panel=OUTPUT),
    ] = False,
    plot: Plot = None,
) -> None:
    """Say what fits, where every byte goes, and what the same flags give on other engines."""
    from windowpane.models import load
    from windowpane.plan.config import config_of, for_device
    from windowpane.plan.planner import make_plan

    try:
        given = flags.given()
        config = for_device(config_of(given), given, on_cpu=gpu is not None and gpu.lower() == "cpu")
        spec = load(model, revision=revision, download_dir=download_dir)
        if config.drafting is not None and config.drafting.method != "ngram":
            from windowpane.models.drafters import drafter_for

            drafting = config.drafting.model
            spec = spec.with_drafter(drafter_for(spec, load(drafting, download_dir=download_dir) if drafting else None))
        made = make_plan(spec, config, gpu=gpu, gpu_memory_bytes=gpu_memory, concurrency=concurrency)
    except ValueError as error:
        raise UserError(error) from None
    if plot is not None:
        from windowpane.plan.plot import draw_plan

        if made.capacity is None:
            raise UserError(
                "--plot draws what fits: say how much memory there is with --gpu or --kv-cache-memory-bytes"
            )
        draw_plan(made, plot)
        typer.echo(f"drawn to {plot}", err=True)
    if as_json:
        from windowpane.plan.document import document

        if concurrency is not None and made.capacity is None:
            raise UserError(
                f"--concurrency {concurrency} needs to know how much memory there is: add --gpu, --gpu-memory or "
                "--kv-cache-memory-bytes; without --json, cards that hold so many are listed"
            )
        typer.echo(json.dumps(document(made), indent=2))
        return
    from rich.console import Console

    from windowpane.plan.cards import cards_that_fit
    from windowpane.plan.report import print_report

    cards = cards_that_fit(made.sizing.spec, config, concurrency or 1) if made.capacity is None else []
    print_report(Console(highlight=False), made, cards, explain=explain, concurrency=concurrency)
