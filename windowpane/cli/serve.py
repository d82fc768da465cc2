"""`windowpane serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import SAMPLING, SERVER, TEXT, EngineFlags, ModelToRun, Seed
from windowpane.garbage import uncollected

if TYPE_CHECKING:
    from windowpane.server.run import ServerOptions, Tls


@dataclass(frozen=True, slots=True)
class Asked:
    """What the words after `windowpane serve` ask for."""

    model: str | None
    flags: Mapping[str, Any]
    options: ServerOptions
    replicas: int | None
    ray_address: str | None


def _read_list(text: str) -> tuple[str, ...]:
    """As vLLM takes it: a list in JSON."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{text} is no JSON list of texts; write for example '[\"https://example.com\"]'")
    return tuple(values)


def _read_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{flag} {text} is no JSON object")
    return found


def read_serve(
    model: ModelToRun = None,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; 0.0.0.0 for all.", envvar="WINDOWPANE_HOST", rich_help_panel=SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", rich_help_panel=SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask for this key, except on /health; may be given again.",
            envvar=["WINDOWPANE_API_KEY", "VLLM_API_KEY"],
            rich_help_panel=SERVER,
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of each API key; more are turned away.", rich_help_panel=SERVER)
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=1, help="Of each API key, running at once.", rich_help_panel=SERVER)
    ] = None,
    enable_admin: Annotated[
        bool,
        typer.Option(
            "--enable-admin", help="Serve /reset_prefix_cache and the like, for --admin-key.", rich_help_panel=SERVER
        ),
    ] = False,
    admin_key: Annotated[
        str | None,
        typer.Option(help="The key that may administer.", envvar="WINDOWPANE_ADMIN_KEY", rich_help_panel=SERVER),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sites whose pages may ask (CORS), as in '[\"*\"]'; none unless set.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_methods: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Methods that those pages may use (all).", rich_help_panel=SERVER),
    ] = None,
    allowed_headers: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Headers that those pages may send (all).", rich_help_panel=SERVER),
    ] = None,
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="Browsers may send cookies.", rich_help_panel=SERVER)
    ] = False,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="A certificate in PEM form: serve https.", rich_help_panel=SERVER)
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Its key in PEM form.", rich_help_panel=SERVER)] = None,
    root_path: Annotated[
        str, typer.Option(help="The path that a proxy serves this server under.", rich_help_panel=SERVER)
    ] = "",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send a span per request there, as in http://127.0.0.1:4318/v1/traces (the `otel` extra).",
            rich_help_panel=SERVER,
        ),
    ] = None,
    kv_events_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Publish what can be resumed for routers, as vLLM does (docs/cluster.md; the `kv-events` extra).",
            rich_help_panel=SERVER,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="So many engines on Ray (docs/cluster.md; the `ray` extra).", rich_help_panel=SERVER),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="The cluster that --replicas run on, as in ray://head:10001 or auto; else this machine.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; may be given again.", rich_help_panel=SERVER),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="An adapter to serve; may be given again.", rich_help_panel=SERVER),
    ] = None,
    lora_dir: Annotated[
        Path | None,
        typer.Option(help="Where /v1/load_lora_adapter may load adapters from.", rich_help_panel=SERVER),
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
    uvicorn_log_level: Annotated[
        str,
        typer.Option(help="The same for uvicorn itself, which also has critical and trace.", rich_help_panel=SERVER),
    ] = "warning",
    config: Annotated[
        str | None, typer.Option(help="A YAML file with more flags by name.", rich_help_panel=SERVER)
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file instead of the model's own template.", rich_help_panel=TEXT)
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Template variables unless requests say otherwise, as in '{\"enable_thinking\": false}'.",
            rich_help_panel=TEXT,
        ),
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
    override_generation_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sampling defaults that win over those, as in '{\"temperature\": 0.7}'.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Seed = 0,
    *,
    flags: EngineFlags,
) -> Asked:
    """Serve a model: the OpenAI API, metrics, and a page that shows the memory live. docs/server.md has it all."""
    with user_errors():
        if config is not None:  # see `cli.words`, which puts the flags of one file in its place
            raise UserError(f"--config {config}: one file is read; put all flags into it")
        from windowpane.plan.sizes import parse_bytes
        from windowpane.routing.events import KvEventsConfig
        from windowpane.server.adapters import parse_modules
        from windowpane.server.auth import Access
        from windowpane.server.run import ServerOptions
        from windowpane.server.service import Limits
        from windowpane.text.parsers import Parsers

        options = ServerOptions(
            host=host,
            port=port,
            access=Access(
                api_keys=tuple(api_key or ()),
                admin_key=_admin_key(enable_admin, admin_key),
                requests_per_minute=requests_per_minute,
                concurrent_requests=concurrent_requests,
                allowed_origins=() if allowed_origins is None else _read_list(allowed_origins),
                allowed_methods=("*",) if allowed_methods is None else _read_list(allowed_methods),
                allowed_headers=("*",) if allowed_headers is None else _read_list(allowed_headers),
                allow_credentials=allow_credentials,
            ),
            root_path=root_path.rstrip("/"),
            otlp_traces_endpoint=otlp_traces_endpoint,
            tls=_tls(ssl_certfile, ssl_keyfile),
            uvicorn_log_level=uvicorn_log_level,
            served_model_names=tuple(served_model_name or ()),
            chat_template=None if chat_template is None else _read_template(chat_template),
            parsers=Parsers(reasoning_parser, tool_call_parser, enable_auto_tool_choice),
            log_level=log_level,
            limits=Limits(max_queue=max_queue, max_body_bytes=parse_bytes(max_body_bytes)),
            special_tokens_in_content=allow_special_tokens_in_content,
            generation_config=generation_config,
            sampling_overrides=_read_object("--override-generation-config", override_generation_config),
            template_variables=_read_object("--default-chat-template-kwargs", default_chat_template_kwargs),
            lora_modules=parse_modules(lora_modules or []),
            lora_dir=lora_dir,
            shutdown_timeout_s=shutdown_timeout,
            kv_events=KvEventsConfig.parse(kv_events_config or "{}"),
        )
        if replicas is None and ray_address is not None:
            raise UserError(f"--ray-address {ray_address} is for --replicas; add that too")
        return Asked(model, {**flags.given(), "seed": seed}, options, replicas, ray_address)


@wraps(read_serve)
def serve(**given: Any) -> int:
    asked = read_serve(**given)
    with user_errors():
        if asked.replicas is not None:
            from windowpane.cluster.serve import serve_replicas

            return serve_replicas(asked.model, asked.flags, asked.options, asked.replicas, asked.ray_address)
        with uncollected(freeze=True):
            from windowpane.server.run import serve as run_server

        return run_server(asked.model, asked.flags, asked.options)


serve.__name__ = "serve"


def _admin_key(enabled: bool, key: str | None) -> str | None:
    if enabled and key is None:
        raise UserError("--enable-admin needs a key of its own: add --admin-key, or set WINDOWPANE_ADMIN_KEY")
    if key is not None and not enabled:
        raise UserError("--admin-key is for --enable-admin; add that too, or leave it out")
    return key


def _tls(certfile: str | None, keyfile: str | None) -> Tls | None:
    from windowpane.server.run import Tls

    if certfile is None and keyfile is not None:
        raise UserError("--ssl-keyfile needs the certificate too: add --ssl-certfile")
    return None if certfile is None else Tls(certfile, keyfile)


def _read_template(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as text:
            return text.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {file} cannot be read: {error}") from None
