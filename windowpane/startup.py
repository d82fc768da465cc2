"""From what the user typed to an engine that runs: the model, the flags, the plan, and then exactly what it says.

The plan comes first, from the code behind `windowpane plan`, and refuses what cannot fit before a byte is loaded. What
was really taken is printed beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowpane.config import ConfigError, EngineConfig, flag
from windowpane.embedded import DEFAULT_GENERATE, EMBEDDED, embedded_path
from windowpane.kv.layout import Layout
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.models import load, shipped_names
from windowpane.models.gguf import is_gguf
from windowpane.models.spec import ModelSpec
from windowpane.plan.memory import Device
from windowpane.plan.planner import Plan, PlanError, make_plan
from windowpane.plan.sizes import format_bytes
from windowpane.scheduler import Scheduler

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from windowpane.cuda_runner import CudaRunner
    from windowpane.engine import Engine
    from windowpane.modeling.scales import Calibration
    from windowpane.runner import Runner
    from windowpane.weights import LoadedWeights

# A CPU shares its memory with everything else on the machine.
CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE = 4

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What the engine's own flags do not say: where to run, in which dtype, where weights come from, and the seed.

    `auto` is the first CUDA card or else the CPU; the model's own dtype, or float32 on a CPU; and whatever weights lie
    with the model. `dummy` makes random ones from the config alone.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, the plan it follows, and where its model lies (None for a shape that came with the package)."""

    engine: Engine
    runner: Runner | CudaRunner
    plan: Plan
    source: Path | None

    @property
    def spec(self) -> ModelSpec:
        return self.plan.sizing.spec

    @property
    def text_source(self) -> Path | None:
        """Where the model's tokenizer lies, if it has one."""
        return _text_source(self.source)


def start(model: str | Path | None, flags: Mapping[str, Any], console: Console | None = None) -> Started:
    """Plan, load and start. Raises ValueError with one line for whoever gave a flag that cannot be honoured."""
    options, config = read_flags(flags)
    with busy(console, "looking at the model"):
        spec, source = find_model(model, options.load_format)

    import torch

    from windowpane.engine import Engine
    from windowpane.sampler import Sampler
    from windowpane.weights import load_weights

    device = resolve_device(options.device)
    config = _resolve_config(config, flags, device)
    plan = resolve_plan(spec, config, device, options.dtype)
    config = plan.sizing.config  # --fit may ask for more sequences
    assert plan.capacity is not None
    dtype = getattr(torch, plan.sizing.compute_dtype)
    with _progress(console, "making weights" if options.load_format == "dummy" else "loading weights") as progress:
        weights = load_weights(
            source,
            plan.sizing.spec,
            dtype=dtype,
            device=device,
            load_format=options.load_format,
            seed=options.seed,
            progress=progress,
        )
    layout, length, slots = plan.sizing.layout, plan.max_model_len, config.max_num_seqs
    calibration = _calibration(plan, source, options.load_format)
    runner = _make_runner(plan, weights, config, device, dtype, console, calibration)
    manager = KVManager(layout, plan.capacity.num_slabs, slots, length)
    restore = RestorePoints(manager) if config.enable_prefix_caching else None
    scheduler = Scheduler(manager, config.batched_tokens, restore=restore)
    sampler = Sampler(spec.vocab_size, device, options.seed)
    engine = Engine(scheduler, runner, sampler, async_scheduling=config.async_scheduling)
    started = Started(engine, runner, plan, source)
    if console is not None:
        print_start(console, started)
    return started


def _calibration(plan: Plan, source: Path | None, load_format: str) -> Calibration:
    """What coded KV formats can know of a model before it runs."""
    from windowpane.modeling.scales import Calibration, warm_up_text
    from windowpane.text.tokenizer import load_tokenizer
    from windowpane.weights import load_kv_scales

    formats = [group.kv_format for group in plan.sizing.layout.groups]
    if not any(fmt is not None and fmt.family != "float" for fmt in formats):
        return Calibration()
    text_source = _text_source(source)
    tokens = load_tokenizer(text_source).encode(warm_up_text()) if text_source is not None else ()
    return Calibration(load_kv_scales(source, plan.sizing.spec, load_format), tokens)


