"""The command line. Each command imports what it needs when it runs, so that `--help` and `plan` start at once."""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inference for hybrid-attention models: each layer pays only for the tokens it can still see.",
)

MEMORY, SCHEDULING, DEVICE, OUTPUT = "Memory", "Scheduling", "Device", "Output"


class UserError(Exception):
    """What was asked for cannot be done; the message says why, and what works."""


def main() -> int:
    """Run what was typed and return the exit code. What cannot be honoured is one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows ? instead of a traceback
    try:
        return app(sys.argv[1:] or ["--help"], prog_name="windowpane", standalone_mode=False) or 0
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        typer.echo(f"windowpane: {message}", err=True)
        return 2


def _explain(error: Exception) -> str | None:
    """One line for an error that its user can mend; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    # A usage error. Its class is typer's own in some releases and click's in others; both have this method.
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "windowpane"
    return f"{' '.join(message().split())} (see `{command} --help`)"


def _print_version(wanted: bool) -> None:
    if wanted:
        from windowpane import __version__

        typer.echo(f"windowpane {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


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
        str | None, typer.Option(help="KV bytes per rank, as in 11.54GiB, instead of a share.", rich_help_panel=MEMORY)
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
        bool,
        typer.Option(help="Keep restore points; vLLM charges states more for it.", rich_help_panel=SCHEDULING),
    ] = True,
    async_scheduling: Annotated[
        bool,
        typer.Option(help="Prepare a step ahead; vLLM 0.26 charges windows more for it.", rich_help_panel=SCHEDULING),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (docs/plan-json.md) instead.", rich_help_panel=OUTPUT)
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why layout and formats are what they are.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Say what fits, where every byte goes, and what the same flags give on other engines."""
    from windowpane.config import EngineConfig
    from windowpane.models import load
    from windowpane.plan.planner import make_plan
    from windowpane.plan.sizes import parse_bytes, parse_tokens

    try:
        config = EngineConfig(
            max_model_len=None if max_model_len is None else parse_tokens(max_model_len),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=None if max_num_batched_tokens is None else parse_tokens(max_num_batched_tokens),
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes),
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            swa_full=swa_full,
        )
        memory = None if gpu_memory is None else parse_bytes(gpu_memory)
        made = make_plan(load(model), config, gpu=gpu, gpu_memory_bytes=memory, concurrency=concurrency)
    except ValueError as error:
        raise UserError(error) from None
    if as_json:
        from windowpane.plan.document import document

        typer.echo(json.dumps(document(made), indent=2))
        return
    from rich.console import Console

    from windowpane.plan.cards import cards_that_fit
    from windowpane.plan.report import print_report

    cards = cards_that_fit(made.sizing.spec, config, concurrency or 1) if made.capacity is None else []
    print_report(Console(highlight=False), made, cards, explain=explain)


@app.command()
def models() -> None:
    """List the model shapes that are shipped."""
    from rich.console import Console

    from windowpane.plan.catalog import print_catalog

    print_catalog(Console(highlight=False))
