"""Writes the answers of a chat as the API's documents: whole, or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from windowpane.schedule.request import FinishReason, TokenLogprobs
from windowpane.server.errors import ApiError
from windowpane.server.job import Job, Piece
from windowpane.server.protocol import ChatBody
from windowpane.server.reader import Reader
from windowpane.server.service import Service
from windowpane.server.sse import BESIDE_THE_LOOP, OPENAI, PlainChunks, event, to_json
from windowpane.server.usage import finish_reason, named_logprobs, routed_experts, stop_reason, tells_routes, usage
from windowpane.text.parsers import Content, Delta, ReadAnswer, Reasoning, ToolStart

PLAIN_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class ChatWriter:
    """`readers` read the answers, one each."""

    form = OPENAI

    def __init__(self, service: Service, body: ChatBody, job: Job, readers: Sequence[Reader]) -> None:
        self._job = job
        self._body = body
        self._tokenizer = service.need_tokenizer("messages")
        self._readers = readers
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = {"id": job.id, "object": kind, "created": int(time.time())}
        self._head["model"] = service.name_of(job)
        before = to_json({**self._head, "choices": []})[:-2]
        self._gives_prompt = bool(body.return_token_ids)  # still to come, in a stream
        tells_more = body.logprobs or body.return_token_ids or body.return_routed_experts
        tells_usage = self._usage_last or self._usage_always
        plain = not tells_more and not tells_usage and not any(reader.reads for reader in readers)
        heads = [b"data: " + before + b'{"index":%d,"delta":{"content":' % i for i in range(len(job.answers))]
        self._plain = PlainChunks(heads, PLAIN_TAIL) if plain else None

    def document(self) -> dict[str, Any]:
        choices = []
        for index, (answer, reader) in enumerate(zip(self._job.answers, self._readers, strict=True)):
            said = ReadAnswer.of(reader, answer.text)
            choices.append(
                {
                    "index": index,
                    "message": _message(said),
                    "logprobs": self._logprobs(answer.request.logprobs),
                    "finish_reason": _reason(reader, answer.finish_reason),
                    "stop_reason": stop_reason(answer, self._body.stop_token_ids),
                    **self._token_ids(answer.request.output),
                    **routed_experts(answer.request),
                }
            )
        return {**self._head, **self._prompt_token_ids(), "choices": choices, "usage": usage(self._job)}

    # -- chunk by chunk --------------------------------------------------------------------------------------------

    def entries(self, pieces: list[Piece]) -> int:
        if self._plain is not None:
            return 0
        scored = len(pieces) * (1 + (self._body.top_logprobs or 0)) if self._body.logprobs else 0
        scored += len(self._job.requests[0].prompt) if self._gives_prompt else 0
        return scored + (BESIDE_THE_LOOP if tells_routes(self._job, pieces) else 0)

    def first(self) -> bytes:
        """Who speaks, before the first word."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, role) for choice in range(len(self._job.answers)))

    def encode(self, pieces: list[Piece]) -> bytes:
        if self._plain is not None and (chunk := self._plain.encode(pieces)) is not None:
            return chunk
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        return b"".join(self._pieces(choice, its) for choice, its in by_choice.items())

    def last(self) -> bytes:
        if not self._usage_last:
            return b""
        return event({**self._head, "choices": [], "usage": usage(self._job)})

    def failed(self, error: ApiError) -> bytes:
        return event(error.document())

    def _pieces(self, choice: int, pieces: list[Piece]) -> bytes:
        reader, ended = self._readers[choice], pieces[-1].finish_reason
        deltas = reader.push("".join(piece.text for piece in pieces))
        if ended is not None:
            deltas += reader.finish()
        fields = [_delta(delta) for delta in deltas]
        scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        tokens = [piece.token for piece in pieces if piece.token is not None]
        if not fields and (scored or ended is not None or self._body.return_token_ids):
            fields = [{}]
        chunks = []
        for index, delta in enumerate(fields):
            is_last = index == len(fields) - 1
            reason = _reason(reader, ended) if is_last else None
            first = index == 0
            chunks.append(self._chunk(choice, delta, scored if first else (), reason, tokens if first else ()))
        return b"".join(chunks)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        scored: Sequence[TokenLogprobs] = (),
        reason: str | None = None,
        tokens: Sequence[int] = (),
    ) -> bytes:
        logprobs = self._logprobs(scored) if scored else None
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        entry |= self._token_ids(tokens)
        if reason is not None:
            entry |= routed_experts(self._job.requests[choice])
        document: dict[str, Any] = {**self._head, "choices": [entry]}
        if self._gives_prompt and tokens:
            self._gives_prompt = False
            document |= self._prompt_token_ids()
        if self._usage_always:
            document["usage"] = usage(self._job)
        elif self._usage_last:
            document["usage"] = None
        return event(document, len(scored) * (1 + (self._body.top_logprobs or 0)))

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self._body.return_token_ids else {}

    def _prompt_token_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.requests[0].prompt.tolist()} if self._body.return_token_ids else {}

    def _logprobs(self, scored: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": named_logprobs(self._tokenizer, scored), "refusal": None}


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning": delta.text, "reasoning_content": delta.text}
    if isinstance(delta, ToolStart):
        return {"tool_calls": [{"index": delta.index, **_call(delta, "")}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.json}}]}


def _call(start: ToolStart, arguments: str) -> dict[str, Any]:
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": arguments}}


def _message(said: ReadAnswer) -> dict[str, Any]:
    content = said.content if said.content or not said.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.reasoning:
        message["reasoning"] = message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [_call(call, said.arguments.get(call.index, "")) for call in said.calls]
    return message


def _reason(reader: Reader, reason: FinishReason | None) -> str | None:
    return "tool_calls" if reader.ended_in_calls(reason) else finish_reason(reason)
