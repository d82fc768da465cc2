"""From what the user typed to an engine that runs: the model, the flags, the plan, and then exactly what it says.

The plan comes first, from the code behind `windowpane plan`, and refuses what cannot fit before a byte is loaded. What
was really taken is printed beside it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowpane.kv.layout import Layout
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.models import load, shipped_repositories
from windowpane.models.embedded import DEFAULT_GENERATE, EMBEDDED, embedded_path
from windowpane.models.gguf import is_gguf
from windowpane.models.hub import Hub, parse_name
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import ConfigError, EngineConfig, flag
from windowpane.plan.memory import Device
from windowpane.plan.planner import Plan, make_plan
from windowpane.plan.sizes import format_bytes
from windowpane.schedule.pace import Pace
from windowpane.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from windowpane.engine.engine import Engine, StepRunner
    from windowpane.lowering.group import RankGroup
    from windowpane.lowering.scales import Calibration
    from windowpane.parallel.job import RankJob, RankReport
    from windowpane.parallel.launch import Workers
    from windowpane.runners.cuda import CudaRunner
    from windowpane.runners.plain import Runner

# A CPU shares its memory with everything else on the machine.
CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE = 4

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What the engine's own flags do not say: where to run, in which dtype, where weights come from, and the seed.

    `auto` is the first CUDA card or else the CPU; the model's own dtype, or float32 on a CPU; and whatever weights lie
    with the model. `dummy` makes random ones from the config alone. A model on the Hub is fetched at `revision` (None:
    its main branch) to `download_dir` (None: the shared cache).
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, the plan it follows, and where its model lies (None for a shape that came with the package).

    `runner` is rank 0's own; `reports` says what every rank has taken. `workers` are the other ranks, if there are any.
    """

    engine: Engine
    runner: Runner | CudaRunner
    plan: Plan
    source: Path | None
    reports: tuple[RankReport, ...]
    workers: Workers | None

    def close(self) -> None:
        """End the other ranks. The engine runs no more then; of one rank nothing has to be ended."""
        if self.workers is not None:
            self.workers.close()

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
        spec, source = find_model(model, options)

    from windowpane.engine.engine import Engine
    from windowpane.engine.sampler import Sampler
    from windowpane.lowering.recipe import read_recipe

    read_recipe(spec)  # what cannot be run is refused before a byte is loaded
    devices = resolve_devices(options.device, config.tensor_parallel_size or 1)
    config = _resolve_config(config, flags, devices)
    plan = resolve_plan(spec, config, devices, options.dtype)
    config = plan.sizing.config  # --fit may ask for more sequences
    assert plan.capacity is not None
    manager = KVManager(plan.sizing.layout, plan.capacity.num_slabs, config.max_num_seqs, plan.max_model_len)
    restore = RestorePoints(manager) if config.enable_prefix_caching else None
    pace = Pace(config.max_itl_ms / 1e3) if config.max_itl_ms else None
    scheduler = Scheduler(manager, config.batched_tokens, restore=restore, pace=pace)
    workers, runner, step_runner, reports = _start_ranks(_job(plan, options, source), devices, console)
    sampler = Sampler(spec.vocab_size, devices[0], options.seed)
    engine = Engine(scheduler, step_runner, sampler, async_scheduling=config.async_scheduling)
    started = Started(engine, runner, plan, source, reports, workers)
    if console is not None:
        print_start(console, started)
    return started


def _calibration(plan: Plan, source: Path | None, load_format: str) -> Calibration:
    """What coded KV formats can know of a model before it runs."""
    from windowpane.lowering.scales import Calibration, warm_up_text
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


def _job(plan: Plan, options: StartOptions, source: Path | None) -> RankJob:
    from windowpane.parallel.job import RankJob

    assert plan.capacity is not None and plan.budget is not None
    sizing, config = plan.sizing, plan.sizing.config
    return RankJob(
        spec=sizing.spec,
        source=source,
        load_format=options.load_format,
        seed=options.seed,
        dtype=sizing.compute_dtype,
        layout=sizing.layout,
        num_slabs=plan.capacity.num_slabs,
        num_slots=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        batched_tokens=config.batched_tokens,
        use_graphs=not config.enforce_eager,
        need_bytes=plan.capacity.arena_bytes + plan.budget.weights_bytes + plan.budget.activation_bytes,
        calibration=_calibration(plan, source, options.load_format),
    )


