"""Records what transformers continues prompts with, greedily: `python -m tests.golden.record`.

transformers reads the GGUF files with its own reader (which needs the `golden` extra) and computes in float32 with
eager attention, so nothing of Windowpane but the tokenizer takes part. Each model is recorded twice: as it is, and with
the inputs of every Linear rounded to 8 bits in groups of 32, which is what packed weights are multiplied with. Gemma
takes a few minutes.
"""

from __future__ import annotations

import json

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.golden.cases import NEW_TOKENS, PROMPTS, golden_path
from windowpane.models.embedded import embedded_path
from windowpane.text import load_tokenizer


@torch.inference_mode()
def continued(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """New tokens, and how far each one's logit lies above the next best."""
    tokens: list[int] = []
    margins: list[float] = []
    asked, cache = torch.tensor([prompt]), None
    while len(tokens) < NEW_TOKENS:
        output = model(asked, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[0, -1], output.past_key_values
        first, second = logits.topk(2).values.tolist()
        margins.append(round(first - second, 4))
        tokens.append(int(logits.argmax()))
        asked = torch.tensor([tokens[-1:]])
    return tokens, margins


def in_8_bits(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """As the inputs of packed products are rounded."""
    groups = inputs[0].unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros(()))
    return (((groups * inverse).round() * (largest / 127)).flatten(-2),)


def record(name: str) -> None:
    path = embedded_path(name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    modes = {"float32": answers_of(model, name)}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(in_8_bits)
    modes["packed"] = answers_of(model, name)
    recorded = {"recorded_with": f"transformers {transformers.__version__}", **modes}
    golden_path(name).write_text(json.dumps(recorded) + "\n")


def answers_of(model: torch.nn.Module, name: str) -> list[dict[str, object]]:
    answers: list[dict[str, object]] = []
    tokenizer = load_tokenizer(embedded_path(name))
    for prompt in PROMPTS[name]:
        prompt_tokens = tokenizer.encode(prompt)
        tokens, margins = continued(model, prompt_tokens)
        answers.append({"prompt_tokens": prompt_tokens, "tokens": tokens, "margins": margins})
        print(f"{name}: {len(prompt_tokens)} tokens … {tokenizer.decode(tokens)!r}", flush=True)
    return answers


if __name__ == "__main__":
    for each in PROMPTS:
        record(each)