def _text_source(source: Path | None) -> Path | None:
    has_one = source is not None and (is_gguf(source) or (source / "tokenizer.json").is_file())
    return source if has_one else None


def _make_runner(
    plan: Plan,
    weights: LoadedWeights,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    console: Console | None,
    calibration: Calibration,
) -> Runner | CudaRunner:
    assert plan.capacity is not None
    spec, layout, slabs = plan.sizing.spec, plan.sizing.layout, plan.capacity.num_slabs
    slots, length = config.max_num_seqs, plan.max_model_len
    if device.type == "cpu":
        from windowpane.runner import Runner

        return Runner(spec, weights, layout, slabs, slots, length, device=device, dtype=dtype, calibration=calibration)
    from windowpane.cuda_runner import CudaRunner

    with _progress(console, "capturing graphs", bytes_unit=False) as progress:
        runner = CudaRunner(
            spec,
            weights,
            layout,
            slabs,
            slots,
            length,
            device=device,
            dtype=dtype,
            use_graphs=not config.enforce_eager,
            calibration=calibration,
            progress=None if progress is None else lambda done, total: progress("", done, total),
        )
    with busy(console, "running the largest step once"):
        runner.rehearse(config.batched_tokens)
    return runner


# -- flags ---------------------------------------------------------------------------------------------------------


def read_flags(flags: Mapping[str, Any]) -> tuple[StartOptions, EngineConfig]:
    """Flags by name; an unknown one is an error that names what may have been meant."""
    options = {f.name for f in fields(StartOptions)}
    engine = {f.name for f in fields(EngineConfig)}
    for name in flags:
        if name not in options | engine:
            close = get_close_matches(name, options | engine, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(options | engine))}"
            raise ConfigError(f"unknown argument {name!r}; {hint}")
    if (flags.get("tensor_parallel_size") or 1) > 1:
        raise ConfigError(f"--tensor-parallel-size {flags['tensor_parallel_size']}: one device runs for now; use 1")
    given = {name: value for name, value in flags.items() if name in engine}
    config = EngineConfig(**given)
    return StartOptions(**{name: value for name, value in flags.items() if name in options}), config


def find_model(model: str | Path | None, load_format: str = "auto") -> tuple[ModelSpec, Path | None]:
    """The shape of a model, and where it lies: None for a shape without weights. No model is the embedded default."""
    name = DEFAULT_GENERATE if model is None else str(model)
    path = Path(name)
    if path.exists():
        return load(path), path
    if load_format == "dummy" and name in shipped_names():
        return load(name), None
    if name in EMBEDDED:
        embedded = embedded_path(name)
        return replace(load(embedded), name=name), embedded
    spec = load(name)
    raise ConfigError(
        f"{spec.name} is a shape without weights; give its directory or a GGUF file, or --load-format dummy for random "
        "weights"
    )


def resolve_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ConfigError(f"--device {name!r} is not known; use auto, cpu, cuda or cuda:1")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise ConfigError(f"--device {name}: this machine has {count} CUDA devices; use --device cpu")
        return torch.device("cuda", int(number or 0))
    return torch.device("cpu")


