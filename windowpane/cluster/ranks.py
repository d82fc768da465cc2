"""The ranks of one replica across machines: rank 0 is the replica, and the others are actors in its placement group.

Ray places them and ends them with the replica. They connect to it, say a secret that came with their actor, and are
told what any other rank is told (`parallel.messages`); tensors go from rank to rank by torch.distributed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOOK_S = 1.0  # between two looks at whether an actor that has not connected yet is still there
SECRET_BYTES = 32


class PlacedRanks:
    """Rank r runs in bundle r of the replica's placement group."""

    def __init__(self, group: PlacementGroup) -> None:
        self.host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._group = group
        self._actors: list[Any] = []

    def backend(self, devices: Sequence[torch.device]) -> str:
        """Every rank sees its own card as the first."""
        return "nccl" if devices[0].type == "cuda" else "gloo"

    def spawn(self, rank: int, devices: Sequence[torch.device]) -> tuple[Connection, _RankActor]:
        secret = secrets.token_bytes(SECRET_BYTES)
        placed = PlacementGroupSchedulingStrategy(self._group, rank)
        remote: Any = ray.remote(num_cpus=1, num_gpus=int(devices[rank].type == "cuda"), max_restarts=0)(_Rank)
        with socket.create_server((self.host, 0)) as listener:
            actor = remote.options(scheduling_strategy=placed).remote()
            self._actors.append(actor)
            process = _RankActor(actor, actor.run.remote(listener.getsockname()[:2], secret))
            return _accept(listener, secret, process, rank), process

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class _Rank:
    """The actor. `run` never returns: the process ends with the connection."""

    def run(self, address: tuple[str, int], secret: bytes) -> None:
        from windowpane.parallel.worker import work

        pipe = Connection(socket.create_connection(address).detach())
        pipe.send_bytes(secret)
        work(pipe)


class _RankActor:
    """An actor, asked as a process is."""

    def __init__(self, actor: Any, ended: Any) -> None:
        self._actor = actor
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        if not ray.wait([self._ended], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        with suppress(RayError):
            ray.get(self._ended)
        return 1

    def kill(self) -> None:
        ray.kill(self._actor)

    def has_ended(self) -> bool:
        return bool(ray.wait([self._ended], timeout=0)[0])


def _accept(listener: socket.socket, secret: bytes, process: _RankActor, rank: int) -> Connection:
    """The connection of the actor that knows the secret; anybody else's is closed before a byte of it is understood."""
    listener.settimeout(LOOK_S)
    while True:
        try:
            pipe = Connection(_blocking(listener.accept()[0]))
        except TimeoutError:
            if process.has_ended():
                raise ValueError(f"rank {rank} ended before it could connect; Ray's logs say why") from None
            continue
        with suppress(OSError, EOFError):
            if hmac.compare_digest(pipe.recv_bytes(SECRET_BYTES), secret):
                return pipe
        pipe.close()


def _blocking(accepted: socket.socket) -> int:
    accepted.settimeout(None)
    return accepted.detach()
