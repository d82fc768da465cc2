"""The engine loop: one thread owns the engine and turns its steps into text; the event loop only passes text on.

    event loop                                engine thread
    submit(job) ──────── commands ──────────► engine.queue
    cancel(job) ────────────────────────────► engine.cancel
    ask(question) ──────────────────────────► question(engine), between steps
                                              engine.step ─ detokenize ─ stop strings
    Mailbox.put ◄── one call per step ─────── pieces of every job

What crosses threads is handed over, never shared: commands in a queue, and pieces in one callback per step, however
many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

from windowpane.engine.engine import Engine, TokenOutput
from windowpane.parallel.launch import RanksLost
from windowpane.schedule.request import FinishReason, Request
from windowpane.server.job import Job, Piece, Times
from windowpane.server.journal import Journal
from windowpane.server.meter import Meter
from windowpane.server.metrics import Metrics
from windowpane.text.answer import Answer

T = TypeVar("T")
DELIVERED_AT_ONCE = 32  # pieces of text that one turn of the event loop hands out
Command = Callable[[], None]

log = logging.getLogger("windowpane.server")


class EngineDied(RuntimeError):
    """The engine thread has ended: no request can be served any more."""


@dataclass(slots=True, eq=False)
class _Choice:
    """A request inside the engine, and where what it says goes."""

    job: Job
    index: int
    answer: Answer
    times: Times
    preemptions: int = 0  # that the journal has


class EngineLoop:
    """Runs an engine in a thread of its own. All methods are for the event loop it was started on."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self.meter = Meter()
        self.journal = Journal()
        self._preemptions = 0  # of all requests, up to the last step
        self.error: BaseException | None = None
        self.jobs: set[Job] = set()  # submitted, not ended; the event loop's own
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._choices: dict[Request, _Choice] = {}  # the engine thread's own, as all that follow
        self._not_admitted: dict[Request, _Choice] = {}
        self._stopping = False
        self._closed = False  # commands are no longer taken; set and read under the lock
        self._coming = 0  # requests in commands that were not taken yet; under the lock too
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: deque[tuple[Job, Piece]] = deque()  # of the event loop's alone
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- for the event loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step it is in; what still runs is cancelled. Any thread may call this."""
        with suppress(EngineDied):
            self._send(self._stop)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def die(self, error: BaseException) -> None:
        """End the thread with this error, also where it waits for work. Any thread may call this."""
        with suppress(EngineDied):
            self._send(lambda: self._raise(error))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted, those included that the engine has not looked at yet."""
        return len(self.engine.scheduler.waiting) + self._coming

    def submit(self, job: Job) -> None:
        """Queue all requests of a job, which have passed `Engine.check`."""
        job.times = [Times(job.arrived) for _ in job.answers]
        self._send(lambda: self._add(job), requests=len(job.answers))
        self.jobs.add(job)

    def cancel(self, job: Job) -> None:
        """Nobody waits for this job any more. Doing it twice, or after its end, does no harm."""
        self.jobs.discard(job)
        if any(times.ended is None for times in job.times):
            with suppress(EngineDied):
                self._send(lambda: self._cancel(job))

    def cancel_for(self, caller: str | None, id: str) -> int:
        """End the jobs of this name, or with a request of it, whose clients wait and are told. How many there were.

        `caller` is whose they must be; None is anybody's.
        """
        found = [job for job in self.jobs if id in (job.id, *(request.id for request in job.requests))]
        mine = [job for job in found if caller is None or job.caller == caller]
        for job in mine:
            self._send(lambda job=job: self._cancel(job, tell=True))  # type: ignore[misc]
        return len(mine)

    def times_of(self, request: Request) -> Times | None:
        """The moments of a request that has not ended. For the engine's thread, as what `ask` asks."""
        choice = self._choices.get(request)
        return None if choice is None else choice.times

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What `question` finds in the engine between two steps; raises EngineDied where there are no more."""
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._send(lambda: self._answer(question, answered))
        return await answered

    async def drop_restore_points(self) -> int:
        """Give up what is only cached: how many there were."""
        return await self.ask(lambda engine: engine.scheduler.drop_restore_points())

    def _send(self, command: Command, requests: int = 0) -> None:
        with self._lock:
            if self._closed:
                raise EngineDied(f"the engine has stopped: {self.error or 'it was shut down'}")
            self._coming += requests
            self._commands.put(command)

    # -- the engine thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                while not self._commands.empty() or not self.engine.has_work:
                    self._commands.get()()  # waits where there is nothing else to do
                    if self._stopping:
                        break
                else:
                    self._step()
        except BaseException as error:
            trace = None if isinstance(error, RanksLost) else error  # it says all there is to say
            log.critical("the engine died: %s", error, exc_info=trace)
            self.error = error
        self._close()

    def _step(self) -> None:
        began, sent_tokens = time.monotonic(), self.engine.sent_tokens
        outputs = self.engine.step()
        now = time.monotonic()
        cpu_s = time.thread_time()
        self.meter.stepped(outputs)
        self.meter.remember(self.engine)
        if self._not_admitted:
            self._note_admitted(began)
        if self.engine.scheduler.preemptions != self._preemptions:
            self._note_preempted()
        posted: list[tuple[Job, Piece]] = []
        for output in outputs:
            choice = None if output.is_dropped else self._choices.get(output.request)
            if choice is not None:
                piece = self._take_in(choice, output, now)
                if piece is not None:
                    posted.append((choice.job, piece))
        self.metrics.stepped(outputs, self.engine.sent_tokens - sent_tokens)
        self._post(posted)
        self.metrics.output_cpu_s += time.thread_time() - cpu_s
        for output in outputs:
            error = output.request.error
            if error is not None and isinstance(error, torch.AcceleratorError | RanksLost):
                raise error  # no device, or not every rank's, answers any more after such an error

    def _take_in(self, choice: _Choice, output: TokenOutput, now: float) -> Piece | None:
        """Tokens to text; None where nobody wants to hear of this token by itself."""
        answer, request, times = choice.answer, choice.answer.request, choice.times
        if output.token is not None:
            self.metrics.token_came(request, times, now)
        has_ended = output.finish_reason is not None
        try:
            if answer.push(output.token, output.finish_reason):
                self.engine.stop(output)
                has_ended = True
        except Exception as error:  # one answer that cannot be read must not end the others
            request.error, has_ended = error, True
            self.engine.cancel(request, FinishReason.FAILED)
        if has_ended:
            self._ended(choice, now)
        elif not choice.job.streams:
            return None
        reason = answer.finish_reason if has_ended else None
        return Piece(choice.index, answer.take(), output.token, output.logprobs, reason)

    def _note_admitted(self, began: float) -> None:
        """Who runs now was let in by the step that has just been taken."""
        for request in self.engine.scheduler.running.values():
            choice = self._not_admitted.pop(request, None)
            if choice is not None:
                choice.times.admitted = began

    def _note_preempted(self) -> None:
        self._preemptions = self.engine.scheduler.preemptions
        for request, choice in self._choices.items():
            if request.preemptions > choice.preemptions:
                choice.preemptions = request.preemptions
                self.journal.preempted(request)

    def _ended(self, choice: _Choice, now: float) -> None:
        request = choice.answer.request
        self._choices.pop(request, None)
        self._not_admitted.pop(request, None)
        choice.times.ended = now
        self.meter.ended(request)
        self.metrics.ended(request, choice.answer.finish_reason, choice.times)
        self.journal.ended(request, choice.answer.finish_reason, choice.times)
        if all(times.ended is not None for times in choice.job.times):
            self.metrics.job_ended(choice.job.requests)

    def _add(self, job: Job) -> None:
        with self._lock:
            self._coming -= len(job.answers)
        for index, (answer, times) in enumerate(zip(job.answers, job.times, strict=True)):
            choice = _Choice(job, index, answer, times)
            try:
                self.engine.queue(answer.request)
            except Exception as error:  # a bug, but one request's only
                self._fail(choice, error)
                continue
            self.meter.arrived(answer.request, times.submitted)
            self._choices[answer.request] = self._not_admitted[answer.request] = choice

    def _cancel(self, job: Job, tell: bool = False) -> None:
        """`tell` its client, if it was not the client who left."""
        now = time.monotonic()
        for request in job.requests:
            choice = self._choices.get(request)
            if choice is not None:
                self.engine.cancel(request)
                self._ended(choice, now)
                if tell:
                    self._post([(job, Piece(choice.index, choice.answer.take(), None, None, FinishReason.CANCELLED))])

    def _fail(self, choice: _Choice, error: BaseException) -> None:
        request = choice.answer.request
        request.error, request.finish_reason = error, FinishReason.FAILED
        self._ended(choice, time.monotonic())
        self._post([(choice.job, Piece(choice.index, "", None, None, FinishReason.FAILED))])

    def _answer(self, question: Callable[[Engine], T], answered: asyncio.Future[T]) -> None:
        try:
            self._call(_settle, answered, question(self.engine), None)
        except Exception as error:
            self._call(_settle, answered, None, error)

    def _stop(self) -> None:
        self._stopping = True

    def _raise(self, error: BaseException) -> NoReturn:
        raise error

    def _close(self) -> None:
        """No step follows. Commands that came before this moment still run, and then everybody is told."""
        with self._lock:
            self._closed = True
        while not self._commands.empty():
            with suppress(Exception):  # an engine that died may not even cancel
                self._commands.get()()
        for choice in list(self._choices.values()):
            if self.error is None:
                self.engine.cancel(choice.answer.request)
            self._fail(choice, self.error or EngineDied("the server was stopped"))

    def _post(self, posted: list[tuple[Job, Piece]]) -> None:
        if posted:
            self._call(self._deliver, posted)

    def _deliver(self, posted: list[tuple[Job, Piece]]) -> None:
        """On the event loop: what a step gave goes into the mailboxes, behind what is still waiting to."""
        is_idle = not self._outbox
        self._outbox.extend(posted)
        if is_idle:
            self._deliver_some()

    def _deliver_some(self) -> None:
        """Each piece wakes a stream, and all that are awake run before the loop looks at anything else."""
        for _ in range(min(DELIVERED_AT_ONCE, len(self._outbox))):
            job, piece = self._outbox.popleft()
            job.mailbox.put(piece)
        if self._outbox:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # a loop that is gone has nobody left to tell
                raise


def _settle(answered: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answered.done():
        return  # nobody waits any more
    if error is not None:
        answered.set_exception(error)
    else:
        answered.set_result(value)
