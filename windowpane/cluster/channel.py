"""Tokens on their way from replicas to an ingress, over one connection each instead of Ray.

An order goes through Ray, and so does its end, with all tokens once more: whatever is lost here comes with that. In
between, a replica writes what a step gave to all requests of one ingress at once, which costs a few microseconds a
token. A frame is its length (4 bytes) and a pickled list of (channel, place of the first token, tokens).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import pickle
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from windowpane.schedule.request import TokenLogprobs

SECRET_BYTES = 32
_LENGTH_BYTES = 4

Tokens = list[tuple[int, TokenLogprobs | None]]
Taker = Callable[[int, Tokens], None]

log = logging.getLogger("windowpane.server")


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where an ingress listens. Who does not say the secret, which goes through Ray alone, is not listened to."""

    host: str
    port: int
    secret: bytes


class Inbox:
    """An ingress's side, on its event loop."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._takers: dict[int, Taker] = {}
        self._channels = count()
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> ReplyTo:
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._listen_to, self._host, 0)
        return ReplyTo(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    def open(self, taker: Taker) -> int:
        """A channel whose tokens go to `taker`, until it is closed."""
        channel = next(self._channels)
        self._takers[channel] = taker
        return channel

    def close(self, channel: int) -> None:
        del self._takers[channel]

    def end(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                if not hmac.compare_digest(await reader.readexactly(SECRET_BYTES), self._secret):
                    return
                while True:
                    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
                    for channel, start, tokens in pickle.loads(await reader.readexactly(length)):
                        taker = self._takers.get(channel)
                        if taker is not None:
                            taker(start, tokens)
        finally:
            writer.close()


class Outbox:
    """A replica's side, on its event loop: connections to ingresses, by where they listen."""

    def __init__(self) -> None:
        self._connections: dict[ReplyTo, _Connection] = {}

    def send(self, to: ReplyTo, channel: int, start: int, tokens: Tokens) -> None:
        connection = self._connections.get(to)
        if connection is None:
            connection = self._connections[to] = _Connection(to)
        connection.send(channel, start, tokens)


class _Connection:
    def __init__(self, to: ReplyTo) -> None:
        self._to = to
        self._pending: list[tuple[int, int, Tokens]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._has_failed = False
        self._connecting = asyncio.create_task(self._connect())

    def send(self, channel: int, start: int, tokens: Tokens) -> None:
        if self._has_failed:
            return  # tokens come with the end
        if not self._pending and self._writer is not None:  # what else comes in this turn of the loop goes with it
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((channel, start, tokens))

    async def _connect(self) -> None:
        try:
            _, self._writer = await asyncio.open_connection(self._to.host, self._to.port)
        except OSError as error:
            log.warning("%s cannot be reached, so its streams come in one piece: %s", self._to.host, error)
            self._has_failed = True
            self._pending.clear()
            return
        self._writer.write(self._to.secret)
        self._flush()

    def _flush(self) -> None:
        assert self._writer is not None
        if self._writer.is_closing():
            self._has_failed = True
        elif self._pending:
            frame = pickle.dumps(self._pending, pickle.HIGHEST_PROTOCOL)
            self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
        self._pending = []
