"""`windowpane serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import SAMPLING, SERVER, TEXT, EngineFlags, ModelToRun, Seed


def serve(
    model: ModelToRun = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", rich_help_panel=SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask for this key, except on /health; may be given again.",
            envvar="WINDOWPANE_API_KEY",
            rich_help_panel=SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; may be given again.", rich_help_panel=SERVER),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more are turned away.", rich_help_panel=SERVER)
    ] = 1024,
    max_body_bytes: Annotated[
        str, typer.Option(help="The largest request body, as in 8MiB.", rich_help_panel=SERVER)
    ] = "8MiB",
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line per request), warning or error.", rich_help_panel=SERVER)
    ] = "info",
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file instead of the model's own template.", rich_help_panel=TEXT)
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model marks its thoughts: qwen3, deepseek_r1, glm45, gemma4, openai_gptoss.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, gemma4, qwen3_coder, glm45, llama4_pythonic, llama4_json, "
            "openai.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option("--enable-auto-tool-choice", help="Let the model decide to call tools.", rich_help_panel=TEXT),
    ] = False,
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that requests have to end after a signal.", rich_help_panel=SERVER)
    ] = 300,
    allow_special_tokens_in_content: Annotated[
        bool,
        typer.Option(
            "--allow-special-tokens-in-content",
            help="Let messages hold control tokens; else they are text.",
            rich_help_panel=TEXT,
        ),
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults: auto (the model's generation_config.json) or vllm (none).",
            rich_help_panel=SAMPLING,
        ),
    ] = "auto",
    seed: Seed = 0,
    *,
    flags: EngineFlags,
) -> int:
    """Serve a model: the OpenAI API, metrics, and a page that shows the memory live. docs/server.md has it all."""
    with user_errors():
        from windowpane.plan.sizes import parse_bytes
        from windowpane.server.parsing import Parsers
        from windowpane.server.run import ServerOptions
        from windowpane.server.run import serve as run_server
        from windowpane.server.service import Limits

        options = ServerOptions(
            host=host,
            port=port,
            api_keys=tuple(api_key or ()),
            served_model_names=tuple(served_model_name or ()),
            chat_template=None if chat_template is None else _read_template(chat_template),
            parsers=Parsers(reasoning_parser, tool_call_parser, enable_auto_tool_choice),
            log_level=log_level,
            limits=Limits(max_queue=max_queue, max_body_bytes=parse_bytes(max_body_bytes)),
            special_tokens_in_content=allow_special_tokens_in_content,
            generation_config=generation_config,
            shutdown_timeout_s=shutdown_timeout,
        )
        return run_server(model, {**flags.given(), "seed": seed}, options)


def _read_template(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as text:
            return text.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {file} cannot be read: {error}") from None
