"""`LLM` does what the server does, by vLLM's names: several answers, formats, tools, streams, prompts of any form."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_model import make_model
from windowpane import LLM, SamplingParams
from windowpane.engine.options import read_flags
from windowpane.plan.config import ConfigError
from windowpane.text.parsers import ToolArguments, ToolStart

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": "4MiB",
    "max_model_len": "1K",
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}|{% endfor %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=TEMPLATE, max_position_embeddings=1024)
    with LLM(model, max_num_batched_tokens=64, tool_call_parser="hermes", **FLAGS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert not shared.engine.has_work
    shared.engine.manager.check_idle()


class TestAnswers:
    def test_several_of_one_prompt(self, llm: LLM) -> None:
        drawn = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
        first, second = llm.generate(["Hello", "There"], drawn)
        assert [len(first.outputs), len(second.outputs)] == [3, 3]
        assert first.outputs[0] == first and len({output.text for output in first.outputs}) > 1
        alone = llm.generate("Hello", SamplingParams(seed=6, max_tokens=8, ignore_eos=True))[0]
        assert first.outputs[1] == alone, "choice i is drawn with seed + i, as by the server"

    @pytest.mark.parametrize(
        ("kinds", "texts"),
        [({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "[ab]"}, "ab"), ({"json": {"enum": [7]}}, "7")],
    )
    def test_what_they_must_look_like(self, llm: LLM, kinds: dict[str, Any], texts: Any) -> None:
        assert llm.generate("Hello", SamplingParams(structured_outputs=kinds))[0].text in texts

    def test_formats_that_are_none_are_refused(self, llm: LLM) -> None:
        for kinds in ({}, {"regex": "a", "choice": ["b"]}, {"nonsense": 1}):
            with pytest.raises(ValueError, match="give exactly one of json, json_object, regex, choice, grammar"):
                llm.generate("Hello", SamplingParams(structured_outputs=kinds))

    def test_words_that_are_never_said(self, llm: LLM) -> None:
        said = llm.generate("Hello", SamplingParams(structured_outputs={"choice": ["yes", "yet"]}, bad_words="yes"))
        assert said[0].text == "yet"

    def test_calls_and_thoughts_are_told_apart(self, llm: LLM, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        params = SamplingParams(max_tokens=400, seed=1, logit_bias=dict.fromkeys(llm.tokenizer.encode(" \n\t\r"), -100))
        answer = llm.chat(messages, params, tools=[WEATHER], tool_choice="weather")
        (call,) = answer.tool_calls
        assert (call.name, answer.content.strip()) == ("weather", "")
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        assert llm.chat(messages, GREEDY).content == llm.chat(messages, GREEDY).text
        model = make_model(tmp_path / "tiny", chat_template=TEMPLATE)
        with LLM(model, reasoning_parser="deepseek_r1", **{**FLAGS, "max_model_len": 256}) as thinking:
            thought = thinking.chat(messages, GREEDY)  # answers begin in a thought, which is never ended
            assert (thought.content, thought.reasoning) == ("", thought.text.strip())
            with pytest.raises(ValueError, match="tool_call_parser"):
                thinking.chat(messages, GREEDY, tools=[WEATHER])

    def test_a_last_message_is_gone_on_from(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
        answer = llm.chat(messages, GREEDY, continue_final_message=True)
        assert llm.tokenizer.decode(answer.prompt_token_ids) == "Hi|So"


class TestStreams:
    def test_async_ones_go_side_by_side(self, llm: LLM) -> None:
        async def read(prompt: str) -> str:
            return "".join([piece async for piece in llm.stream(prompt, GREEDY)])

        async def both() -> list[str]:
            return await asyncio.gather(read("Hello"), read("There"))

        assert asyncio.run(both()) == [c.text for c in llm.generate(["Hello", "There"], GREEDY)]

    def test_one_that_ends_while_another_is_read_is_whole(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Right when the first finds nothing to take, a thread begins to read the second, which ends both."""
        first, second = llm.stream("Hello", GREEDY), llm.stream("There", GREEDY)
        answer, others = first._answer, list[threading.Thread]()
        take = answer.take

        def meanwhile() -> str:
            piece = take()
            if not piece and not others:
                others.append(threading.Thread(target=list, args=[second]))
                others[0].start()
                others[0].join(0.5)
            return piece

        monkeypatch.setattr(answer, "take", meanwhile)
        assert "".join(first) == llm.generate("Hello", GREEDY)[0].text
        others[0].join()

    def test_one_that_is_left_ends(self, llm: LLM) -> None:
        async def leave() -> None:
            pieces = aiter(llm.stream("Hello", GREEDY))
            await anext(pieces)
            await pieces.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave())
        assert not llm.engine.has_work

    def test_deltas_tell_calls_apart(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        params = SamplingParams(max_tokens=400, seed=1, logit_bias=dict.fromkeys(llm.tokenizer.encode(" \n\t\r"), -100))
        stream = llm.stream(messages, params, tools=[WEATHER], tool_choice="weather")
        deltas = list(stream.deltas())
        (start,) = (delta for delta in deltas if isinstance(delta, ToolStart))
        arguments = "".join(delta.json for delta in deltas if isinstance(delta, ToolArguments))
        assert (start.name, arguments) == ("weather", stream.completion.tool_calls[0].arguments)
        assert [d.text for d in llm.stream("Hello", GREEDY).deltas()] == list(llm.stream("Hello", GREEDY))
        with pytest.raises(ValueError, match="tools are for chats"):
            llm.stream("Hello", GREEDY, tools=[WEATHER])

    def test_each_is_one_answer(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="a stream is one answer, and n is 2"):
            llm.stream("Hello", SamplingParams(n=2))


class TestPrompts:
    def test_arrays_tensors_and_dicts(self, llm: LLM) -> None:
        tokens = llm.tokenizer.encode("Hello")
        (expected,) = llm.generate("Hello", GREEDY)
        for prompt in (
            *(
                tokens,
                tuple(tokens),
                np.array(tokens),
                torch.tensor(tokens),
                torch.tensor([tokens]),
                [np.array(tokens)],
            ),
            *({"prompt": "Hello"}, {"prompt_token_ids": tokens}, [{"prompt_token_ids": np.array(tokens)}]),
        ):
            assert llm.generate(prompt, GREEDY) == [expected], prompt  # type: ignore[arg-type]
        assert len(llm.generate(np.array([tokens, tokens]), GREEDY)) == 2
        assert llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=None)) == [
            expected
        ]

    @pytest.mark.parametrize("prompt", [5, 1.5, None, [1.5], [None], ["a", 5.0], {"text": "a"}, [[True, False]], b"x"])
    def test_what_is_none_is_one_clear_error(self, llm: LLM, prompt: Any) -> None:
        with pytest.raises(TypeError, match=r"(a prompt|prompts) (is|are|as) "):
            llm.generate(prompt, GREEDY)

    def test_so_are_parameters(self, llm: LLM) -> None:
        with pytest.raises(TypeError, match="sampling_params are SamplingParams"):
            llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
        for given, message in (
            ({"temperature": "hot"}, "temperature takes a number, not 'hot'"),
            ({"top_p": None}, "top_p takes a number"),
            ({"max_tokens": 1.5}, "max_tokens takes whole numbers"),
            ({"stop": 5}, "stop is one or more strings"),
            ({"n": 0}, "n is a number of answers"),
        ):
            with pytest.raises(ValueError, match=message):
                SamplingParams(**given)


