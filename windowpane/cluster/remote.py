"""The engine loop of an ingress: what the server asks of its engine, replicas elsewhere do.

A job's requests become orders; tokens come back and are made text here, so stop strings, parsers and all that is the
API's own run as in a server with an engine of its own. A request whose replica dies before it said anything is given to
another; one that had begun ends with an error, for its text cannot be taken back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from windowpane.cluster import published
from windowpane.cluster.channel import Inbox, ReplyTo, Tokens
from windowpane.cluster.order import Ending, Order, To
from windowpane.cluster.replica import Facts
from windowpane.engine.engine import Engine, TokenOutput
from windowpane.engine.sampler import Sampler
from windowpane.kv.manager import KVManager
from windowpane.routing.digest import Digest
from windowpane.routing.hashes import Hashes, prefix_hashes
from windowpane.schedule.request import FinishReason, TokenLogprobs
from windowpane.schedule.scheduler import Scheduler
from windowpane.server.job import Job, Piece, Times
from windowpane.server.loop import EngineLoop
from windowpane.server.metrics import Metrics
from windowpane.server.stats import SIZES, add_arenas
from windowpane.text.grammar import GrammarError

T = TypeVar("T")
ATTEMPTS = 4  # to have a request begun, each by another replica if the one before died


class ReplicaLost(RuntimeError):
    """The replica that ran a request is gone."""


def shadow_engine(facts: Facts) -> Engine:
    """The books of an engine like those of the replicas, which never takes a step: it refuses what they would."""
    sizes = (facts.num_slabs, facts.num_slots, facts.max_model_len)
    manager = KVManager(facts.layout, *sizes, facts.rollback_tokens)
    scheduler = Scheduler(manager, facts.batched_tokens, draft_tokens=facts.draft_tokens)
    sampler = Sampler(facts.vocab_size, torch.device("cpu"), 0)
    return Engine(scheduler, None, sampler, async_scheduling=False)  # type: ignore[arg-type]


class RemoteReplicas:
    """What replicas published last, and what one says when it is asked."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._published = published.LATEST[handle.deployment_name]

    @property
    def names(self) -> list[str]:
        return list(self._published)

    def add_to(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        said = list(self._published.items())
        arena = add_arenas([stats["arena"] for _, stats in said]) if said else snapshot["arena"]
        return {**snapshot, "arena": arena, "replicas": [_document(name, stats) for name, stats in said]}

    async def stats(self, id: str) -> dict[str, Any]:
        if id not in self._published:
            raise LookupError(id)
        try:
            found: dict[str, Any] = await self._handle.stats.remote(To(id))
        except RayError:
            raise LookupError(id) from None  # it is gone since
        return found

    async def drop_restore_points(self) -> int:
        asked = [self._handle.drop_restore_points.remote(To(name)) for name in self.names]
        return sum(await asyncio.gather(*asked))


class RemoteLoop(EngineLoop):
    """`EngineLoop` with its engine behind `handle`. All runs on the event loop; there is no thread."""

    def __init__(self, facts: Facts, handle: DeploymentHandle[Any], metrics: Metrics) -> None:
        super().__init__(shadow_engine(facts), metrics)
        self.replicas = RemoteReplicas(handle)
        self._handle = handle
        self._inbox = Inbox(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._unbegun = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def stop(self, timeout_s: float = 10.0) -> None:
        self._closed = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has ended, and so has all that it had open
                self._loop.call_soon_threadsafe(self._inbox.end)

    @property
    def is_alive(self) -> bool:
        return not self._closed

    @property
    def waiting(self) -> int:
        return self._unbegun

    def submit(self, job: Job) -> None:
        job.times = [Times(job.arrived) for _ in job.answers]
        self.jobs.add(job)
        self._unbegun += len(job.answers)
        for request in job.requests:
            self.meter.arrived(request, job.arrived)
        self._tasks[job] = asyncio.create_task(self._run_job(job))

    def cancel(self, job: Job) -> None:
        self.jobs.discard(job)
        task = self._tasks.pop(job, None)
        if task is not None:
            task.cancel()

    def cancel_for(self, caller: str | None, id: str) -> int:
        found = [job for job in self.jobs if id in (job.id, *(request.id for request in job.requests))]
        mine = [job for job in found if caller is None or job.caller == caller]
        for job in mine:
            task = self._tasks.pop(job, None)
            if task is not None:
                task.cancel()
            for index, times in enumerate(job.times):
                if times.ended is None:
                    self._end(job, index, FinishReason.CANCELLED, None)
        return len(mine)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        return question(self.engine)

    async def drop_restore_points(self) -> int:
        return await self.replicas.drop_restore_points()

    # -- one job ---------------------------------------------------------------------------------------------------

    async def _run_job(self, job: Job) -> None:
        await asyncio.gather(*(self._run_choice(job, index) for index in range(len(job.answers))))

    async def _run_choice(self, job: Job, index: int) -> None:
        request = job.answers[index].request
        hashes = prefix_hashes(request.prefix_key, request.prompt)
        streams = job.streams or bool(request.params.stop)
        try:
            reply_to = await self._inbox.address() if streams else None
            for attempt in range(ATTEMPTS):
                try:
                    await self._follow(job, index, hashes, reply_to)
                    break
                except (RayError, RayServeException) as error:
                    if request.output or attempt == ATTEMPTS - 1:
                        self._end(job, index, FinishReason.FAILED, ReplicaLost(_reason(error)))
                        break
        except asyncio.CancelledError:
            if job.times[index].ended is None:
                self._note_end(job, index, FinishReason.CANCELLED)
            raise
        except Exception as error:  # one answer that cannot be read must not leave its client waiting
            self._end(job, index, FinishReason.FAILED, error)

    async def _follow(self, job: Job, index: int, hashes: Hashes, reply_to: ReplyTo | None) -> None:
        """Pass on what one replica says, to the end or until nobody wants it."""
        request = job.answers[index].request
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by a stop string

        def take(start: int, tokens: Tokens) -> None:
            if stopped.done() or start > len(request.output):
                return
            try:
                if self._take_in_tokens(job, index, tokens[len(request.output) - start :], None):
                    stopped.set_result(None)
            except Exception as error:
                stopped.set_exception(error)

        channel = self._inbox.open(take)
        response: Any = self._handle.generate.remote(Order.of(request, hashes, reply_to, channel))
        ended = asyncio.ensure_future(_awaited(response))
        try:
            either: list[asyncio.Future[Any]] = [ended, stopped]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                stopped.result()
            else:
                self._take_in_end(job, index, ended.result())
        finally:
            self._inbox.close(channel)
            if not ended.done():
                ended.cancel()
                response.cancel()

    def _take_in_end(self, job: Job, index: int, ending: Ending) -> None:
        request = job.answers[index].request
        for name, value in ending.fields.items():
            setattr(request, name, value)
        left = [*zip_longest(ending.output, ending.logprobs)][len(request.output) :]
        if self._take_in_tokens(job, index, left, ending):
            return
        error = ending.error and (GrammarError if ending.is_grammar_error else RuntimeError)(ending.error)
        self._end(job, index, ending.finish_reason, error or None)  # it ended without a token

    def _take_in_tokens(self, job: Job, index: int, tokens: Tokens, ending: Ending | None) -> bool:
        """Tokens to text. True where the answer is over."""
        return any(
            self._take_in_token(job, index, token, logprobs, ending if number == len(tokens) else None)
            for number, (token, logprobs) in enumerate(tokens, 1)
        )

    def _take_in_token(
        self, job: Job, index: int, token: int, logprobs: TokenLogprobs | None, ending: Ending | None
    ) -> bool:
        """True where the answer is over: with this token, or by a stop string."""
        answer, times = job.answers[index], job.times[index]
        request, now = answer.request, time.monotonic()
        if times.first_token is None:
            self._unbegun -= 1
            times.admitted = times.admitted or now
        request.output.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        self.metrics.token_came(request, times, now)
        self.metrics.generated_tokens += 1
        reason = None if ending is None else ending.finish_reason
        request.finish_reason = reason
        if ending is not None and ending.error is not None:
            request.error = RuntimeError(ending.error)
        if answer.push(token, reason):
            request.finish_reason = reason = FinishReason.STOP
        self.meter.stepped([TokenOutput(request, token, logprobs, reason, len(request.output))])
        if reason is not None:
            self._note_end(job, index, answer.finish_reason)
        if reason is not None or job.streams:
            reason = answer.finish_reason if reason is not None else None
            job.mailbox.put(Piece(index, answer.take(), token, logprobs, reason))
        return reason is not None

    def _end(self, job: Job, index: int, reason: FinishReason, error: BaseException | None) -> None:
        """End a choice without a token."""
        answer = job.answers[index]
        answer.request.finish_reason, answer.request.error = reason, error
        self._note_end(job, index, reason)
        job.mailbox.put(Piece(index, answer.take(), None, None, reason))

    def _note_end(self, job: Job, index: int, reason: FinishReason | None) -> None:
        request, times = job.answers[index].request, job.times[index]
        if times.first_token is None:
            self._unbegun -= 1
        times.ended = time.monotonic()
        self.meter.ended(request)
        self.metrics.ended(request, reason, times)
        self.journal.ended(request, reason, times)


async def _awaited(response: Any) -> Ending:
    ending: Ending = await response
    return ending


def _document(name: str, stats: dict[str, Any]) -> dict[str, Any]:
    digest = Digest.unpack(stats["digest"])
    load, arena = digest.load, stats["arena"]
    counts = {key: stats[key] for key in ("prompt_tokens", "cached_tokens", "generated_tokens")}
    sizes = {key: arena[key] for key in SIZES}
    return {
        "id": name,
        "running": load.running,
        "waiting": load.waiting,
        "wait_s": load.wait_s,
        "prefixes": len(digest.hashes),
        **counts,
        "arena": sizes,
    }


def _reason(error: Exception) -> str:
    return f"the replica that ran the request is gone ({type(error).__name__}); send it again"
