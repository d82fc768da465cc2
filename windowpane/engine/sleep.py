"""Sleep: an idle engine gives its memory back to the machine, and takes it again when it is woken.

Level 1 drops what the KV arena holds; on a CPU the weights stay, and the arena's memory is given back in place. On a
GPU, whose graphs know every address, and at level 2 everywhere, the runner goes as a whole: weights, arena and graphs.
Waking then loads it anew, from the same files.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from windowpane.device import heap

if TYPE_CHECKING:
    import torch

    from windowpane.engine.ranks import StartedRanks
    from windowpane.engine.start import Started
    from windowpane.lowering.adapters import Pair

LEVELS = (1, 2)
_OF_FILES = getattr(mmap, "MADV_REMOVE", mmap.MADV_DONTNEED)  # Linux alone has the first


class Sleeper:
    """For the thread that owns the engine, between steps. `restart` makes the runner anew."""

    def __init__(self, started: Started, restart: Callable[[], StartedRanks]) -> None:
        self._started = started
        self._restart = restart
        self.level = 0  # awake
        self._adapters: dict[int, dict[str, Pair]] = {}  # those of a runner that is gone

    def check(self, level: int) -> None:
        """Raises ValueError for what cannot be done here. Any thread may ask."""
        if level not in LEVELS:
            raise ValueError(f"level is 1 (KV is dropped) or 2 (weights too), not {level}")
        if self._started.workers is not None:
            raise ValueError("an engine of several ranks cannot sleep; stop the server and start it again")
        if self._started.disk is not None and not self._stays(level):
            raise ValueError(
                "an engine with --kv-disk-path sleeps on a CPU and at level 1 only: files are written from the host "
                "tier, which would go"
            )

    def sleep(self, level: int) -> int:
        """Returns the bytes that were given back. The engine must be idle; one that sleeps already gives none."""
        if self.level:
            return 0
        started = self._started
        assert not started.engine.has_work
        started.engine.scheduler.drop_restore_points()
        started.engine.scheduler.forget_restore_points()  # the device's last ones, if any were still being written
        [report] = started.reports
        self.level = level
        if self._stays(level):
            pages = started.runner.pages
            host_bytes = _give_back(pages.host.memory, _OF_FILES) if started.disk is None else 0
            return _give_back(pages.arena, mmap.MADV_DONTNEED) + host_bytes
        host_bytes = started.runner.pages.host.memory.numel()
        del started.runner, started.engine.runner
        if started.engine.adapters is not None:
            self._adapters = started.engine.adapters.leave()
        if started.engine.speculator is not None:
            del started.engine.speculator.drafter  # models that draft are the runner's
        _collect()
        return report.weights_bytes + report.arena_bytes + report.adapter_bytes + host_bytes

    def _stays(self, level: int) -> bool:
        """Whether the runner does, with all but the arena's memory."""
        return level == 1 and self._started.runner.device.type == "cpu"

    def wake(self) -> None:
        started = self._started
        if not hasattr(started, "runner"):
            ranks = self._restart()
            started.runner, started.engine.runner = ranks.own, ranks.together
            if started.engine.adapters is not None:
                assert ranks.own.adapters is not None
                started.engine.adapters.enter(ranks.own.adapters, self._adapters)
                self._adapters = {}
            if started.engine.speculator is not None:
                from windowpane.engine.start import drafter_of

                drafting = started.plan.sizing.config.drafting
                assert drafting is not None
                started.engine.speculator.drafter = drafter_of(drafting, ranks.together)
            gc.freeze()
        self.level = 0


def _give_back(memory: torch.Tensor, advice: int) -> int:
    """The memory of whole pages of the system's, whose addresses stay; they are zeros when they are next touched.

    What is a file's, as host pages are, goes by `_OF_FILES`: else the file would keep it.
    """
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.numel() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if size > 0 and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
    return max(size, 0)


def _collect() -> None:
    """A server freezes what it started with, which a collection would pass over."""
    import torch

    gc.unfreeze()
    gc.collect()
    heap.give_back()  # the C library may have cut the arena out of memory that was freed before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
