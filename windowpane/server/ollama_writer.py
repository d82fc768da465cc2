"""Writes an answer as Ollama's documents: one, or a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from windowpane.schedule.request import TokenLogprobs
from windowpane.server.errors import ApiError
from windowpane.server.job import Job, Piece
from windowpane.server.messages_writer import call_input
from windowpane.server.reader import Reader
from windowpane.server.service import Service
from windowpane.server.sse import Form, to_json
from windowpane.server.usage import finish_reason, named_logprobs, usage
from windowpane.text.parsers import ReadAnswer

NANOSECONDS = 10**9


class OllamaWriter:
    """`model` is what the client called it."""

    form = Form("application/x-ndjson", sign_of_life=b"")

    def __init__(self, service: Service, model: str, is_chat: bool, job: Job, readers: Sequence[Reader]) -> None:
        self._service = service
        self._model = model
        self._is_chat = is_chat
        self._job = job
        (self._reader,) = readers
        self._calls = ReadAnswer()  # calls are told when they are whole

    def document(self) -> dict[str, Any]:
        answer = self._job.answers[0]
        said = ReadAnswer.of(self._reader, answer.text)
        return self._chunk(said, answer.request.logprobs) | self._end()

    def entries(self, pieces: list[Piece]) -> int:
        return len(pieces) * (1 + (self._job.requests[0].params.logprobs or 0))

    def first(self) -> bytes:
        return b""

    def encode(self, pieces: list[Piece]) -> bytes:
        deltas = self._reader.push("".join(piece.text for piece in pieces))
        if pieces[-1].finish_reason is not None:
            deltas += self._reader.finish()
        said = ReadAnswer()
        said.add(deltas)
        self._calls.calls += said.calls
        for index, arguments in said.arguments.items():
            self._calls.arguments[index] = self._calls.arguments.get(index, "") + arguments
        said.calls = []
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        if not (said.content or said.reasoning or scored):
            return b""
        return _line(self._chunk(said, scored))

    def last(self) -> bytes:
        return _line(self._chunk(self._calls, ()) | self._end())

    def failed(self, error: ApiError) -> bytes:
        return _line(error.document("/api/"))

    def _chunk(self, said: ReadAnswer, scored: Sequence[TokenLogprobs]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"model": self._model, "created_at": datetime.now(UTC).isoformat(), "done": False}
        thought = {"thinking": said.reasoning} if said.reasoning else {}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": said.content, **thought}
            if said.calls:
                message["tool_calls"] = [
                    {"id": call.id, "function": {"name": call.name, "arguments": call_input(arguments)}}
                    for call, arguments in ((call, said.arguments.get(call.index, "")) for call in said.calls)
                ]
            chunk["message"] = message
        else:
            chunk |= {"response": said.content, **thought}
        if scored:
            chunk["logprobs"] = named_logprobs(self._service.need_tokenizer("logprobs"), scored)
        return chunk

    def _end(self) -> dict[str, Any]:
        (times,) = self._job.times
        counts = usage(self._job)
        ended = times.ended or times.submitted
        first = times.first_token or ended
        return {
            "done": True,
            "done_reason": finish_reason(self._job.answers[0].finish_reason),
            "total_duration": int((ended - times.submitted) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": counts["prompt_tokens"],
            "prompt_eval_duration": int((first - (times.admitted or first)) * NANOSECONDS),
            "eval_count": counts["completion_tokens"],
            "eval_duration": int((ended - first) * NANOSECONDS),
        }


def _line(document: dict[str, Any]) -> bytes:
    return to_json(document) + b"\n"
