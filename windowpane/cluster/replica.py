"""A replica: an engine with its loop, as a Ray Serve deployment. It takes orders and publishes digests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windowpane.cluster.autoscaling import stats_of
from windowpane.cluster.channel import Outbox
from windowpane.cluster.order import COPIED, Ending, Order, To
from windowpane.engine.accounts import accounts
from windowpane.engine.engine import Engine
from windowpane.engine.start import Started, start
from windowpane.kv.layout import Layout
from windowpane.parallel.launch import Launcher
from windowpane.routing.digest import DigestMaker, Load
from windowpane.schedule.request import FinishReason, Request
from windowpane.server.job import Job
from windowpane.server.loop import EngineLoop
from windowpane.server.metrics import Metrics
from windowpane.server.stats import ModelFacts, arena_totals, snapshot
from windowpane.text import load_tokenizer
from windowpane.text.answer import Answer
from windowpane.text.grammar import GrammarError, Grammars


@dataclass(frozen=True, slots=True)
class Facts:
    """What an ingress must know of its replicas to check requests as they would: see `remote.shadow_engine`."""

    name: str
    vocab_size: int
    layout: Layout
    num_slabs: int
    num_slots: int
    max_model_len: int
    rollback_tokens: int
    batched_tokens: int
    draft_tokens: int
    device: str
    compute_dtype: str


def _make_launcher() -> Launcher:
    """Ranks in the placement group that Ray Serve has made for this replica."""
    from ray.util import get_current_placement_group

    from windowpane.cluster.ranks import PlacedRanks

    group = get_current_placement_group()
    assert group is not None
    return PlacedRanks(group)


class Replica:
    """Ray Serve makes one per process."""

    async def __init__(self, model: str | None, flags: Mapping[str, Any]) -> None:  # type: ignore[misc]
        has_ranks = (flags.get("tensor_parallel_size") or 1) > 1
        self._started = start(model, flags, make_launcher=_make_launcher if has_ranks else None)
        engine = self._started.engine
        source = self._started.text_source
        self._tokenizer = None if source is None else load_tokenizer(source)
        self._grammars = None if self._tokenizer is None else Grammars(self._tokenizer)
        self._digests = DigestMaker(engine.scheduler)
        self._loop = EngineLoop(engine, Metrics(self._started.spec.name))
        self._loop.start()
        self._outbox = Outbox()
        if self._started.workers is not None:
            self._started.workers.when_lost(self._loop.die)

    async def facts(self) -> Facts:
        return facts_of(self._started)

    async def generate(self, order: Order) -> Ending:
        """Tokens go out as they come. Whoever cancels the call cancels the request."""
        try:
            request = order.request(await asyncio.to_thread(self._grammar, order))
            self._loop.engine.check(request)
        except (GrammarError, ValueError) as error:
            return Ending(FinishReason.FAILED, str(error), isinstance(error, GrammarError), {})
        job = Job(order.id, [Answer(request, None)], streams=order.reply_to is not None)
        self._loop.submit(job)
        sent = 0
        try:
            while True:
                pieces = await job.mailbox.take()
                if any(piece.finish_reason is not None for piece in pieces):
                    return ending_of(request)
                tokens = [(p.token, p.logprobs) for p in pieces if p.token is not None]
                if order.reply_to is not None and tokens:
                    self._outbox.send(order.reply_to, order.channel, sent, tokens)
                    sent += len(tokens)
        finally:
            self._loop.cancel(job)

    def _grammar(self, order: Order) -> Any:
        if order.grammar is None:
            return None
        assert self._grammars is not None and self._tokenizer is not None
        return order.grammar.compile(self._grammars, self._tokenizer, self._loop.engine.sampler.vocab_size)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Ray Serve passes on to every router of this deployment."""
        return await self._loop.ask(self._published)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve passes on to the policy, where replicas are scaled."""
        return await self._loop.ask(_autoscaling_stats)

    async def check_health(self) -> None:
        """Ray Serve starts another replica where this raises."""
        if not self._loop.is_alive:
            raise RuntimeError(f"the engine has stopped: {self._loop.error}")

    async def stats(self, _: To) -> dict[str, Any]:
        """Its own /stats."""
        plan, loop = self._started.plan, self._loop
        facts = facts_of(self._started)
        rows = tuple(accounts(plan, self._started.reports))
        shown = ModelFacts(facts.name, facts.max_model_len, False, facts.device, facts.compute_dtype, rows)
        return await loop.ask(lambda engine: snapshot(engine, loop.meter, shown, loop.times_of))

    async def drop_restore_points(self, _: To) -> int:
        return await self._loop.drop_restore_points()

    def _published(self, engine: Engine) -> dict[str, Any]:
        metrics = self._loop.metrics
        ended = sum(metrics.ended_requests.values())
        found_share = metrics.cached_tokens / max(1, metrics.prompt_tokens)
        load = Load.of(engine.scheduler, metrics.request_s.total / ended if ended else 1.0, found_share)
        counts = {
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "generated_tokens": metrics.generated_tokens,
            "process_id": os.getpid(),
            "arena": arena_totals(engine.manager),
        }
        return {"digest": self._digests.make(load).pack(), **counts}


def _autoscaling_stats(engine: Engine) -> dict[str, float]:
    scheduler, manager = engine.scheduler, engine.manager
    live = sum(manager.group_bytes(group).live for group in range(len(manager.layout.groups)))
    return stats_of(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        most_running=manager.num_slots,
        kv_share=live / max(1, manager.arena.total_bytes),
    )


def facts_of(started: Started) -> Facts:
    plan, engine = started.plan, started.engine
    assert plan.capacity is not None and plan.device is not None
    config = plan.sizing.config
    return Facts(
        name=started.spec.name,
        vocab_size=engine.sampler.vocab_size,
        layout=plan.sizing.layout,
        num_slabs=plan.capacity.num_slabs,
        num_slots=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        rollback_tokens=plan.sizing.rollback_tokens,
        batched_tokens=config.batched_tokens,
        draft_tokens=config.draft_tokens,
        device=plan.device.name,
        compute_dtype=plan.sizing.compute_dtype,
    )


def ending_of(request: Request) -> Ending:
    return Ending(
        request.finish_reason or FinishReason.CANCELLED,
        None if request.error is None else str(request.error),
        isinstance(request.error, GrammarError),
        {name: getattr(request, name) for name in COPIED},
        list(request.output),
        list(request.logprobs),
    )
