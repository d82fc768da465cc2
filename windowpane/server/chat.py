"""POST /v1/chat/completions: the next message of a chat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from windowpane.server.auth import caller
from windowpane.server.chat_writer import ChatWriter
from windowpane.server.errors import ApiError, bad_request
from windowpane.server.job import Job, job_id
from windowpane.server.json_body import strict_json
from windowpane.server.parsing import chat_grammar, output_parser, thought_budget, tool_choice, with_allowed_tools
from windowpane.server.protocol import ChatBody, ChatFields, Message, shallow
from windowpane.server.reader import Reader
from windowpane.server.sampling import check_stream, constraint_of, sampling_params
from windowpane.server.service import Service
from windowpane.server.sse import Encoder, answered
from windowpane.text import ChatPrompt, PromptTooLong, TextError, chat_prompt
from windowpane.text.answer import Answer
from windowpane.text.grammar import CompiledGrammar
from windowpane.text.parsers import OutputParser, kept_special_ids

MakeWriter = Callable[[Job, Sequence[Reader]], Encoder]


async def chat(service: Service, body: ChatBody, http: HttpRequest) -> Response:
    return await answer_chat(service, body, http, "chatcmpl", partial(ChatWriter, service, body))


async def answer_chat(
    service: Service, body: ChatBody, http: HttpRequest, prefix: str, make_writer: MakeWriter
) -> Response:
    """Answer a chat in the words of any API. `prefix` is that of the answer's id."""
    arrived = time.monotonic()
    service.check_model(body.model)
    with service.admitted(body.n or 1):  # first, so that who is turned away costs nothing
        _check(service, body)
        constrained = constraint_of(body) is not None or body.tools is not None
        prepare = service.beside_grammars if constrained else service.off_loop
        id = job_id(prefix, body.request_id, http.headers)
        job, parsers = await prepare(_prepare, service, body, id, arrived)
        reasoning, one_call = body.include_reasoning is not False, body.parallel_tool_calls is False
        readers = [Reader(parser, wants_reasoning=reasoning, wants_one_call=one_call) for parser in parsers]
        job.caller, job.traceparent = caller(http.scope), http.headers.get("traceparent")
        writer = make_writer(job, readers)
    return await answered(service, job, writer, http.receive)


def _prepare(service: Service, body: ChatBody, id: str, arrived: float) -> tuple[Job, Sequence[OutputParser | None]]:
    """All that takes time before the engine is asked."""
    body = with_allowed_tools(body)
    choice = tool_choice(body, service.parsers)
    prompt = chat_prompt_of(service, body, choice != "none")
    grammar = chat_grammar(body, choice, service.parsers, service.grammars, prompt.text)
    parsers = [output_parser(service.parsers, choice, body, prompt.text) for _ in range(body.n or 1)]
    return _job(service, body, prompt, grammar, parsers, id, arrived), parsers


def chat_prompt_of(service: Service, body: ChatBody, with_tools: bool = True) -> ChatPrompt:
    return render(service, body, _variables(service, body), with_tools)


