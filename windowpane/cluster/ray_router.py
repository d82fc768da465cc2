"""The router as Ray Serve knows routers. It runs wherever a handle to the replicas is: in every ingress."""

from __future__ import annotations

from collections import deque
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from windowpane.cluster import published
from windowpane.cluster.order import Order, To
from windowpane.routing.digest import Digest
from windowpane.routing.router import Choice, Router

MOST_CHOICES = 16_384  # that are remembered


class RestorePointRouter(RequestRouter):
    """Sends an `Order` where its first token comes soonest, what is `To` a replica there, and the rest by queues."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._router = Router()
        self._seen: dict[str, int] = {}  # the id of the digest that was taken in last
        self._choices: dict[str, Choice] = {}  # of requests that Ray has not sent yet, oldest first
        self._under_way: dict[str, str] = {}  # who has an order
        self._ended: deque[str] = deque()  # orders, as another thread tells
        self._published = published.LATEST[self._deployment_id.name]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this when replicas come and go, and when one has published."""
        super().update_replicas(replicas)
        self._take_in({replica.replica_id.unique_id: replica for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(order, To):
            return [[by_name[order.replica]] if order.replica in by_name else []]
        while self._ended:
            if (replica := self._under_way.pop(self._ended.popleft(), None)) is not None:
                self._router.ended(replica)
        known = set(by_name) & set(self._router.replicas)
        if pending_request is None or not isinstance(order, Order) or not known:
            return [candidate_replicas]
        available = {r.replica_id.unique_id for r in self.select_available_replicas(candidate_replicas)} & known
        choice = self._router.choose(order.hashes, len(order.prompt), available or known)
        request = pending_request.metadata.internal_request_id
        if request not in self._choices:  # else Ray asks again, for no replica took it
            # Counted before it is sent: others are chosen for meanwhile, and should not all go to the same replica.
            self._router.sent(choice, order.hashes, len(order.prompt), order.message_ends)
        self._choices[request] = choice
        if len(self._choices) > MOST_CHOICES:  # who was cancelled is never sent
            del self._choices[next(iter(self._choices))]
        chosen = by_name[choice.replica]
        return [[chosen], [replica for replica in candidate_replicas if replica is not chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request, taker = pending_request.metadata.internal_request_id, replica_id.unique_id
        choice = self._choices.pop(request, None)
        order = pending_request.args[0] if pending_request.args else None
        if not isinstance(order, Order):
            return
        self._under_way[request] = taker
        if choice is not None and choice.replica != taker:
            # The queue of the one that was chosen is full.
            taken = Choice(taker, 0, choice.expected_s)
            self._router.sent(taken, order.hashes, len(order.prompt), order.message_ends)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Comes from a thread of Ray's."""
        self._ended.append(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.remove(replica_id.unique_id)
        self._published.pop(replica_id.unique_id, None)

    def _take_in(self, replicas: dict[str, RunningReplica]) -> None:
        for gone in [name for name in self._router.replicas if name not in replicas]:
            self._router.remove(gone)
            self._published.pop(gone, None)
        for name, replica in replicas.items():
            stats = replica.routing_stats
            if not stats:
                self._router.join(name)
            elif self._seen.get(name) != id(stats["digest"]):
                self._seen[name] = id(stats["digest"])
                self._published[name] = stats  # which keeps the digest, and so its id
                self._router.update(name, Digest.unpack(stats["digest"]))
