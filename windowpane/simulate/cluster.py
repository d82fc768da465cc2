"""Many replicas: a simulation for each, on one clock, and the real router in front of them.

No replica's clock is behind an arrival unless it only decodes, so what a router is told is what a replica would say.
Digests are published by the clock of the simulation, and the router's own time is measured.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windowpane.routing.digest import Digest, DigestMaker, Load
from windowpane.routing.hashes import prefix_hashes
from windowpane.routing.router import Choice, RoundRobin, Router
from windowpane.simulate.run import Simulation
from windowpane.simulate.traffic import Session

DIGEST_PERIOD_S = 1.0
ROUTERS = ("restore-points", "two-choices", "round-robin")
NO_KEY = "0:"  # of requests without adapter and salt
NO_HASHES = prefix_hashes(NO_KEY, np.zeros(0, dtype=np.int32))


@dataclass(slots=True)
class ClusterResult:
    """What the replicas did together. `busiest` is the largest share of all requests that one of them answered."""

    router: str
    replicas: int
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    busiest: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)  # of processor time, hashing included
    digest_s: float = 0.0  # of processor time, to take digests in
    digests: int = 0
    digest_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent)) if self.ttft_s else 0.0

    def decision(self, percent: float) -> float:
        return float(np.percentile(self.decision_s, percent)) if self.decision_s else 0.0

    @property
    def digest_bytes_per_s(self) -> float:
        """Of one replica, on average."""
        return self.digest_bytes / self.seconds / self.replicas if self.seconds else 0.0

    @property
    def digest_share(self) -> float:
        """Of a processor's time, to take in the digests of all replicas."""
        return self.digest_s / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, Any]:
        return {
            "router": self.router,
            "replicas": self.replicas,
            "requests": self.requests,
            "refused": self.refused,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "hit_rate": self.hit_rate,
            "ttft_s": {"mean": float(np.mean(self.ttft_s or [0])), **{f"p{p}": self.ttft(p) for p in (50, 90, 99)}},
            "busiest_share": self.busiest,
            "router_us": {f"p{p}": 1e6 * self.decision(p) for p in (50, 99)},
            "digest_bytes_per_s": self.digest_bytes_per_s,
            "digest_processor_share": self.digest_share,
        }


@dataclass(slots=True)
class _Replica:
    name: str
    simulation: Simulation
    digests: DigestMaker
    published: int = -1  # the version of its last digest
    due_s: float = 0.0
    event_s: float = np.inf  # nothing new is to be heard of it before

    def load(self) -> Load:
        result = self.simulation.result
        request_s = max(1.0, result.running_seconds / max(1, result.requests))  # what still runs counts too
        return Load.of(self.simulation.scheduler, request_s, result.hit_rate)


class ClusterSimulation:
    """`make` gives the simulation of one replica."""

    def __init__(self, make: Callable[[], Simulation], replicas: int, router: str, seed: int = 0) -> None:
        self._now_s = 0.0
        self._router = Router(seed, clock=lambda: self._now_s)
        self._round_robin = RoundRobin()
        self._arrivals: list[tuple[float, int, Session]] = []
        self._order = 0
        self._events: list[tuple[float, str]] = []  # when replicas have to be looked at
        self.result = ClusterResult(router, replicas)
        self._replicas: dict[str, _Replica] = {}
        for number in range(replicas):
            simulation = make()
            simulation.next_turn = self._come
            simulation.result.samples.next_s = np.inf  # nobody draws so many
            name = f"replica-{number}"
            self._replicas[name] = _Replica(name, simulation, DigestMaker(simulation.scheduler))
            self._router.join(name)

    def run(self, sessions: list[Session], progress: Callable[[int], None] = lambda done: None) -> ClusterResult:
        """Until every turn is answered. `progress` is told the turns that came, now and then."""
        for session in deepcopy(sessions):
            self._come(session, session.start_s)
        routed = 0
        while self._arrivals or self._events:
            arrival_s = self._arrivals[0][0] if self._arrivals else np.inf
            if self._events and self._events[0][0] < arrival_s:
                event_s, name = heapq.heappop(self._events)
                replica = self._replicas[name]
                if event_s == replica.event_s:  # else it has done something since this was entered
                    replica.simulation.tick(arrival_s)
                    self._wait_for(replica)
                continue
            self._now_s, _, session = heapq.heappop(self._arrivals)
            replica = self._replicas[self._choose(session)]
            simulation = replica.simulation
            while simulation.is_busy and simulation.now_s < self._now_s:
                simulation.tick(self._now_s)
            simulation.come(session, self._now_s)
            simulation.tick(self._now_s)
            self._wait_for(replica)
            routed += 1
            progress(routed)
        return self._total()

    def _wait_for(self, replica: _Replica) -> None:
        """Look at a replica again when it can have something new to say."""
        replica.event_s = replica.simulation.quiet_until_s() if replica.simulation.is_busy else np.inf
        if replica.simulation.is_busy:
            heapq.heappush(self._events, (replica.event_s, replica.name))

    def _come(self, session: Session, at_s: float) -> None:
        self._order += 1
        heapq.heappush(self._arrivals, (at_s, self._order, session))

    def _choose(self, session: Session) -> str:
        prompt, ends = session.coming_prompt()
        self._publish()
        began = time.thread_time()
        if self.result.router == "round-robin":
            chosen = Choice(self._round_robin.choose(self._router.replicas), 0, 0.0)
        else:
            knows = self.result.router == "restore-points"
            hashes = prefix_hashes(NO_KEY, prompt) if knows else NO_HASHES
            chosen = self._router.choose(hashes, len(prompt))
            self._router.sent(chosen, hashes, len(prompt), ends)
        self.result.decision_s.append(time.thread_time() - began)
        return chosen.replica

    def _publish(self) -> None:
        """Digests that are due by now."""
        result = self.result
        for replica in self._replicas.values():
            if replica.due_s > self._now_s:
                continue
            replica.due_s = self._now_s + DIGEST_PERIOD_S
            is_idle = not replica.simulation.is_busy
            if is_idle and replica.published == replica.digests.version:
                continue  # it says what it said before
            replica.published = replica.digests.version if is_idle else -1
            packed = replica.digests.make(replica.load()).pack()
            result.digests += 1
            result.digest_bytes += len(packed)
            began = time.thread_time()
            self._router.update(replica.name, Digest.unpack(packed))
            result.digest_s += time.thread_time() - began

    def _total(self) -> ClusterResult:
        total, parts = self.result, []
        for replica in self._replicas.values():
            replica.simulation.close()
            parts.append(replica.simulation.result)
        for name in ("requests", "refused", "prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(total, name, sum(getattr(part, name) for part in parts))
        total.seconds = max(part.seconds for part in parts)
        total.ttft_s = [ttft_s for part in parts for ttft_s in part.ttft_s]
        total.busiest = max(part.requests for part in parts) / max(1, total.requests)
        return total
