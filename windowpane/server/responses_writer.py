"""Writes the answer of a chat as the Responses API's documents: whole, or event by event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from windowpane.schedule.request import FinishReason, TokenLogprobs
from windowpane.server.errors import ApiError
from windowpane.server.job import Job, Piece
from windowpane.server.protocol import FunctionCall, Message, ToolCall
from windowpane.server.reader import Reader
from windowpane.server.responses_protocol import LOGPROBS, ResponsesBody
from windowpane.server.service import Service
from windowpane.server.sse import BESIDE_THE_LOOP, Form, named_event
from windowpane.server.usage import named_logprobs, usage
from windowpane.text.parsers import Content, Delta, Reasoning, ToolArguments, ToolStart

Event = tuple[str, dict[str, Any]]
Keep = Callable[[dict[str, Any], Message], None]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesWriter:
    """`keep` takes the finished document, and the answer as a message of the chat that may follow."""

    form = Form()

    def __init__(self, service: Service, body: ResponsesBody, keep: Keep, job: Job, readers: Sequence[Reader]) -> None:
        self._service = service
        self._body = body
        self._keep = keep
        self._job = job
        (self._reader,) = readers
        self._output = _Output()
        self._created = int(time.time())
        self._sequence = 0

    def document(self) -> dict[str, Any]:
        answer = self._job.answers[0]
        deltas = [*self._reader.push(answer.text), *self._reader.finish()]
        for _ in self._output.events(deltas, self._logprobs(answer.request.logprobs)):
            pass
        return self._finished(answer.finish_reason)[-1][1]["response"]  # type: ignore[no-any-return]

    # -- event by event --------------------------------------------------------------------------------------------

    def entries(self, pieces: list[Piece]) -> int:
        """The last event repeats all of the answer."""
        ends = pieces[-1].finish_reason is not None
        return BESIDE_THE_LOOP if ends else len(pieces) * (1 + (self._body.top_logprobs or 0))

    def first(self) -> bytes:
        response = self._response("in_progress")
        return self._written(
            [("response.created", {"response": response}), ("response.in_progress", {"response": response})]
        )

    def encode(self, pieces: list[Piece]) -> bytes:
        ended = pieces[-1].finish_reason
        deltas = self._reader.push("".join(piece.text for piece in pieces))
        if ended is not None:
            deltas += self._reader.finish()
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        events = list(self._output.events(deltas, self._logprobs(scored)))
        if ended in (FinishReason.STOP, FinishReason.LENGTH):
            events += self._finished(ended)
        return self._written(events)

    def last(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._written([("response.failed", {"response": response})])

    def _written(self, events: Sequence[Event]) -> bytes:
        written = []
        for kind, fields in events:
            written.append(named_event({"type": kind, "sequence_number": self._sequence, **fields}))
            self._sequence += 1
        return b"".join(written)

    def _finished(self, reason: FinishReason | None) -> list[Event]:
        """The end of the last item, and the response with all of them."""
        is_whole = reason is FinishReason.STOP
        status = "completed" if is_whole else "incomplete"
        events = list(self._output.close(status))
        response = self._response(status) | {"usage": self._usage()}
        if not is_whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(response, self._output.message())
        return [*events, (f"response.{status}", {"response": response})]

    # -- documents -------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._job.requests[0].params
        given = body.model_dump(by_alias=True, exclude_none=True, include={"reasoning", "text", "tools", "tool_choice"})
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.name_of(self._job),
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "background": False,
            "usage": None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._job)
        tokenizer = self._service.need_tokenizer("input")
        reasoning = "".join(self._output.reasoning)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(tokenizer.encode(reasoning, add_special_tokens=False))},
            "total_tokens": counts["total_tokens"],
        }

    def _logprobs(self, scored: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        if LOGPROBS not in (self._body.include or ()):
            return []
        return named_logprobs(self._service.need_tokenizer("include"), scored)


class _Output:
    """The items of one response, as deltas make them, and the events that tell of it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning: list[str] = []
        self._pieces: list[str] = []  # of the item that is open
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False

    def events(self, deltas: Sequence[Delta], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Logprobs go with the next text that is shown, whatever they are of: tokens are not told apart."""
        self._logprobs += logprobs
        for delta in deltas:
            kind = _kind(delta)
            if not self._is_open or self.items[-1]["type"] != kind or isinstance(delta, ToolStart):
                yield from self.close("completed")
                yield from self._open(kind, delta)
            if not isinstance(delta, ToolStart):
                yield self._grow(delta)

    def close(self, status: str) -> Iterator[Event]:
        """The item that is open, if one is, has all of its text."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=text, **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def message(self) -> Message:
        """The same as a message of a chat."""
        texts = [item["content"][0]["text"] for item in self.items if item["type"] == "message"]
        calls = [
            ToolCall(id=item["call_id"], function=FunctionCall(name=item["name"], arguments=item["arguments"]))
            for item in self.items
            if item["type"] == "function_call"
        ]
        return Message(
            role="assistant",
            content="".join(texts),
            reasoning="".join(self.reasoning) or None,
            tool_calls=calls or None,
        )

    def _open(self, kind: str, delta: Delta) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
        if isinstance(delta, ToolStart):
            item |= {"call_id": delta.id, "name": delta.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._pieces = []
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)}
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._of_item("response.content_part.added", content_index=0, part=_copy(part))

    def _grow(self, delta: Delta) -> Event:
        text = delta.json if isinstance(delta, ToolArguments) else getattr(delta, "text", "")
        self._pieces.append(text)
        if isinstance(delta, ToolArguments):
            return self._of_item("response.function_call_arguments.delta", delta=text)
        if isinstance(delta, Reasoning):
            self.reasoning.append(text)
            return self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
        logprobs, self._logprobs = self._logprobs, []
        self.items[-1]["content"][0]["logprobs"] += logprobs
        return self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _kind(delta: Delta) -> str:
    if isinstance(delta, Content):
        return "message"
    return "reasoning" if isinstance(delta, Reasoning) else "function_call"


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    """As it is now: it is written later, and grows until then."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
