"""Request bodies: the fields of the OpenAI API and of vLLM's additions to it that are honoured, and no others.

A field that is not declared is refused by name. Those that clients often send with a value that asks for nothing
(`"store": false`) are let through with that value only: see `NEUTRAL`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOPS = 32
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 128

# Known to other servers and not honoured here, with what to do instead.
UNSUPPORTED: dict[str, str] = {
    "add_special_tokens": "the chat template writes them",
    "allowed_token_ids": "constrain the answer with structured_outputs instead",
    "audio": "this server writes text only",
    "best_of": "all of n are returned; choose among them by their logprobs",
    "chat_template": "start the server with --chat-template instead",
    "documents": "put them into the messages",
    "echo": "complete text with /v1/completions to have prompts echoed",
    "extra_args": "there are none",
    "function_call": "use tool_choice instead",
    "functions": "use tools instead",
    "kv_transfer_params": "there is no KV connector",
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias instead",
    "media_io_kwargs": "this server reads text only",
    "metadata": "answers are not stored",
    "mm_processor_kwargs": "this server reads text only",
    "modalities": 'only ["text"] is written',
    "moderation": "there is none",
    "prediction": "there is no predicted output",
    "prompt_cache_retention": "how long prompts stay cached depends on memory alone",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "return_tokens_as_token_ids": "use return_token_ids",
    "safety_identifier": "use user instead; it is logged",
    "service_tier": "there is one tier; use priority",
    "spaces_between_special_tokens": "special tokens are written as they are",
    "store": "answers are not stored",
    "suffix": "text is only written at the end",
    "truncate_prompt_tokens": "shorten the prompt yourself, so that you know what is left out",
    "use_beam_search": "there is no beam search; use n",
    "verbosity": "say in the messages how long the answer should be",
    "vllm_xargs": "there are none",
    "web_search_options": "there is no web search",
}

# What asks for nothing, and so may be sent.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "documents": ([],),
    "extra_args": ({},),
    "add_special_tokens": (False,),
    "echo": (False,),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
}

# Hints that a server which caches every prompt follows whatever they say.
SATISFIED = frozenset({"prompt_cache_key"})

MAX_DEPTH = 200  # of what bodies hold as they like: deeper values would exhaust whoever walks them


def shallow(value: Any) -> Any:
    """Refuses deep nesting, level by level: whatever recurses would fail on it first."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _few_biases(value: Any) -> Any:
    """Looks at their number first: each of many wrong ones would be an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens may be biased, not {len(value)}")
    return value


Document = Annotated[dict[str, Any], AfterValidator(shallow)]
Count = Annotated[int, Field(ge=0)]
Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]


class Body(BaseModel):
    """Strict: a number in quotes is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept = {}
        is_complete = True  # of several unknown fields one is enough to refuse a body
        for name, value in fields.items():
            is_known = name in cls._names()
            if is_known or (is_complete and not cls._asks_for_nothing(name, value)):
                kept[name] = value
                is_complete &= is_known
        return kept

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _asks_for_nothing(cls, name: str, value: Any) -> bool:
        return value is None or name in SATISFIED or value in NEUTRAL.get(name, ())


class Echoed(Body):
    """Part of an answer that a client sends back, with all that SDKs add to it: none of that is for the model."""

    @classmethod
    def _asks_for_nothing(cls, name: str, value: Any) -> bool:
        return name in ("annotations", "provider_specific_fields") or value in (None, "", [], {})


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")


class StructuredOutputs(Body):
    """What the answer must look like. Exactly one of these."""

    json_schema: Document | str | bool | None = Field(None, alias="json", description="A JSON schema.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    regex: str | None = None
    choice: Texts | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description="A context-free grammar in EBNF.")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: Document | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Drawing(Body):
    """How an answer is drawn: the fields that all endpoints share, under their own names."""

    model: str | None = Field(None, description="A served model's name; may be left out.")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None,
        Field(max_length=MAX_BIASES),
        BeforeValidator(_few_biases),
    ] = None
    seed: int | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = Field(
        None, description="Words that the answer never has."
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    priority: int | None = Field(None, description="Lower runs first; 0 unless given.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Requests with different salts never share cached memory."
    )
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\w.:-]+$")
    structured_outputs: StructuredOutputs | None = None

    def shared_fields(self) -> dict[str, Any]:
        """Those of `Drawing` that were given, for a body of another endpoint."""
        return {name: getattr(self, name) for name in Drawing.model_fields if name in self.model_fields_set}


class Sampling(Drawing):
    """Fields that completions and chats share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Stops | None = None
    return_token_ids: bool | None = Field(None, description="Give the tokens of prompt and answer by number.")
    return_routed_experts: bool | None = Field(
        None, description="Give the experts that each token visited, as a .npy file in base64."
    )
    routed_experts_prompt_start: Count | None = Field(
        None, description="The first prompt token that they are given of."
    )
    user: str | None = Field(None, max_length=256, description="Who asks; written to the log.")
    response_format: ResponseFormat | None = None
    guided_json: Document | str | None = Field(None, description="The same as structured_outputs.json.")
    guided_regex: str | None = None
    guided_choice: Texts | None = Field(None, min_length=1)
    guided_grammar: str | None = None


class CompletionBody(Sampling):
    """POST /v1/completions"""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: Count | None = Field(None, description="16 unless given; 0 only with echo.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None


class EmbeddingsBody(Body):
    """POST /v1/embeddings"""

    model: str | None = None
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="The first so many, scaled to length 1 again.")
    pooling: Literal["last", "mean"] | None = Field(None, description="Of final hidden states; last unless given.")
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, description="Lower runs first; 0 unless given.")
    user: str | None = Field(None, max_length=256, description="Who asks; written to the log.")


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Echoed):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(Echoed):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Echoed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(default=None, description="The same as reasoning.")
    refusal: str | None = None


class FunctionDefinition(Body):
    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: Document | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatFields(Body):
    """What a chat template is given."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: Document | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on from the last message.")


class ChatBody(ChatFields, Sampling):
    """POST /v1/chat/completions"""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=1, description="A thought is ended after so many tokens.")


class TokenizeCompletion(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Tokens
