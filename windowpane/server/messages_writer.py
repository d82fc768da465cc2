"""Writes the answer of a chat as Anthropic's documents: one message, or the events that it grows by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windowpane.schedule.request import FinishReason
from windowpane.server.errors import ApiError
from windowpane.server.job import Job, Piece
from windowpane.server.json_body import strict_json
from windowpane.server.reader import Reader
from windowpane.server.service import Service
from windowpane.server.sse import Form, named_event
from windowpane.server.usage import usage
from windowpane.text.parsers import Content, Delta, Reasoning, ToolArguments, ToolStart

PING = named_event({"type": "ping"})


class MessagesWriter:
    form = Form(sign_of_life=PING)

    def __init__(self, service: Service, stops: Sequence[str], job: Job, readers: Sequence[Reader]) -> None:
        self._model = service.name_of(job)
        self._stops = stops
        self._job = job
        (self._reader,) = readers
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each block, in pieces
        self._is_open = False

    def document(self) -> dict[str, Any]:
        answer = self._job.answers[0]
        for _ in self._events([*self._reader.push(answer.text), *self._reader.finish()]):
            pass
        content = [
            {**block, _FIELDS[block["type"]]: call_input(text) if block["type"] == "tool_use" else text}
            for block, text in zip(self._blocks, map("".join, self._texts), strict=True)
        ]
        return {**self._message(), "content": content, **self._end(answer.finish_reason)}

    # -- event by event --------------------------------------------------------------------------------------------

    def entries(self, pieces: list[Piece]) -> int:
        return len(pieces)

    def first(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message()})

    def encode(self, pieces: list[Piece]) -> bytes:
        deltas = self._reader.push("".join(piece.text for piece in pieces))
        if pieces[-1].finish_reason is not None:
            deltas += self._reader.finish()
        return b"".join(map(named_event, self._events(deltas)))

    def last(self) -> bytes:
        end = self._end(self._job.answers[0].finish_reason)
        counts = end.pop("usage")
        delta = {"type": "message_delta", "delta": end, "usage": counts}
        return b"".join(map(named_event, [*self._close(), delta, {"type": "message_stop"}]))

    def failed(self, error: ApiError) -> bytes:
        return named_event(error.document("/v1/messages"))

    def _events(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            kind = _kind(delta)
            if not self._is_open or self._blocks[-1]["type"] != kind or isinstance(delta, ToolStart):
                yield from self._close()
                yield self._open(kind, delta)
            if not isinstance(delta, ToolStart):
                text = delta.json if isinstance(delta, ToolArguments) else delta.text
                self._texts[-1].append(text)
                name, field = _DELTAS[kind]
                yield self._of_block("content_block_delta", delta={"type": name, field: text})

    def _open(self, kind: str, delta: Delta) -> dict[str, Any]:
        self._is_open = True
        block: dict[str, Any] = {"type": kind, **_EMPTY[kind]}
        if isinstance(delta, ToolStart):
            block |= {"id": delta.id, "name": delta.name}
        self._blocks.append(block)
        self._texts.append([])
        return self._of_block("content_block_start", content_block=block)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            yield self._of_block("content_block_stop")

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    # -- documents -------------------------------------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self, reason: FinishReason | None) -> dict[str, Any]:
        stop = self._job.answers[0].stop
        if stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop, "usage": self._usage()}
        why = "tool_use" if self._reader.ended_in_calls(reason) else _REASONS.get(reason, "end_turn")
        return {"stop_reason": why, "stop_sequence": None, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """What was found in the cache is counted apart from the input."""
        counts = usage(self._job)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }


_REASONS: dict[FinishReason | None, str] = {FinishReason.LENGTH: "max_tokens", FinishReason.STOP: "end_turn"}
_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _kind(delta: Delta) -> str:
    if isinstance(delta, Content):
        return "text"
    return "thinking" if isinstance(delta, Reasoning) else "tool_use"


def call_input(text: str) -> Any:
    """Arguments that were cut off are no JSON; an input is an object in any case."""
    try:
        document = strict_json(text or "{}")
    except Exception:
        return {}
    return document if isinstance(document, dict) else {}
