"""The embedded models continue prompts as transformers recorded it (see `record.py`)."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import NEW_TOKENS, PROMPTS, golden_path
from windowpane import LLM, SamplingParams
from windowpane.models.embedded import EmbeddedError, embedded_path

FLOAT32_MARGIN = 2e-3  # logits of both sides may each be off by a few roundings of values around 20
# An input at the edge between two values of 8 bits may fall either way, which changes logits by more.
PACKED_MARGIN = 0.25
LENGTHS = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512}


def recorded(model: str, mode: str) -> list[dict[str, list]]:
    try:
        embedded_path(model)
    except EmbeddedError as error:
        pytest.skip(str(error))
    return json.loads(golden_path(model).read_text())[mode]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "float16"])
@pytest.mark.parametrize("model", PROMPTS)
def test_greedy_answers_are_the_recorded_ones(model: str, kv_cache_dtype: str) -> None:
    answers = recorded(model, "float32")
    llm = LLM(model, device="cpu", dtype="float32", kv_cache_dtype=kv_cache_dtype, **LENGTHS)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[model]]
    assert prompts == [a["prompt_tokens"] for a in answers]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for answer, completion in zip(answers, llm.generate(prompts, greedy), strict=True):
        clear = next((i for i, m in enumerate(answer["margins"]) if m < FLOAT32_MARGIN), NEW_TOKENS)
        assert clear >= 16, "hardly anything is compared"
        assert completion.token_ids[:clear] == answer["tokens"][:clear]


@pytest.mark.parametrize("model", PROMPTS)
def test_packed_weights_give_every_clear_token_that_was_recorded(model: str) -> None:
    """Each token by itself, behind the recorded ones: one that is no clear choice decides nothing about those after."""
    llm = LLM(model, device="cpu", **LENGTHS)
    for answer in recorded(model, "packed"):
        clear = [i for i, margin in enumerate(answer["margins"]) if margin >= PACKED_MARGIN]
        assert len(clear) >= NEW_TOKENS // 2, "hardly anything is compared"
        prompts = [answer["prompt_tokens"] + answer["tokens"][:i] for i in clear]
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        assert [f.token_ids[0] for f in found] == [answer["tokens"][i] for i in clear]