def _start_ranks(
    job: RankJob, devices: Sequence[torch.device], console: Console | None
) -> tuple[Workers | None, Runner | CudaRunner, StepRunner, tuple[RankReport, ...]]:
    """Load everywhere, then make runners everywhere; what one rank cannot do ends the others."""
    from windowpane.lowering.group import ALONE
    from windowpane.parallel.job import RankReport

    if len(devices) == 1:
        runner = _own_runner(job, devices[0], ALONE, console, None)
        return None, runner, runner, (RankReport.of(runner),)
    import torch

    from windowpane.parallel.launch import RankRefused, Workers, threads_per_rank
    from windowpane.parallel.messages import Load, Ready
    from windowpane.parallel.runner import ParallelRunner

    with busy(console, f"starting {len(devices)} ranks"):
        workers = Workers(devices)
    try:
        if devices[0].type == "cpu":
            torch.set_num_threads(threads_per_rank(len(devices)))
        workers.send(Load(job))
        runner = _own_runner(job, devices[0], workers.group, console, workers)
        with busy(console, "waiting for all ranks"):
            others = [ready.report for ready in workers.answers(Ready)]
    except RuntimeError as error:  # of another rank's end this one may hear in a collective first
        raise RankRefused(str(workers.explain(error))) from error
    except BaseException:
        workers.close()
        raise
    parallel = ParallelRunner(runner, workers)
    weakref.finalize(parallel, workers.close)
    return workers, runner, parallel, (RankReport.of(runner), *others)


def _own_runner(
    job: RankJob, device: torch.device, group: RankGroup, console: Console | None, workers: Workers | None
) -> Runner | CudaRunner:
    """This rank's part of start-up. Runners are made together, so it waits until every rank has loaded."""
    from windowpane.parallel.messages import Loaded, Start

    with _progress(console, "making weights" if job.load_format == "dummy" else "loading weights") as progress:

        def loaded(name: str, done_bytes: int, total_bytes: int) -> None:
            if workers is not None:
                workers.check()  # a rank that has failed is told now
            if progress is not None:
                progress(name, done_bytes, total_bytes)

        weights = job.load(device, group.place, loaded)
    if workers is not None:
        with busy(console, "waiting for all ranks"):
            workers.answers(Loaded)
        workers.send(Start())
    with _progress(None if device.type == "cpu" else console, "capturing graphs", bytes_unit=False) as progress:
        counted = None if progress is None else lambda done, total: progress("", done, total)
        runner = job.make_runner(weights, device, group, counted)
    with busy(console, "running the largest step once"):
        job.rehearse(runner)
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
    given = {name: value for name, value in flags.items() if name in engine}
    config = EngineConfig(**given)
    return StartOptions(**{name: value for name, value in flags.items() if name in options}), config


def find_model(model: str | Path | None, options: StartOptions) -> tuple[ModelSpec, Path | None]:
    """The shape of a model, and where it lies: None for a shape without weights. No model is the embedded default; a
    name on the Hub is fetched.
    """
    name = DEFAULT_GENERATE if model is None else str(model)
    path = Path(name)
    if path.exists():
        return load(path), path
    if options.load_format == "dummy":
        return load(name, revision=options.revision, download_dir=options.download_dir), None
    if name in EMBEDDED:
        embedded = embedded_path(name)
        return replace(load(embedded), name=name), embedded
    if hub_name := parse_name(name):
        fetched = Hub(revision=options.revision, cache_dir=options.download_dir).model(hub_name)
        return replace(load(fetched), name=name), fetched
    spec = load(name)
    raise ConfigError(
        f"{spec.name} is a shape without weights; give its directory or a GGUF file, its name on the Hub "
        f"({shipped_repositories()[spec.name]}), or --load-format dummy for random weights"
    )


