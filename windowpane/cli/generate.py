"""`windowpane generate`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from windowpane.cli.answer import show
from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import SAMPLING, EngineFlags, MaxTokens, ModelToRun, SamplingFlags, Temperature, TopP
from windowpane.garbage import uncollected


def generate(
    model: ModelToRun = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to go on from; else stdin.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.", rich_help_panel=SAMPLING)
    ] = False,
    *,
    sampling: SamplingFlags,
    flags: EngineFlags,
) -> None:
    """Go on from a prompt: the text on stdout, the plan and progress on stderr."""
    if prompt is None:
        if sys.stdin.isatty():
            raise UserError('no prompt; add --prompt "Once upon a time", or pipe one in')
        prompt = sys.stdin.read()
    with user_errors(), uncollected(freeze=True):
        from windowpane.engine.llm import LLM
        from windowpane.schedule.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, ignore_eos=ignore_eos, **sampling.given()
        )
        stream = LLM(model, **flags.given(), seed=sampling.seed).stream(prompt, params)
    began = time.perf_counter()
    show(stream)
    tokens, seconds = len(stream.completion.token_ids), time.perf_counter() - began
    typer.echo(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tok/s", err=True)
