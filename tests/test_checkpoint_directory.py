"""A Hugging Face directory, as transformers saves one, through `LLM`: the same tokens as transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.running.small_models import CONFIGS
from tests.test_llm import make_model
from windowpane import LLM, SamplingParams

PROMPTS = ["The lighthouse keeper wrote down the weather every morning, and read it to the sea.", "Fog: ä€"]
NEW_TOKENS = 24


@pytest.fixture(scope="module", params=["gemma3", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in several files, with a tokenizer of single bytes beside them."""
    path = make_model(tmp_path_factory.mktemp("models") / request.param)
    torch.manual_seed(11)
    fields = {**CONFIGS[request.param], "vocab_size": 258}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def test_answers_are_those_of_the_model_that_was_saved(directory: Path) -> None:
    llm = LLM(directory, device="cpu", kv_cache_memory_bytes=4 * 2**20, max_num_seqs=4, max_num_batched_tokens=64)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    for completion in llm.generate(PROMPTS, greedy):
        prompt, answer = completion.prompt_token_ids, completion.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert completion.text == llm.tokenizer.decode(answer)
        assert completion.prompt_logprobs is not None
        found = [entry.logprob for entry in completion.prompt_logprobs[1:] if entry is not None]
        expected = logits.log_softmax(dim=-1)[range(len(prompt) - 1), prompt[1:]]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
