"""From what the user typed to an engine that runs: the model, the flags, the plan, and then exactly what it says.

The plan comes first, from the code behind `windowpane plan`, and refuses what cannot fit before a byte is loaded. What
was really taken is printed beside it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowpane.engine.accounts import print_accounts
from windowpane.engine.devices import check_host_memory, resolve_config, resolve_devices, resolve_plan
from windowpane.engine.find import find_drafter, find_model, text_source
from windowpane.engine.options import StartOptions, read_flags
from windowpane.engine.progress import busy
from windowpane.engine.ranks import StartedRanks, start_ranks
from windowpane.engine.sleep import Sleeper
from windowpane.garbage import uncollected
from windowpane.kv.disk import DiskStore
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.tier import HostTier
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import ONLY_RANK
from windowpane.plan.planner import Plan
from windowpane.plan.sizes import parse_gib
from windowpane.schedule.adapters import AdapterSlots
from windowpane.schedule.pace import Pace
from windowpane.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from rich.console import Console

    from windowpane.drafts.config import DraftConfig
    from windowpane.drafts.drafter import Drafter
    from windowpane.drafts.speculator import Speculator
    from windowpane.engine.engine import Engine
    from windowpane.lowering.scales import Calibration
    from windowpane.parallel.job import RankJob, RankReport
    from windowpane.parallel.launch import Launcher, Workers
    from windowpane.parallel.runner import ParallelRunner
    from windowpane.runners.cuda import CudaRunner
    from windowpane.runners.plain import Runner


@dataclass(slots=True)
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
    disk: DiskStore | None = None
    sleeper: Sleeper = field(init=False)

    def close(self) -> None:
        """End the other ranks, and finish what is being written to disk. The engine runs no more then."""
        if self.disk is not None:
            self.disk.close()
        if self.workers is not None:
            self.workers.close()

    @property
    def spec(self) -> ModelSpec:
        return self.plan.sizing.spec

    @property
    def text_source(self) -> Path | None:
        """Where the model's tokenizer lies, if it has one."""
        return text_source(self.source)


def start(
    model: str | Path | None,
    flags: Mapping[str, Any],
    console: Console | None = None,
    make_launcher: Callable[[], Launcher] | None = None,
) -> Started:
    """Plan, load and start. Raises ValueError with one line for whoever gave a flag that cannot be honoured.

    Ranks that `make_launcher` runs elsewhere have a device each that is called as this one's own.
    """
    with uncollected():
        return _start(model, flags, console, make_launcher)


def _start(
    model: str | Path | None,
    flags: Mapping[str, Any],
    console: Console | None,
    make_launcher: Callable[[], Launcher] | None,
) -> Started:
    options, config = read_flags(flags)
    with busy(console, "looking at the model"):
        spec, source = find_model(model, options)
        spec, drafter_source = find_drafter(spec, config.drafting, options)

    from windowpane.engine.adapters import EngineAdapters
    from windowpane.engine.engine import Engine
    from windowpane.engine.sampler import Sampler
    from windowpane.models.running import runnable

    runnable(spec)  # what cannot be run is refused before a byte is loaded
    num_ranks = config.tensor_parallel_size or 1
    if make_launcher is None:
        devices = resolve_devices(options.device, num_ranks)
    else:
        devices = resolve_devices(options.device, 1) * num_ranks
        if config.kv_disk_path is not None:
            raise ValueError("--kv-disk-path needs all ranks on one machine, and replicas spread them; leave it out")
    runnable(spec, on_gpu=devices[0].type == "cuda")
    if spec.drafter is not None and len(devices) > 1 and devices[0].type == "cuda":
        raise ValueError("--speculative-config: models draft on one GPU or on CPUs so far; use method 'ngram'")
    config = resolve_config(config, flags, devices)
    check_host_memory(config)
    plan = resolve_plan(spec, config, devices, options.dtype)
    config = plan.sizing.config  # --fit may ask for more sequences
    assert plan.capacity is not None
    sizes = (plan.capacity.num_slabs, config.max_num_seqs, plan.max_model_len)
    manager = KVManager(plan.sizing.layout, *sizes, plan.sizing.rollback_tokens)
    points = RestorePoints(manager) if config.enable_prefix_caching else None
    tier = None
    if points is not None and plan.sizing.host.num_slabs:
        tier = HostTier(points, plan.sizing.host.num_slabs)
    pace = Pace(config.max_itl_ms / 1e3) if config.max_itl_ms else None
    slots = AdapterSlots(config.max_loras) if config.enable_lora else None
    scheduler = Scheduler(
        manager, config.batched_tokens, restore_points=points, pace=pace, draft_tokens=config.draft_tokens,
        tier=tier, adapter_slots=slots,
    )  # fmt: skip
    job = _job(plan, options, source, drafter_source)

    def launched(shown_on: Console | None) -> StartedRanks:
        return start_ranks(job, devices, shown_on, None if make_launcher is None else make_launcher())

    ranks = launched(console)
    disk = None if tier is None else _disk(tier, plan, source, options, ranks)
    sampler = Sampler(spec.vocab_size, devices[0], options.seed)
    speculator = None if config.drafting is None else _speculator(config.drafting, ranks.together)
    adapters = None
    if slots is not None and ranks.own.adapters is not None:
        place = ONLY_RANK if ranks.workers is None else ranks.workers.group.place
        read = partial(job.read_adapter, place=place)
        adapters = EngineAdapters(ranks.own.adapters, slots, read, ranks.workers, tier)
    engine = Engine(
        scheduler, ranks.together, sampler, async_scheduling=config.async_scheduling, speculator=speculator,
        adapters=adapters,
    )  # fmt: skip
    if disk is not None:
        weakref.finalize(engine, disk.close)
    if console is not None:
        print_accounts(console, plan, ranks.reports)
    started = Started(engine, ranks.own, plan, source, ranks.reports, ranks.workers, disk)
    started.sleeper = Sleeper(started, lambda: launched(None))
    return started


