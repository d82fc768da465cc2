"""Grammar workers as the server sees them: who compiles what, who follows which answer, and what happens when one dies.

One shared worker compiles plain schemas (`plain_schema`) when their first answer begins. Every other grammar is
compiled by a worker of its own first. Most take a millisecond: the shared worker compiles them again
and follows their answers. One that took long stays where it is, so that nobody else waits for it. A worker that dies
while it compiles costs that request; the shared one's answers are taken up again by its successor, all but the one that
killed it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windowpane.text.grammar_worker import (
    MASK_ROWS,
    Compiled,
    CompileOrder,
    Encode,
    Limits,
    MaskOrder,
    Masks,
    Row,
    Source,
    Words,
    mask_words,
)

COMPILE_CPU_S = 3.0
MASK_CPU_S = 0.3  # of one step's masks, and what each of them adds to it:
MASK_ROW_CPU_S = 0.02
SHARED_COMPILE_CPU_S = 0.02  # what took longer is never compiled while others wait for their masks
WALL_S = 60.0  # for a machine that is so busy that processor time hardly passes
COMPILE_LIMITS = Limits(memory_bytes=512 * 2**20, niceness=5)
SHARED_LIMITS = Limits(memory_bytes=4 * 2**30, niceness=0)
COMPILERS = 8  # at once; more than cores, so that quick grammars get past slow ones
OWN_WORKERS = 16  # grammars that took long, in use at once
CACHED_GRAMMARS, CACHED_BYTES = 256, 32 * 2**20  # what came of them, and of their sources

_KEEPER = "import sys; sys.path[:] = {path!r}; from windowpane.text.grammar_worker import keep; keep({fd})"


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why."""


class TooManyGrammars(GrammarError):
    """It could be used at another time."""


class WorkerDied(Exception):
    """A worker ended in the middle of an order; the message says why."""


class WorkerHandle:
    """A worker's process: one order at a time, from whichever thread."""

    def __init__(self, keeper: Keeper, pid: int, fds: Sequence[int], words: int) -> None:
        self._keeper = keeper
        self._pid = pid
        self._connection = Connection(fds[0])
        self._memory = mmap(fds[1], 0)
        os.close(fds[1])
        self.masks = np.frombuffer(self._memory, dtype=np.uint32).reshape(MASK_ROWS, words)
        self._end: str | None = None
        self.grammars: set[int] = set()  # those it knows
        # Filled whenever answers and grammars are collected, in any thread.
        self.ended: deque[int] = deque()
        self.forgotten: deque[int] = deque()

    @property
    def is_alive(self) -> bool:
        """Between orders a worker says nothing, unless it is its end."""
        try:
            return not self._connection.poll(0)
        except OSError:
            return False

    def send(self, order: CompileOrder | MaskOrder) -> None:
        try:
            self._connection.send(order)
        except OSError:
            raise WorkerDied(self.end()) from None

    def receive(self) -> Any:
        """What came of the order. Meanwhile the worker may ask for tokens."""
        try:
            while self._connection.poll(WALL_S):
                reply = self._connection.recv()
                if not isinstance(reply, Encode):
                    return reply
                self._connection.send(self._keeper.encode(reply.text))
        except (EOFError, OSError):
            pass
        raise WorkerDied(self.end())

    def end(self) -> str:
        """Be gone, however busy; says why it was if it had ended by itself."""
        if self._end is None:
            self._connection.close()
            self._end = _why(self._keeper.end(self._pid))
        return self._end


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return "it takes too much processor time"
    if code == -signal.SIGABRT:
        return f"it takes more than {COMPILE_LIMITS.memory_bytes // 2**20} MiB of memory"
    if code == -signal.SIGKILL:
        return "it takes too long, or too much memory"
    return "it is nested, chained or repeated too deeply"


