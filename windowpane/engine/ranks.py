"""Start-up of all ranks, this one included: weights everywhere, then runners everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from windowpane.engine.progress import busy, progress_bar

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from windowpane.lowering.group import RankGroup
    from windowpane.parallel.job import RankJob, RankReport
    from windowpane.parallel.launch import Launcher, Workers
    from windowpane.parallel.runner import ParallelRunner
    from windowpane.runners.cuda import CudaRunner
    from windowpane.runners.plain import Runner


class StartedRanks(NamedTuple):
    """`own` is rank 0's runner, in this process; `together` runs a step on all ranks. `workers` are the other ranks."""

    own: Runner | CudaRunner
    together: Runner | CudaRunner | ParallelRunner
    reports: tuple[RankReport, ...]
    workers: Workers | None


def start_ranks(
    job: RankJob, devices: Sequence[torch.device], console: Console | None, launcher: Launcher | None = None
) -> StartedRanks:
    """Load everywhere, then make runners everywhere; what one rank cannot do ends the others."""
    from windowpane.lowering.group import ALONE
    from windowpane.parallel.job import RankReport

    if len(devices) == 1:
        runner = _own_runner(job, devices[0], ALONE, console, None)
        return StartedRanks(runner, runner, (RankReport.of(runner),), None)
    import torch

    from windowpane.parallel.launch import RankRefused, Workers, threads_per_rank
    from windowpane.parallel.messages import Load, Ready
    from windowpane.parallel.runner import ParallelRunner

    with busy(console, f"starting {len(devices)} ranks"):
        workers = Workers(devices, launcher)
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
    return StartedRanks(runner, parallel, (RankReport.of(runner), *others), workers)


def _own_runner(
    job: RankJob, device: torch.device, group: RankGroup, console: Console | None, workers: Workers | None
) -> Runner | CudaRunner:
    """This rank's part of start-up. Runners are made together, so it waits until every rank has loaded."""
    from windowpane.parallel.messages import Loaded, Start

    with progress_bar(console, "making weights" if job.load_format == "dummy" else "loading weights") as progress:

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
    with progress_bar(None if device.type == "cpu" else console, "capturing graphs", bytes_unit=False) as progress:
        counted = None if progress is None else lambda done, total: progress("", done, total)
        runner = job.make_runner(weights, device, group, counted)
    with busy(console, "running the largest step once"):
        job.rehearse(runner)
    return runner