def _disk(
    tier: HostTier, plan: Plan, source: Path | None, options: StartOptions, ranks: StartedRanks
) -> DiskStore | None:
    """Restore points of all ranks on disk, if they were asked for."""
    sizing, config = plan.sizing, plan.sizing.config
    if config.kv_disk_path is None:
        return None
    made_of = (sizing.spec.name, sizing.compute_dtype, ranks.own.device.type, sizing.layout, len(ranks.reports))
    weights = options.seed if options.load_format == "dummy" or source is None else _files(source)
    fingerprint = hashlib.sha256(repr((made_of, weights)).encode()).hexdigest()
    handles = [report.host for report in ranks.reports[1:]]
    others = [handle.map() for handle in handles if handle is not None]
    if len(others) < len(handles):
        raise ValueError("--kv-disk-path with several ranks needs Linux, where one rank can map another's host memory")
    memories = [ranks.own.pages.host.memory.numpy(), *(pages for pages, _ in others)]
    path = Path(config.kv_disk_path).expanduser()
    marks = [marks for _, marks in others]
    disk = DiskStore(path, parse_gib(config.kv_disk_size), fingerprint, sizing.layout, memories, marks)
    tier.use_disk(disk)
    return disk


def _files(source: Path) -> list[tuple[str, int, int]]:
    """What tells one checkpoint from another without reading it: names, sizes and times of its files."""
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _speculator(config: DraftConfig, runner: Runner | CudaRunner | ParallelRunner) -> Speculator:
    from windowpane.drafts.speculator import Speculator

    return Speculator(drafter_of(config, runner), config.num_speculative_tokens)


def drafter_of(config: DraftConfig, runner: Runner | CudaRunner | ParallelRunner) -> Drafter:
    """The runner's own model that drafts, if it has one; else n-grams do."""
    from windowpane.drafts.drafter import ModelDrafter
    from windowpane.drafts.ngram import NgramDrafter

    return NgramDrafter(*config.ngram_tokens) if runner.drafter is None else ModelDrafter(runner.drafter)


def _job(plan: Plan, options: StartOptions, source: Path | None, drafter_source: Path | None) -> RankJob:
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
        draft_tokens=config.draft_tokens,
        host_slabs=plan.sizing.host.num_slabs,
        drafter_source=drafter_source,
        use_graphs=not config.enforce_eager,
        use_chain=config.enable_layer_chain,
        need_bytes=plan.capacity.arena_bytes + plan.budget.before_kv_bytes - plan.budget.runtime_bytes,
        adapter_room=config.adapter_room,
        leaves_snapshots=config.enable_prefix_caching,
        calibration=_calibration(plan, source, options.load_format),
    )


def _calibration(plan: Plan, source: Path | None, load_format: str) -> Calibration:
    """What coded KV formats can know of a model before it runs."""
    from windowpane.lowering.scales import Calibration, warm_up_text
    from windowpane.text.tokenizer import load_tokenizer
    from windowpane.weights import load_kv_scales

    formats = [group.kv_format for group in plan.sizing.layout.groups]
    if not any(fmt is not None and fmt.family != "float" for fmt in formats):
        return Calibration()
    text = text_source(source)
    tokens = load_tokenizer(text).encode(warm_up_text()) if text is not None else ()
    return Calibration(load_kv_scales(source, plan.sizing.spec, load_format), tokens)
