"""The command line. Each command imports what it needs when it runs, so that `--help` and `plan` start at once."""

from __future__ import annotations

import inspect
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from windowpane.cli.common import DEVICE, MEMORY, SAMPLING, SCHEDULING, SERVER, TEXT, WORKLOAD, UserError
from windowpane.cli.doctor import doctor
from windowpane.cli.plan import models, plan
from windowpane.cli.simulate import simulate

if TYPE_CHECKING:
    from windowpane.engine.llm import LLM, Stream

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inference for hybrid-attention models: each layer pays only for the tokens it can still see.",
)


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


app.command()(plan)
app.command()(models)
app.command()(doctor)
app.command()(simulate)


# -- running a model -----------------------------------------------------------------------------------------------

ModelToRun = Annotated[
    str | None,
    typer.Argument(
        help="A Hugging Face directory, a GGUF file or an embedded model; the embedded default if left out."
    ),
]


def _engine_flags(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.", rich_help_panel=DEVICE)] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=DEVICE)] = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto, safetensors, gguf, or dummy for random weights.", rich_help_panel=DEVICE)
    ] = "auto",
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks: one process and one card each.", rich_help_panel=DEVICE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a card that may be used (0.9).", rich_help_panel=MEMORY)
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="KV bytes, as in 2GiB, instead of a share.", rich_help_panel=MEMORY)
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto, a format, or full=FORMAT,window=FORMAT.", rich_help_panel=MEMORY)
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="Sequences and length, as in 16x131072: the least lossy KV formats.", rich_help_panel=MEMORY),
    ] = None,
    swa_full: Annotated[
        bool, typer.Option("--swa-full", help="Keep sliding layers at full length.", rich_help_panel=MEMORY)
    ] = False,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest sequence, as in 8192 or 8K.", rich_help_panel=SCHEDULING)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences running at once (256).", rich_help_panel=SCHEDULING)
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None, typer.Option(help="Tokens of the largest step (8192).", rich_help_panel=SCHEDULING)
    ] = None,
    max_itl_ms: Annotated[
        float | None,
        typer.Option(
            help="Cut prompts so that a step others decode in takes no longer; 0: do not (serve: 200).",
            rich_help_panel=SCHEDULING,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(help="Keep restore points, so that shared prompts are computed once.", rich_help_panel=SCHEDULING),
    ] = True,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Prepare a step while one is computed (on CUDA).", rich_help_panel=SCHEDULING),
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Run steps without CUDA graphs.", rich_help_panel=SCHEDULING)
    ] = False,
) -> dict[str, Any]:
    """Flags that start an engine; those left out are left to it."""
    from windowpane.plan.sizes import parse_bytes, parse_tokens

    flags = {
        "device": device,
        "dtype": dtype,
        "load_format": load_format,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_memory_bytes is None else parse_bytes(kv_cache_memory_bytes),
        "kv_cache_dtype": kv_cache_dtype,
        "fit": fit,
        "swa_full": swa_full,
        "max_model_len": None if max_model_len is None else parse_tokens(max_model_len),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": None if max_num_batched_tokens is None else parse_tokens(max_num_batched_tokens),
        "max_itl_ms": max_itl_ms,
        "enable_prefix_caching": enable_prefix_caching,
        "async_scheduling": async_scheduling,
        "enforce_eager": enforce_eager,
        "tensor_parallel_size": tensor_parallel_size,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _sampling_flags(
    top_k: Annotated[
        int, typer.Option(help="Draw from so many of the likeliest; 0: all.", rich_help_panel=SAMPLING)
    ] = 0,
    min_p: Annotated[
        float, typer.Option(help="Leave out what is less likely than this share of the best.", rich_help_panel=SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what prompt and answer said.", rich_help_panel=SAMPLING)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: less of what the answer said.", rich_help_panel=SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for each time it was said.", rich_help_panel=SAMPLING)
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.", rich_help_panel=SAMPLING)] = 0,
) -> dict[str, Any]:
    """Sampling flags that commands share, as arguments of `SamplingParams`."""
    return {
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or (),
        "seed": seed,
    }


def _takes(**flag_sets: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command whole sets of flags: each is a function of them, whose result the command takes by this name."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            for name, flag_set in flag_sets.items():
                chosen = {flag: given.pop(flag) for flag in inspect.signature(flag_set).parameters}
                with _user_errors():
                    given[name] = flag_set(**chosen)
            return command(**given)

        hints: dict[str, Any] = {}
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in flag_sets]
        for source in (command, *flag_sets.values()):
            hints |= get_type_hints(source, include_extras=True)
        shared = [p for flag_set in flag_sets.values() for p in inspect.signature(flag_set).parameters.values()]
        parameters = [p.replace(annotation=hints[p.name]) for p in (*own, *shared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


@contextmanager
def _user_errors() -> Iterator[None]:
    """What was asked for cannot be done, or a package for it is missing: one line says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("windowpane"):
            raise
        raise UserError(f"running a model needs the package {error.name}: pip install {error.name}") from None
    except ValueError as error:
        raise UserError(error) from None


@app.command()
@_takes(sampling=_sampling_flags, flags=_engine_flags)
def generate(
    model: ModelToRun = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to go on from; else stdin.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to add.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest that make up this share.", rich_help_panel=SAMPLING)
    ] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.", rich_help_panel=SAMPLING)
    ] = False,
    *,
    sampling: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """Go on from a prompt: the text on stdout, the plan and progress on stderr."""
    if prompt is None:
        if sys.stdin.isatty():
            raise UserError('no prompt; add --prompt "Once upon a time", or pipe one in')
        prompt = sys.stdin.read()
    with _user_errors():
        from windowpane.engine.llm import LLM
        from windowpane.schedule.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, ignore_eos=ignore_eos, **sampling
        )
        stream = LLM(model, **flags, seed=params.seed).stream(prompt, params)
    began = time.perf_counter()
    _show(stream)
    tokens, seconds = len(stream.completion.token_ids), time.perf_counter() - began
    typer.echo(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tok/s", err=True)


@app.command()
@_takes(sampling=_sampling_flags, flags=_engine_flags)
def chat(
    model: ModelToRun = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one answer; else what fits.", rich_help_panel=SAMPLING)
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=SAMPLING)
    ] = 0.2,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest that make up this share.", rich_help_panel=SAMPLING)
    ] = 0.9,
    *,
    sampling: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    """Talk to a model, message by message. Piped in, each line is a message and only answers are printed."""
    with _user_errors():
        from windowpane.engine.llm import LLM
        from windowpane.models.embedded import DEFAULT_CHAT
        from windowpane.schedule.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens or 1, temperature=temperature, top_p=top_p, **sampling
        )  # refused before anything is loaded
        llm = LLM(model or DEFAULT_CHAT, **flags, seed=params.seed)
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


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any, max_tokens: int | None) -> str:
    from dataclasses import replace

    with _user_errors():
        room = llm.max_model_len + 1 - len(llm.encode(messages))
        if room < 1:
            raise UserError(f"this chat has filled --max-model-len {llm.max_model_len}; start a new one")
        stream = llm.stream(messages, replace(params, max_tokens=min(max_tokens or room, room)))
    _show(stream)
    return stream.completion.text


def _show(stream: Stream) -> None:
    """Print an answer as it comes; an interrupt ends the answer, not the program."""
    from windowpane.text.answer import RequestFailed

    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
    except RequestFailed as error:
        raise UserError(error) from error
    sys.stdout.write("\n")
    sys.stdout.flush()


@app.command()
@_takes(flags=_engine_flags)
def bench(
    model: ModelToRun = None,
    workload: Annotated[str, typer.Option(help="serve, turns or b1.", rich_help_panel=WORKLOAD)] = "b1",
    requests: Annotated[
        int | None, typer.Option(help="Requests at once (serve 256, turns 8, b1 1).", rich_help_panel=WORKLOAD)
    ] = None,
    input_len: Annotated[
        str | None, typer.Option(help="Prompt tokens, as in 512 or 100-1024.", rich_help_panel=WORKLOAD)
    ] = None,
    output_len: Annotated[
        str | None, typer.Option(help="Answer tokens, as in 64 or 100-1024.", rich_help_panel=WORKLOAD)
    ] = None,
    more_len: Annotated[
        int | None, typer.Option(help="Tokens that a second turn adds (turns 256).", rich_help_panel=WORKLOAD)
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=WORKLOAD)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and random weights.", rich_help_panel=WORKLOAD)] = 0,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure speed on random prompts: tok/s, latencies, GB/s and the share of the roof. The last line is JSON."""
    with _user_errors():
        from dataclasses import replace

        from windowpane.measure.workloads import WORKLOADS, parse_range

        if workload not in WORKLOADS:
            raise UserError(f"unknown workload {workload!r}; there are {', '.join(WORKLOADS)}")
        chosen = {
            "requests": requests,
            "input_tokens": None if input_len is None else parse_range(input_len),
            "output_tokens": None if output_len is None else parse_range(output_len),
            "more_tokens": more_len,
        }
        changes: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        work = replace(WORKLOADS[workload], **changes)
        from windowpane.measure.report import run_bench, start_bench

        started = start_bench(model, work, {**flags, "seed": seed})
    run_bench(started, work, temperature, seed)


@app.command()
@_takes(flags=_engine_flags)
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
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that requests have to end after a signal.", rich_help_panel=SERVER)
    ] = 300,
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line per request), warning or error.", rich_help_panel=SERVER)
    ] = "info",
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file instead of the model's own template.", rich_help_panel=TEXT)
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="How the model marks its thoughts: qwen3, …", rich_help_panel=TEXT)
    ] = None,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="How the model writes tool calls: hermes, …", rich_help_panel=TEXT)
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option("--enable-auto-tool-choice", help="Let the model decide to call tools.", rich_help_panel=TEXT),
    ] = False,
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
    seed: Annotated[
        int, typer.Option(help="For requests that bring none, and random weights.", rich_help_panel=SAMPLING)
    ] = 0,
    *,
    flags: dict[str, Any],
) -> int:
    """Serve a model: the OpenAI API, metrics, and a page that shows the memory live. docs/server.md has it all."""
    with _user_errors():
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
        return run_server(model, {**flags, "seed": seed}, options)


def _read_template(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as text:
            return text.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {file} cannot be read: {error}") from None
