"""The command line. Each command imports what it needs when it runs, so that `--help` and `plan` start at once."""

from __future__ import annotations

import json
import sys
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inference for hybrid-attention models: each layer pays only for the tokens it can still see.",
)

MEMORY, SCHEDULING, DEVICE, OUTPUT = "Memory", "Scheduling", "Device", "Output"


def main() -> None:
    app()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from windowpane import __version__

        typer.echo(f"windowpane {__version__}")
        raise typer.Exit


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model directory, a config.json, or a shipped name (see `models`).")],
    gpu: Annotated[
        str | None, typer.Option(help="Cards, as in h200 or 2x3090; or cpu.", rich_help_panel=DEVICE)
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one card, as in 24GiB; overrides the table.", rich_help_panel=DEVICE)
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks; one per card unless given.", rich_help_panel=DEVICE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a card that may be used.", rich_help_panel=MEMORY)
    ] = 0.9,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV bytes per rank, as in 11.54GiB, instead.", rich_help_panel=MEMORY)
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, a format, or full=FORMAT,window=FORMAT.", rich_help_panel=MEMORY)
    ] = "auto",
    swa_full: Annotated[
        bool, typer.Option("--swa-full", help="Keep sliding layers at full length.", rich_help_panel=MEMORY)
    ] = False,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest sequence, as in 131072 or 128K.", rich_help_panel=SCHEDULING)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Sequences of that length that must fit at once.", rich_help_panel=SCHEDULING)
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences running at once.", rich_help_panel=SCHEDULING)
    ] = 256,
    max_num_batched_tokens: Annotated[
        str | None, typer.Option(help="Tokens of the largest step (8192).", rich_help_panel=SCHEDULING)
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep restore points for reuse.", rich_help_panel=SCHEDULING)
    ] = True,
    async_scheduling: Annotated[
        bool, typer.Option(help="Prepare a step while another runs.", rich_help_panel=SCHEDULING)
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (docs/plan-json.md) instead.", rich_help_panel=OUTPUT)
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why the layout is what it is.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Say what fits, where every byte goes, and what the same flags give on other engines."""
    from windowpane.config import EngineConfig
    from windowpane.models import load
    from windowpane.plan.planner import make_plan
    from windowpane.plan.sizes import parse_bytes, parse_tokens

    try:
        config = EngineConfig(
            max_model_len=parse_tokens(max_model_len) if max_model_len else None,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=parse_tokens(max_num_batched_tokens) if max_num_batched_tokens else None,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=parse_bytes(kv_cache_memory_bytes) if kv_cache_memory_bytes else None,
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            swa_full=swa_full,
        )
        memory = parse_bytes(gpu_memory) if gpu_memory else None
        made = make_plan(load(model), config, gpu=gpu, gpu_memory_bytes=memory, concurrency=concurrency)
    except ValueError as error:
        _fail(str(error))
    if as_json:
        from windowpane.plan.document import document

        typer.echo(json.dumps(document(made), indent=2))
        return
    from rich.console import Console

    from windowpane.plan.cards import cards_that_fit
    from windowpane.plan.report import print_report

    cards = cards_that_fit(made.sizing.spec, config) if made.capacity is None else []
    print_report(Console(highlight=False), made, cards, explain=explain)


@app.command()
def models() -> None:
    """List the model shapes that are shipped."""
    from rich.console import Console

    from windowpane.plan.catalog import print_catalog

    print_catalog(Console(highlight=False))


def _fail(message: str) -> NoReturn:
    """One clear error, exit code 2."""
    typer.echo(f"windowpane: {message}", err=True)
    sys.exit(2)