def _check(service: Service, body: ChatBody) -> None:
    check_stream(body)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request("max_tokens and max_completion_tokens are the same; give one", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")


# -- messages to a prompt ------------------------------------------------------------------------------------------


def render(service: Service, body: ChatFields, variables: Mapping[str, Any], with_tools: bool = True) -> ChatPrompt:
    """The prompt of a chat, by the model's own template."""
    tokenizer = service.need_tokenizer("messages")
    template = service.template
    if template is None or not template.exists:
        raise bad_request(
            f"{service.name} has no chat template, so it cannot chat: it is probably a base model. Complete text with "
            "/v1/completions, start the server with --chat-template FILE, or serve an instruction-tuned model",
            "messages",
            "no_chat_template",
        )
    messages = [_plain(message, index) for index, message in enumerate(body.messages)]
    if service.parsers.is_harmony:
        messages = [_with_thinking(message) for message in messages]
    variables = {**service.template_variables, **(body.chat_template_kwargs or {}), **variables}
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise bad_request(f"chat_template_kwargs.{name} is a field of its own", "chat_template_kwargs")
    if body.continue_final_message and (body.add_generation_prompt or body.messages[-1].role != "assistant"):
        raise bad_request(
            "continue_final_message goes on from a last message of the assistant, and without add_generation_prompt",
            "continue_final_message",
        )
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools and with_tools else None
    if tools and not template.knows("tools"):
        raise bad_request(
            f'the chat template of {service.name} never reads tools; set tool_choice to "none", describe them in a '
            "message, or start the server with a --chat-template that does",
            "tools",
        )
    try:
        return chat_prompt(
            template,
            tokenizer,
            messages,
            max_tokens=service.max_model_len,
            special_tokens_in_content=service.special_tokens_in_content,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            tools=tools,
            variables=variables,
        )
    except PromptTooLong as error:
        raise service.too_long(str(error), "messages") from None
    except (TextError, UnicodeError) as error:
        raise bad_request(str(error), "messages", "invalid_value") from None


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates know it: one text, and the arguments of calls as objects."""
    plain: dict[str, Any] = {"role": message.role, "content": _text(message)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    if message.tool_calls:
        where = f"messages.{index}.tool_calls"
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)},
            }
            for call in message.tool_calls
        ]
    elif message.role != "assistant" and message.content is None:
        raise bad_request(f"a message of role {message.role} needs content", f"messages.{index}.content")
    return plain


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """As gpt-oss's template knows reasoning. Beside a call it takes one text, for the analysis channel."""
    if "reasoning" not in message:
        return message
    if not message.get("tool_calls"):
        return {**message, "thinking": message["reasoning"]}
    thinking = "\n".join(text for text in (message["reasoning"], message["content"]) if text)
    return {**message, "thinking": thinking, "content": ""}


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or message.refusal or ""


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = shallow(strict_json(text or "{}"))
    except ApiError as error:
        raise bad_request(f"{where}: arguments: {error.message}", where) from None
    except ValueError as error:
        raise bad_request(f"{where}: arguments are not JSON: {error}", where) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}: arguments are a JSON object, not {type(arguments).__name__}", where)
    return arguments


def _variables(service: Service, body: ChatBody) -> dict[str, Any]:
    """What else the template is told."""
    if body.reasoning_effort is None:
        return {}
    if service.template is None or not service.template.knows("reasoning_effort"):
        raise bad_request(
            f"the chat template of {service.name} does not know reasoning_effort; leave it out", "reasoning_effort"
        )
    return {"reasoning_effort": body.reasoning_effort}


def thinking_variables(service: Service, given: Mapping[str, Any], thinks: bool, param: str) -> dict[str, Any]:
    """Template variables with whether to think, where the template can be told."""
    if thinks and service.parsers.reasoning is None:
        raise bad_request(f"{param} needs a server started with --reasoning-parser; leave it out", param)
    if service.template is None or not service.template.knows("enable_thinking"):
        return dict(given)
    return {"enable_thinking": thinks, **given}


# -- the job -------------------------------------------------------------------------------------------------------


def _job(
    service: Service,
    body: ChatBody,
    prompt: ChatPrompt,
    grammar: CompiledGrammar | None,
    parsers: Sequence[OutputParser | None],
    id: str,
    arrived: float,
) -> Job:
    tokenizer = service.need_tokenizer("messages")
    tokens = service.tokens(prompt.token_ids, "messages")
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        max_tokens = service.room(len(tokens), "messages")
    params = sampling_params(
        body,
        service.tokenizer,
        max_tokens=max_tokens,
        defaults=service.sampling_defaults,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    answers = []
    for choice, parser in enumerate(parsers):
        request = service.request(
            f"{id}-{choice}",
            tokens,
            params.for_choice(choice),
            "messages",
            priority=body.priority or 0,
            message_ends=prompt.message_ends,
            cache_salt=body.cache_salt or "",
            adapter=service.adapter_of(body.model),
            grammar=grammar,
            thought_budget=thought_budget(service.parsers, body, prompt.text),
        )
        answers.append(
            Answer(
                request,
                tokenizer,
                skip_special_tokens=body.skip_special_tokens is not False,
                include_stop=body.include_stop_str_in_output or False,
                kept_special_ids=kept_special_ids(tokenizer, parser.markers) if parser else (),
            )
        )
    return Job(id, answers, bool(body.stream), arrived, body.user)
