"""Rank 0's side of the other ranks: starting their processes, talking to them, and noticing when one is gone.

A thread of its own reads what ranks answer, so that a rank that fails or dies is known at once, also while nothing
runs. Then all others are ended too: a model of which a part is missing computes nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Protocol, TypeVar

import torch

import windowpane
from windowpane.models.tensors import RankPlace
from windowpane.parallel.messages import Answer, Awake, Failed, Join, Order
from windowpane.parallel.process_group import HERE, ProcessGroup, backend_for, host_store

# How long a rank may take to end by itself before it is killed, and how long an error here waits to hear whether
# another rank caused it.
LEAVE_S = 2.0
EXPLAIN_S = 1.0

AnyAnswer = TypeVar("AnyAnswer", bound=Answer)


class RanksLost(RuntimeError):
    """A rank failed while the model ran: nothing can be computed any more. The message says which, and why."""


class RankRefused(ValueError):
    """A rank could not start; the message is its own."""


class RankProcess(Protocol):
    """Of `subprocess.Popen`, what is asked of a rank's process."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Where the ranks other than 0 run. `host` is rank 0's address to them; each has a card of its own or none."""

    host: str

    def backend(self, devices: Sequence[torch.device]) -> str: ...

    def spawn(self, rank: int, devices: Sequence[torch.device]) -> tuple[Connection, RankProcess]: ...

    def end(self) -> None:
        """Have all of them end, whatever they are waiting for."""


class Workers:
    """The processes of all ranks but this one, which is rank 0, and the group they form with it.

    `devices` has one device per rank, this one's first; unless a `launcher` runs them elsewhere, ranks are processes of
    this machine. Orders are for one thread; `close` and `when_lost` for any.
    """

    def __init__(self, devices: Sequence[torch.device], launcher: Launcher | None = None) -> None:
        self.devices = tuple(devices)
        self._launcher = launcher or LocalLauncher()
        self.lost: RanksLost | None = None
        self._group: ProcessGroup | None = None
        self._listeners: list[Callable[[RanksLost], None]] = []
        self._answers: list[deque[Answer]] = []
        self._refused = False  # a rank said what its user can do about it
        self._ending: int | None = None  # the thread that is ending them, or has, for whatever reason
        self._changed = threading.Condition(threading.RLock())
        self._pipes: list[Connection] = []
        self._processes: list[RankProcess] = []
        try:
            for rank in range(1, len(self.devices)):
                pipe, process = self._launcher.spawn(rank, self.devices)
                self._pipes.append(pipe)
                self._processes.append(process)
                self._answers.append(deque())
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            self.answers(Awake)
            self._group = self._join()
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> ProcessGroup:
        assert self._group is not None  # made before anybody has this object
        return self._group

    # -- talking ---------------------------------------------------------------------------------------------------

    def send(self, order: Order) -> None:
        """Tell every rank."""
        self.check()
        for pipe in self._pipes:
            pipe.send(order)

    def answers(self, kind: type[AnyAnswer]) -> list[AnyAnswer]:
        """The next answer of every rank, which is of this kind; waits for it. For start-up."""
        found: list[AnyAnswer] = []
        with self._changed:
            for answers in self._answers:
                self._changed.wait_for(lambda a=answers: a or self.lost is not None)  # type: ignore[misc]
                self.check()
                answer = answers.popleft()
                assert isinstance(answer, kind), f"{answer} is not the {kind.__name__} that was waited for"
                found.append(answer)
        return found

    def check(self) -> None:
        """Raise what has become of a rank, if anything has."""
        if self.lost is not None:
            raise RankRefused(str(self.lost)) if self._refused else self.lost

    def when_lost(self, listener: Callable[[RanksLost], None]) -> None:
        """Call this, from a thread of its own, as soon as a rank is lost."""
        with self._changed:
            self._listeners.append(listener)
            lost = self.lost
        if lost is not None:
            listener(lost)

    def explain(self, error: BaseException) -> RanksLost:
        """What an error of this rank's, in the middle of a step, comes to. All ranks are lost with it.

        Usually another rank is gone and this one noticed in a collective; otherwise it failed by itself, and the others
        wait in vain.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ending is not None, EXPLAIN_S)
        self._lose(f"rank 0 failed: {type(error).__name__}: {error}")
        assert self.lost is not None
        return self.lost

    def close(self) -> None:
        """End all ranks; returns when they are gone. May be called again."""
        self._lose("the engine was closed", told=False)

    # -- processes -------------------------------------------------------------------------------------------------

    def _join(self) -> ProcessGroup:
        backend, ranks, host = self._launcher.backend(self.devices), len(self.devices), self._launcher.host
        store, port = host_store(host)
        for index, pipe in enumerate(self._pipes):
            rank = index + 1
            pipe.send(Join(RankPlace(rank, ranks), str(self.devices[rank]), backend, host, port))
        return ProcessGroup(RankPlace(0, ranks), backend, store, host)

    def _watch(self) -> None:
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes, start=1)}
        while open_pipes:
            for pipe in wait(list(open_pipes)):
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    answer: Answer = pipe.recv()
                except (EOFError, OSError):
                    del open_pipes[pipe]
                    pipe.close()
                    self._gone(rank)
                    continue
                if isinstance(answer, Failed):
                    self._refused = answer.expected and self._ending is None
                    self._lose(f"rank {rank}: {answer.message}")
                    continue
                with self._changed:
                    self._answers[rank - 1].append(answer)
                    self._changed.notify_all()

    def _gone(self, rank: int) -> None:
        if self._ending is None:
            self._lose(f"rank {rank} {_how_it_ended(self._processes[rank - 1])}")

    def _lose(self, reason: str, *, told: bool = True) -> None:
        """End all ranks, then tell. The first reason counts: what ranks say after it is about one another."""
        with self._changed:
            if self._ending is not None:
                # Until another thread has ended them; this one may be back here from a finalizer.
                this = threading.get_ident()
                self._changed.wait_for(lambda: self.lost is not None or self._ending == this)
                return
            self._ending = threading.get_ident()
            self._changed.notify_all()
        self._end()
        if self._group is not None:
            self._group.abort()
        with self._changed:
            self.lost = RanksLost(reason)
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listener in listeners if told else ():
            listener(self.lost)

    def _end(self) -> None:
        self._launcher.end()
        deadline = time.monotonic() + LEAVE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class LocalLauncher:
    """Processes of this machine."""

    host = HERE

    def __init__(self) -> None:
        self._held_by_ranks, self._lifeline = os.pipe()  # ranks wait for its end, which comes with this process's

    def backend(self, devices: Sequence[torch.device]) -> str:
        return backend_for(devices)

    def spawn(self, rank: int, devices: Sequence[torch.device]) -> tuple[Connection, RankProcess]:
        ours, theirs = socketpair()
        lifeline = self._held_by_ranks
        with theirs:
            command = [sys.executable, "-P", "-m", "windowpane.parallel.worker", str(theirs.fileno()), str(lifeline)]
            # In a session of its own: what is typed at a terminal concerns rank 0 only.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # answers are written to stdout, and by rank 0 alone
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
                env=_environment(devices),
            )
        return Connection(ours.detach()), process

    def end(self) -> None:
        os.close(self._lifeline)
        os.close(self._held_by_ranks)


def _environment(devices: Sequence[torch.device]) -> dict[str, str]:
    """Ranks import this very package, and those that share a CPU share its cores."""
    package = str(Path(windowpane.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if devices[0].type == "cpu":
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(len(devices)))
    return environment


def threads_per_rank(ranks: int) -> int:
    return max(1, torch.get_num_threads() // ranks)


def _how_it_ended(process: RankProcess) -> str:
    try:
        code = process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        return "stopped answering"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
