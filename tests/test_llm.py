"""`LLM` on a small random model with a byte-level tokenizer: text, stops, streams, chat, start-up and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import windowpane
from tests.models.small_configs import small
from tests.tiny_model import BOS, EOS, make_model
from windowpane import LLM, FinishReason, RequestFailed, SamplingParams
from windowpane.engine.accounts import accounts
from windowpane.engine.devices import free_memory_bytes
from windowpane.engine.options import read_flags
from windowpane.engine.start import start
from windowpane.parallel.job import RankReport
from windowpane.plan.config import ConfigError
from windowpane.plan.planner import PlanError
from windowpane.schedule.scheduler import RequestTooLong
from windowpane.text import TextError

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "kv_cache_memory_bytes": 4 * 2**20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(model: Path) -> LLM:
    return LLM(model, **FLAGS)


@pytest.fixture
def llm(shared: LLM) -> Any:
    """The same engine for every test, idle before and after."""
    yield shared
    assert not shared.engine.has_work
    shared.engine.manager.check_idle()


def printable(llm: LLM) -> SamplingParams:
    """Greedy, but only letters can be said: what comes is plain text."""
    letters = llm.tokenizer.encode("abcdefgh", add_special_tokens=False)
    return SamplingParams(max_tokens=40, seed=1, logit_bias=dict.fromkeys(letters, 100.0))


class TestGenerating:
    def test_answers_come_in_the_order_of_the_prompts_and_as_if_alone(self, llm: LLM) -> None:
        prompts = ["Once upon a time there was", "x", "The window slides over many tokens of this prompt"]
        together = llm.generate(prompts, GREEDY)
        assert together == [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert len({c.text for c in together}) == 3

    def test_text_is_that_of_the_tokens(self, llm: LLM) -> None:
        (completion,) = llm.generate("Hello", GREEDY)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.prompt_token_ids == llm.tokenizer.encode("Hello")
        assert completion.prompt_token_ids[0] == BOS
        assert (len(completion.token_ids), completion.finish_reason) == (40, FinishReason.LENGTH)

    def test_token_ids_and_text_are_the_same_prompt(self, llm: LLM) -> None:
        assert llm.generate(llm.tokenizer.encode("Hello"), GREEDY) == llm.generate("Hello", GREEDY)

    def test_each_prompt_may_have_its_own_parameters(self, llm: LLM) -> None:
        short = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
        first, second = llm.generate(["Hello", "Hello"], [GREEDY, short])
        assert second.token_ids == first.token_ids[:3]
        assert first.logprobs is None and first.prompt_logprobs is None
        assert second.logprobs is not None and second.prompt_logprobs is not None
        assert [entry.token for entry in second.logprobs] == second.token_ids
        assert len(second.prompt_logprobs) == len(second.prompt_token_ids)
        with pytest.raises(ValueError, match="2 prompts and 1 params"):
            llm.generate(["a", "b"], [GREEDY])

    def test_a_seed_repeats_an_answer_in_any_company(self, llm: LLM) -> None:
        seeded = SamplingParams(max_tokens=20, seed=11, ignore_eos=True)
        (alone,) = llm.generate("Hello", seeded)
        company = llm.generate(["a", "Hello", "b"], [SamplingParams(), seeded, SamplingParams(top_k=3)])
        assert company[1] == alone

    def test_overlapped_steps_answer_the_same(self, llm: LLM, model: Path) -> None:
        prompts = ["Hello", "Once upon a time"]
        params = [GREEDY, SamplingParams(max_tokens=30, seed=3, presence_penalty=0.5)]
        assert LLM(model, async_scheduling=True, **FLAGS).generate(prompts, params) == llm.generate(prompts, params)

    def test_nothing_is_left_of_a_batch_with_one_impossible_prompt(self, llm: LLM) -> None:
        with pytest.raises(RequestTooLong, match="exceed max_model_len 512"):
            llm.generate(["fine", "x" * 600], GREEDY)

    def test_no_prompts_no_answers(self, llm: LLM) -> None:
        assert llm.generate([]) == []


class TestStopping:
    def test_the_models_own_stop_token_ends_the_answer_and_is_not_shown(self, llm: LLM) -> None:
        eager = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 1000.0})
        (completion,) = llm.generate("Hello", eager)
        assert (completion.text, completion.token_ids) == ("", [EOS])
        assert (completion.finish_reason, completion.stop) == (FinishReason.STOP, EOS)

    def test_unless_it_is_ignored_or_comes_too_early(self, llm: LLM) -> None:
        bias = {EOS: 1000.0}
        ignoring = SamplingParams(temperature=0, max_tokens=5, logit_bias=bias, ignore_eos=True)
        (completion,) = llm.generate("Hello", ignoring)
        assert (completion.token_ids, completion.finish_reason) == ([EOS] * 5, FinishReason.LENGTH)
        (completion,) = llm.generate(
            "Hello", SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias=bias)
        )
        assert EOS not in completion.token_ids[:3] and completion.token_ids[3:] == [EOS]

    def test_a_stop_string_is_cut_before_it_is_shown(self, llm: LLM) -> None:
        free = printable(llm)
        (whole,) = llm.generate("Hello", free)
        stop = whole.text[10:13]
        at = whole.text.index(stop)
        params = SamplingParams(max_tokens=40, seed=1, logit_bias=free.logit_bias, stop=stop)
        (completion,) = llm.generate("Hello", params)
        assert (completion.text, completion.stop) == (whole.text[:at], stop)
        assert completion.finish_reason is FinishReason.STOP
        stream = llm.stream("Hello", params)
        assert "".join(stream) == whole.text[:at]

    def test_a_stop_string_completed_by_the_last_token_is_cut_too(self, llm: LLM) -> None:
        free = printable(llm)
        (whole,) = llm.generate("Hello", free)
        stop = next(whole.text[i : i + 5] for i in range(30) if whole.text.index(whole.text[i : i + 5]) == i)
        end = whole.text.index(stop) + 5
        params = SamplingParams(max_tokens=end, seed=1, logit_bias=free.logit_bias, stop=[stop])
        (completion,) = llm.generate("Hello", params)
        assert (completion.text, completion.finish_reason) == (whole.text[: end - 5], FinishReason.STOP)

    def test_an_unfinished_stop_string_is_ordinary_text(self, llm: LLM) -> None:
        free = printable(llm)
        (whole,) = llm.generate("Hello", free)
        params = SamplingParams(max_tokens=40, seed=1, logit_bias=free.logit_bias, stop=whole.text[-2:] + "!")
        assert llm.generate("Hello", params)[0].text == whole.text


class TestStreaming:
    def test_pieces_make_up_the_text(self, llm: LLM) -> None:
        stream = llm.stream("Hello", printable(llm))
        pieces = list(stream)
        assert len(pieces) == 40
        assert stream.completion == llm.generate("Hello", printable(llm))[0]
        assert "".join(pieces) == stream.completion.text

    def test_leaving_early_frees_everything(self, llm: LLM) -> None:
        stream = llm.stream("Hello", printable(llm))
        for _ in range(3):
            next(stream)
        stream.close()
        assert stream.completion.finish_reason is FinishReason.CANCELLED
        assert len(stream.completion.text) == 3

    def test_so_does_leaving_the_loop(self, llm: LLM) -> None:
        for _ in llm.stream("Hello", printable(llm)):
            break
        assert not llm.engine.has_work

    def test_a_stream_that_is_never_read_can_be_closed(self, llm: LLM) -> None:
        llm.stream("Hello", printable(llm)).close()
        assert not llm.engine.has_work

    def test_two_streams_read_in_turn(self, llm: LLM) -> None:
        params = printable(llm)
        first, second = llm.stream("Hello", params), llm.stream("Once upon", params)
        texts = ["", ""]
        for a, b in zip(first, second, strict=True):
            texts[0] += a
            texts[1] += b
        assert texts == [c.text for c in llm.generate(["Hello", "Once upon"], params)]

    def test_characters_are_never_split(self, llm: LLM) -> None:
        euro = llm.tokenizer.encode("€", add_special_tokens=False)
        assert len(euro) == 3
        bias = dict.fromkeys(euro, 100.0)
        stream = llm.stream("Hello", SamplingParams(max_tokens=60, seed=2, logit_bias=bias))
        pieces = list(stream)
        assert "".join(pieces) == llm.tokenizer.decode(stream.completion.token_ids)


class TestChatting:
    def test_messages_go_through_the_models_template(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        completion = llm.chat(messages, GREEDY)
        rendered = "<bos>user: Hi\nassistant:"
        assert completion.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
        assert "".join(llm.stream(messages, GREEDY)) == completion.text

    def test_a_second_question_resumes_at_the_end_of_the_system_prompt(self, model: Path) -> None:
        system = {"role": "system", "content": "Answer in as few words as you can, and never in verse or in Latin."}
        kept, plain = LLM(model, **FLAGS), LLM(model, **FLAGS, enable_prefix_caching=False)
        chats = [[system, {"role": "user", "content": word}] for word in ("Hi", "How are you?")]
        for llm, found in ((kept, True), (plain, False)):
            first, second = (llm.chat(messages, GREEDY) for messages in chats)
            assert first.cached_tokens == 0
            assert (second.cached_tokens > 50) is found
        assert kept.chat(chats[1], GREEDY) == plain.chat(chats[1], GREEDY)

    def test_the_next_turn_resumes_after_the_answer(self, model: Path) -> None:
        llm = LLM(model, **FLAGS)
        question = [{"role": "user", "content": "Tell me all that you know about windows."}]
        answer = llm.chat(question, printable(llm))
        more = [*question, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]
        assert llm.chat(more, GREEDY).cached_tokens >= len(answer.prompt_token_ids)

    def test_several_chats_at_once(self, llm: LLM) -> None:
        chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]
        assert llm.generate(chats, GREEDY) == [llm.chat(messages, GREEDY) for messages in chats]

    def test_what_is_no_chat_is_refused(self, llm: LLM) -> None:
        with pytest.raises(TypeError, match="messages is a list"):
            llm.chat("Hi")  # type: ignore[arg-type]

    def test_a_base_model_says_that_it_cannot_chat(self, tmp_path: Path) -> None:
        base = LLM(make_model(tmp_path / "base", chat_template=None), **FLAGS)
        with pytest.raises(TextError, match="has no chat template"):
            base.chat([{"role": "user", "content": "Hi"}])


class TestFailing:
    def test_a_failed_step_is_raised_and_the_next_prompt_is_answered(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = llm.generate("Hello", GREEDY)

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "forward", broken)
            with pytest.raises(RequestFailed, match="out of luck"):
                llm.generate(["Hello", "again"], GREEDY)
            with pytest.raises(RequestFailed, match="out of luck"):
                list(llm.stream("Hello", GREEDY))
        assert llm.generate("Hello", GREEDY) == expected


class TestStarting:
    def test_predicted_bytes_are_measured_bytes(self, model: Path) -> None:
        started = start(model, FLAGS)
        rows = {row.name.strip(): row for row in accounts(started.plan, started.reports)}
        assert rows.keys() == {"weights", "KV arena", "window-8", "full"}
        for row in rows.values():
            assert row.predicted_bytes == row.measured_bytes > 0, row.name

    def test_both_are_told_on_stderr(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        LLM(model, **FLAGS)
        out, err = capsys.readouterr()
        assert out == ""
        for word in ("predicted", "measured", "weights", "KV arena", "window-8", "full", "--max-model-len 512"):
            assert word in err

    def test_it_refuses_what_cannot_hold_one_sequence_and_says_the_longest_that_fits(self, model: Path) -> None:
        tight = {**FLAGS, "kv_cache_memory_bytes": 96 * 2**10, "block_tokens": 16, "slab_bytes": 8192}
        with pytest.raises(PlanError, match=r"The longest that fits is --max-model-len (\d+)") as refusal:
            LLM(model, max_model_len=512, **tight)
        longest = int(str(refusal.value).split("--max-model-len ")[1].split(";")[0])
        assert LLM(model, max_model_len=longest, **tight).max_model_len == longest
        assert LLM(model, **tight).max_model_len == longest

    def test_a_cpu_keeps_to_a_share_of_its_memory(self, model: Path) -> None:
        flags = {name: value for name, value in FLAGS.items() if name != "kv_cache_memory_bytes"}
        started = start(model, flags)
        assert started.plan.kv_bytes is not None
        assert 0 < started.plan.kv_bytes <= min(4 * 2**30, free_memory_bytes() // 2)
        assert not started.engine.async_scheduling

    def test_unknown_arguments_name_close_ones(self, model: Path) -> None:
        with pytest.raises(ConfigError, match="unknown argument 'max_model_length'; did you mean max_model_len"):
            LLM(model, max_model_length=3)
        with pytest.raises(ConfigError, match="known: async_scheduling, "):
            read_flags({"qqqq": 1})

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"device": "tpu"}, "use auto, cpu, cuda or cuda:1"),
            ({"device": "cuda:77"}, "use --device cpu"),
            ({"dtype": "bfloat16"}, "CPUs compute in float32"),
            ({"dtype": "float8"}, "use auto, float32, bfloat16, float16"),
            ({"max_model_len": 4096}, "its limit is 512"),
            ({"tensor_parallel_size": 3}, "works with 1, 2"),
            ({"max_num_seqs": 65}, "must be at least max_num_seqs"),
            ({"load_format": "pickle"}, "unknown load format"),
        ],
    )
    def test_flags_that_cannot_be_honoured_say_what_can(self, model: Path, flags: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            start(model, {**FLAGS, **flags})

    def test_a_shape_without_weights_says_what_is_missing(self) -> None:
        with pytest.raises(ConfigError, match="a shape without weights; give its directory or a GGUF file"):
            LLM("gemma-4-31b")

    def test_a_shape_with_random_weights_takes_token_ids_only(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(small("llama")))
        bare = LLM(tmp_path, **FLAGS)
        assert len(bare.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].token_ids) == 4
        with pytest.raises(TextError, match="came without a tokenizer; give prompts as token ids"):
            bare.generate("Hello")
        with pytest.raises(TextError, match="use stop_token_ids"):
            bare.generate([1, 2, 3], SamplingParams(stop="x"))


class TestPublicNames:
    def test_are_all_there(self) -> None:
        for name in windowpane.__all__:
            assert getattr(windowpane, name).__name__ == name
        assert set(windowpane.__all__) <= set(dir(windowpane))
        with pytest.raises(AttributeError, match="no attribute 'LMM'"):
            windowpane.LMM  # noqa: B018

    def test_importing_the_package_costs_no_torch(self) -> None:
        code = "import sys, windowpane; from windowpane import SamplingParams; print('torch' in sys.modules)"
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
        )


class TestDrafts:
    @pytest.mark.parametrize("overlapped", [False, True])
    def test_change_no_answer(self, model: Path, llm: LLM, overlapped: bool) -> None:
        config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        with LLM(model, **FLAGS, async_scheduling=overlapped, speculative_config=config) as drafting:
            prompts = ["abcabcabcabc", "the same and the same and the"]
            assert drafting.generate(prompts, GREEDY) == llm.generate(prompts, GREEDY)
            assert drafting.generate(prompts, printable(llm)) == llm.generate(prompts, printable(llm))
            predicted = {row.name: (row.predicted_bytes, row.measured_bytes) for row in plan_accounts(drafting)}
            assert all(one == other for one, other in predicted.values())


def plan_accounts(llm: LLM) -> list[Any]:
    report = RankReport(llm.plan.sizing.weights_bytes, llm.plan.capacity.arena_bytes, None)
    return accounts(llm.plan, [report])


class TestHostTier:
    def test_chats_beyond_the_arena_go_on_where_they_were(self, model: Path) -> None:
        """Six chats of more than 200 tokens in 640 KiB of KV, with 64 MiB of host memory beside it."""
        tight = {**FLAGS, "kv_cache_memory_bytes": 5 * 2**17, "max_model_len": 512}
        prompts = [f"chat {index}: " + "abcdefghij" * 20 for index in range(6)]
        plain = LLM(model, **tight)
        for overlapped in (False, True):
            llm = LLM(model, **tight, kv_offloading_size="64MiB", async_scheduling=overlapped)
            first = llm.generate(prompts, GREEDY)
            longer = [completion.prompt_token_ids + completion.token_ids for completion in first]
            second, without = llm.generate(longer, GREEDY), plain.generate(longer, GREEDY)
            assert [c.token_ids for c in second] == [c.token_ids for c in without]
            tier = llm.engine.scheduler.tier
            assert tier is not None and tier.stats.fetches > 0 and tier.stats.fetched_bytes > 0
            assert sum(c.cached_tokens for c in second) > sum(c.cached_tokens for c in without)
            tier.check_integrity()
            llm.engine.manager.check_idle()

    def test_sizes_are_gib_or_have_a_unit(self, model: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"--kv-offloading-size 9999999 is .* of host memory are free; the most is"
        ):
            LLM(model, **FLAGS, kv_offloading_size=9_999_999)
        with pytest.raises(ConfigError, match=r"--kv-offloading-size: unknown unit 'miles'"):
            LLM(model, **FLAGS, kv_offloading_size="3 miles")
        with pytest.raises(ConfigError, match="--no-enable-prefix-caching leaves none; leave one out"):
            LLM(model, **FLAGS, kv_offloading_size=0.01, enable_prefix_caching=False)
        assert LLM(model, **FLAGS, kv_offloading_size=0).engine.scheduler.tier is None


# As Qwen3.5's does, it drops reasoning from answers in earlier turns.
OPENING = "<|im_start|>assistant\n<think>\n"
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}" + OPENING + "{% endif %}"
)


def test_with_recurrent_states_the_next_turn_begins_at_the_last_question_where_reasoning_is_dropped(
    tmp_path: Path,
) -> None:
    path = make_model(tmp_path / "hybrid", chat_template=DROPS_REASONING)
    (path / "config.json").write_text(json.dumps(small("qwen3.5", vocab_size=258)))
    messages = [{"role": "system", "content": "Be brief."}]
    llm, up_to_question = LLM(path, max_model_len=512, **{**FLAGS, "kv_cache_memory_bytes": 2**26}), 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}, which is long enough to be found again."})
        answer = llm.chat(messages, GREEDY)
        assert answer.cached_tokens == up_to_question
        up_to_question = len(answer.prompt_token_ids) - len(OPENING)  # tokens are bytes
        messages.append({"role": "assistant", "content": f"{answer.text}</think>It is {turn}."})
