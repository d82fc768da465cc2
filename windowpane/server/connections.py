"""Connections that do not get on: time limits for headers, bodies and clients that do not read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take for its headers, for its body after them, for reading what was sent to it, and between
    two requests. That last one is longer than clients and proxies keep a connection: who sends on one that is just
    being closed gets no answer.
    """

    headers_s: float = 20.0
    body_s: float = 60.0
    reading_s: float = 60.0
    idle_s: float = 75.0
    max_header_bytes: int = 64 * 2**10


class Connection(HttpToolsProtocol):
    """uvicorn's, cut off when it does not get on."""

    patience = Patience()
    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = self.patience.idle_s  # type: ignore[assignment]
        self._expect(self.patience.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._expect(self.patience.headers_s)

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._expect(self.patience.body_s)
        # uvicorn puts --root-path in front; a proxy that leaves it there has done so before.
        if self.root_path and self.scope["path"].startswith(f"{self.root_path * 2}/"):
            for name in ("path", "raw_path"):
                self.scope[name] = self.scope[name][len(self.root_path) :]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(self.patience.reading_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(None)

    def _count(self, data: bytes) -> None:
        self._header_bytes += len(data) + 4
        if self._header_bytes > self.patience.max_header_bytes:
            self.transport.abort()

    def _expect(self, within_s: float | None) -> None:
        """Cut the connection off unless this is called again within so long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if within_s is None else self.loop.call_later(within_s, self.transport.abort)


def connection_with(patience: Patience) -> type[Any]:
    return type("PatientConnection", (Connection,), {"patience": patience})
