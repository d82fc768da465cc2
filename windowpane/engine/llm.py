"""`LLM`: prompts and messages in, text out. The engine below knows only tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast, get_args

import numpy as np
from numpy.typing import NDArray

from windowpane.engine.adapters import LoRARequest
from windowpane.engine.progress import busy
from windowpane.engine.start import start
from windowpane.schedule.request import Pooling, Request, SamplingParams
from windowpane.text import ChatPrompt, ChatTemplate, TextError, Tokenizer, chat_prompt, load_tokenizer
from windowpane.text.answer import Answer, Completion, with_stop_ids
from windowpane.text.grammar import CompiledGrammar, Grammars
from windowpane.text.parsers import Content, Delta, OutputParser, Parsers, ReadAnswer, kept_special_ids, tool_grammar
from windowpane.text.rules import with_rules

if TYPE_CHECKING:
    from windowpane.plan.planner import Plan

Message = Mapping[str, Any]
Tokens = Sequence[int] | NDArray[np.integer[Any]]  # or a tensor
Prompt = str | Tokens | Sequence[Message] | Mapping[str, Any]


class LLM:
    """A model that answers.

    `model` is a Hugging Face directory, a GGUF file or an embedded model's name; None is the embedded default.
    `reasoning_parser` and `tool_call_parser` say how it marks thoughts and writes calls in chats. `flags` are those of
    the command line with underscores (`max_model_len`, `kv_cache_dtype`, …; see `EngineConfig`), and `device`, `dtype`,
    `load_format` and `seed`; sizes may be text (`"4K"`, `"256MiB"`). Unknown ones are errors. The plan is printed on
    stderr.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
        **flags: Any,
    ) -> None:
        from rich.console import Console

        self._parsers = Parsers(reasoning_parser, tool_call_parser)
        self._console = Console(stderr=True)
        started = start(model, flags, self._console)
        self.engine = started.engine
        self._close = started.close
        self._sleeper = started.sleeper
        self.plan: Plan = started.plan
        self._text_source = started.text_source
        self._answers: dict[Request, Answer] = {}
        self._loaded_adapters: dict[int, tuple[LoRARequest, int]] = {}  # with their numbers, by lora_int_id
        self._names = count()
        self._engine_lock = threading.RLock()  # streams may be read by several threads

    def close(self) -> None:
        """End the other processes now. They also end when this object goes, or the program."""
        if "_grammars" in self.__dict__:
            self._grammars.close()
        self._close()

    def sleep(self, level: int = 1) -> int:
        """Give memory back until `wake_up`, and say how many bytes: level 1 drops KV, 2 the weights too.

        What runs must have been answered. Meanwhile prompts are refused.
        """
        self._sleeper.check(level)
        with self._engine_lock:
            if self._answers:
                raise ValueError(f"{len(self._answers)} answers are not complete; read their streams, or close them")
            return self._sleeper.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again. Weights that went are loaded anew."""
        with self._engine_lock:
            self._sleeper.wake()

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

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Completion]:
        """Answer all prompts together; one completion each, in order.

        A prompt is text, token ids (a list, an array or a tensor), or chat messages. `sampling_params` are one for all,
        or one per prompt, and so is `lora_request`, an adapter (with `enable_lora=True`).
        """
        several = [self._rendered(prompt) for prompt in _several(prompts)]
        adapters = self._adapters(lora_request, len(several))
        adapted = [replace(prompt, adapter=adapter) for prompt, adapter in zip(several, adapters, strict=True)]
        return self._answered(adapted, _one_each(sampling_params, len(several)))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> Completion:
        """Answer the last of `messages` (`{"role": …, "content": …}`), by the model's own chat template.

        `tool_choice` is none, auto, required, or the name of a function that must be called.
        """
        if isinstance(messages, str) or not _is_chat(messages):
            raise TypeError('messages is a list of {"role": …, "content": …}')
        prompt = self._rendered(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            variables=dict(chat_template_kwargs or {}),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
        prompt = replace(prompt, adapter=self._adapters(lora_request, 1)[0])
        return self._answered([prompt], [sampling_params or SamplingParams()])[0]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Answer one prompt piece by piece: iterate for the text (`for` or `async for`), then read `completion`.

        `deltas` are the same with thoughts and calls told apart, where parsers were named. Tools are for chats.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a stream is one answer, and n is {params.n}; open several")
        one = _one(prompt)
        if tools and not _is_chat(one):
            raise ValueError("tools are for chats; give messages")
        rendered = self._rendered(one, tools=tools, tool_choice=tool_choice)
        rendered = replace(rendered, adapter=self._adapters(lora_request, 1)[0])
        return Stream(self, rendered, self._submit(rendered, params))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        """The final hidden states of each prompt: the last token's, or the mean of all. Of length 1 unless told not."""
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling is {' or '.join(get_args(Pooling))}, not {pooling!r}")
        params = SamplingParams(max_tokens=1, temperature=0.0)
        several = [self._rendered(prompt) for prompt in _several(prompts)]
        answers = self._run(self._submit(prompt, params, pooling) for prompt in several)
        return [answer.request.embedding(normalize=normalize) for answer in answers]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids that `prompt` becomes."""
        return self._rendered(_one(prompt)).token_ids

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _grammars(self) -> Grammars:
        """Started with the first answer that must look like something."""
        return Grammars(self.tokenizer)

    def _rendered(
        self,
        prompt: _Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        **settings: Any,
    ) -> _Rendered:
        if isinstance(prompt, str):
            return _Rendered(self.tokenizer.encode(prompt))
        if not _is_chat(prompt):
            return _Rendered(cast("list[int]", prompt))
        if tool_choice == "none":
            tools = None
        if tools and self._parsers.tools is None:
            raise ValueError("tools need LLM(tool_call_parser=…), which says how the model writes calls")
        made = chat_prompt(self._chat_template, self.tokenizer, prompt, tools=tools, **settings)
        return _Rendered(made.token_ids, made, list(tools or ()), tool_choice)

    def _adapters(self, asked: LoRARequest | Sequence[LoRARequest | None] | None, prompts: int) -> list[int]:
        """The number of each prompt's adapter, loaded when it is first asked for; 0 for none."""
        each = [asked] * prompts if asked is None or isinstance(asked, LoRARequest) else list(asked)
        if len(each) != prompts:
            raise ValueError(f"{prompts} prompts and {len(each)} lora_requests; give one for all, or one per prompt")
        with self._engine_lock:
            return [0 if one is None else self._adapter(one) for one in each]

    def _adapter(self, asked: LoRARequest) -> int:
        adapters = self.engine.adapters
        if adapters is None:
            raise ValueError("lora_request needs an engine with adapters: LLM(enable_lora=True, max_loras=…)")
        known = self._loaded_adapters.get(asked.lora_int_id)
        if known is None:
            known = asked, adapters.load(f"{asked.lora_int_id}: {asked.lora_name}", asked.lora_path).number
            self._loaded_adapters[asked.lora_int_id] = known
        if known[0] != asked:
            raise ValueError(f"lora_int_id {asked.lora_int_id} is {known[0]}; give {asked.lora_name!r} another number")
        return known[1]

    def _answered(self, prompts: Sequence[_Rendered], each: Sequence[SamplingParams]) -> list[Completion]:
        pairs = list(zip(prompts, each, strict=True))
        submitted = (self._submit(prompt, own.for_choice(i)) for prompt, own in pairs for i in range(own.n))
        answers = iter(self._run(submitted))
        completions = []
        for prompt, own in pairs:
            first, *others = [self._read(prompt, next(answers)) for _ in range(own.n)]
            completions.append(replace(first, others=tuple(others)))
        return completions

    def _read(self, prompt: _Rendered, answer: Answer) -> Completion:
        """An answer with its thoughts and calls told apart, where it is to a chat and parsers were named."""
        completion = answer.completion()
        parser = self._parser(prompt)
        return completion if parser is None else replace(completion, said=ReadAnswer.of(parser, completion.text))

    def _parser(self, prompt: _Rendered) -> OutputParser | None:
        return None if prompt.chat is None else self._parsers.reading(prompt.chat.text, prompt.tools or None)

    def _submit(self, prompt: _Rendered, params: SamplingParams, pooling: Pooling | None = None) -> Answer:
        caches = self.plan.sizing.config.enable_prefix_caching
        has_text = self._text_source is not None
        if has_text and not params.ignore_eos:
            params = replace(params, stop_token_ids=with_stop_ids(params.stop_token_ids, self.tokenizer))
        if params.stop and not has_text:
            raise TextError("stop strings need a tokenizer and this model came without one; use stop_token_ids")
        tokenizer = self.tokenizer if has_text else None
        chat = prompt.chat
        grammar = with_rules(self._grammar(prompt, params), params, tokenizer, self.engine.sampler.vocab_size)
        request = Request(
            str(next(self._names)),
            np.array(prompt.token_ids, dtype=np.int32),
            params,
            message_ends=chat.message_ends if chat is not None and caches else (),
            grammar=grammar,
            pooling=pooling,
            adapter=prompt.adapter,
        )
        parser = self._parser(prompt)
        kept = () if parser is None or tokenizer is None else kept_special_ids(tokenizer, parser.markers)
        answer = Answer(request, tokenizer, kept_special_ids=kept)
        with self._engine_lock:
            if self._sleeper.level:
                raise ValueError("the model sleeps; wake_up() wakes it")
            self.engine.add(request)
            self._answers[request] = answer
        return answer

    def _grammar(self, prompt: _Rendered, params: SamplingParams) -> CompiledGrammar | None:
        """What the answer must look like, if anything. A thought may come first."""
        calls = bool(prompt.tools) and prompt.tool_choice not in ("none", "auto")
        if params.structured_outputs is None and not calls:
            return None
        make_reasoning = None if prompt.chat is None else self._parsers.make_reasoning()
        grammars = self._grammars
        if make_reasoning is not None and prompt.chat is not None:
            grammars = grammars.after(make_reasoning(prompt.chat.text).thought)
        if not calls:
            return grammars.structured(params.structured_outputs or {})
        if params.structured_outputs is not None:
            raise ValueError("an answer by structured_outputs cannot also be a call; leave one out")
        assert self._parsers.tools is not None
        function = None if prompt.tool_choice == "required" else prompt.tool_choice
        return tool_grammar(grammars, self._parsers.tools, prompt.tools, function=function)

    def _run(self, submitted: Iterable[Answer]) -> list[Answer]:
        """Submit all of them, and run them to their ends. Where one is refused, none is left."""
        answers: list[Answer] = []
        try:
            answers.extend(submitted)
            with busy(self._console, f"answering {len(answers)} prompts"):
                while any(answer.request.finish_reason is None for answer in answers):
                    self._step()
        finally:
            self._dismiss(answers)
        return answers

    def _step(self) -> None:
        """One step for everybody: several streams may be read in turn."""
        with self._engine_lock:
            for output in self.engine.step():
                answer = None if output.is_dropped else self._answers.get(output.request)
                if answer is not None and answer.push(output.token, output.finish_reason):
                    self.engine.stop(output)

    def _dismiss(self, answers: Iterable[Answer]) -> None:
        """These are done with, whether they have ended or not. The last to go leaves the engine idle."""
        with self._engine_lock:
            for answer in answers:
                self.engine.cancel(answer.request)
                self._answers.pop(answer.request, None)
            while not self._answers and self.engine.has_work:
                self.engine.step()


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt as tokens; of a chat also its text, and the tools that may be called."""

    token_ids: list[int]
    chat: ChatPrompt | None = None
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    adapter: int = 0


class Stream:
    """The text of one answer as it comes. Leaving it early ends the request; `close` one that is not read at all."""

    def __init__(self, llm: LLM, prompt: _Rendered, answer: Answer) -> None:
        self._llm = llm
        self._prompt = prompt
        self._answer = answer
        self._pieces = _read(llm, answer)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    async def __aiter__(self) -> AsyncIterator[str]:
        """The same for an event loop: steps are computed in a thread, and other streams may be read meanwhile."""
        try:
            while (piece := await asyncio.to_thread(next, self._pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(self.close)

    def deltas(self) -> Iterator[Delta]:
        """The same as deltas: `Content`, `Reasoning`, `ToolStart` and `ToolArguments`."""
        parser = self._llm._parser(self._prompt)
        for piece in self._pieces:
            yield from [Content(piece)] if parser is None else parser.push(piece)
        yield from () if parser is None else parser.finish()

    def close(self) -> None:
        self._pieces.close()
        self._llm._dismiss([self._answer])

    @property
    def completion(self) -> Completion:
        """What has been answered so far; all of it once the iteration has ended."""
        return self._llm._read(self._prompt, self._answer)


def _read(llm: LLM, answer: Answer) -> Generator[str, None, None]:
    """The pieces of an answer. It does not know its stream, so that it ends at once when a loop over it is left."""
    try:
        while True:
            with llm._engine_lock:  # or a step for another stream could end the answer once nothing was there to take
                piece = answer.take()
                if not piece:
                    if answer.request.finish_reason is not None:
                        break
                    llm._step()
            if piece:
                yield piece
    finally:
        llm._dismiss([answer])
    answer.completion()  # raises where a step failed


# -- prompts -------------------------------------------------------------------------------------------------------

_Prompt = str | list[int] | Sequence[Message]  # in one of its forms


def _several(prompts: Any) -> list[_Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [_one(prompts)]
    prompts = _listed(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise TypeError(f"prompts are text, token ids or messages, or a list of such, not {type(prompts).__name__}")
    if prompts and (_is_number(prompts[0]) or _is_chat(prompts)):
        return [_one(prompts)]
    return [_one(prompt) for prompt in prompts]


def _one(prompt: Any) -> _Prompt:
    if isinstance(prompt, Mapping):
        for name in ("prompt", "prompt_token_ids"):
            if set(prompt) == {name}:
                return _one(prompt[name])
        raise TypeError(f'a prompt as a dict has "prompt" or "prompt_token_ids", not {", ".join(map(str, prompt))}')
    prompt = _listed(prompt)
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and _is_chat(prompt)):
        return prompt
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence) or not all(map(_is_number, prompt)):
        raise TypeError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}")
    return [index(token) for token in prompt]


def _listed(prompt: Any) -> Any:
    """Arrays and tensors as lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") and getattr(prompt, "ndim", 0) in (1, 2) else prompt


def _is_number(token: Any) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)


def _is_chat(prompt: Any) -> TypeGuard[Sequence[Message]]:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
        and "role" in prompt[0]
    )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise TypeError(f"sampling_params are SamplingParams, or a list of them, not {type(params).__name__}")
    if len(params) != prompts:
        raise ValueError(f"{prompts} prompts and {len(params)} params; give one for all, or one per prompt")
    return list(params)
