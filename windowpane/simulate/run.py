"""The simulation: the real scheduler and manager, with a clock and a cost model in place of the runner."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from windowpane.garbage import uncollected
from windowpane.kv.arena import Offsets
from windowpane.kv.changes import NO_CHANGES, ChangeLog, Changes, Place
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.sharing import Ids, SharedPages
from windowpane.kv.tables import Columns, PageTable
from windowpane.kv.tier import HostTier
from windowpane.plan.hardware import Gpu
from windowpane.plan.planner import Sizing
from windowpane.schedule.batch import Batch
from windowpane.schedule.coasting import Coasting
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import RequestTooLong, Scheduler
from windowpane.simulate.cost import CostModel, cost_model
from windowpane.simulate.policies import HOST_BYTES_PER_SECOND, Policy
from windowpane.simulate.traffic import ANSWER_TOKEN, Session

MOST_SAMPLES = 1000
COAST_STEPS = 64  # whose times are computed ahead: about as many as there are between two arrivals


@dataclass(slots=True)
class Samples:
    """Bytes by state and sequences by time; thinned to half when there are too many."""

    every_s: float = 0.05
    next_s: float = 0.0
    rows: list[tuple[float, int, int, int, int, int, int]] = field(default_factory=list)

    def take(self, now_s: float, manager: KVManager, running: int, waiting: int) -> None:
        groups = [manager.group_bytes(g) for g in range(len(manager.layout.groups))]
        live, cached, stranded = (sum(getattr(g, name) for g in groups) for name in ("live", "cached", "stranded"))
        self.rows.append((now_s, live, cached, stranded, manager.free_bytes, running, waiting))
        if len(self.rows) > MOST_SAMPLES:
            self.rows = self.rows[::2]
            self.every_s *= 2
        self.next_s = now_s + self.every_s


@dataclass(slots=True)
class Result:
    """What one policy did with the traffic. Times are simulated seconds."""

    policy: str
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    running_seconds: float = 0.0  # sequences × seconds
    most_running: int = 0
    arena_bytes: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    step_s: array[float] = field(default_factory=lambda: array("d"))
    step_rows: array[int] = field(default_factory=lambda: array("i"))
    samples: Samples = field(default_factory=Samples)

    @property
    def output_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_running(self) -> float:
        """Sequences that ran at once, on average while anything ran."""
        return self.running_seconds / self.busy_seconds if self.busy_seconds else 0.0

    def ttft(self, percent: float) -> float:
        return float(np.percentile(np.asarray(self.ttft_s), percent)) if self.ttft_s else 0.0

    def itl(self, percent: float) -> float:
        """A percentile of the gaps between tokens: each step is one gap for every sequence that decodes in it."""
        if not self.step_s:
            return 0.0
        times, rows = np.asarray(self.step_s), np.asarray(self.step_rows)
        order = np.argsort(times)
        below = np.cumsum(rows[order])
        return float(times[order][np.searchsorted(below, below[-1] * percent / 100)])


@dataclass(slots=True)
class _Asked:
    """A request under way: whose it is, when it came, and how much of it was computed before, found again or not."""

    session: Session
    came_s: float
    seen_tokens: int


class _Unheard(ChangeLog):
    """Changes for tables on a device that there is none of: dropped as they come, but for copies between tiers."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(num_groups)
        self.begun: list[tuple[int, bool, Sequence[tuple[int, Ids, Offsets]]]] = []

    def transfer(self, number: int, pages: Sequence[tuple[int, Ids, Offsets]], *, to_host: bool) -> None:
        self.begun.append((number, to_host, pages))

    def landed(self, number: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def entry(self, group: int, slot: int, column: int) -> None:
        pass

    def entries(self, group: int, slot: int, columns: Columns, *, late: bool = False) -> None:
        pass

    def moved_read(self, place: Place) -> None:
        pass

    def tail(self, group: int, slot: int, start: int, stop: int, ids: Ids) -> None:
        pass

    def snapshot(self, group: int, slot: int, position: int, ids: Ids) -> None:
        pass

    def close(
        self, tables: Sequence[PageTable], shared: Sequence[SharedPages], outgoing: Mapping[Place, Ids]
    ) -> Changes:
        self.copies.clear()
        return NO_CHANGES


class Simulation:
    """One policy over one traffic."""

    def __init__(
        self, sizing: Sizing, card: Gpu, kv_bytes: int, max_model_len: int, policy: Policy, prefix_caching: bool = True
    ) -> None:
        layout, config = policy.layout(sizing), sizing.config
        tokens = config.batched_tokens
        slots = min(config.max_num_seqs, tokens)
        in_flight = policy.chunks_in_flight * tokens
        manager = KVManager(layout, kv_bytes // layout.slab_bytes, slots, max_model_len, in_flight)
        manager.books.log = self._log = _Unheard(len(layout.groups))
        points = RestorePoints(manager) if prefix_caching else None
        tier = HostTier(points, policy.host_bytes // layout.slab_bytes) if points and policy.host_bytes else None
        self.scheduler = Scheduler(manager, tokens, policy.growth_tokens, restore_points=points, tier=tier)
        # Sliding layers that are reserved in full still read only what they see.
        self.cost: CostModel = cost_model(sizing, sizing.layout if policy.swa_full else layout, card)
        self.result = Result(policy.name, arena_bytes=manager.arena.total_bytes)
        self._now_s = 0.0
        self._arrivals: list[tuple[float, int, Session]] = []
        self._order = 0
        self._landings: list[tuple[float, int, float]] = []  # of copies: when, which, and how long they take
        self._link_free_s = {True: 0.0, False: 0.0}  # each way
        self._asked: dict[Request, _Asked] = {}
        self._seen: dict[str, int] = {}
        self.next_turn: Callable[[Session, float], None] = self._come  # who hears when a session's next turn comes

    def run(self, sessions: list[Session], progress: Callable[[int], None] = lambda done: None) -> Result:
        """Until every turn is answered. `progress` is told the turns done, now and then."""
        with uncollected():  # nothing here refers to itself
            return self._run(sessions, progress)

    def _run(self, sessions: list[Session], progress: Callable[[int], None]) -> Result:
        for session in deepcopy(sessions):
            self._come(session, session.start_s)
        told = -1
        while self.is_busy or self._arrivals:
            self.tick(np.inf)
            if self.result.requests != told:
                told = self.result.requests
                progress(told)
        self.close()
        return self.result

    @property
    def is_busy(self) -> bool:
        return self.scheduler.has_work

    @property
    def now_s(self) -> float:
        return self._now_s

    def quiet_until_s(self) -> float:
        """No answer ends before that moment, and nothing can be told of it that could not be told now, if nobody comes:
        sequences only decode, and steps grow longer with them.
        """
        scheduler = self.scheduler
        if not scheduler.only_decodes:
            return self._now_s
        steps = min(r.params.max_tokens - len(r.output) for r in scheduler.running.values()) - 1
        rows, lengths = len(scheduler.running), scheduler.manager.lengths[scheduler.decoding_slots]
        return self._now_s + steps * float(self.cost.seconds(rows, 0, rows, *self.cost.decode_kv(lengths)))

    def tick(self, until_s: float) -> None:
        """Take the next step, or a few that only decode and begin before `until_s`, or wait for what comes next."""
        scheduler = self.scheduler
        self._take_arrivals()
        self._land()
        if scheduler.only_decodes and self._coast(until_s):
            return
        batch = scheduler.schedule()
        self._begin_copies()
        if batch is not None:
            self._step(batch)
            return
        events = [queue[0][0] for queue in (self._arrivals, self._landings) if queue]
        if events:
            self._now_s = max(self._now_s, min(events))
        elif scheduler.has_work:
            raise RuntimeError("requests wait and nothing runs: the scheduler is stuck")

    def close(self) -> None:
        """No turn follows: complete the result."""
        self.result.seconds = self._now_s
        self.result.preemptions = self.scheduler.preemptions

    def come(self, session: Session, at_s: float) -> None:
        """The session's next turn comes; who is idle has done nothing until then."""
        if not self.is_busy and not self._arrivals:
            self._now_s = max(self._now_s, at_s)
        self._come(session, at_s)

    def _come(self, session: Session, at_s: float) -> None:
        self._order += 1
        heapq.heappush(self._arrivals, (at_s, self._order, session))

    def _begin_copies(self) -> None:
        """Copies of one direction follow one another, beside steps."""
        groups, begun = self.scheduler.manager.layout.groups, self._log.begun
        for number, to_host, pages in begun:
            copy_bytes = sum(len(ids) * groups[g].page_bytes for g, ids, _ in pages)
            seconds = copy_bytes / HOST_BYTES_PER_SECOND
            self._link_free_s[to_host] = max(self._now_s, self._link_free_s[to_host]) + seconds
            heapq.heappush(self._landings, (self._link_free_s[to_host], number, seconds))
        begun.clear()

    def _land(self) -> None:
        while self._landings and self._landings[0][0] <= self._now_s:
            _, number, seconds = heapq.heappop(self._landings)
            self.scheduler.land([(number, seconds)])

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            came_s, _, session = heapq.heappop(self._arrivals)
            turn = session.next_turn
            assert turn is not None
            prompt, ends = session.next_prompt()
            request = Request(
                f"{session.name}.{session.said}", prompt, SamplingParams(turn.output_tokens), message_ends=ends
            )
            try:
                self.scheduler.add(request)
            except RequestTooLong:
                self.result.refused += 1  # the session ends here: its later turns would be longer still
                continue
            self._asked[request] = _Asked(session, came_s, min(self._seen.get(session.name, 0), len(prompt)))

    def _step(self, batch: Batch) -> None:
        scheduler, result = self.scheduler, self.result
        manager = scheduler.manager
        decoding = len(batch.decode_slots)
        kv_bytes, kv_flops = map(float, self.cost.decode_kv(manager.lengths[batch.decode_slots]))
        prefilling, sampled = 0, decoding
        first: list[Request] = []
        for chunk in batch.chunks:
            count = len(chunk.tokens)
            more_bytes, more_flops = self.cost.chunk_kv(chunk.start, chunk.start + count)
            kv_bytes, kv_flops = kv_bytes + more_bytes, kv_flops + more_flops
            prefilling += count
            sampled += chunk.samples
            request = scheduler.running[chunk.slot]
            asked = self._asked[request]
            if request.output:  # it was sent back: all but the last token had been computed
                asked.seen_tokens = request.known_tokens - 1
            again = min(chunk.start + count, asked.seen_tokens) - min(chunk.start, asked.seen_tokens)
            result.recomputed_tokens += again
            asked.seen_tokens = max(asked.seen_tokens, chunk.start + count)
            if chunk.samples and not request.output:
                first.append(request)
        self._pass(decoding, prefilling, sampled, kv_bytes, kv_flops)
        for request in first:
            result.ttft_s.append(self._now_s - self._asked[request].came_s)
        for request in scheduler.commit(np.full(sampled, ANSWER_TOKEN, dtype=np.int64)):
            self._answered(request)

    def _pass(self, decoding: int, prefilling: int, sampled: int, kv_bytes: float, kv_flops: float) -> None:
        """Let the time of one step pass, and count it."""
        seconds = float(self.cost.seconds(decoding, prefilling, sampled, kv_bytes, kv_flops))
        self._now_s += seconds
        self.scheduler.speeds.computed(prefilling, seconds)
        self.result.computed_tokens += prefilling
        self.result.output_tokens += sampled - decoding
        self._count(seconds, decoding, [seconds])

    def _count(self, busy_s: float, decoding: int, seconds: list[float]) -> None:
        """Count steps with so many decoding rows that took `seconds` each and are over now."""
        scheduler, result, steps = self.scheduler, self.result, len(seconds)
        running = len(scheduler.running)
        result.steps += steps
        result.computed_tokens += steps * decoding
        result.output_tokens += steps * decoding
        result.busy_seconds += busy_s
        result.running_seconds += busy_s * running
        result.most_running = max(result.most_running, running)
        if decoding:
            result.step_s.extend(seconds)
            result.step_rows.extend([decoding] * steps)
        if self._now_s >= result.samples.next_s:
            result.samples.take(self._now_s, scheduler.manager, running, len(scheduler.waiting))

    def _coast(self, until_s: float) -> int:
        """Steps in which every running sequence only gets its next token, up to the next arrival; returns how many."""
        coasting = Coasting(self.scheduler, ANSWER_TOKEN)
        if not coasting.steps:
            return 0
        arrival_s = min(until_s, self._arrivals[0][0] if self._arrivals else np.inf)
        most, rows = min(coasting.steps, max(COAST_STEPS, coasting.calm_steps)), len(coasting.slots)
        lengths = coasting.lengths + np.arange(1, most + 1)[:, None]
        seconds = self.cost.seconds(rows, 0, rows, *self.cost.decode_kv(lengths)).tolist()
        while self._now_s < arrival_s and coasting.done < most:
            done, calm = coasting.done, coasting.calm_steps
            if done + calm > most:
                break
            if calm > 1:
                ends_s = self._ends_of(seconds[done : done + calm], min(self.result.samples.next_s, arrival_s))
                coasting.pass_steps(len(ends_s))
                busy_s = ends_s[-1] - self._now_s
                self._now_s = ends_s[-1]
            else:
                if not coasting.step():
                    break
                busy_s = seconds[done]
                self._now_s += busy_s
            self._count(busy_s, rows, seconds[done : coasting.done])
        coasting.close()
        return coasting.done

    def _ends_of(self, seconds: list[float], event_s: float) -> list[float]:
        """When each of these steps ends, up to the one in which the event is."""
        ends_s, busy_s = [], 0.0
        for step_s in seconds:
            busy_s += step_s
            ends_s.append(self._now_s + busy_s)
            if ends_s[-1] >= event_s:
                break
        return ends_s

    def _answered(self, request: Request) -> None:
        asked, result = self._asked.pop(request), self.result
        session = asked.session
        result.requests += 1
        result.prompt_tokens += len(request.prompt)
        result.cached_tokens += request.cached_tokens
        session.answered(len(request.output))
        # The last token of an answer was sampled and never computed.
        self._seen[session.name] = len(session.history) - 1
        following = session.next_turn
        if following is not None:
            at_s = self._now_s + following.wait_s if following.at_s is None else max(self._now_s, following.at_s)
            self.next_turn(session, at_s)
