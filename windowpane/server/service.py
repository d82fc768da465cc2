"""What all endpoints share: the model, its text side, the engine loop, and who may come in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope

from windowpane.device import heap
from windowpane.engine.accounts import Account
from windowpane.engine.adapters import LoadedAdapter
from windowpane.engine.engine import Engine, outside_vocabulary
from windowpane.engine.sleep import Sleeper
from windowpane.schedule.request import FinishReason, Request, SamplingParams, Tokens
from windowpane.schedule.scheduler import BeyondModelLen, RequestTooLong
from windowpane.server.errors import ApiError, bad_request, failed, route_path, unavailable
from windowpane.server.job import Job, Piece
from windowpane.server.json_body import slow_json
from windowpane.server.log import log_job
from windowpane.server.loop import EngineDied, EngineLoop
from windowpane.server.traces import Traces
from windowpane.text import ChatTemplate, PromptTooLong, Tokenizer
from windowpane.text.grammar import CompiledGrammar, GrammarError, Grammars
from windowpane.text.parsers import Parsers
from windowpane.text.rules import ThoughtBudget, with_rules
from windowpane.text.tokenizer import check_length

T = TypeVar("T")

KEEP_ALIVE_S = 10.0  # a stream that has been silent for so long shows a sign of life
LAG_PROBE_S = 0.05
GIVE_BACK_S = 20.0  # after the last time, where requests have come since
GRAMMAR_THREADS = 16  # twice as many as compile at once: most find theirs in the cache

log = logging.getLogger("windowpane.server")


class Replicas(Protocol):
    """Engines elsewhere that answer for this server, where it has none of its own."""

    def add_to(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """A snapshot of /stats with what is known of them."""

    async def stats(self, id: str) -> dict[str, Any]:
        """The whole snapshot of one; raises LookupError."""


class ClientGone(Exception):
    """Nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_queue`: requests that may wait. `max_body_bytes`: of one HTTP request."""

    max_queue: int = 1024
    max_body_bytes: int = 8 * 2**20


@dataclass(slots=True, eq=False)
class Service:
    """One served model. `names` are what clients may call it; the first is what answers call it."""

    names: tuple[str, ...]
    loop: EngineLoop
    max_model_len: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    grammars: Grammars | None = None
    parsers: Parsers = field(default_factory=Parsers)
    special_tokens_in_content: bool = False
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # of chats that do not say otherwise
    traces: Traces | None = None
    sleeper: Sleeper | None = None
    replicas: Replicas | None = None
    asleep: bool = False  # or on its way there
    _falling_asleep: asyncio.Lock = field(default_factory=asyncio.Lock)  # or waking up: one at a time
    hardware: tuple[str, str, tuple[Account, ...]] = ("", "", ())  # device, dtype, and the books of its memory
    lora_dir: Path | None = None
    _grammar_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(GRAMMAR_THREADS))
    _being_made: int = 0  # requests that have their places but are not submitted yet
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def engine(self) -> Engine:
        return self.loop.engine

    @property
    def can_chat(self) -> bool:
        return self.template is not None and self.template.exists

    # -- the server's life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop.start()
        works = (self._show_life(), self._probe_lag(), self._give_memory_back())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.loop.stop)
        if self.grammars is not None:
            await asyncio.to_thread(self.grammars.close)
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def _show_life(self) -> None:
        """Wake streams that have been silent for long: during a long prefill, proxies would hang up otherwise."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 4)
            before = time.monotonic() - KEEP_ALIVE_S
            for job in self.loop.jobs:
                if job.streams and job.mailbox.looked_at < before:
                    job.mailbox.wake()

    async def _probe_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self.loop.metrics.loop_lag_s.observe(max(0.0, time.monotonic() - due))

    async def _give_memory_back(self) -> None:
        """What large bodies took, and what threads did that are idle now, the C library would keep for itself."""
        before = 0
        while True:
            await asyncio.sleep(GIVE_BACK_S)
            if self.loop.journal.noted != before:
                before = self.loop.journal.noted
                await self.off_loop(heap.give_back)

    # -- coming in -------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """By the names that clients call them."""
        return {} if self.engine.adapters is None else self.engine.adapters.loaded

    def adapter_of(self, name: str | None) -> int:
        """The adapter of a request to this model; 0 is none."""
        found = None if name is None else self.adapters.get(name)
        return 0 if found is None else found.number

    def name_of(self, job: Job) -> str:
        """What an answer calls its model."""
        adapter = job.requests[0].adapter
        return next((found.name for found in list(self.adapters.values()) if found.number == adapter), self.name)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join([*self.names, *self.adapters])}",
                param="model",
                code="model_not_found",
            )

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request(f"{self.name} came without a tokenizer; give prompts as token ids", param)
        return self.tokenizer

    async def off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        """Templates, tokenizers and grammars may take a while: other streams must not wait for them."""
        return await asyncio.to_thread(work, *arguments)

    async def beside_grammars(self, work: Callable[..., T], *arguments: Any) -> T:
        """The same for work that may compile a grammar: who needs none must not wait for threads that do."""
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, work, *arguments)

    def encode(self, text: str, param: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """The tokens of a text, refused before it is tokenized where there are surely more than the model takes."""
        tokenizer = self.need_tokenizer(param)
        try:
            check_length(tokenizer, text, max_tokens or self.max_model_len)
        except PromptTooLong as error:
            raise self.too_long(str(error), param) from None
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def document(self, make: Callable[[], Any], headers: Mapping[str, str] | None = None) -> Response:
        """An answer that may be large, made and encoded beside the event loop."""
        return Response(await self.off_loop(lambda: slow_json(make())), 200, headers, "application/json")

    def room(self, prompt_tokens: int, param: str) -> int:
        """New tokens that fit behind a prompt; at least one, or else the prompt is too long."""
        room = self.engine.scheduler.room(prompt_tokens)
        if room < 1:
            raise self.too_long(f"the prompt has {prompt_tokens} tokens", param)
        return room

    def too_long(self, asked: str, param: str) -> ApiError:
        message = f"this model's maximum context length is {self.max_model_len} tokens, and {asked}"
        return bad_request(message, param, "context_length_exceeded")

    def tokens(self, ids: Sequence[int], param: str) -> Tokens:
        """A prompt of token ids. Numbers that are no tokens are refused here: they might not even fit an array."""
        vocab_size = self.engine.sampler.vocab_size
        if len(ids) == 0:
            raise bad_request("the prompt is empty; a model needs at least one token", param)
        wrong = outside_vocabulary(ids, vocab_size)
        if wrong is not None:
            raise bad_request(f"token {wrong} is not in the vocabulary of {vocab_size:,}", param, "invalid_value")
        return np.array(ids, dtype=np.int32)

    def prompt_tokens(self, prompt: str | Sequence[int], param: str, add_special_tokens: bool) -> Tokens:
        """A prompt that is text or token ids."""
        if isinstance(prompt, str):
            prompt = self.encode(prompt, param, add_special_tokens)
        return self.tokens(prompt, param)

    def request(
        self,
        id: str,
        prompt: Tokens,
        params: SamplingParams,
        prompt_param: str,
        *,
        grammar: CompiledGrammar | None = None,
        thought_budget: ThoughtBudget | None = None,
        **fields: Any,
    ) -> Request:
        """A request that has passed the engine's check: it is made here and queued as it is, or never will be."""
        try:
            ruled = with_rules(grammar, params, self.tokenizer, self.engine.sampler.vocab_size, thought_budget)
        except GrammarError as error:
            raise bad_request(str(error), "bad_words") from None
        request = Request(id, prompt, params, grammar=ruled, **fields)
        try:
            self.engine.check(request)
        except BeyondModelLen:
            self.room(len(prompt), prompt_param)  # raises where the prompt alone is too long
            total = len(prompt) + params.max_tokens
            asked = f"{len(prompt)} prompt tokens and {params.max_tokens} new ones make {total}"
            raise self.too_long(asked, "max_tokens") from None
        except RequestTooLong as error:
            raise bad_request(_unnamed(error, id), prompt_param, "context_length_exceeded") from None
        except ValueError as error:
            raise bad_request(_unnamed(error, id), code="invalid_value") from None
        return request

    @contextmanager
    def admitted(self, requests: int) -> Iterator[None]:
        """Places in the queue for requests that are made in here, and then run: see `running`.

        Turns away what would wait too long, and everybody when the server goes down. Who is let in is not turned away
        later, however many come while its prompts are read.
        """
        self._admit(requests)
        self._being_made += requests
        try:
            yield
        except BaseException:
            self._being_made -= requests
            raise

    def _admit(self, requests: int) -> None:
        rejected = self.loop.metrics.rejected_requests
        if self.draining:
            rejected["draining"] += 1
            raise unavailable("the server is shutting down", retry_after_s=5)
        if self.asleep:
            rejected["sleeping"] += 1
            raise unavailable("the engine sleeps; POST /wake_up with the admin key wakes it", retry_after_s=5)
        if not self.loop.is_alive:
            rejected["engine_died"] += 1
            raise unavailable(f"the engine has stopped: {self.loop.error}")
        waiting, most = self.loop.waiting + self._being_made, self.limits.max_queue
        if requests > most:
            raise bad_request(f"{requests} answers at once; the server queues at most {most}", "n")
        # Slots that are free take their share at once, so that an idle server never turns anybody away.
        free = self.engine.manager.num_slots - len(self.engine.scheduler.running)
        if waiting + requests > most + max(0, free):
            rejected["queue_full"] += 1
            raise ApiError(
                429,
                f"{waiting} requests are waiting and the server queues at most {most}; try again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=self.loop.metrics.seconds_to_serve(waiting),
            )

    def note_refused(self, scope: Scope, error: ApiError) -> None:
        """For the journal, by path and code alone: the message may quote what was sent."""
        where = f"{scope['method']} {route_path(scope)[:64]}"
        self.loop.journal.refused(where, f"{error.status_code} {error.code or ''}".strip())

    def refused(self, scope: Scope, error: ApiError) -> None:
        """Somebody was turned away at the door."""
        self.loop.metrics.rejected_requests[error.code or "refused"] += 1
        self.note_refused(scope, error)
        log.info("%s %s refused: %d %s", scope["method"], scope["path"], error.status_code, error.message)

    # -- running ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self, job: Job, receive: Receive) -> AsyncIterator[AsyncIterator[list[Piece]]]:
        """Batches of pieces until every choice has ended. Leaving early, or the client's leaving, ends the job.

        A batch may be empty: nothing has come for a while. Raises ClientGone when nobody listens any more. The job was
        made while `admitted` held places for it.
        """
        self._being_made -= len(job.answers)
        self.loop.submit(job)
        gone = asyncio.create_task(_until_gone(job, receive))
        try:
            yield _Batches(job)
        finally:
            gone.cancel()
            self.loop.cancel(job)
            log_job(log, job)
            if self.traces is not None:
                self.traces.job_ended(job)

    async def finished(self, job: Job, receive: Receive) -> None:
        """Run a job to its end. A choice that failed fails the whole."""
        async with self.running(job, receive) as batches:
            async for _ in batches:
                pass
        if (failure := failure_of(job)) is not None:
            raise failure

    async def sleep(self, level: int) -> int:
        """Lets what runs or waits be answered, and nobody else in; then gives memory back, and says how much."""
        sleeper = self._own_sleeper()
        sleeper.check(level)
        async with self._falling_asleep:
            self.asleep = True
            while self.loop.jobs or self._being_made or await self.loop.ask(lambda engine: engine.has_work):
                await asyncio.sleep(LAG_PROBE_S)
            return await self.loop.ask(lambda _: sleeper.sleep(level))

    async def wake(self) -> None:
        """Whoever comes before all is there again is refused as before."""
        sleeper = self._own_sleeper()
        async with self._falling_asleep:
            await self.loop.ask(lambda _: sleeper.wake())
            self.asleep = False

    def _own_sleeper(self) -> Sleeper:
        if self.sleeper is None:
            raise bad_request("replicas do not sleep; `windowpane deploy` with autoscaling ends those without work")
        return self.sleeper

    async def watch(self, question: Callable[[Engine], T]) -> T:
        """What `question` finds in the engine, for who would watch without end: no more when the server goes down."""
        if self.draining:
            raise EngineDied("the server is shutting down")
        return await self.loop.ask(question)


class _Batches:
    """What a job says, as it comes, until every choice has ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._left = len(job.answers)

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> list[Piece]:
        job = self._job
        if not self._left:
            raise StopAsyncIteration
        # Before, for who left while something was being sent; and after, for who left while nothing came.
        batch = [] if job.client_gone else await job.mailbox.take()
        if job.client_gone:
            raise ClientGone
        for piece in batch:
            if piece.finish_reason is not None:
                self._left -= 1
        return batch


def _unnamed(error: ValueError, id: str) -> str:
    return str(error).removeprefix(f"request {id}: ")


def failure_of(job: Job) -> ApiError | None:
    """Why a job failed, if it did. A grammar that turns out to be too complex is its sender's, not ours."""
    for request in job.requests:
        if request.finish_reason is FinishReason.FAILED:
            if isinstance(request.error, GrammarError):
                return bad_request(str(request.error), code="invalid_value")
            return failed(f"a step failed: {request.error}")
        if request.finish_reason is FinishReason.CANCELLED:  # and not by its own client, who would be gone
            return ApiError(409, "the request was cancelled by DELETE /requests", code="request_cancelled")
    return None


async def _until_gone(job: Job, receive: Receive) -> None:
    """Wait for the client to hang up, and tell the job's reader."""
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        job.client_gone = True
        job.mailbox.wake()