class Keeper:
    """The process that forks workers. `encode` is what they ask: the tokens of a text, none of them special."""

    def __init__(self, words: Words, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode
        self._words = mask_words(len(words.tokens))
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = _KEEPER.format(path=sys.path, fd=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._orders = Connection(os.dup(self._socket.fileno()))
        self._process = process
        self.close = weakref.finalize(self, _close, self._orders, self._socket, process)
        self._orders.send(words)
        self._orders.recv()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, limits: Limits) -> WorkerHandle:
        with self._lock:
            self._orders.send(limits)
            pid, fds, _, _ = socket.recv_fds(self._socket, 8, 2)
        if len(fds) != 2:
            raise EOFError("the keeper of grammar workers is gone")
        return WorkerHandle(self, int.from_bytes(pid, "little"), fds, self._words)

    def end(self, pid: int) -> int:
        try:
            with self._lock:
                self._orders.send(pid)
                code: int = self._orders.recv()
                return code
        except (EOFError, OSError):
            return -signal.SIGKILL  # the keeper is gone, and took its workers along


def _close(orders: Connection, asking: socket.socket, process: subprocess.Popen[bytes]) -> None:
    orders.close()
    asking.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class PooledGrammar:
    """A grammar that has been compiled. `own` is its worker where it is not the shared one's business."""

    def __init__(self, id: int, source: Source, own: WorkerHandle | None) -> None:
        self.id = id
        self.source = source
        self.own = own


class PooledAnswer:
    """Where one answer stands: all its tokens, and how many of them its worker knows."""

    def __init__(self, id: int, grammar: PooledGrammar) -> None:
        self.id = id
        self.grammar = grammar
        self.tokens: list[int] = []
        self.worker: WorkerHandle | None = None  # the one that knows it
        self.sent = 0
        self.may_stop = True
        self.mask: NDArray[np.uint32] | None = None
        self.error: str | None = None

    def row(self, worker: WorkerHandle) -> Row:
        is_new = self.worker is not worker
        if is_new:
            self.worker, self.sent = worker, 0
        grammar = self.grammar
        source = grammar.source if is_new and grammar.id not in worker.grammars else None
        worker.grammars.add(grammar.id)
        tokens = self.tokens[self.sent :]
        self.sent = len(self.tokens)
        return Row(self.id, grammar.id, source, is_new, tokens, self.may_stop)

    @property
    def followed(self) -> PooledAnswer:
        """The one that its worker follows."""
        return self

    def ahead(self, tokens: Sequence[int]) -> PooledAnswer:
        """The same behind these tokens, as long as it takes to ask for one mask."""
        return _Ahead(self, tokens)


class _Ahead(PooledAnswer):
    """An answer as it would be behind some drafts. Its worker looks ahead from where the answer itself stands."""

    def __init__(self, answer: PooledAnswer, tokens: Sequence[int]) -> None:
        super().__init__(answer.id, answer.grammar)
        self._followed = answer
        self._ahead = tuple(tokens)

    @property
    def followed(self) -> PooledAnswer:
        return self._followed

    def row(self, worker: WorkerHandle) -> Row:
        return self._followed.row(worker)._replace(ahead=self._ahead, may_stop=self.may_stop)


class _Cache:
    """What came of the sources asked for last: so many, and together no more than so many bytes of them.

    What is refused is kept as its reason: an error would hold the frames of everybody that it was raised for.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Source, PooledGrammar | str] = OrderedDict()
        self._sizes: dict[Source, int] = {}

    def find(self, source: Source) -> PooledGrammar | str | None:
        found = self._found.get(source)
        if found is not None:
            self._found.move_to_end(source)
        return found

    def add(self, source: Source, result: PooledGrammar | str) -> None:
        self._found[source], self._sizes[source] = result, source.size_bytes
        while len(self._found) > CACHED_GRAMMARS or sum(self._sizes.values()) > CACHED_BYTES:
            self.drop(next(iter(self._found)))

    def drop(self, source: Source) -> None:
        self._found.pop(source, None)
        self._sizes.pop(source, None)

    def drop_own(self) -> None:
        """Forget grammars that have a worker of their own, which ends once no request holds them."""
        owning = [s for s, found in self._found.items() if isinstance(found, PooledGrammar) and found.own is not None]
        for source in owning:
            self.drop(source)

    def clear(self) -> None:
        self._found.clear()
        self._sizes.clear()


class GrammarPool:
    """Compiles sources and answers for masks. Any thread may compile; answers are one thread's business at a time."""

    def __init__(self, words: Callable[[], Words], encode: Callable[[str], list[int]]) -> None:
        self._words = words
        self._encode = encode
        self._keeper: Keeper | None = None
        self._lock = threading.RLock()
        self._compilers = threading.BoundedSemaphore(COMPILERS)
        self._idle: list[WorkerHandle] = []
        self._own = 0
        self._unused: deque[WorkerHandle] = deque()  # own workers of grammars that are gone; filled in any thread
        self._ids = count()
        self._cache = _Cache()
        self._shared: WorkerHandle | None = None
        self._asked: list[PooledAnswer] = []

    def start(self) -> Keeper:
        """The keeper, started if there is none."""
        with self._lock:
            if self._keeper is None:
                self._keeper = Keeper(self._words(), self._encode)
            return self._keeper

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            if self._keeper is not None:
                self._keeper.close()
            self._keeper, self._shared = None, None
            self._idle.clear()
            self._cache.clear()

    def _fork(self, limits: Limits) -> WorkerHandle:
        try:
            return self.start().fork(limits)
        except (EOFError, OSError):
            if not self._lost_keeper():
                raise
            return self.start().fork(limits)

    def _lost_keeper(self) -> bool:
        """Whether the keeper was killed from outside, and all workers with it: a new one may fare better."""
        with self._lock:
            lost = self._keeper is None or not self._keeper.is_alive
            if lost:
                self.close()
            return lost

    # -- compiling -------------------------------------------------------------------------------------------------

    def compile(self, source: Source) -> PooledGrammar:
        """Ready to be followed; from the cache where it is there. Raises GrammarError."""
        with self._lock:
            known = self._cache.find(source)
        if known is None and source.is_plain_schema:
            known = self._plain(source)
        elif known is None:
            with self._compilers:
                known = self._try(source)
        if isinstance(known, str):
            raise GrammarError(known)
        return known

    def _plain(self, source: Source) -> PooledGrammar:
        self.start()
        grammar = self._of_shared(next(self._ids), source)
        with self._lock:
            self._cache.add(source, grammar)
        return grammar

    def _try(self, source: Source) -> PooledGrammar | str:
        """Compile, and remember what came of it: what is refused once must not cost as much again."""
        try:
            result: PooledGrammar | str = self._compile(source)
        except TooManyGrammars:
            raise
        except GrammarError as error:
            result = str(error)
        with self._lock:
            self._cache.add(source, result)
        return result

    def _compile(self, source: Source) -> PooledGrammar:
        with self._lock:
            self._end_unused()
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.is_alive:
            worker = self._fork(COMPILE_LIMITS)
        id = next(self._ids)
        try:
            worker.send(CompileOrder(id, source, COMPILE_CPU_S))
            compiled: Compiled = worker.receive()
        except WorkerDied as death:
            if self._lost_keeper():
                return self._compile(source)
            raise GrammarError(f"{death}; make it smaller") from None
        if compiled.error is None and compiled.cpu_s > SHARED_COMPILE_CPU_S:
            return self._keep_own(id, source, worker)
        with self._lock:
            self._idle.append(worker)
        if compiled.error is not None:
            raise GrammarError(_reason(compiled.error))
        return self._of_shared(id, source)

    def _of_shared(self, id: int, source: Source) -> PooledGrammar:
        grammar = PooledGrammar(id, source, None)
        weakref.finalize(grammar, self._forget, id).atexit = False
        return grammar

    def _keep_own(self, id: int, source: Source, worker: WorkerHandle) -> PooledGrammar:
        with self._lock:
            if self._own >= OWN_WORKERS:  # those that no request holds can go
                self._cache.drop_own()
            self._end_unused()
            is_full = self._own >= OWN_WORKERS
            self._own += not is_full
        if is_full:
            worker.end()
            raise TooManyGrammars(
                f"{OWN_WORKERS} large grammars are in use already; try again later, or make it smaller"
            )
        worker.grammars.add(id)
        grammar = PooledGrammar(id, source, worker)
        weakref.finalize(grammar, self._unused.append, worker).atexit = False
        return grammar

    def _end_unused(self) -> None:
        while self._unused:
            self._unused.popleft().end()
            self._own -= 1

    def _forget(self, id: int) -> None:
        shared = self._shared
        if shared is not None:
            shared.forgotten.append(id)
            shared.grammars.discard(id)

    # -- following answers -----------------------------------------------------------------------------------------

    def answer(self, grammar: PooledGrammar) -> PooledAnswer:
        return PooledAnswer(next(self._ids), grammar)

    def ask(self, answer: PooledAnswer, may_stop: bool) -> None:
        """Its mask will be wanted: all that were asked for are computed together when the first is taken."""
        answer.may_stop, answer.mask = may_stop, None
        self._asked.append(answer)

    def take(self, answer: PooledAnswer) -> NDArray[np.uint32]:
        """The mask that was asked for; it holds until the next one is. Raises GrammarError."""
        if answer.mask is None and answer.error is None:
            asked, self._asked = self._asked, []
            for start in range(0, len(asked), MASK_ROWS):
                self._fill(asked[start : start + MASK_ROWS], keep=len(asked) > MASK_ROWS)
        if answer.error is not None:
            raise GrammarError(answer.error)
        assert answer.mask is not None
        return answer.mask

    def _fill(self, answers: Sequence[PooledAnswer], keep: bool) -> None:
        """Ask every worker concerned, then read what they say."""
        if any(answer.grammar.own is None for answer in answers) and not (self._shared and self._shared.is_alive):
            self._shared = self._fork(SHARED_LIMITS)
        batches: dict[WorkerHandle, list[PooledAnswer]] = {}
        for answer in answers:
            worker = answer.grammar.own or self._shared
            assert worker is not None
            batches.setdefault(worker, []).append(answer)
        lost = []
        for worker, batch in batches.items():
            try:
                worker.send(_order(worker, batch))
            except WorkerDied as death:
                lost.append((worker, batch, str(death)))
        for worker, batch in batches.items():
            if all(worker is not gone for gone, _, _ in lost):
                try:
                    _read(worker, batch, worker.receive(), keep)
                except WorkerDied as death:
                    lost.append((worker, batch, str(death)))
        for worker, batch, reason in lost:
            self._bury(worker, batch, reason)

    def _bury(self, worker: WorkerHandle, batch: Sequence[PooledAnswer], reason: str) -> None:
        """Who was alone with a worker that died has killed it. Of several, each goes on alone to show who did."""
        if worker is self._shared:
            self._shared = None
        is_own = worker is batch[0].grammar.own
        if is_own or (len(batch) == 1 and not self._lost_keeper()):
            with self._lock:
                for answer in batch:
                    self._cache.drop(answer.grammar.source)
                    answer.error = f"the grammar cannot go on: {reason}"
        else:
            for answer in batch:
                self._fill([answer], keep=True)


def _order(worker: WorkerHandle, batch: Sequence[PooledAnswer]) -> MaskOrder:
    rows = [answer.row(worker) for answer in batch]
    for answer, row in zip(batch, rows, strict=True):
        if row.is_new:
            weakref.finalize(answer.followed, worker.ended.append, answer.id).atexit = False
    ended = [worker.ended.popleft() for _ in range(len(worker.ended))]
    forgotten = [worker.forgotten.popleft() for _ in range(len(worker.forgotten))]
    return MaskOrder(rows, ended, forgotten, MASK_CPU_S + MASK_ROW_CPU_S * len(rows))


def _read(worker: WorkerHandle, batch: Sequence[PooledAnswer], masks: Masks, keep: bool) -> None:
    for index, answer in enumerate(batch):
        if index in masks.errors:
            answer.error = f"the grammar cannot go on: {_reason(masks.errors[index])}"
        else:
            answer.mask = worker.masks[index].copy() if keep else worker.masks[index]


def _reason(message: str) -> str:
    """The library's words, without the state of its parser."""
    reason = message.split("<state>")[0].replace("<non-verbose/>", "").strip()
    if reason == "NoExtensionBias":
        return "no text fits it"
    return reason if len(reason) <= 500 else reason[:500] + "…"
