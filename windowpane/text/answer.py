"""The text side of a request: tokens to text, stop strings cut out. The library and the server answer through it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from windowpane.schedule.request import FinishReason, Request, RoutedExperts, TokenLogprobs
from windowpane.text.detokenizer import Detokenizer
from windowpane.text.parsers import ReadAnswer
from windowpane.text.stops import StopStrings
from windowpane.text.tokenizer import Tokenizer


class RequestFailed(RuntimeError):
    """A step of this request raised; the cause is attached."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` are the text of a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. `stop` is the stop string or token that ended it, if one did.

    `text` ends before it, while `token_ids` has every token that was sampled, the stop token too. `cached_tokens` of
    the prompt were found computed. `routed_experts`, where asked for: [tokens - 1, layers with experts, experts].

    `outputs` are all answers to the prompt, this one first. Where parsers were named, `reasoning`, `content` and
    `tool_calls` are what the text is made of; else it is all content.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    cached_tokens: int = field(default=0, compare=False)  # how an answer came about, not what it is
    routed_experts: RoutedExperts | None = field(default=None, compare=False)
    said: ReadAnswer | None = field(default=None, compare=False, repr=False)
    others: tuple[Completion, ...] = field(default=(), compare=False, repr=False)

    @property
    def outputs(self) -> tuple[Completion, ...]:
        return (self, *self.others)

    @property
    def content(self) -> str:
        return self.text if self.said is None else self.said.content

    @property
    def reasoning(self) -> str:
        return "" if self.said is None else self.said.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        if self.said is None:
            return []
        return [ToolCall(call.id, call.name, self.said.arguments.get(call.index, "")) for call in self.said.calls]


class Answer:
    """What one request says, piece by piece. Without a tokenizer it has tokens but no text.

    `include_stop` shows the stop string too, and `skip_special_tokens` False what special tokens are called;
    `kept_special_ids` are shown in any case.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        self.request = request
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens, kept_special_ids)
        self._stops = StopStrings(request.params.stop, include_stop) if request.params.stop else None
        self._shown: list[str] = []
        self._taken = 0
        self._pushed = 0  # tokens

    def push(self, token: int | None, finish_reason: FinishReason | None) -> bool:
        """Take one token in; True when a stop string has ended the text, so that the request should end too."""
        ended = finish_reason is not None
        self._pushed += 1
        if self._detokenizer is None or token is None:
            return False
        # The stop token itself is no text.
        text = "" if finish_reason is FinishReason.STOP else self._detokenizer.push(token)
        if ended:
            text += self._detokenizer.finish()
        if self._stops is None or self._pushed < self.request.params.min_tokens:
            self._shown.append(text)  # nothing to stop at, or too early to stop
            return False
        self._shown.append(self._stops.push(text))
        if ended:
            self._shown.append(self._stops.finish())
        return not ended and self._stops.matched is not None

    def take(self) -> str:
        """Text that has come since the last time."""
        new, self._taken = self._shown[self._taken :], len(self._shown)
        return "".join(new)

    @property
    def text(self) -> str:
        return "".join(self._shown)

    @property
    def stop(self) -> str | int | None:
        """The stop string or token that ended the answer."""
        if self._stops is not None and self._stops.matched is not None:
            return self._stops.matched
        return self.request.output[-1] if self.request.finish_reason is FinishReason.STOP else None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; a stop string counts also where the last token that was allowed completed it."""
        stopped = self._stops is not None and self._stops.matched is not None
        return FinishReason.STOP if stopped else self.request.finish_reason

    def completion(self) -> Completion:
        request = self.request
        if request.finish_reason is FinishReason.FAILED:
            raise RequestFailed(f"a step failed: {request.error}") from request.error
        return Completion(
            prompt_token_ids=request.prompt.tolist(),
            text=self.text,
            token_ids=list(request.output),
            finish_reason=self.finish_reason or FinishReason.CANCELLED,
            stop=self.stop,
            logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
            prompt_logprobs=list(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
            cached_tokens=request.cached_tokens,
            routed_experts=request.routed_experts,
        )


def with_stop_ids(asked: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Stop tokens that were asked for, and then the model's own."""
    own = [stop for stop in sorted(tokenizer.stop_ids) if stop not in asked]
    return (*asked, *own)