class TestFlags:
    def test_sizes_may_be_text(self) -> None:
        _, config = read_flags({"max_model_len": "4K", "kv_cache_memory_bytes": "256MiB", "max_num_seqs": np.int64(3)})
        assert (config.max_model_len, config.kv_cache_memory_bytes, config.max_num_seqs) == (4096, 256 * 2**20, 3)

    def test_what_is_so_anyway_may_be_asked_for(self) -> None:
        asked = {
            "trust_remote_code": True,
            "pipeline_parallel_size": 1,
            "enable_chunked_prefill": True,
            "dtype": "half",
        }
        options, config = read_flags({**asked, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 0}})
        assert (options.dtype, config.max_num_seqs) == ("float16", 4)
        for other in ({"pipeline_parallel_size": 2}, {"enable_chunked_prefill": False}):
            with pytest.raises(ConfigError, match="unknown argument"):
                read_flags(other)

    def test_a_small_step_lowers_the_default_of_sequences(self) -> None:
        assert read_flags({"max_num_batched_tokens": 16})[1].max_num_seqs == 16
        assert read_flags({"max_num_batched_tokens": "8K"})[1].max_num_seqs == 256
        assert read_flags({"max_num_batched_tokens": 16, "max_num_seqs": 20})[1].max_num_seqs == 20, (
            "as it was asked for"
        )

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"kv_cache_memory_bytes": "lots"}, "--kv-cache-memory-bytes: cannot read size 'lots'"),
            ({"max_num_seqs": "many"}, "--max-num-seqs takes a whole number, not 'many'"),
            ({"max_num_seqs": True}, "--max-num-seqs takes a whole number, not True"),
            ({"gpu_memory_utilization": "90%"}, "--gpu-memory-utilization takes a number, not '90%'"),
            ({"enable_prefix_caching": "yes"}, "--enable-prefix-caching takes True or False, not 'yes'"),
            ({"kv_cache_dtype": 8}, "--kv-cache-dtype takes text, not 8"),
        ],
    )
    def test_a_wrong_type_is_one_line(self, flags: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            read_flags(flags)
        assert str(error.value).startswith(message) and "\n" not in str(error.value)


# Of vLLM 0.27. What is not here, and why.
VLLM_PARAMS = {
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("logit_bias", "bad_words", "structured_outputs"),
}
NOT_HERE = {
    "allowed_token_ids": "structured_outputs",
    "detokenize": "text is always made, where there is a tokenizer",
    "extra_args": "there are none",
    "flat_logprobs": "logprobs have one form",
    "include_stop_str_in_output": "a field of requests to the server",
    "logits_processors": "logit_bias",
    "output_kind": "stream or generate",
    "skip_special_tokens": "a field of requests to the server",
    "spaces_between_special_tokens": "special tokens are written as they are",
    "thinking_token_budget": "a field of requests to the server",
    "truncate_prompt_tokens": "prompts are never cut",
}
OURS = {"return_routed_experts", "routed_experts_prompt_start"}
OUR_METHODS = {"close", "stream", "encode"}  # `encode` of vLLM pools; here it tokenizes


def test_names_are_vllms_but_for_these() -> None:
    assert {field.name for field in fields(SamplingParams)} == VLLM_PARAMS | OURS
    assert not VLLM_PARAMS & NOT_HERE.keys()
    methods = {name for name in vars(LLM) if not name.startswith("_")}
    assert methods - OUR_METHODS == {
        "generate", "chat", "embed", "get_tokenizer", "tokenizer", "max_model_len", "sleep", "wake_up",
    }  # fmt: skip
    chat = set(signature(LLM.chat).parameters)
    assert chat - {"self", "tool_choice"} == {
        *("messages", "sampling_params", "tools", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "lora_request"),
    }
    assert list(signature(LLM.generate).parameters)[1:] == ["prompts", "sampling_params", "lora_request"]
