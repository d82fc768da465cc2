"""KV events as vLLM publishes them: which blocks of tokens can be resumed here, for routers that are not ours.

A block is stored while some restore point holds it and all blocks before it, and removed with the last one. So a block
whose window or state is gone is never announced by itself: what is announced is the way to a place where a request can
begin. Block hashes are those of `routing.hashes`, as unsigned 64-bit numbers.

    topic │ sequence, 8 bytes, big-endian │ msgpack of [ts, [event, …], data_parallel_rank]

    ["BlockStored", [hash, …], parent hash or nil, [token, …], block_size, lora_id, medium, lora_name, extra_keys]
    ["BlockRemoved", [hash, …], medium]
    ["AllBlocksCleared"]
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from queue import Empty, Queue
from typing import Any

from windowpane.kv.index import PointIndex
from windowpane.kv.sharing import RestorePoint
from windowpane.routing.digest import tier_indexes
from windowpane.routing.hashes import BLOCK_TOKENS, prefix_hashes
from windowpane.schedule.scheduler import Scheduler

MEDIUMS = ("GPU", "CPU", "DISK")  # as vLLM calls them, whatever the device is
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
EVENTS_AT_ONCE = 256
POLL_S = 0.05

Event = list[Any]

log = logging.getLogger("windowpane.server")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's `--kv-events-config`, with its defaults."""

    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Of its JSON text; raises ValueError in one line."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--kv-events-config is no JSON: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not given.keys() <= known:
            raise ValueError(f"--kv-events-config {text} is no JSON object with some of {', '.join(sorted(known))}")
        for field in fields(cls):
            value, default = given.get(field.name, field.default), field.default
            if type(value) is not (type(default) if default is not None or value is None else str):
                raise ValueError(f"--kv-events-config: {field.name} cannot be {value!r}; the default is {default!r}")
        config = cls(**given)
        if config.publisher not in ("", "null", "zmq"):
            raise ValueError(f"--kv-events-config: publisher {config.publisher!r} is not known; use zmq or null")
        if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
            raise ValueError("--kv-events-config: buffer_steps, hwm and max_queue_size are at least 1")
        return config

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


class KvEvents:
    """Publishes the events of one scheduler until `close`. The engine's thread makes them, and one of its own sends."""

    def __init__(self, config: KvEventsConfig, scheduler: Scheduler) -> None:
        indexes = tier_indexes(scheduler)
        if not indexes:
            raise ValueError("--kv-events-config tells of restore points, and prefix caching is off; leave one out")
        self._events: Queue[Event | None] = Queue(config.max_queue_size)
        self._counts = [Counter[int]() for _ in indexes]  # restore points that hold a block, by tier
        self._hashes: dict[RestorePoint, list[int]] = {}
        self._publisher = _Publisher(config, self._events)
        for tier, index in enumerate(indexes):
            index.listen(partial(self._put, index, tier), partial(self._remove, tier))
            for point in index.points():
                self._put(index, tier, point)
        self._publisher.start()

    def close(self) -> None:
        """Send what is left, and end."""
        self._events.put(None)
        self._publisher.join(2.0)

    def _put(self, index: PointIndex, tier: int, point: RestorePoint) -> None:
        key, tokens = index.content(point)
        hashes = self._hashes[point] = prefix_hashes(key, tokens).tolist()
        counts = self._counts[tier]
        known = sum(1 for hashed in hashes if counts[hashed])  # who has a block has those before it
        counts.update(hashes)
        if known == len(hashes):
            return
        adapter, _, salt = key.partition(":")
        new = hashes[known:]
        stored = tokens[known * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS].tolist()
        event = ["BlockStored", new, hashes[known - 1] if known else None, stored, BLOCK_TOKENS, int(adapter) or None]
        event += [MEDIUMS[tier], None]
        if salt and not known:  # where vLLM has it: with the first block
            event.append([[salt], *([None] * (len(new) - 1))])
        self._events.put(event)

    def _remove(self, tier: int, point: RestorePoint) -> None:
        counts = self._counts[tier]
        hashes = self._hashes.pop(point)
        counts.subtract(hashes)
        gone = [hashed for hashed in hashes if not counts[hashed]]
        for hashed in gone:
            del counts[hashed]
        if gone:
            self._events.put(["BlockRemoved", gone, MEDIUMS[tier]])
            if not any(self._counts):
                self._events.put(["AllBlocksCleared"])


class _Publisher(threading.Thread):
    def __init__(self, config: KvEventsConfig, events: Queue[Event | None]) -> None:
        super().__init__(name="kv-events", daemon=True)
        if find_spec("zmq") is None or find_spec("msgpack") is None:
            raise ValueError('--kv-events-config needs pyzmq and msgpack: pip install "windowpane[kv-events]"')
        import zmq

        self._events = events
        self._topic = config.topic.encode()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(config.hwm)
        self._replay = None if config.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        try:
            binds = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith(("ipc:", "inproc:"))
            (self._out.bind if binds else self._out.connect)(config.endpoint)
            if self._replay is not None and config.replay_endpoint is not None:
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            named = " or ".join(filter(None, (config.endpoint, config.replay_endpoint)))
            raise ValueError(f"--kv-events-config: {named} cannot be used: {error}") from None

    def run(self) -> None:
        ended = False
        while not ended:
            if self._replay is not None and self._replay.poll(0):
                self._send_again()
            batch, ended = self._next_batch()
            if batch:
                self._send(batch)
        self._context.destroy(linger=1000)

    def _next_batch(self) -> tuple[list[Event], bool]:
        batch: list[Event] = []
        try:
            event = self._events.get(timeout=POLL_S)
            while event is not None:
                batch.append(event)
                if len(batch) == EVENTS_AT_ONCE:
                    return batch, False
                event = self._events.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _send(self, batch: list[Event]) -> None:
        import msgpack

        sequence, payload = self._sequence.to_bytes(8, "big"), msgpack.packb([time.time(), batch, 0])
        self._out.send_multipart((self._topic, sequence, payload))
        self._sent.append((sequence, payload))
        self._sequence += 1

    def _send_again(self) -> None:
        """What was sent from the sequence number on that a client asks for."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a replay of KV events was asked for with %d frames, not with a sequence number", len(frames))
            return
        client, _, first = frames
        for sequence, payload in self._sent:
            if sequence >= first:  # big-endian: bytes compare as numbers do
                self._replay.send_multipart((client, b"", sequence, payload))
        self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))
