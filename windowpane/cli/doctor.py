"""`windowpane doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from windowpane.cli.errors import UserError
from windowpane.cli.flags import DEVICE, MEMORY, SCHEDULING, AsJson, MaxModelLen, read_tokens


def doctor(
    log: Annotated[str, typer.Argument(help="A vLLM start-up log, or - for stdin.")],
    model: Annotated[str | None, typer.Option(help="A directory, config.json or shipped name.")] = None,
    vllm_version: Annotated[str | None, typer.Option(help="The release, as in 0.26.0.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The card, as in h200 or 3090.", rich_help_panel=DEVICE)] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="Ranks.", rich_help_panel=DEVICE)] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV bytes per rank, as in 11.54GiB.", rich_help_panel=MEMORY)
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="As vLLM names it.", rich_help_panel=MEMORY)] = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            parser=read_tokens, metavar="TOKENS", help="Tokens of the largest step.", rich_help_panel=SCHEDULING
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None, typer.Option(help="As vLLM ran.", rich_help_panel=SCHEDULING, show_default=False)
    ] = None,
    start: Annotated[
        int | None, typer.Option(help="Which of several starts in the log; else the last that tells something.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a vLLM start-up log: where KV memory went, what the figures mean, what would change them.

    Options fill what the log does not say, and win over what it does.
    """
    from windowpane.doctor.diagnosis import diagnose
    from windowpane.doctor.log import LogFacts, Rounded
    from windowpane.plan.sizes import parse_bytes

    text = _read(log)
    try:
        kv_bytes = None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes)
        given = LogFacts(
            version=vllm_version,
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype,
            async_scheduling=async_scheduling,
            gpu=gpu,
            available_kv=None if kv_bytes is None else Rounded(str(kv_cache_memory_bytes), kv_bytes, kv_bytes),
        )
        found = diagnose(text, given, start)
    except ValueError as error:
        raise UserError(error) from None
    if as_json:
        from windowpane.doctor.document import document

        typer.echo(json.dumps(document(found), indent=2))
        return
    from rich.console import Console

    from windowpane.doctor.report import print_diagnosis

    print_diagnosis(Console(highlight=False), found)


def _read(log: str) -> str:
    from windowpane.doctor.text import decode

    if log == "-":
        raw = getattr(sys.stdin, "buffer", None)
        return sys.stdin.read() if raw is None else decode(raw.read())
    try:
        return decode(Path(log).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the log {log}: {error.strerror}; give a file, or - for stdin") from None
