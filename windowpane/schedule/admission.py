"""How a waiting request gets its memory: from its first token, from a restore point, or from one on the host.

What is on the host has to arrive first: the request has its slot and its reservation then, and waits there.
"""

from __future__ import annotations

from collections.abc import Iterable

from windowpane.kv.manager import KVManager
from windowpane.kv.restore import Hit
from windowpane.kv.sharing import RestorePoint
from windowpane.kv.tier import HostTier
from windowpane.schedule.request import Request
from windowpane.schedule.restoring import NoRestorePlanner, RestorePlanner


class Admission:
    """Looks for room and takes it. Slots whose pages are on their way from the host hold up nobody else."""

    def __init__(
        self, manager: KVManager, restoring: RestorePlanner | NoRestorePlanner, tier: HostTier | None = None
    ) -> None:
        self._manager = manager
        self._restoring = restoring
        self._tier = tier
        self._fetched: dict[int, RestorePoint] = {}  # what slots wait for

    @property
    def fetching(self) -> list[int]:
        """Slots that wait for pages from the host."""
        return list(self._fetched)

    def fit(self, request: Request, tokens: int) -> Hit | None:
        """How a request can be admitted, with `tokens` tokens reserved; None: not now.

        A sequence that resumes pins the window's pages beside its own, so where memory is short it may have to begin
        with its first token; with a host tier it waits for others to end. Where room would be made of what is spilled
        in a moment, it waits for that.
        """
        manager = self._manager
        hit = self._restoring.look_up(request)
        if hit.arrives:
            return None
        if hit.on_host is not None:
            if (demand := self._fetch_demand(request, tokens, hit)) is not None:
                return self._unless_lossy(request, tokens, hit, demand)
            if self._is_worth_waiting(manager.demand(tokens)):
                return None
            hit = self._restoring.look_up(request, on_host=False)
        if hit.point is not None:
            demand = manager.start_demand(tokens, hit.point, hit.length)
            if manager.can_reserve(demand):
                return self._unless_lossy(request, tokens, hit, demand)
            manager.give_way(demand)
            if hit.point in manager.books.points and manager.can_reserve(
                manager.start_demand(tokens, hit.point, hit.length)
            ):
                return hit
            if self._tier is not None and self._is_worth_waiting(demand):
                return None
            hit = Hit(branch=hit.branch, miss=f"{hit.length} tokens are kept, but there is no room to resume them")
        demand = manager.start_demand(tokens)
        if manager.can_reserve(demand) or manager.give_way(demand):
            return self._unless_lossy(request, tokens, hit, demand)
        return None

    def start(self, slot: int, request: Request, tokens: int, hit: Hit) -> bool:
        """Take what `fit` has found; False where the sequence begins only when its pages have arrived."""
        manager = self._manager
        if hit.on_host is not None:
            assert self._tier is not None
            known = request.tokens(0, request.known_tokens)
            self._fetched[slot] = self._tier.fetch(slot, tokens, request.prefix_key, known, hit)
        else:
            if hit.point is not None:
                manager.touch(hit.point)
            manager.start(slot, tokens, hit.point, hit.length if hit.point is not None else None)
        self._restoring.admit(slot, request, hit)
        return slot not in self._fetched

    def land(self, landed: Iterable[tuple[int, float]]) -> list[int]:
        """These transfers are over, and took so many seconds each. Returns the slots whose sequences begin now."""
        assert self._tier is not None
        ready = []
        for number, seconds in landed:
            point = self._tier.land(number, seconds)
            if point is None:
                continue
            for slot in [slot for slot, awaited in self._fetched.items() if awaited is point]:
                del self._fetched[slot]
                self._manager.start_claimed(slot, point)
                ready.append(slot)
            self._manager.publish(point)
        return ready

    def forget(self, slot: int) -> None:
        """The request has left its slot; what it waited for stays as a restore point."""
        self._fetched.pop(slot, None)

    def _fetch_demand(self, request: Request, tokens: int, hit: Hit) -> list[int] | None:
        """What fetching takes now, points of others given up if need be; None where there is no room for it."""
        assert self._tier is not None
        known = request.tokens(0, request.known_tokens)
        for may_give_way in (False, True):
            demands = self._tier.fetch_demands(tokens, request.prefix_key, known, hit)
            if may_give_way:
                self._manager.give_way(demands[1])
                demands = self._tier.fetch_demands(tokens, request.prefix_key, known, hit)
            for demand in demands:
                if self._manager.can_reserve(demand):
                    return demand
        return None

    def _is_worth_waiting(self, demand: list[int]) -> bool:
        """Whether there is room for this once those that run have ended: with a tier what they leave is not lost, and
        waiting for them takes less time than computing a long beginning again.
        """
        per_slab = self._manager.arena.pages_per_slab
        slabs = sum(-(-pages // per) for pages, per in zip(demand, per_slab, strict=True))
        return any(self._manager.live_pages) and slabs <= self._manager.arena.num_slabs

    def _unless_lossy(self, request: Request, tokens: int, hit: Hit, demand: list[int]) -> Hit | None:
        if self._tier is None:
            return hit
        if self._tier.should_wait(demand):
            return None
        if hit.on_host is not None and hit.on_host not in self._tier.books.points:
            return self.fit(request, tokens)  # the host gave it up for what was to be spilled
        return hit
