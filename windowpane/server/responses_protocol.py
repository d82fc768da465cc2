"""Bodies of the Responses API: the fields and items that are honoured, and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from windowpane.server.protocol import (
    MAX_LOGPROBS,
    Body,
    Document,
    Drawing,
    Echoed,
    FunctionDefinition,
    JsonSchema,
    NamedFunction,
    Stop,
    Stops,
)

LOGPROBS = "message.output_text.logprobs"


class InputText(Echoed):
    type: Literal["input_text", "output_text"]
    text: str


class Refusal(Echoed):
    type: Literal["refusal"]
    refusal: str


class ReasoningText(Echoed):
    type: Literal["reasoning_text", "summary_text"]
    text: str


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else getattr(part, "type", None)


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[InputText, Tag("output_text")]
    | Annotated[Refusal, Tag("refusal")],
    Discriminator(_kind),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class Sent(Echoed):
    """An item of a conversation. What answers say of themselves may be sent back with it."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Sent):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(Sent):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Sent):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(Sent):
    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


def _item_kind(item: Any) -> Any:
    return _kind(item) or "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]


class FlatTool(FunctionDefinition):
    type: Literal["function"]


class FlatNamedTool(NamedFunction):
    type: Literal["function"]


class FlatAllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, fail_fast=True)]


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = Field(None, max_length=32)
    summary: Literal["auto"] | None = Field(None, description="Reasoning is given whole; there is no summary of it.")


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Drawing):
    """POST /v1/responses"""

    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = Field(None, description="A system message; not kept for the next response.")
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = Field(None, description="Keep the response for a next one; true unless given.")
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Reasoning comes in clear text always; encrypted_content adds nothing."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: Stop | Stops | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | FlatAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Document | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    user: str | None = Field(None, max_length=256, description="Who asks; written to the log.")
