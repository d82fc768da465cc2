"""Server-sent events: one response that sends what a job says as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from windowpane.server.errors import ApiError
from windowpane.server.job import Job, Piece
from windowpane.server.json_body import slow_json
from windowpane.server.service import ClientGone, Service, failure_of

ENTRIES_AT_ONCE = 1000  # tokens and logprobs that are written on the event loop, in a few milliseconds
BESIDE_THE_LOOP = ENTRIES_AT_ONCE + 1

log = logging.getLogger("windowpane.server")


def event(document: Mapping[str, Any], entries: int = 0) -> bytes:
    """`entries` is about how many tokens and logprobs it names."""
    return b"data: " + (to_json(document) if entries <= ENTRIES_AT_ONCE else slow_json(document)) + b"\n\n"


def named_event(document: Mapping[str, Any]) -> bytes:
    """With its `type` as the event's name, which some clients go by."""
    return f"event: {document['type']}\n".encode() + event(document)


def to_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint streams: what is sent while nothing comes, and at the end of all."""

    media_type: str = "text/event-stream"
    sign_of_life: bytes = b": the engine is at work\n\n"
    end: bytes = b""


OPENAI = Form(end=b"data: [DONE]\n\n")


class Encoder(Protocol):
    """What a job says as the events of one endpoint, or as one document."""

    @property
    def form(self) -> Form: ...

    def document(self) -> dict[str, Any]:
        """All of it, once every choice has ended."""

    def entries(self, pieces: list[Piece]) -> int:
        """How many tokens and logprobs these pieces will name, about."""

    def first(self) -> bytes:
        """Before anything has come."""

    def encode(self, pieces: list[Piece]) -> bytes:
        """These pieces; nothing where they show nothing."""

    def last(self) -> bytes:
        """After every choice has ended."""

    def failed(self, error: ApiError) -> bytes:
        """The same where one has failed. The headers are long gone, so that it can only be told as an event."""


async def answered(service: Service, job: Job, encoder: Encoder, receive: Receive) -> Response:
    """The response to a job that was made while `Service.admitted` held its places."""
    if job.streams:
        return EventStream(service, job, encoder)
    await service.finished(job, receive)
    return await service.document(encoder.document, job.headers)


class EventStream(Response):
    """Streams one job. A client that reads slowly gets larger pieces, and holds no memory of the engine's."""

    def __init__(self, service: Service, job: Job, encoder: Encoder) -> None:
        self.media_type = encoder.form.media_type
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **job.headers})
        del self.headers["content-length"]
        self._service = service
        self._job = job
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoder, job = self._encoder, self._job
        try:
            async with self._service.running(job, receive) as batches:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await _send(send, encoder.first())
                async for batch in batches:
                    if not batch:
                        await _send(send, encoder.form.sign_of_life)
                    elif data := await self._encoded(batch):
                        await _send(send, data)
                failure = failure_of(job)
                end = encoder.last() if failure is None else encoder.failed(failure)
                await _send(send, end + encoder.form.end, more=False)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self._service.draining:  # else the time to end was over, and what was sent is all there is
                raise

    async def _encoded(self, batch: list[Piece]) -> bytes:
        """A prompt's logprobs, or all that a slow reader has not read, may be much."""
        if self._encoder.entries(batch) <= ENTRIES_AT_ONCE:
            return self._encoder.encode(batch)
        return await self._service.off_loop(self._encoder.encode, batch)


async def _send(send: Send, data: bytes, more: bool = True) -> None:
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