def _resolve_config(config: EngineConfig, flags: Mapping[str, Any], device: torch.device) -> EngineConfig:
    """What the device decides where the user did not: steps overlap only where the device computes by itself."""
    on_cpu = device.type == "cpu"
    if "async_scheduling" not in flags:
        config = replace(config, async_scheduling=not on_cpu)
    if on_cpu and config.kv_cache_memory_bytes is None:
        config = replace(config, kv_cache_memory_bytes=min(CPU_KV_BYTES, free_memory_bytes() // CPU_KV_SHARE))
    return config


# -- the plan ------------------------------------------------------------------------------------------------------


def resolve_plan(spec: ModelSpec, config: EngineConfig, device: torch.device, dtype: str) -> Plan:
    """The plan that start-up follows; a PlanError says by how much it does not fit, and the longest that would."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        if dtype not in ("auto", "float32"):
            raise ConfigError(
                f"--dtype {dtype}: CPUs compute in float32 here, other types are far slower; leave it out"
            )
        return make_plan(spec, config, gpu="cpu")
    import torch

    card = torch.cuda.get_device_properties(device)
    if dtype != "auto":
        spec = replace(spec, dtype=dtype)
    plan = make_plan(spec, config, gpu_memory_bytes=card.total_memory)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    assert plan.capacity is not None and plan.budget is not None
    need_bytes = plan.capacity.arena_bytes + plan.budget.weights_bytes + plan.budget.activation_bytes
    if need_bytes > free_bytes:
        share = 0.95 * free_bytes / card.total_memory
        raise PlanError(
            f"the plan needs {format_bytes(need_bytes)} and {format_bytes(free_bytes)} of {card.name} are free; "
            f"try --gpu-memory-utilization {share:.2f}"
        )
    return replace(plan, device=Device(card.name, card.total_memory, (card.major, card.minor)))


def free_memory_bytes() -> int:
    """Memory that this process could still take, by the kernel's estimate and the container's limit."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free.append(max(0, int(limit[0]) - int(used[0])))
    return min(free)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# -- what is told --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Account:
    """One line of the books: what the plan said and what was taken."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    note: str = ""


def accounts(started: Started) -> list[Account]:
    """Weights and arena as they lie on the device; KV groups as the manager hands them to one longest sequence."""
    plan, runner = started.plan, started.runner
    assert plan.capacity is not None
    length, layout = plan.max_model_len, plan.sizing.layout
    arena_bytes = runner.arena.numel() * runner.arena.element_size()
    count = plan.capacity.sequences(length)
    rows = [
        Account("weights", plan.sizing.weights_bytes, runner.weights_bytes, plan.sizing.compute_dtype),
        Account("KV arena", plan.capacity.arena_bytes, arena_bytes, f"{count} × {length:,} tokens, each:"),
    ]
    measured_activations = getattr(runner, "activation_bytes", None)
    if measured_activations is not None and plan.budget is not None:
        predicted = plan.budget.activation_bytes
        rows.insert(1, Account("activations", predicted, measured_activations, "of the largest step"))
    handed_out = _rehearse(layout, plan.capacity.num_slabs, length)
    for group, measured in zip(layout.groups, handed_out, strict=True):
        stored = group.kv_format.name if group.kv_format else "state"
        predicted = group.max_pages(length) * group.page_bytes
        rows.append(Account(f"  {group.name}", predicted, measured, f"{group.layers} layers, {stored}"))
    return rows


def _rehearse(layout: Layout, num_slabs: int, length: int) -> list[int]:
    """Bytes per group that the manager really hands to a sequence that is prefilled and then decodes up to `length`."""
    manager = KVManager(layout, num_slabs, 1, length)
    manager.start(0, length)
    decoded = 2 * max((g.block_tokens or 1) for g in layout.groups)  # enough for windows to lie across blocks
    for reached in range(max(1, length - decoded), length + 1):
        manager.extend(0, reached)
    return [manager.group_bytes(g).live for g in range(len(layout.groups))]


def print_start(console: Console, started: Started) -> None:
    from rich.table import Table

    from windowpane.plan.report import print_trimmed

    plan, config = started.plan, started.plan.sizing.config
    assert plan.device is not None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("", "predicted", "measured", ""):
        table.add_column(name, justify="right" if name in ("predicted", "measured") else "left", no_wrap=True)
    for row in accounts(started):
        table.add_row(f"  {row.name}", format_bytes(row.predicted_bytes), format_bytes(row.measured_bytes), row.note)
    console.print(f"{started.spec.name} on {plan.device.name}", style="bold", highlight=False)
    print_trimmed(console, table)
    chosen = f" ({plan.max_model_len_note})" if plan.max_model_len_note else ""
    steps = "overlapping" if config.async_scheduling else "one at a time"
    console.print(f"{flag('max_model_len')} {plan.max_model_len}{chosen}; steps {steps}", style="dim", highlight=False)


def busy(console: Console | None, what: str) -> AbstractContextManager[object]:
    """A spinner beside what may take a second or two."""
    return nullcontext() if console is None or not console.is_terminal else console.status(what)


@contextmanager
def _progress(
    console: Console | None, what: str, *, bytes_unit: bool = True
) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar that goes away when it is done; nothing where there is no terminal to draw it on."""
    if console is None or not console.is_terminal:
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    amount = DownloadColumn(binary_units=True) if bytes_unit else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)
