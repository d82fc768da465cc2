"""The embedded models continue prompts as transformers recorded it (see `record.py`)."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import NEW_TOKENS, PROMPTS, golden_path
from windowpane import LLM, SamplingParams
from windowpane.models.embedded import EmbeddedError, embedded_path

# Logits of both sides may each be off by a few roundings of values around 20. An input at the edge between two values
# of 8 bits may fall either way, which changes logits by more.
CLEAR_MARGINS = {"float32": 2e-3, "packed": 0.1}


@pytest.mark.parametrize(
    ("mode", "kv_cache_dtype"), [("float32", "float32"), ("float32", "float16"), ("packed", "float32")]
)
@pytest.mark.parametrize("model", PROMPTS)
def test_greedy_answers_are_the_recorded_ones(model: str, mode: str, kv_cache_dtype: str) -> None:
    try:
        embedded_path(model)
    except EmbeddedError as error:
        pytest.skip(str(error))
    answers = json.loads(golden_path(model).read_text())[mode]
    lengths = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    dtype = "auto" if mode == "packed" else mode
    llm = LLM(model, device="cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype, **lengths)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[model]]
    assert prompts == [a["prompt_tokens"] for a in answers]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for answer, completion in zip(answers, llm.generate(prompts, greedy), strict=True):
        clear = next((i for i, m in enumerate(answer["margins"]) if m < CLEAR_MARGINS[mode]), NEW_TOKENS)
        assert clear >= 16, "hardly anything is compared"
        assert completion.token_ids[:clear] == answer["tokens"][:clear]
