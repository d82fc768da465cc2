"""POST /v1/messages and /v1/messages/count_tokens: a chat in the blocks of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from windowpane.server.chat import answer_chat, chat_prompt_of, thinking_variables
from windowpane.server.errors import bad_request, translated
from windowpane.server.messages_writer import MessagesWriter
from windowpane.server.protocol import (
    Body,
    ChatBody,
    Document,
    Drawing,
    Echoed,
    FunctionCall,
    FunctionDefinition,
    Message,
    Stops,
    ToolCall,
)
from windowpane.server.service import Service


class Cached(Body):
    """Prompts are cached by themselves, so what is marked to be cached is."""

    cache_control: Document | None = None


class TextBlock(Echoed, Cached):
    type: Literal["text"]
    text: str


class ThinkingBlock(Echoed):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Echoed, Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Document


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class MessagesTool(Cached):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    input_schema: Document
    strict: bool | None = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: Document = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(None, max_length=256)


class KeepThoughts(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: list[KeepThoughts] | None = Field(None, description="Nothing is taken out of a chat: keep all.")


class CountBody(Cached):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True)] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesBody(CountBody, Drawing):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    chat_template_kwargs: Document | None = None


async def answer_messages(service: Service, body: MessagesBody, http: HttpRequest) -> Response:
    chat = await service.off_loop(_chat, service, body)
    return await answer_chat(service, chat, http, "msg", partial(MessagesWriter, service, body.stop_sequences or ()))


async def count_tokens(service: Service, body: CountBody) -> Response:
    service.check_model(body.model)

    def document() -> dict[str, Any]:
        return {"input_tokens": len(chat_prompt_of(service, _chat(service, body)).token_ids)}

    return await service.document(document)


def _chat(service: Service, body: CountBody) -> ChatBody:
    """The same in the words of chat completions."""
    fields: dict[str, Any] = {"model": body.model}
    if isinstance(body, MessagesBody):
        fields |= {
            **body.shared_fields(),
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "user": None if body.metadata is None else body.metadata.user_id,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    if body.output_config is not None:
        effort = body.output_config.effort
        reads_effort = service.template is not None and service.template.knows("reasoning_effort")
        # That of who says nothing, which agents send nevertheless.
        fields["reasoning_effort"] = None if effort == "high" and not reads_effort else effort
        if (form := body.output_config.format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
    fields |= _tool_fields(body) | _thinking_fields(service, body, fields)
    return translated(ChatBody, {**fields, "messages": _messages(body)})


def _tool_fields(body: CountBody) -> dict[str, Any]:
    tools = [
        {
            "type": "function",
            "function": FunctionDefinition(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        }
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools or None}
    if (choice.type == "tool") != (choice.name is not None):
        raise bad_request('tool_choice.name goes with type "tool", and only with it', "tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": tools or None,
        "tool_choice": {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _thinking_fields(service: Service, body: CountBody, fields: dict[str, Any]) -> dict[str, Any]:
    """Templates of models that can do either are told whether to think; what is thought is shown only if asked for."""
    thinking = body.thinking
    # "adaptive" leaves it to the model, also to one that never thinks.
    adapts = thinking is not None and thinking.type == "adaptive" and service.parsers.reasoning is not None
    thinks = adapts or (thinking is not None and thinking.type == "enabled")
    given = thinking_variables(service, fields.get("chat_template_kwargs") or {}, thinks, "thinking")
    budget = None if thinking is None else thinking.budget_tokens
    if budget is not None and not thinks:
        raise bad_request("thinking.budget_tokens is for thinking that is enabled", "thinking.budget_tokens")
    most = fields.get("max_completion_tokens")
    if budget is not None and most is not None and budget >= most:
        raise bad_request(f"thinking.budget_tokens {budget} must be below max_tokens {most}", "thinking.budget_tokens")
    return {
        "chat_template_kwargs": given or None,
        "include_reasoning": thinks and (thinking is None or thinking.display != "omitted"),
        "thinking_token_budget": budget,
    }


# -- blocks to messages --------------------------------------------------------------------------------------------


def _messages(body: CountBody) -> list[Message]:
    system = [] if body.system is None else [Message(role="system", content=_text(body.system))]
    return [*system, *(message for index, turn in enumerate(body.messages) for message in _turn(turn, index))]


def _turn(turn: Turn, index: int) -> Iterable[Message]:
    """A turn as messages: results of calls are messages of their own, in front of what the user says."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    texts, messages = [], []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for place, block in enumerate(turn.content):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock) and turn.role == "user":
            messages.append(_result(block))
        elif isinstance(block, ThinkingBlock) and turn.role == "assistant":
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock) and turn.role == "assistant":
            function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, function=function))
        else:
            where = f"messages.{index}.content.{place}"
            raise bad_request(f"{where}: a turn of role {turn.role} has no {block.type} blocks", where)
    if texts or thoughts or calls or not messages:
        content = _text(texts) if texts or not calls else None
        reasoning = "\n".join(thoughts) or None
        messages.append(Message(role=turn.role, content=content, reasoning=reasoning, tool_calls=calls or None))
    return messages


def _result(block: ToolResultBlock) -> Message:
    """Chat templates have no place for failure, so it is said."""
    text = _text(block.content or "")
    return Message(role="tool", tool_call_id=block.tool_use_id, content=f"Error: {text}" if block.is_error else text)


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else "\n".join(block.text for block in given)