def resolve_devices(name: str, ranks: int) -> tuple[torch.device, ...]:
    """One device per rank: cards one after another from the one that is named, or the CPU for all."""
    import torch

    first = resolve_device(name)
    if first.type == "cpu":
        return (first,) * ranks
    count = torch.cuda.device_count()
    if first.index + ranks > count:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} needs {ranks} CUDA devices from {first} on, and this machine has {count}; "
            f"the most is --tensor-parallel-size {count - first.index}"
        )
    return tuple(torch.device("cuda", first.index + rank) for rank in range(ranks))


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


def _resolve_config(config: EngineConfig, flags: Mapping[str, Any], devices: Sequence[torch.device]) -> EngineConfig:
    """What the device decides where the user did not: steps overlap only where the device computes by itself."""
    on_cpu = devices[0].type == "cpu"
    if "async_scheduling" not in flags:
        config = replace(config, async_scheduling=not on_cpu)
    if on_cpu and config.kv_cache_memory_bytes is None:
        kv_bytes = min(CPU_KV_BYTES, free_memory_bytes() // CPU_KV_SHARE)
        config = replace(config, kv_cache_memory_bytes=kv_bytes // len(devices))
    return config


# -- the plan ------------------------------------------------------------------------------------------------------


def resolve_plan(spec: ModelSpec, config: EngineConfig, devices: Sequence[torch.device], dtype: str) -> Plan:
    """The plan that every rank follows; a PlanError says by how much it does not fit, and the longest that would."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}")
    if devices[0].type == "cpu":
        if dtype not in ("auto", "float32"):
            raise ConfigError(
                f"--dtype {dtype}: CPUs compute in float32 here, other types are far slower; leave it out"
            )
        return make_plan(spec, config, gpu="cpu")
    import torch

    # Ranks are equal, so the smallest card decides.
    card = min(map(torch.cuda.get_device_properties, devices), key=lambda c: c.total_memory)
    if dtype != "auto":
        spec = replace(spec, dtype=dtype)
    plan = make_plan(spec, config, gpu_memory_bytes=card.total_memory)
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
    """One line of the books: what the plan said of each rank, and what each has taken."""

    name: str
    predicted_bytes: int
    rank_bytes: tuple[int, ...]
    note: str = ""

    @property
    def measured_bytes(self) -> int:
        return max(self.rank_bytes)


def accounts(started: Started) -> list[Account]:
    """Weights and arena as they lie on the device; KV groups as the manager hands them to one longest sequence."""
    plan, reports = started.plan, started.reports
    assert plan.capacity is not None
    length, layout = plan.max_model_len, plan.sizing.layout
    count = plan.capacity.sequences(length)
    weights_bytes = tuple(r.weights_bytes for r in reports)
    arena_bytes = tuple(r.arena_bytes for r in reports)
    rows = [
        Account("weights", plan.sizing.weights_bytes, weights_bytes, plan.sizing.compute_dtype),
        Account("KV arena", plan.capacity.arena_bytes, arena_bytes, f"{count} × {length:,} tokens, each:"),
    ]
    activations = tuple(r.activation_bytes for r in reports if r.activation_bytes is not None)
    if activations and plan.budget is not None:
        rows.insert(1, Account("activations", plan.budget.activation_bytes, activations, "of the largest step"))
    handed_out = _rehearse(layout, plan.capacity.num_slabs, length)
    for group, measured in zip(layout.groups, handed_out, strict=True):
        stored = group.kv_format.name if group.kv_format else "state"
        predicted = group.max_pages(length) * group.page_bytes
        each = (measured,) * len(reports)  # one manager keeps the books of all ranks
        rows.append(Account(f"  {group.name}", predicted, each, f"{group.layers} layers, {stored}"))
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
    ranks = len(started.reports)
    measured = ("measured",) if ranks == 1 else tuple(f"rank {rank}" for rank in range(ranks))
    for name in ("", "predicted", *measured, ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in accounts(started):
        table.add_row(f"  {row.name}", *map(format_bytes, (row.predicted_bytes, *row.rank_bytes)), row.note)
    where = plan.device.name if ranks == 1 else f"{ranks} ranks of {plan.device.name}"
    console.print(f"{started.spec.name} on {where}", style="bold", highlight=False)
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
