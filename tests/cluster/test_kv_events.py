"""KV events, heard by a subscriber that knows vLLM's public format and nothing of ours."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from tests.cluster.test_simulated import chats, replica
from windowpane.routing.events import KvEvents, KvEventsConfig
from windowpane.simulate.run import Simulation


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Subscriber:
    """Keeps the blocks that a publisher says it has."""

    def __init__(self, endpoint: str, topic: bytes) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.salts: dict[int, str] = {}
        self.seen: list[int] = []
        self.was_cleared = False

    def hear(self, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if self.seen and number <= self.seen[-1]:
            return  # it was replayed
        self.seen.append(number)
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for tag, *fields in events:
            {"BlockStored": self.stored, "BlockRemoved": self.removed, "AllBlocksCleared": self.cleared}[tag](*fields)

    def stored(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *more: Any) -> None:
        assert len(tokens) == size * len(hashes) and more[1] == "GPU"
        assert parent is None or parent in self.blocks
        if len(more) > 3:
            self.salts[hashes[0]] = more[3][0][0]
        for at, hashed in enumerate(hashes):
            self.blocks[hashed] = (parent, tokens[at * size : (at + 1) * size])
            parent = hashed

    def removed(self, hashes: list[int], medium: str) -> None:
        for hashed in hashes:
            del self.blocks[hashed]

    def cleared(self) -> None:
        self.blocks.clear()
        self.was_cleared = True

    def known_tokens(self, prompt: np.ndarray) -> int:
        """How far the blocks lead into a prompt, by their tokens and parents alone."""
        children = {(parent, tuple(tokens)): hashed for hashed, (parent, tokens) in self.blocks.items()}
        at: int | None = None
        for start in range(0, len(prompt) - 15, 16):
            at = children.get((at, tuple(prompt[start : start + 16].tolist())))
            if at is None:
                return start
        return len(prompt) // 16 * 16


@pytest.fixture
def told() -> Iterator[tuple[Simulation, KvEvents, KvEventsConfig]]:
    simulation = replica()
    config = KvEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://*:{free_port()}",
        replay_endpoint=f"tcp://127.0.0.1:{free_port()}",
        topic="kv",
    )
    events = KvEvents(config, simulation.scheduler)
    yield simulation, events, config
    events.close()


def replayed(config: KvEventsConfig, subscriber: Subscriber, first: int) -> None:
    """Ask for everything from a sequence number on, as after a gap."""
    asking = subscriber.context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, 5000)
    asking.connect(config.replay_endpoint)
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    while True:
        _, sequence, payload = asking.recv_multipart()
        if int.from_bytes(sequence, "big", signed=True) == -1:
            assert payload == b""
            asking.close()
            return
        subscriber.hear(sequence, payload)


def test_a_subscriber_knows_what_can_be_resumed(told: tuple[Simulation, KvEvents, KvEventsConfig]) -> None:
    simulation, _, config = told
    subscriber = Subscriber(config.endpoint.replace("*", "127.0.0.1"), b"kv")
    (chat,) = chats(1)
    simulation.run([chat])
    replayed(config, subscriber, 0)  # what was sent before it had joined
    prompt, _ = chat.next_prompt()
    assert subscriber.known_tokens(prompt) == len(prompt) // 16 * 16
    assert subscriber.known_tokens(np.flip(prompt)) == 0

    heard = subscriber.seen[-1]
    assert subscriber.seen == list(range(heard + 1))
    simulation.scheduler.drop_restore_points()
    while not subscriber.was_cleared:
        subscriber.hear(*subscriber.socket.recv_multipart()[1:])
    assert subscriber.blocks == {} and subscriber.seen == list(range(len(subscriber.seen)))
    subscriber.context.destroy(linger=0)


def test_the_config_is_vllms() -> None:
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events", "hwm": 10}'
    config = KvEventsConfig.parse(text)
    assert config.publishes and (config.endpoint, config.hwm, config.topic) == ("tcp://*:5557", 10, "kv-events")
    assert not KvEventsConfig.parse("{}").publishes
    assert not KvEventsConfig.parse('{"enable_kv_cache_events": true, "publisher": "null"}').publishes


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "no JSON"),
        ('{"port": 1}', "no JSON object with some of buffer_steps"),
        ('{"hwm": "many"}', "hwm cannot be 'many'; the default is 100000"),
        ('{"publisher": "kafka"}', "publisher 'kafka' is not known; use zmq or null"),
        ('{"buffer_steps": 0}', "at least 1"),
    ],
)
def test_a_wrong_config_is_refused_in_a_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        KvEventsConfig.parse(text)
    assert "\n" not in str(refused.value)


def test_an_endpoint_that_is_taken_is_refused_in_a_line(told: tuple[Simulation, KvEvents, KvEventsConfig]) -> None:
    _, _, config = told
    with pytest.raises(ValueError, match="cannot be used: Address already in use"):
        KvEvents(config, replica().scheduler)
