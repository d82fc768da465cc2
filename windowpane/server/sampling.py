"""What a body asks for, as the engine's own words: sampling parameters, and what the answer must look like."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from windowpane.schedule.request import SamplingParams
from windowpane.server.errors import ApiError, bad_request
from windowpane.server.protocol import ResponseFormat, Sampling, StructuredOutputs
from windowpane.text.answer import with_stop_ids
from windowpane.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from windowpane.text.grammar import CompiledGrammar, Grammars

GREEDY_BELOW = 1e-5  # a temperature that divides by next to nothing is meant to be none


def sampling_params(
    body: Sampling,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> SamplingParams:
    """The parameters of all choices: see `SamplingParams.for_choice`. `defaults` hold where the body is silent."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if stop and tokenizer is None:
        raise bad_request("stop strings need text and this model came without a tokenizer; use stop_token_ids", "stop")
    stop_token_ids = tuple(body.stop_token_ids or ())
    if tokenizer is not None and not body.ignore_eos:
        stop_token_ids = with_stop_ids(stop_token_ids, tokenizer)

    def chosen(name: str, otherwise: float) -> Any:
        value = getattr(body, name)
        return defaults.get(name, otherwise) if value is None else value

    temperature = chosen("temperature", 1.0)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=stop_token_ids,
            stop=tuple(stop),
            bad_words=tuple(body.bad_words or ()),
            ignore_eos=body.ignore_eos or False,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=chosen("top_k", 0),
            top_p=chosen("top_p", 1.0),
            min_p=chosen("min_p", 0.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=chosen("repetition_penalty", 1.0),
            logit_bias=_logit_bias(body),
            seed=body.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            return_routed_experts=body.return_routed_experts or False,
            routed_experts_prompt_start=body.routed_experts_prompt_start or 0,
        )
    except ValueError as error:
        raise named(error, body) from None


def check_stream(body: Sampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is for streams; set stream to true, or leave it out", "stream_options")


def named(error: ValueError, body: Sampling) -> ApiError:
    """A refusal in the engine's words, which begin with the field they are about."""
    words = str(error).split()
    param = words[0].rstrip(":") if words and words[0].rstrip(":") in type(body).model_fields else None
    return bad_request(str(error), param, "invalid_value")


def _logit_bias(body: Sampling) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise bad_request("logit_bias maps token numbers, written as strings, to values", "logit_bias") from None


def constraint_of(body: Sampling) -> tuple[str, Any] | None:
    """The field that says what the answer must look like, and its value. Two that do are an error."""
    asked = {name: value for name in _CONSTRAINTS if (value := getattr(body, name)) is not None}
    if body.response_format is not None and body.response_format.type == "text":
        del asked["response_format"]
    if len(asked) > 1:
        raise bad_request(f"{' and '.join(asked)} both say what the answer must look like; give one", next(iter(asked)))
    return next(iter(asked.items()), None)


def grammar_of(body: Sampling, grammars: Grammars | None) -> CompiledGrammar | None:
    """What the answer must look like, ready for a request."""
    asked = constraint_of(body)
    if asked is None:
        return None
    name, value = asked
    if grammars is None:
        raise bad_request(f"{name} needs text and this model came without a tokenizer", name)
    try:
        return _compile(grammars, name, value)
    except ValueError as error:
        raise bad_request(f"{name}: {error}", name, "invalid_value") from None


_CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def _compile(grammars: Grammars, name: str, value: Any) -> CompiledGrammar | None:
    if isinstance(value, ResponseFormat):
        return grammars.from_response_format(value.model_dump(by_alias=True, exclude_none=True))
    if isinstance(value, StructuredOutputs):
        return grammars.structured(value.model_dump(by_alias=True, exclude_none=True))
    return grammars.structured({name.removeprefix("guided_"): value})
