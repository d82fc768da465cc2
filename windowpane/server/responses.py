"""POST /v1/responses: a chat in the items of the Responses API, and answers that can be gone on from by their id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from windowpane.server.auth import caller
from windowpane.server.chat import answer_chat
from windowpane.server.errors import ApiError, bad_request, translated
from windowpane.server.protocol import ChatBody, FunctionCall, Message, ToolCall
from windowpane.server.responses_protocol import (
    LOGPROBS,
    CallItem,
    FlatAllowedTools,
    FlatNamedTool,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesBody,
    ResultItem,
)
from windowpane.server.responses_writer import ResponsesWriter
from windowpane.server.service import Service

MAX_STORED_BYTES = 64 * 2**20
VALUE_BYTES = 128  # of one value of a document, about: an object and its place
MESSAGE_BYTES = 2**11


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the chat up to its end: without instructions, which are those of one request."""

    document: dict[str, Any]
    messages: tuple[Message, ...]

    def size_bytes(self) -> int:
        """About what it holds in memory. Messages count as often as they are stored, though responses share them."""
        return _size_bytes(self.document) + sum(map(_message_bytes, self.messages))


class ResponseStore:
    """Responses that may be asked for again, each by the key that made it. The oldest go first. Any thread."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()  # with its size
        self._lock = threading.Lock()

    def keep(self, who: str, stored: Stored) -> None:
        key, size_bytes = (who, stored.document["id"]), stored.size_bytes()
        with self._lock:
            self._forget(key)
            self._kept[key] = stored, size_bytes
            self._bytes += size_bytes
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def find(self, who: str, id: str, param: str | None = None) -> Stored:
        """Raises a 404 where this caller has no such response."""
        with self._lock:
            found = self._kept.get((who, id))
        if found is None:
            raise ApiError(
                404,
                f"there is no response {id!r}: it was never stored for this key, or gave way to newer ones; "
                "send the whole conversation as input",
                param=param,
                code="response_not_found",
            )
        return found[0]

    def delete(self, who: str, id: str) -> None:
        self.find(who, id)
        with self._lock:
            self._forget((who, id))

    def _forget(self, key: tuple[str, str]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= found[1]


async def respond(service: Service, store: ResponseStore, body: ResponsesBody, http: HttpRequest) -> Response:
    who = caller(http.scope)
    earlier = () if body.previous_response_id is None else _earlier(store, who, body.previous_response_id)
    messages = (*earlier, *await service.off_loop(_messages, body.input))
    chat = _chat(body, messages)

    def keep(document: dict[str, Any], said: Message) -> None:
        if body.store is not False:
            store.keep(who, Stored(document, (*messages, said)))

    return await answer_chat(service, chat, http, "resp", partial(ResponsesWriter, service, body, keep))


def _earlier(store: ResponseStore, who: str, id: str) -> tuple[Message, ...]:
    return store.find(who, id, "previous_response_id").messages


def _chat(body: ResponsesBody, messages: Sequence[Message]) -> ChatBody:
    """The same in the words of chat completions."""
    logprobs = LOGPROBS in (body.include or ()) or None
    if body.top_logprobs and not logprobs:
        raise bad_request(f'top_logprobs needs "{LOGPROBS}" in include', "top_logprobs")
    system = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return translated(
        ChatBody,
        {
            **body.shared_fields(),
            "messages": [*system, *messages],
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": logprobs,
            "top_logprobs": body.top_logprobs,
            "stop": body.stop,
            "user": body.user,
            "tools": _tools(body),
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
            "response_format": _response_format(body),
            "chat_template_kwargs": body.chat_template_kwargs,
        },
    )


def _tool_choice(choice: str | FlatNamedTool | FlatAllowedTools | None) -> Any:
    def named(tool: FlatNamedTool) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.name}}

    if isinstance(choice, FlatAllowedTools):
        allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return named(choice) if isinstance(choice, FlatNamedTool) else choice


def _tools(body: ResponsesBody) -> list[dict[str, Any]] | None:
    if body.tools is None:
        return None
    return [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in body.tools
    ]


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    kind = form.pop("type")
    return {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind}


# -- items to messages ---------------------------------------------------------------------------------------------


def _messages(given: str | Sequence[Item]) -> list[Message]:
    """One message per turn: what an assistant thought, said and called belongs together."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    if not given:
        raise bad_request("input is empty; give text or items", "input")
    messages: list[Message] = []
    for item in given:
        if isinstance(item, ResultItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=_text(item.content)))
        else:
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[Message], item: MessageItem | CallItem | ReasoningItem) -> None:
    if not messages or messages[-1].role != "assistant" or not _goes_on(messages[-1], item):
        messages.append(Message(role="assistant"))
    turn = messages[-1]
    if isinstance(item, MessageItem):
        turn.content = _text(item.content)
    elif isinstance(item, CallItem):
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        turn.tool_calls = [*(turn.tool_calls or ()), call]
    else:
        thoughts = item.content or item.summary or ()
        turn.reasoning = "\n".join(part.text for part in thoughts) or None


def _goes_on(turn: Message, item: MessageItem | CallItem | ReasoningItem) -> bool:
    """Whether an item is still of this turn: thoughts come first, then text, then calls."""
    if isinstance(item, CallItem):
        return True
    if isinstance(item, MessageItem):
        return turn.content is None and not turn.tool_calls
    return False


def _text(given: str | Iterable[Part]) -> str:
    if isinstance(given, str):
        return given
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in given)


def _message_bytes(message: Message) -> int:
    calls = sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
    return MESSAGE_BYTES + len(str(message.content or "")) + len(message.reasoning or "") + calls


def _size_bytes(document: Any) -> int:
    """Of values in values, however deep."""
    size, left = 0, [document]
    while left:
        value = left.pop()
        size += VALUE_BYTES + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return size
