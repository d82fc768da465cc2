"""What endpoints say alike about an answer: what it cost, why it ended, what its tokens are called and visited."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from windowpane.schedule.request import FinishReason, Request, TokenLogprobs
from windowpane.server.job import Job, Piece
from windowpane.text.answer import Answer
from windowpane.text.tokenizer import Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


def finish_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else _REASONS.get(reason, "error")


def stop_reason(answer: Answer, asked: Sequence[int] | None) -> str | int | None:
    """vLLM's addition: which of the stops that were asked for ended the answer; None where it was the model's own."""
    stop = answer.stop
    return stop if isinstance(stop, str) or stop in (asked or ()) else None


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token is called. One that is no text by itself is called by its bytes, so that names stay apart."""
    data = tokenizer.token_bytes(token, skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def named_logprobs(tokenizer: Tokenizer, scored: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Tokens with their logprobs as chats and responses write them: by text and by bytes."""
    return [
        {
            **_named(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_named(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in scored
    ]


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token, skip_special_tokens=False)
    return {"token": token_text(tokenizer, token), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """JSON has no infinity; this is what the API says instead."""
    return max(logprob, -9999.0)


def routed_experts(request: Request) -> dict[str, Any]:
    """vLLM's addition to a choice, where it was asked for: an array as a .npy file, in base64."""
    if not request.params.return_routed_experts:
        return {}
    found = request.routed_experts
    if found is None:  # it was cancelled
        return {"routed_experts": None}
    file = BytesIO()
    np.save(file, found)
    return {"routed_experts": b64encode(file.getvalue()).decode()}


def tells_routes(job: Job, pieces: Iterable[Piece]) -> bool:
    """Whether these pieces end a choice that asked for routed experts, which may have to be waited for."""
    return any(p.finish_reason and job.requests[p.choice].params.return_routed_experts for p in pieces)


def usage(job: Job, *, generates: bool = True) -> dict[str, Any]:
    """Tokens of a job so far. A prompt counts once, however many choices were made of it. Drafts are told where steps
    verified some.
    """
    prompts: dict[int, Request] = {}
    for request in job.requests:
        prompts.setdefault(id(request.prompt), request)
    prompt_tokens = sum(len(request.prompt) for request in prompts.values())
    completion_tokens = sum(len(request.output) for request in job.requests) if generates else 0
    drafted, accepted = (sum(getattr(r, name) for r in job.requests) for name in ("drafted_tokens", "accepted_tokens"))
    drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts.values())},
        **({"completion_tokens_details": drafts} if drafted else {}),
    }
