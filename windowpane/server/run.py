"""`windowpane serve`: from what was typed to a server that answers, and to its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from windowpane.drafts.config import tokens_each
from windowpane.engine.accounts import accounts
from windowpane.engine.devices import resolve_device
from windowpane.engine.progress import busy
from windowpane.engine.start import Started, start
from windowpane.parallel.launch import RanksLost, Workers
from windowpane.routing.events import KvEvents, KvEventsConfig
from windowpane.schedule.request import SamplingParams
from windowpane.server import log as server_log
from windowpane.server.app import make_app
from windowpane.server.auth import Access
from windowpane.server.connections import Patience, connection_with
from windowpane.server.loop import EngineLoop
from windowpane.server.metrics import Metrics, cache_config
from windowpane.server.service import Limits, Service
from windowpane.server.traces import Traces
from windowpane.text import ChatTemplate, TextError, Tokenizer, load_tokenizer
from windowpane.text.grammar import Grammars
from windowpane.text.parsers import Parsers
from windowpane.text.tokenizer import SAMPLING_DEFAULTS

# How long a thread may keep the interpreter to itself. The default of 5 ms is long beside a token; the event loop would
# wait for it whenever the engine computes in Python.
SWITCH_INTERVAL_S = 0.0005
# Connections that the system keeps for us, and those that the event loop accepts before it does anything else.
QUEUED_CONNECTIONS = 2048
ACCEPTED_AT_ONCE = 32

# Somebody reads what a server decodes, so prompts may hold a step up for no longer, unless --max-itl-ms says otherwise.
MAX_ITL_MS = 200.0

# On a CPU, a step of the usual 8,192 tokens takes a minute or more, and whoever comes meanwhile waits for its end.
CPU_BATCHED_TOKENS = 256

GENERATION_CONFIGS = ("auto", "vllm")
LOG_LEVELS = ("debug", "info", "warning", "error")
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

log = logging.getLogger("windowpane.server")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form. `keyfile` may be left out where the certificate's file holds the key."""

    certfile: str
    keyfile: str | None = None

    def __post_init__(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except (OSError, ValueError) as error:
            files = " and ".join(f for f in (self.certfile, self.keyfile) if f)
            raise ValueError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {error}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the server's own flags say. `chat_template` is the template itself. `lora_modules` are directories of
    adapters by name, and `lora_dir` is the one from which more may be loaded. `sampling_overrides` win over the model's
    own defaults, and `template_variables` are those of chat templates; both yield to requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    access: Access = field(default_factory=Access)
    root_path: str = ""
    otlp_traces_endpoint: str | None = None
    tls: Tls | None = None
    uvicorn_log_level: str = "warning"
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    parsers: Parsers = field(default_factory=Parsers)
    log_level: str = "info"
    limits: Limits = field(default_factory=Limits)
    special_tokens_in_content: bool = False
    generation_config: str = "auto"
    sampling_overrides: Mapping[str, Any] = field(default_factory=dict)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    lora_dir: Path | None = None
    shutdown_timeout_s: int = 300
    patience: Patience = field(default_factory=Patience)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port is a number from 0 (any that is free) to 65535, not {self.port}")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"--log-level {self.log_level!r} is not known; use {', '.join(LOG_LEVELS)}")
        if self.uvicorn_log_level not in UVICORN_LOG_LEVELS:
            known = ", ".join(UVICORN_LOG_LEVELS)
            raise ValueError(f"--uvicorn-log-level {self.uvicorn_log_level!r} is not known; use {known}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"--root-path begins with a slash, as in /{self.root_path}")
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in self.template_variables:
                raise ValueError(f"--default-chat-template-kwargs: {name} is what requests bring; leave it out")
        if self.generation_config not in GENERATION_CONFIGS:
            raise ValueError(
                f"--generation-config {self.generation_config!r} is not known; use auto (the model's "
                "generation_config.json) or vllm (the API's own defaults)"
            )


def serve(model: str | None, flags: Mapping[str, Any], options: ServerOptions) -> int:
    """Start, answer until a signal comes, and let what runs finish: 0 then, 1 when a second signal cut it off."""
    console = Console(stderr=True)
    with listen(options) as listener:  # first, so that a port that is taken is told before a model is loaded
        started = start(model, with_defaults(flags), console)
        service = make_service(started, options, console)
        events = KvEvents(options.kv_events, started.engine.scheduler) if options.kv_events.publishes else None
        try:
            return http_serve(service, options, listener, console, started.workers)
        finally:
            started.close()
            if events is not None:
                events.close()


def http_serve(
    service: Service, options: ServerOptions, listener: socket.socket, console: Console, workers: Workers | None = None
) -> int:
    """Answer until a signal comes: the exit code."""
    app = make_app(service, options.access)
    server_log.set_up(options.log_level, options.uvicorn_log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    app.openapi()  # takes a while when it is first asked for
    gc.freeze()  # what is there now stays: a collection that looks at all of it would hold up every stream
    server = Server(http_config(app, options), service)
    if workers is not None:
        workers.when_lost(server.end_without_ranks)
    _greet(console, service, listener.getsockname(), options)
    try:
        server.run([listener])
    finally:
        service.loop.stop()
    return 1 if server.force_exit or server.gave_up or service.loop.error is not None else 0


def with_defaults(flags: Mapping[str, Any]) -> dict[str, Any]:
    """A server's flags where nothing else was said."""
    defaults: dict[str, Any] = {"max_itl_ms": MAX_ITL_MS}
    if resolve_device(flags.get("device") or "auto").type == "cpu":
        sequences = flags.get("max_num_seqs") or 0
        defaults["max_num_batched_tokens"] = max(
            CPU_BATCHED_TOKENS, sequences * tokens_each(flags.get("speculative_config"))
        )
    return {**defaults, **flags}


def http_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection_with(options.patience),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=options.shutdown_timeout_s,
        root_path=options.root_path,
        ssl_certfile=None if options.tls is None else options.tls.certfile,
        ssl_keyfile=None if options.tls is None else options.tls.keyfile,
    )


def make_service(started: Started, options: ServerOptions, console: Console | None = None) -> Service:
    names = options.served_model_names or (started.spec.name,)
    _load_adapters(started, options, names, console)
    loop = EngineLoop(started.engine, Metrics(names[0], cache_config(started)))
    service = service_of(loop, started.text_source, started.plan.max_model_len, names, options, console)
    service.sleeper = started.sleeper
    service.hardware = (
        _device(started),
        started.plan.sizing.compute_dtype,
        tuple(accounts(started.plan, started.reports)),
    )
    return service


def service_of(
    loop: EngineLoop,
    text_source: Path | None,
    max_model_len: int,
    names: tuple[str, ...],
    options: ServerOptions,
    console: Console | None = None,
) -> Service:
    """An engine, here or elsewhere, and the text side of its model."""
    tokenizer = template = None
    if text_source is not None:
        with busy(console, "reading the tokenizer"):
            tokenizer = load_tokenizer(text_source)
        template = ChatTemplate(_with_template(tokenizer, options.chat_template))
    elif options.chat_template is not None:
        raise TextError("--chat-template needs a tokenizer, and this model came without one")
    return Service(
        names=names,
        loop=loop,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        template=template,
        grammars=None if tokenizer is None else Grammars(tokenizer),
        parsers=options.parsers,
        limits=options.limits,
        special_tokens_in_content=options.special_tokens_in_content,
        sampling_defaults=_sampling_defaults(tokenizer, options, console),
        template_variables=options.template_variables,
        traces=None if options.otlp_traces_endpoint is None else Traces(options.otlp_traces_endpoint, names[0]),
        lora_dir=options.lora_dir,
    )


def _device(started: Started) -> str:
    assert started.plan.device is not None
    ranks = len(started.reports)
    return started.plan.device.name if ranks == 1 else f"{ranks} × {started.plan.device.name}"


def _load_adapters(started: Started, options: ServerOptions, names: Sequence[str], console: Console | None) -> None:
    adapters = started.engine.adapters
    if adapters is None:
        if options.lora_modules or options.lora_dir is not None:
            raise ValueError("--lora-modules and --lora-dir are for --enable-lora; add that too")
        return
    if options.lora_dir is not None and not options.lora_dir.is_dir():
        raise ValueError(f"--lora-dir {options.lora_dir} is no directory")
    for name, path in options.lora_modules.items():
        if name in names:
            raise ValueError(f"--lora-modules: {name!r} is the model's own name; give the adapter another")
        with busy(console, f"reading the adapter {name}"):
            adapters.load(name, path)


def _sampling_defaults(
    tokenizer: Tokenizer | None, options: ServerOptions, console: Console | None
) -> Mapping[str, float]:
    """Those of the model's own file and of the command. A wrong value is the operator's business, not a client's."""
    overrides = options.sampling_overrides
    if unknown := set(overrides) - set(SAMPLING_DEFAULTS):
        known = ", ".join(SAMPLING_DEFAULTS)
        raise ValueError(f"--override-generation-config: {', '.join(sorted(unknown))} is not known; use {known}")
    from_file = {} if tokenizer is None or options.generation_config == "vllm" else tokenizer.files.sampling_defaults
    defaults = {**from_file, **overrides}
    if not defaults:
        return {}
    try:
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        where = "--override-generation-config" if overrides else "generation_config.json"
        raise TextError(f"{where}: {error}; --generation-config vllm ignores the model's file") from None
    if console is not None:
        named = ", ".join(f"{name} {value}" for name, value in defaults.items())
        console.print(f"Unless requests say otherwise: {named}", highlight=False)
    return defaults


def _with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    if template is not None:
        tokenizer.files = replace(tokenizer.files, source="--chat-template", chat_template=template)
    return tokenizer


class Server(uvicorn.Server):
    """The first signal drains: nobody new is let in, and what runs goes on. The second ends it all."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.gave_up = False  # requests were cut off when --shutdown-timeout was over

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """To asyncio a backlog is also how many connections it accepts before it does anything else, so it is told a
        small one; the system keeps the long queue.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED_CONNECTIONS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        watch = asyncio.create_task(self._give_up_later())
        await super().shutdown(sockets)
        watch.cancel()

    async def _give_up_later(self) -> None:
        await asyncio.sleep(self.config.timeout_graceful_shutdown or 0)
        log.warning("--shutdown-timeout is over: %d requests are cut off", len(self._service.loop.jobs))
        self.gave_up = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            log.warning("a second signal: %d requests are cut off", len(self._service.loop.jobs))
            self.force_exit = True
            return
        running = len(self._service.loop.jobs)
        log.info("shutting down when %d requests have ended; a second signal cuts them off", running)
        self._service.draining = True
        self.should_exit = True

    def end_without_ranks(self, lost: RanksLost) -> None:
        """A part of the model is gone. Whoever waits is told, and a supervisor may start it all anew. Any thread."""
        self._service.draining = True
        self._service.loop.die(lost)
        self.should_exit = True


def listen(options: ServerOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=QUEUED_CONNECTIONS)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"cannot listen on {options.host} port {options.port}: {reason}; choose another with --port"
        ) from None


def _greet(console: Console, service: Service, address: Sequence[Any], options: ServerOptions) -> None:
    """Where it is, and a line to try it with."""
    host, port = address[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"{'http' if options.tls is None else 'https'}://{shown}:{port}"
    if service.can_chat:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "What is a window pane?"}]}'
    else:
        path, body = "/v1/completions", '{"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}'
    key = ' -H "Authorization: Bearer $API_KEY"' if options.access.api_keys else ""
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"\n{service.name} is served at {url} (the page), {url}/v1 (the API) and {url}/docs. Try:", **plain)
    console.print(f"\n  curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'\n", **plain)
