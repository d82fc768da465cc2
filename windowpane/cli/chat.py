"""`windowpane chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from windowpane.cli.answer import show
from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import EngineFlags, MaxTokensOrNone, ModelToRun, SamplingFlags, Temperature, TopP
from windowpane.garbage import uncollected

if TYPE_CHECKING:
    from windowpane.engine.llm import LLM
    from windowpane.schedule.request import SamplingParams


def chat(
    model: ModelToRun = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    max_tokens: MaxTokensOrNone = None,
    temperature: Temperature = 0.2,
    top_p: TopP = 0.9,
    *,
    sampling: SamplingFlags,
    flags: EngineFlags,
) -> None:
    """Talk to a model, message by message. Piped in, each line is a message and only answers are printed."""
    with user_errors(), uncollected(freeze=True):
        from windowpane.engine.llm import LLM
        from windowpane.models.embedded import DEFAULT_CHAT
        from windowpane.schedule.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens or 1, temperature=temperature, top_p=top_p, **sampling.given()
        )  # refused before anything is loaded
        llm = LLM(model or DEFAULT_CHAT, **flags.given(), seed=sampling.seed)
        llm.encode([{"role": "user", "content": "?"}])  # so is a model that cannot chat
    messages = [] if system is None else [{"role": "system", "content": system}]
    for message in _messages():
        messages.append({"role": "user", "content": message})
        answer = _answer(llm, messages, params, max_tokens)
        messages.append({"role": "assistant", "content": answer})


def _messages() -> Iterator[str]:
    """Lines that someone types, with a mark to type them at, or that are piped in."""
    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo("Ctrl-C stops an answer, Ctrl-D ends the chat.", err=True)
        with suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            line = input("› " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                typer.echo()
            return
        if line.strip():
            yield line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, max_tokens: int | None) -> str:
    with user_errors():
        room = llm.engine.scheduler.room(len(llm.encode(messages)))
        if room < 1:
            raise UserError(f"this chat has filled --max-model-len {llm.max_model_len}; start a new one")
        stream = llm.stream(messages, replace(params, max_tokens=min(max_tokens or room, room)))
    show(stream)
    return stream.completion.text
