"""`LLM`: prompts and messages in, text out. The engine below knows only tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from windowpane.engine.progress import busy
from windowpane.engine.start import start
from windowpane.schedule.request import Request, SamplingParams
from windowpane.text import ChatPrompt, ChatTemplate, TextError, Tokenizer, chat_prompt, load_tokenizer
from windowpane.text.answer import Answer, Completion, with_stop_ids

if TYPE_CHECKING:
    from windowpane.plan.planner import Plan

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A model that answers.

    `model` is a Hugging Face directory, a GGUF file or an embedded model's name; None is the embedded default. `flags`
    are those of the command line with underscores (`max_model_len`, `kv_cache_dtype`, …; see `EngineConfig`), and
    `device`, `dtype`, `load_format` and `seed`. Unknown ones are errors. The plan is printed on stderr.
    """

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        started = start(model, flags, self._console)
        self.engine = started.engine
        self._close = started.close
        self.plan: Plan = started.plan
        self._text_source = started.text_source
        self._answers: dict[Request, Answer] = {}
        self._names = count()

    def close(self) -> None:
        """End the other ranks' processes now. They also end when this object goes, or the program."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded when text is first needed: prompts of token ids do without."""
        if self._text_source is None:
            raise TextError(f"{self.plan.sizing.spec.name} came without a tokenizer; give prompts as token ids")
        with busy(self._console, "reading the tokenizer"):
            return load_tokenizer(self._text_source, lazy=True)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer all prompts together; one completion each, in order.

        A prompt is text, token ids, or chat messages. `params` is one for all, or one per prompt.
        """
        several: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = _one_each(params, len(several))
        answers: list[Answer] = []
        try:
            for prompt, own in zip(several, each, strict=True):
                answers.append(self._submit(prompt, own))
            with busy(self._console, f"answering {len(answers)} prompts"):
                while any(answer.request.finish_reason is None for answer in answers):
                    self._step()
        finally:
            self._dismiss(answers)
        return [answer.completion() for answer in answers]

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer the last of `messages` (`{"role": …, "content": …}`), by the model's own chat template."""
        if not (_is_one(messages) and _is_chat(messages)):
            raise TypeError('messages is a list of {"role": …, "content": …}')
        return self.generate(messages, params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Answer one prompt piece by piece: iterate for the text, then read `completion`."""
        return Stream(self, self._submit(prompt, params or SamplingParams()))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that `prompt` becomes."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_chat(prompt):
            return self._chat_prompt(prompt).token_ids
        return [int(token) for token in cast("Sequence[int]", prompt)]

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def _submit(self, prompt: Prompt, params: SamplingParams) -> Answer:
        chat = self._chat_prompt(prompt) if _is_chat(prompt) else None
        tokens = self.encode(prompt) if chat is None else chat.token_ids
        caches = self.plan.sizing.config.enable_prefix_caching
        has_text = self._text_source is not None
        if has_text and not params.ignore_eos:
            params = replace(params, stop_token_ids=with_stop_ids(params.stop_token_ids, self.tokenizer))
        if params.stop and not has_text:
            raise TextError("stop strings need a tokenizer and this model came without one; use stop_token_ids")
        request = Request(
            str(next(self._names)),
            np.array(tokens, dtype=np.int32),
            params,
            message_ends=chat.message_ends if chat is not None and caches else (),
        )
        self.engine.add(request)
        answer = Answer(request, self.tokenizer if has_text else None)
        self._answers[request] = answer
        return answer

    def _chat_prompt(self, messages: Prompt) -> ChatPrompt:
        return chat_prompt(self._chat_template, self.tokenizer, cast("Sequence[Message]", messages))

    def _step(self) -> None:
        """One step for everybody: several streams may be read in turn."""
        for output in self.engine.step():
            answer = None if output.is_dropped else self._answers.get(output.request)
            if answer is not None and answer.push(output.token, output.finish_reason):
                self.engine.stop(output)

    def _dismiss(self, answers: Iterable[Answer]) -> None:
        """These are done with, whether they have ended or not. The last to go leaves the engine idle."""
        for answer in answers:
            self.engine.cancel(answer.request)
            self._answers.pop(answer.request, None)
        while not self._answers and self.engine.has_work:
            self.engine.step()


class Stream:
    """The text of one answer as it comes. Leaving it early ends the request; `close` one that is not read at all."""

    def __init__(self, llm: LLM, answer: Answer) -> None:
        self._llm = llm
        self._answer = answer
        self._pieces = _read(llm, answer)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()
        self._llm._dismiss([self._answer])

    @property
    def completion(self) -> Completion:
        """What has been answered so far; all of it once the iteration has ended."""
        return self._answer.completion()


def _read(llm: LLM, answer: Answer) -> Generator[str, None, None]:
    """The pieces of an answer. It does not know its stream, so that it ends at once when a loop over it is left."""
    try:
        while True:
            if piece := answer.take():
                yield piece
            elif answer.request.finish_reason is not None:
                break
            else:
                llm._step()
    finally:
        llm._dismiss([answer])
    answer.completion()  # raises where a step failed


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt rather than several: text, or a list of token ids or of messages."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping))


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise ValueError(f"{prompts} prompts and {len(params)} params; give one for all, or one per prompt")
    return list(params)
