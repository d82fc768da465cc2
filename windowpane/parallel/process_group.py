"""A `RankGroup` of processes, over torch.distributed: NCCL between cards, gloo otherwise.

The backends are used directly: torch's global process group is left to whoever embeds this engine, and several models
may run in one process. Ranks are on one machine and nothing listens to others, unless rank 0 is told an address.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from windowpane.models.tensors import RankPlace

# Ranks do equal work, so they wait for one another only for as long as their speeds differ. A rank that is later than
# this is as good as dead; one that dies is noticed at once (see `launch`).
PATIENCE = timedelta(minutes=5)
HERE = "127.0.0.1"


class ProcessGroup:
    """`store` is where ranks find one another: rank 0's own, or `join_store`'s. `host` is this rank's own address."""

    def __init__(self, place: RankPlace, backend: str, store: Any, host: str = HERE) -> None:
        self.place = place
        self.in_graphs = backend == "nccl"
        self._group = _BACKENDS[backend](store, place, host)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.numel():
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        ranks = self.place.ranks
        parts = x.new_empty(ranks * rows, width)
        if x.numel():
            self._group._allgather_base(parts, x.contiguous()).wait()
        return parts.view(ranks, rows, width).transpose(0, 1).reshape(rows, ranks * width)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if x.numel():
            self._group.broadcast([x], options).wait()
        return x

    def abort(self) -> None:
        """Let go of calls that wait for a rank which is gone. gloo notices by itself."""
        if self.in_graphs:
            self._group.abort()


def backend_for(devices: Sequence[torch.device]) -> str:
    """NCCL wants a card for each rank; ranks that share one, or have none, talk over gloo."""
    own_cards = all(d.type == "cuda" for d in devices) and len(set(devices)) == len(devices)
    return "nccl" if own_cards else "gloo"


def host_store(host: str = HERE) -> tuple[Any, int]:
    """Where ranks find one another, and the port by which the others reach it."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=listener.detach()
    )
    return store, port


def join_store(host: str, port: int) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)  # type: ignore[attr-defined]


def own_address(host: str) -> str:
    """By which this machine is known to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:  # nothing is sent
        asking.connect((host, 1))
        return str(asking.getsockname()[0])


def _gloo(store: Any, place: RankPlace, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, place.rank, place.ranks, options)


def _nccl(store: Any, place: RankPlace, host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, place.rank, place.ranks, options)


_BACKENDS: dict[str, Callable[[Any, RankPlace, str], Any]] = {"gloo": _gloo, "nccl": _nccl}
