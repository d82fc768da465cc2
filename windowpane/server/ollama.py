"""Ollama's API: /api/chat and /api/generate, which stream lines of JSON unless told otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from windowpane.server.chat import answer_chat, thinking_variables
from windowpane.server.completions import Prompt, answer_completion
from windowpane.server.errors import bad_request, translated
from windowpane.server.job import Job
from windowpane.server.ollama_writer import OllamaWriter
from windowpane.server.protocol import (
    MAX_LOGPROBS,
    Body,
    ChatBody,
    CompletionBody,
    Document,
    Echoed,
    FunctionCall,
    Message,
    Stops,
    Tool,
    ToolCall,
)
from windowpane.server.reader import Reader
from windowpane.server.service import Service


class Options(Body):
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: Stops | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    num_predict: int | None = Field(None, ge=-1, description="-1: as many tokens as fit.")
    num_ctx: int | None = Field(None, ge=1, description="No longer than the server's own context.")


class Called(Echoed):
    name: str
    arguments: Document


class OllamaToolCall(Echoed):
    id: str | None = None
    type: Literal["function"] | None = None
    function: Called


class OllamaMessage(Echoed):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(Body):
    model: str
    stream: bool | None = Field(None, description="True unless given.")
    options: Options | None = None
    format: Literal["", "json"] | Document | None = None
    keep_alive: float | str | None = Field(None, description="The model stays loaded whatever this says but 0.")
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class OllamaChatBody(OllamaBody):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None


class GenerateBody(OllamaBody):
    """POST /api/generate"""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="The prompt as it is, without the chat template.")


async def ollama_chat(service: Service, body: OllamaChatBody, http: HttpRequest) -> Response:
    messages = [_message(message) for message in body.messages]
    return await _answer(service, body, messages, http, is_chat=True, tools=body.tools)


async def ollama_generate(service: Service, body: GenerateBody, http: HttpRequest) -> Response:
    if not body.prompt:
        service.check_model(_name(body))
        loaded = {"model": body.model, "created_at": datetime.now(UTC).isoformat(), "response": ""}
        return JSONResponse({**loaded, "done": True, "done_reason": "load"})
    if body.raw or not service.can_chat:
        return await _generate_raw(service, body, http)
    system = [] if body.system is None else [Message(role="system", content=body.system)]
    return await _answer(service, body, [*system, Message(role="user", content=body.prompt)], http, is_chat=False)


def tags(service: Service) -> dict[str, Any]:
    loaded = datetime.fromtimestamp(service.created, UTC).isoformat()
    return {"models": [{"name": name, "model": name, "modified_at": loaded, "details": {}} for name in service.names]}


async def _answer(
    service: Service, body: OllamaBody, messages: Sequence[Message], http: HttpRequest, *, is_chat: bool, **more: Any
) -> Response:
    """By the chat template, in the words of chat completions."""
    fields = _fields(service, body) | more
    fields["max_completion_tokens"] = fields.pop("max_tokens")
    fields["logprobs"] = body.logprobs or None
    fields["top_logprobs"] = body.top_logprobs
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    if body.think is not None:
        fields["chat_template_kwargs"] = thinking_variables(service, {}, bool(body.think), "think")
        fields["include_reasoning"] = bool(body.think)
    chat = translated(ChatBody, {**fields, "messages": list(messages)})
    return await answer_chat(service, chat, http, "ollama", partial(OllamaWriter, service, body.model, is_chat))


async def _generate_raw(service: Service, body: GenerateBody, http: HttpRequest) -> Response:
    for name in ("system", "think", "top_logprobs"):
        if getattr(body, name):
            raise bad_request(f"{name} needs the chat template; leave it out, or raw", name)
    if body.logprobs:
        raise bad_request("logprobs of raw prompts are given by /v1/completions", "logprobs")
    text = translated(CompletionBody, {**_fields(service, body), "prompt": body.prompt})

    def writer(job: Job, prompts: Sequence[Prompt]) -> OllamaWriter:
        return OllamaWriter(service, body.model, False, job, [Reader(None)])

    return await answer_completion(service, text, http, "ollama", writer, cut_to_fit=True)


def _fields(service: Service, body: OllamaBody) -> dict[str, Any]:
    """What both kinds of bodies share, in OpenAI's names."""
    if body.keep_alive in (0, "0", "0s", "0m"):
        raise bad_request("keep_alive 0 would unload the model, which is served until the server ends", "keep_alive")
    options = body.options or Options.model_validate({})
    if options.num_ctx is not None and options.num_ctx > service.max_model_len:
        raise bad_request(
            f"options.num_ctx {options.num_ctx} exceeds the server's context of {service.max_model_len}; "
            "restart it with a larger --max-model-len",
            "options.num_ctx",
        )
    given = options.model_dump(exclude_none=True, exclude={"num_ctx", "num_predict", "repeat_penalty"})
    form: dict[str, Any] = {}
    if body.format == "json":
        form = {"response_format": {"type": "json_object"}}
    elif isinstance(body.format, dict):
        form = {"structured_outputs": {"json": body.format}}
    return {
        **given,
        **form,
        "model": _name(body),
        "stream": body.stream is not False,
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": None if options.num_predict in (None, -1) else options.num_predict,
    }


def _name(body: OllamaBody) -> str:
    """A name without a tag means the latest, and with that tag the same."""
    return body.model.removesuffix(":latest")


def _message(message: OllamaMessage) -> Message:
    calls = [
        ToolCall(
            id=call.id,
            function=FunctionCall(
                name=call.function.name, arguments=json.dumps(call.function.arguments, ensure_ascii=False)
            ),
        )
        for call in message.tool_calls or ()
    ]
    return Message(
        role=message.role,
        content=message.content if message.content is not None or calls else "",
        reasoning=message.thinking,
        tool_calls=calls or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )
