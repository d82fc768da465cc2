"""Every option that more than one command takes, and the sets of them that commands take together.

An option's type, help and panel stand here; its default is the argument of whoever takes it. None leaves the choice to
the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from windowpane.cli.errors import UserError
from windowpane.plan.sizes import parse_bytes, parse_tokens

MEMORY, SCHEDULING, DEVICE, OUTPUT = "Memory", "Scheduling", "Device", "Output"
SAMPLING, WORKLOAD, SERVER, TEXT = "Sampling", "Workload", "Server", "Chat, tools and reasoning"
# Less was meant in GiB: `--gpu-memory 24`.
LEAST_MEMORY_BYTES = 64 * 1024


def _read(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise UserError(error) from None


def read_tokens(text: str) -> int:
    return _read(parse_tokens, text)


def read_bytes(text: str) -> int:
    return _read(parse_bytes, text)


def read_memory(text: str) -> int:
    """Memory of a card: a bare small number was meant in another unit."""
    size_bytes = read_bytes(text)
    if size_bytes < LEAST_MEMORY_BYTES:
        number = text.strip().rstrip("bB").strip()
        raise UserError(f"{text} is {size_bytes:,} bytes, too few for a model; did you mean {number}GiB?")
    return size_bytes


def _picture_file(plot: str) -> str:
    """Refuse a picture that could not be written, before anything is computed for it."""
    if Path(plot).suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot {plot}: pictures are PNG or SVG; write for example --plot plan.png")
    if not Path(plot).resolve().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no directory {Path(plot).parent}")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'windowpane[plot]' (or pip install matplotlib)")
    return plot


# -- options -------------------------------------------------------------------------------------------------------

ModelToRun = Annotated[
    str | None,
    typer.Argument(
        help="A name on the Hub (org/name, org/name:Q4_K_M), a directory, a GGUF file or an embedded model."
    ),
]
ModelShape = Annotated[
    str, typer.Argument(help="A name on the Hub, a directory, a config.json, or a shipped name (see `models`).")
]

Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.", rich_help_panel=DEVICE)
]
DownloadDir = Annotated[
    str | None, typer.Option(help="Where models from the Hub go (the shared cache).", rich_help_panel=DEVICE)
]

Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization", "-q", help="How the checkpoint is quantized; another way is an error.", rich_help_panel=DEVICE
    ),
]

_GPU = typer.Option(help="Cards, as in h200 or 2x3090; plan knows cpu too.", rich_help_panel=DEVICE)
Gpu = Annotated[str, _GPU]
GpuOrNone = Annotated[str | None, _GPU]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.", rich_help_panel=DEVICE)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=DEVICE)]
LoadFormat = Annotated[
    str, typer.Option(help="auto, safetensors, gguf, or dummy for random weights.", rich_help_panel=DEVICE)
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        help="Ranks, one card each (plan and simulate: all cards; else 1).",
        rich_help_panel=DEVICE,
    ),
]

GpuMemory = Annotated[
    int | None,
    typer.Option(
        parser=read_memory,
        metavar="BYTES",
        help="Memory of one card, as in 24GiB; overrides the table.",
        rich_help_panel=DEVICE,
    ),
]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(help="Share of a card that may be used (0.9).", rich_help_panel=MEMORY)
]
KvCacheMemoryBytes = Annotated[
    int | None,
    typer.Option(
        parser=read_memory,
        metavar="BYTES",
        help="KV bytes per rank, as in 11.54GiB, instead of a share.",
        rich_help_panel=MEMORY,
    ),
]
KvOffloadingSize = Annotated[
    str | None,
    typer.Option(metavar="GIB", help="Host memory for restore points, over all ranks.", rich_help_panel=MEMORY),
]
KvDiskPath = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Keep restore points on disk too, across restarts.", rich_help_panel=MEMORY),
]
KvDiskSize = Annotated[
    str | None, typer.Option(metavar="GIB", help="Most of them, as in 200GiB (16GiB).", rich_help_panel=MEMORY)
]
KvCacheDtype = Annotated[
    str | None, typer.Option(help="auto, a format, or full=FORMAT,window=FORMAT.", rich_help_panel=MEMORY)
]
MambaSsmCacheDtype = Annotated[
    str | None,
    typer.Option(help="Recurrent states: auto (the config's), float32 or bfloat16.", rich_help_panel=MEMORY),
]
Fit = Annotated[
    str | None,
    typer.Option(help="Sequences and length, as in 16x131072: the least lossy KV formats.", rich_help_panel=MEMORY),
]
SwaFull = Annotated[
    bool, typer.Option("--swa-full", help="Keep sliding layers at full length.", rich_help_panel=MEMORY)
]
EnableReturnRoutedExperts = Annotated[
    bool,
    typer.Option(
        "--enable-return-routed-experts",
        help="Keep which experts tokens visit, for requests that ask.",
        rich_help_panel=MEMORY,
    ),
]

EnableLora = Annotated[
    bool, typer.Option("--enable-lora", help="Make room for adapters (LoRA).", rich_help_panel=MEMORY)
]
MaxLoras = Annotated[int | None, typer.Option(help="Adapters on the device at a time (1).", rich_help_panel=MEMORY)]
MaxLoraRank = Annotated[int | None, typer.Option(help="The highest rank of an adapter (16).", rich_help_panel=MEMORY)]
LoraTargetModules = Annotated[
    list[str] | None,
    typer.Option(help="Modules that adapters may change, as in q_proj (all).", rich_help_panel=MEMORY),
]

MaxModelLen = Annotated[
    int | None,
    typer.Option(
        parser=read_tokens, metavar="TOKENS", help="Longest sequence, as in 131072 or 128K.", rich_help_panel=SCHEDULING
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Most sequences running at once (256).", rich_help_panel=SCHEDULING)
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        parser=read_tokens, metavar="TOKENS", help="Tokens of the largest step (8192).", rich_help_panel=SCHEDULING
    ),
]
MaxItlMs = Annotated[
    float | None,
    typer.Option(
        help="Cut prompts so that a step others decode in takes no longer; 0: do not (serve: 200).",
        rich_help_panel=SCHEDULING,
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(help="Keep restore points, so that shared prompts are computed once.", rich_help_panel=SCHEDULING),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(help="Prepare a step while one is computed (on, except on CPUs).", rich_help_panel=SCHEDULING),
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='Drafts, as in {"method": "ngram", "num_speculative_tokens": 4}.',
        rich_help_panel=SCHEDULING,
    ),
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="Run steps without CUDA graphs.", rich_help_panel=SCHEDULING)
]
EnableLayerChain = Annotated[
    bool,
    typer.Option(
        help="Run a single row's int4 layers in one launch each, where the card can.", rich_help_panel=SCHEDULING
    ),
]

_MAX_TOKENS = typer.Option(help="Most tokens of one answer (chat: what fits).", rich_help_panel=SAMPLING)
MaxTokens = Annotated[int, _MAX_TOKENS]
MaxTokensOrNone = Annotated[int | None, _MAX_TOKENS]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest that make up this share.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int, typer.Option(help="The same seed gives the same answers, and random weights.", rich_help_panel=SAMPLING)
]
WorkloadSeed = Annotated[int, typer.Option(help="Of all that is drawn: lengths, tokens, …", rich_help_panel=WORKLOAD)]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead (docs/ has it).", rich_help_panel=OUTPUT)]
Plot = Annotated[
    str | None,
    typer.Option(
        parser=_picture_file, metavar="FILE", help="Also draw it, to a .png or .svg file.", rich_help_panel=OUTPUT
    ),
]

# -- sets of them --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSet:
    """Options that commands take together: a command has the set as one argument."""

    def given(self) -> dict[str, Any]:
        """The flags by name, without those that are left to the engine."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags(FlagSet):
    """What decides how much fits and how it is scheduled."""

    tensor_parallel_size: TensorParallelSize = None
    gpu_memory_utilization: GpuMemoryUtilization = None
    kv_cache_memory_bytes: KvCacheMemoryBytes = None
    kv_cache_dtype: KvCacheDtype = None
    mamba_ssm_cache_dtype: MambaSsmCacheDtype = None
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    enable_prefix_caching: EnablePrefixCaching = True
    kv_offloading_size: KvOffloadingSize = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags(SimulateFlags):
    fit: Fit = None
    swa_full: SwaFull = False
    enable_return_routed_experts: EnableReturnRoutedExperts = False
    enable_lora: EnableLora = False
    max_loras: MaxLoras = None
    max_lora_rank: MaxLoraRank = None
    lora_target_modules: LoraTargetModules = None
    async_scheduling: AsyncScheduling = None
    speculative_config: SpeculativeConfig = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(PlanFlags):
    """What every command that runs a model takes."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    revision: Revision = None
    download_dir: DownloadDir = None
    quantization: Quantization = None
    max_itl_ms: MaxItlMs = None
    kv_disk_path: KvDiskPath = None
    kv_disk_size: KvDiskSize = None
    enforce_eager: EnforceEager = False
    enable_layer_chain: EnableLayerChain = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(FlagSet):
    """Arguments of `SamplingParams` that `generate` and `chat` share."""

    top_k: Annotated[
        int, typer.Option(help="Draw from so many of the likeliest; 0: all.", rich_help_panel=SAMPLING)
    ] = 0
    min_p: Annotated[
        float, typer.Option(help="Leave out what is less likely than this share of the best.", rich_help_panel=SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what prompt and answer said.", rich_help_panel=SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: less of what the answer said.", rich_help_panel=SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, for each time it was said.", rich_help_panel=SAMPLING)
    ] = 0.0
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.", rich_help_panel=SAMPLING)
    ] = None
    seed: Seed = 0


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer is to see it: in place of each `FlagSet` that it takes stand the options of that set."""
    hints = get_type_hints(command, include_extras=True)
    sets = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, FlagSet)}

    def run(**given: Any) -> Any:
        for name, flag_set in sets.items():
            given[name] = flag_set(**{f.name: given.pop(f.name) for f in fields(flag_set)})
        return command(**given)

    parameters = []
    for own in signature(command).parameters.values():
        shared = sets.get(own.name)
        if shared is None:
            parameters.append(own)
        else:
            hints |= get_type_hints(shared, include_extras=True)
            parameters += signature(shared).parameters.values()
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
