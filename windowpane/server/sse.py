"""Server-sent events: one response that sends what a job says as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
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

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `json.dumps` would make one per call

log = logging.getLogger("windowpane.server")


def event(document: Mapping[str, Any], entries: int = 0) -> bytes:
    """`entries` is about how many tokens and logprobs it names."""
    return b"data: " + (to_json(document) if entries <= ENTRIES_AT_ONCE else slow_json(document)) + b"\n\n"


def named_event(document: Mapping[str, Any]) -> bytes:
    """With its `type` as the event's name, which some clients go by."""
    return f"event: {document['type']}\n".encode() + event(document)


def to_json(document: Any) -> bytes:
    return _ENCODER.encode(document).encode()


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint streams: what is sent while nothing comes, and at the end of all."""

    media_type: str = "text/event-stream"
    sign_of_life: bytes = b": the engine is at work\n\n"
    end: bytes = b""


OPENAI = Form(end=b"data: [DONE]\n\n")


class PlainChunks:
    """Chunks that hold nothing but text, as most do, put together from ready-made parts: a head per choice, and a tail.

    A head ends where the text's JSON begins.
    """

    def __init__(self, heads: Sequence[bytes], tail: bytes) -> None:
        self._heads = heads
        self._tail = tail

    def encode(self, pieces: list[Piece]) -> bytes | None:
        """None where there is more to say: several choices, or an end."""
        choice, text, _, _, ended = pieces[-1]
        if ended is not None or (len(pieces) > 1 < len(self._heads)):
            return None
        if len(pieces) > 1:
            text = "".join([piece.text for piece in pieces])
        return self._heads[choice] + to_json(text) + self._tail if text else b""


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
        # In a task of its own: each piece wakes it, and would go through the frames of all middleware otherwise.
        await asyncio.create_task(self._stream(receive, send))

    async def _stream(self, receive: Receive, send: Send) -> None:
        encoder, job = self._encoder, self._job
        try:
            async with self._service.running(job, receive) as batches:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if data := encoder.first():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                async for batch in batches:
                    if not batch:
                        data = encoder.form.sign_of_life
                    elif encoder.entries(batch) <= ENTRIES_AT_ONCE:
                        data = encoder.encode(batch)
                    else:  # a prompt's logprobs, or all that a slow reader has not read, may be much
                        data = await self._service.off_loop(encoder.encode, batch)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                failure = failure_of(job)
                end = encoder.last() if failure is None else encoder.failed(failure)
                await send({"type": "http.response.body", "body": end + encoder.form.end, "more_body": False})
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self._service.draining:  # else the time to end was over, and what was sent is all there is
                raise
