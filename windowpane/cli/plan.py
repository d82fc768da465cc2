"""`windowpane plan` and `windowpane models`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from windowpane.cli.common import DEVICE, MEMORY, OUTPUT, SCHEDULING, UserError, check_plot_file


def plan(
    model: Annotated[
        str, typer.Argument(help="A name on the Hub, a directory, a config.json, or a shipped name (see `models`).")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    download_dir: Annotated[str | None, typer.Option(help="Where configs go (the shared cache).")] = None,
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
    fit: Annotated[
        str | None,
        typer.Option(help="Sequences and length, as in 16x131072: the least lossy KV formats.", rich_help_panel=MEMORY),
    ] = None,
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
    plot: Annotated[
        str | None,
        typer.Option(help="Also draw it, to a .png or .svg file.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Say what fits, where every byte goes, and what the same flags give on other engines."""
    check_plot_file(plot)
    from windowpane.models import load
    from windowpane.plan.config import EngineConfig
    from windowpane.plan.planner import make_plan
    from windowpane.plan.sizes import parse_bytes, parse_tokens

    try:
        config = EngineConfig(
            max_model_len=None if max_model_len is None else parse_tokens(max_model_len),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=None if max_num_batched_tokens is None else parse_tokens(max_num_batched_tokens),
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            fit=fit,
            kv_cache_memory_bytes=None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes),
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            swa_full=swa_full,
        )
        memory = None if gpu_memory is None else parse_bytes(gpu_memory)
        spec = load(model, revision=revision, download_dir=download_dir)
        made = make_plan(spec, config, gpu=gpu, gpu_memory_bytes=memory, concurrency=concurrency)
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

        typer.echo(json.dumps(document(made), indent=2))
        return
    from rich.console import Console

    from windowpane.plan.cards import cards_that_fit
    from windowpane.plan.report import print_report

    cards = cards_that_fit(made.sizing.spec, config, concurrency or 1) if made.capacity is None else []
    print_report(Console(highlight=False), made, cards, explain=explain)


def models(
    wanted: Annotated[str, typer.Argument(help="Show only names with this in them.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON (docs/plan-json.md) instead.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """List the model shapes that are shipped, and the models of the Hub in the shared cache."""
    from windowpane.plan.catalog import catalog, print_catalog

    if as_json:
        typer.echo(json.dumps(catalog(wanted), indent=2))
        return
    from rich.console import Console

    print_catalog(Console(highlight=False), wanted)
