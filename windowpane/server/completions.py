"""POST /v1/completions: text that goes on from prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from windowpane.schedule.request import TokenLogprobs, Tokens
from windowpane.server.auth import caller
from windowpane.server.errors import ApiError, bad_request
from windowpane.server.job import Job, Piece, job_id
from windowpane.server.protocol import CompletionBody
from windowpane.server.sampling import check_stream, constraint_of, grammar_of, sampling_params
from windowpane.server.service import Service
from windowpane.server.sse import BESIDE_THE_LOOP, OPENAI, Encoder, PlainChunks, answered, event, to_json
from windowpane.server.usage import finish_reason, finite, routed_experts, stop_reason, tells_routes, token_text, usage
from windowpane.text.answer import Answer

DEFAULT_MAX_TOKENS = 16  # as in the OpenAI API
PLAIN_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    text: str | None  # where it is to be echoed


MakeWriter = Callable[[Job, Sequence[Prompt]], Encoder]


async def complete(service: Service, body: CompletionBody, http: HttpRequest) -> Response:
    return await answer_completion(service, body, http, "cmpl", partial(_Writer, service, body))


async def answer_completion(
    service: Service,
    body: CompletionBody,
    http: HttpRequest,
    prefix: str,
    make_writer: MakeWriter,
    *,
    cut_to_fit: bool = False,
) -> Response:
    """Continue prompts in the words of any API. `cut_to_fit`: answers may be as long as there is room for."""
    arrived = time.monotonic()
    service.check_model(body.model)
    several = several_prompts(body.prompt, "prompt")
    with service.admitted(len(several) * (body.n or 1)):  # first, so that who is turned away costs nothing
        _check(service, body)
        id = job_id(prefix, body.request_id, http.headers)
        prepare = service.off_loop if constraint_of(body) is None else service.beside_grammars
        job, prompts = await prepare(_prepare, service, body, several, id, arrived, cut_to_fit)
        job.caller, job.traceparent = caller(http.scope), http.headers.get("traceparent")
        writer = make_writer(job, prompts)
    return await answered(service, job, writer, http.receive)


def _prepare(
    service: Service,
    body: CompletionBody,
    several: list[str] | list[list[int]],
    id: str,
    arrived: float,
    cut_to_fit: bool,
) -> tuple[Job, list[Prompt]]:
    """All that takes time before the engine is asked."""
    prompts = _prompts(service, body, several)
    if cut_to_fit:
        room = min(service.room(len(prompt.tokens), "prompt") for prompt in prompts)
        body = body.model_copy(update={"max_tokens": min(room, body.max_tokens or room)})
    grammar = grammar_of(body, service.grammars)
    return _job(service, body, prompts, grammar, id, arrived), prompts


def _check(service: Service, body: CompletionBody) -> None:
    check_stream(body)
    if body.logprobs is not None:
        service.need_tokenizer("logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens 0 says nothing; only with echo is the prompt itself an answer", "max_tokens")


def several_prompts(given: Any, param: str) -> list[str] | list[list[int]]:
    """One prompt or several, text or token ids, as a list."""
    several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several:
        raise bad_request(f"{param} is empty; give text or token ids", param)
    return several


def _prompts(service: Service, body: CompletionBody, several: list[str] | list[list[int]]) -> list[Prompt]:
    prompts = []
    for one in several:
        tokens = service.prompt_tokens(one, "prompt", body.add_special_tokens is not False)
        text = one if isinstance(one, str) else None
        if text is None and body.echo:
            text = service.need_tokenizer("echo").decode(tokens.tolist())
        prompts.append(Prompt(tokens, text))
    return prompts


def _job(
    service: Service, body: CompletionBody, prompts: Sequence[Prompt], grammar: Any, id: str, arrived: float
) -> Job:
    # A prompt that is only to be scored still needs a step: the token that comes of it is not shown.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    params = sampling_params(
        body,
        service.tokenizer,
        max_tokens=max_tokens,
        defaults=service.sampling_defaults,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    answers: list[Answer] = []
    for prompt in prompts:
        for choice in range(body.n or 1):
            request = service.request(
                f"{id}-{len(answers)}",
                prompt.tokens,
                params.for_choice(choice),
                "prompt",
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                adapter=service.adapter_of(body.model),
                grammar=grammar,
            )
            answers.append(
                Answer(
                    request,
                    service.tokenizer,
                    skip_special_tokens=body.skip_special_tokens is not False,
                    include_stop=body.include_stop_str_in_output or False,
                )
            )
    return Job(id, answers, bool(body.stream), arrived, body.user)


class _Writer:
    """Writes a job as the API's documents: whole, or chunk by chunk."""

    form = OPENAI

    def __init__(self, service: Service, body: CompletionBody, job: Job, prompts: Sequence[Prompt]) -> None:
        self._job = job
        self._body = body
        self._tokenizer = service.tokenizer
        self._scores_only = body.max_tokens == 0
        # Per choice, what is still to be echoed; None where nothing is, or no longer.
        self._echoed = [p.text if body.echo else None for p in prompts for _ in range(body.n or 1)]
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._offsets = [0] * len(job.answers)
        self._head = {"id": job.id, "object": "text_completion", "created": int(time.time())}
        self._head["model"] = service.name_of(job)
        before = to_json({**self._head, "choices": []})[:-2]
        self._gave_prompt = [not body.return_token_ids] * len(job.answers)
        tells_more = body.return_token_ids or body.return_routed_experts or body.echo or body.logprobs is not None
        plain = not tells_more and not self._usage_last and not self._usage_always
        heads = [b"data: " + before + b'{"index":%d,"text":' % i for i in range(len(job.answers))]
        self._plain = PlainChunks(heads, PLAIN_TAIL) if plain else None

    def document(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self._job.answers):
            request = answer.request
            text = "" if self._scores_only else answer.text
            scored: list[TokenLogprobs | None] = list(request.prompt_logprobs)
            scored += [] if self._scores_only else request.logprobs
            choices.append(
                {
                    "index": index,
                    "text": (self._echoed[index] or "") + text,
                    "logprobs": self._logprobs(index, scored),
                    "finish_reason": self._reason(answer),
                    "stop_reason": stop_reason(answer, self._body.stop_token_ids),
                    **self._token_ids(index, [] if self._scores_only else request.output),
                    **routed_experts(request),
                }
            )
        return {**self._head, "choices": choices, "usage": usage(self._job, generates=not self._scores_only)}

    def entries(self, pieces: list[Piece]) -> int:
        if self._plain is not None:
            return 0
        per_token = 1 + (self._body.logprobs or 0) if self._body.logprobs is not None else 0
        routed = BESIDE_THE_LOOP if tells_routes(self._job, pieces) else 0
        requests = self._job.requests
        routed += sum(len(requests[p.choice].prompt) for p in pieces if not self._gave_prompt[p.choice])
        if not per_token:
            return routed
        echoed = sum(len(requests[p.choice].prompt) for p in pieces if self._echoed[p.choice] is not None)
        return per_token * (len(pieces) + echoed) + routed

    def first(self) -> bytes:
        return b""

    def encode(self, pieces: list[Piece]) -> bytes:
        if self._plain is not None and (chunk := self._plain.encode(pieces)) is not None:
            return chunk
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        return b"".join(self._chunk(choice, its) for choice, its in by_choice.items())

    def last(self) -> bytes:
        if not self._usage_last:
            return b""
        return event({**self._head, "choices": [], "usage": usage(self._job, generates=not self._scores_only)})

    def failed(self, error: ApiError) -> bytes:
        return event(error.document())

    def _chunk(self, choice: int, pieces: list[Piece]) -> bytes:
        answer = self._job.answers[choice]
        ended = pieces[-1].finish_reason is not None
        text = "" if self._scores_only else "".join(piece.text for piece in pieces)
        scored: list[TokenLogprobs | None] = []
        if not self._scores_only:
            scored += [piece.logprobs for piece in pieces if piece.logprobs is not None]
        if (echoed := self._echoed[choice]) is not None:
            text = echoed + text
            scored = [*answer.request.prompt_logprobs, *scored]
            self._echoed[choice] = None
        tokens = [] if self._scores_only else [piece.token for piece in pieces if piece.token is not None]
        if not text and not ended and not scored and not self._body.return_token_ids:
            return b""
        chunk: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": self._logprobs(choice, scored),
            "finish_reason": self._reason(answer) if ended else None,
            **self._token_ids(choice, tokens),
            **(routed_experts(answer.request) if ended else {}),
        }
        document: dict[str, Any] = {**self._head, "choices": [chunk]}
        if self._usage_always:
            document["usage"] = usage(self._job, generates=not self._scores_only)
        elif self._usage_last:
            document["usage"] = None
        return event(document, len(scored) * (1 + (self._body.logprobs or 0)))

    def _token_ids(self, choice: int, tokens: Sequence[int]) -> dict[str, Any]:
        """Of what is told now; the prompt's come with the first of a choice."""
        if not self._body.return_token_ids:
            return {}
        given, self._gave_prompt[choice] = self._gave_prompt[choice], True
        prompt = None if given else self._job.requests[choice].prompt.tolist()
        return {"prompt_token_ids": prompt, "token_ids": list(tokens)}

    def _reason(self, answer: Answer) -> str | None:
        return "length" if self._scores_only else finish_reason(answer.finish_reason)

    def _logprobs(self, choice: int, scored: Sequence[TokenLogprobs | None]) -> dict[str, Any] | None:
        """Parallel lists, one entry per token; what a prompt's first token is called is known, but not its logprob."""
        if self._body.logprobs is None or self._tokenizer is None:
            return None
        first_id = int(self._job.answers[choice].request.prompt[0])
        texts = [token_text(self._tokenizer, first_id if entry is None else entry.token) for entry in scored]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        return {
            "text_offset": offsets,
            "tokens": texts,
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in scored],
            "top_logprobs": [
                None
                if entry is None
                else {token_text(self._tokenizer, t): finite(p) for t, p in (*entry.top, (entry.token, entry.logprob))}
                for entry in scored
            ],
        }
