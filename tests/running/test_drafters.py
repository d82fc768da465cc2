"""Drafters compute what transformers' own modules do, over pages that their targets have written."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, modeling_layers
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from bench.gpu_checks.drafters import answers_stay
from bench.gpu_checks.engine import ITSELF, OWN_LAYER
from tests.running.harness import Knobs, Run, generate_by
from tests.running.small_models import CONFIGS, FULL, SLIDING, WINDOW, reference, spec_of, weights_of
from tests.running.test_against_transformers import prompt
from tests.running.test_independence import assert_same
from windowpane.device.pages import KVPages
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.lowering.cpu.model import lower
from windowpane.lowering.linear import Parameters
from windowpane.models import ModelError, ModelSpec, from_config
from windowpane.models.drafters import drafter_for
from windowpane.models.spec import Drafter
from windowpane.models.weights import weight_bytes
from windowpane.runners.plain import Runner
from windowpane.schedule.step import Segment, Step

CPU = torch.device("cpu")
LIMIT = 1e-4
SLOT = 1
ASSISTANT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "max_position_embeddings": 2048,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "initializer_range": 0.1,
    "dtype": "float32",
}
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 3}


class Bench:
    """A target and its drafter over one arena, and one sequence of the target in its pages."""

    def __init__(self, target: str, drafter: Drafter, weights: dict[str, Any], tokens: list[int]) -> None:
        spec = spec_of(target)
        caches = list(spec.with_drafter(drafter).caches)
        layout = plan_layout(caches, resolve_formats("auto", group_caches(caches), "float32"), "float32")
        slabs = 2 * Capacity(layout, 0).slabs_for(1, len(tokens) + 8)
        manager = KVManager(layout, slabs, 2, len(tokens) + 8)
        manager.start(SLOT, len(tokens) + 8)
        manager.extend(SLOT, len(tokens))
        self.pages = KVPages(layout, slabs, 2, len(tokens) + 8, CPU)
        self.pages.arena.fill_(0xFF)
        self.pages.before_step(manager.take_changes())
        assert spec.decoder is not None
        parameters = Parameters(spec.decoder, weights_of(target))
        self.target = lower(spec.decoder, parameters, 256)
        self.model = lower(drafter.decoder, Parameters(drafter.decoder, weights, parameters), 256, target=self.target)
        self.hidden = self.target.final_hidden(segment(0, len(tokens)), torch.tensor(tokens), self.pages)
        self.pages.forget_rows()


def segment(start: int, stop: int) -> Step:
    one = (Segment(SLOT, start, stop, 0, 0, stop - start),)
    nobody = np.zeros(0, dtype=np.int64)
    rows = np.arange(stop - start)
    return Step(np.zeros(0, np.int32), rows + start, nobody, one, one, rows, np.zeros(1, np.int8))


def decoding(position: int) -> Step:
    at = np.array([position])
    return Step(np.zeros(0, np.int32), at, np.array([SLOT]), (), (), np.arange(1), np.zeros(1, np.int8))


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """With norms and scalars away from their trivial initial values."""
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if "norm" in key or "layer_scalar" in key:
                tensor.add_(0.1 * torch.randn_like(tensor))
            if "q_norm" in key:
                tensor.mul_(0.3)
    return module.eval()


@cache
def assistant(target: str, centroids: bool) -> tuple[ModelSpec, torch.nn.Module]:
    torch.manual_seed(11)
    kept = CONFIGS[target]
    same = {key: kept[key] for key in ("attention_k_eq_v", "num_global_key_value_heads") if key in kept}
    text = Gemma4TextConfig(**ASSISTANT, **same)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=64, **(CENTROIDS if centroids else {}))
    config._attn_implementation = "eager"
    model = Gemma4AssistantForCausalLM(config)
    if centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(160))
    fields = {**config.to_dict(), "architectures": ["Gemma4AssistantForCausalLM"]}
    return from_config(fields, "assistant"), shaken(model)


@pytest.mark.parametrize("target", ["gemma4 K = V", "gemma4 shared KV"])
@pytest.mark.parametrize("count", [11, 40])
def test_an_assistant_equals_transformers_over_its_targets_pages(target: str, count: int) -> None:
    spec, theirs = assistant(target, centroids=count == 40)
    state = {key: tensor.clone() for key, tensor in theirs.state_dict().items() if key != "lm_head.weight"}
    assert state.keys() == {tensor.name for tensor in spec.tensors}
    tokens = torch.randint(3, 160, (count + 1,), generator=torch.Generator().manual_seed(count)).tolist()
    bench = Bench(target, drafter_for(spec_of(target), spec), state, tokens[:-1])
    output = reference(target).model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True)
    seen = {FULL: count, SLIDING: min(count, WINDOW - 1)}
    shared = {kind: tuple(x[:, :, -seen[kind] :] for x in kv) for kind, kv in output.shared_kv_states.items()}
    token, before, theirs_before = torch.tensor(tokens[-1:]), bench.hidden[-1:], output.last_hidden_state[:, -1:]
    for _ in range(3):  # a draft, and drafts of drafts, all from the last position
        inputs = torch.cat([reference(target).model.embed_tokens(token)[None], theirs_before], dim=-1)
        want = theirs(inputs_embeds=inputs, position_ids=torch.tensor([[count - 1]]), shared_kv_states=shared)
        bench.pages.forget_rows()
        hidden = bench.model.final_hidden(decoding(count - 1), token, bench.pages, before)
        logits, before, theirs_before = (
            bench.model.logits(hidden),
            bench.model.passed_on(hidden),
            want.last_hidden_state,
        )
        torch.testing.assert_close(logits, want.logits[0], atol=LIMIT, rtol=0)
        torch.testing.assert_close(before, theirs_before[0], atol=LIMIT, rtol=0)
        token = logits.argmax(-1)


QWEN = {
    "qwen3-next": ("Qwen3Next", modeling_qwen3_next),
    "qwen3.5": ("Qwen3_5", modeling_qwen3_5),
    "qwen3.5 experts": ("Qwen3_5Moe", modeling_qwen3_5_moe),
}
MTP_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


@cache
def mtp_layer(target: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """transformers' layer for multi-token prediction over this family's own full layer, and its rotation."""
    torch.manual_seed(13)
    prefix, module = QWEN[target]
    config = copy.deepcopy(reference(target).config)
    config.layer_types, config.mlp_only_layers = [FULL], []
    norm = getattr(module, f"{prefix}RMSNorm")
    made = modeling_layers.MtpLayer(config, getattr(module, f"{prefix}DecoderLayer"), norm, 0)
    for tensor in made.state_dict().values():
        torch.nn.init.normal_(tensor, std=0.1)
    rotary = getattr(module, f"{prefix}TextRotaryEmbedding" if "3_5" in prefix else f"{prefix}RotaryEmbedding")
    return made.eval(), rotary(config)


def mtp_weights(target: str) -> dict[str, torch.Tensor]:
    """By the names of checkpoints."""
    found = {}
    for key, tensor in mtp_layer(target)[0].state_dict().items():
        first, _, rest = key.partition(".")
        name = f"mtp.layers.0.{rest}" if first == "mtp_block" else f"mtp.{MTP_NAMES[first]}.{rest}"
        if target == "qwen3-next" and "experts." in name:  # which stores them one by one
            at = name.rpartition(".")[0]
            parts = {"gate": 0, "up": 1} if "gate_up" in name else {"down": 0}
            pieces = tensor.chunk(len(parts), dim=1)
            found |= {f"{at}.{{}}.{part}_proj.weight": pieces[i].clone() for part, i in parts.items()}
        else:
            found[name] = tensor.clone()
    return found


@pytest.mark.parametrize("target", QWEN)
def test_a_layer_for_multi_token_prediction_equals_transformers(target: str) -> None:
    drafter, weights = drafter_for(spec_of(target)), mtp_weights(target)
    assert {t.name: t.shape for t in drafter.tensors} == {name: tuple(t.shape) for name, t in weights.items()}
    tokens = torch.randint(3, 160, (38,), generator=torch.Generator().manual_seed(1)).tolist()
    bench, count = Bench(target, drafter, weights, tokens[:-1]), len(tokens) - 1
    module, rotary = mtp_layer(target)
    inner = reference(target).model
    hidden, following = inner(torch.tensor([tokens[:-1]])).last_hidden_state, torch.tensor(tokens[1:])
    positions = torch.arange(count)[None]
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    want = module(inner.embed_tokens(following)[None], hidden, rotary(hidden, positions), mask, positions, None)
    got = []
    for start, stop in ((0, 20), (20, count)):  # in chunks: its own past comes from pages
        bench.pages.forget_rows()
        step = segment(start, stop)
        got.append(bench.model.final_hidden(step, following[start:stop], bench.pages, bench.hidden[start:stop]))
    torch.testing.assert_close(torch.cat(got), want[0], atol=LIMIT, rtol=0)
    logits = bench.model.logits(got[-1])
    torch.testing.assert_close(logits, reference(target).lm_head(want[0, 20:]), atol=LIMIT, rtol=0)


def test_a_smaller_model_drafts_as_it_would_speak() -> None:
    """Its layers are numbered behind the target's, whose pages it shares an arena with."""
    target, small = spec_of("gemma4 shared KV"), "gemma4 per-layer embeddings"
    drafter = drafter_for(target, spec_of(small))
    assert [cache.layer for cache in drafter.decoder.caches] == [9, 10, 11, 12, 13, 14]
    tokens = torch.randint(3, 160, (40,), generator=torch.Generator().manual_seed(2))
    bench = Bench("gemma4 shared KV", drafter, weights_of(small), tokens.tolist())
    hidden = bench.model.final_hidden(segment(0, 40), tokens, bench.pages)
    want = reference(small)(tokens[None]).logits[0]
    torch.testing.assert_close(bench.model.logits(hidden), want, atol=LIMIT, rtol=0)


def test_every_byte_of_a_drafter_is_counted() -> None:
    own_layer, gemma = spec_of("qwen3.5"), spec_of("gemma4 K = V")
    both = own_layer.with_drafter(drafter_for(own_layer))
    assert len(both.caches) == len(own_layer.caches) + 1
    assert weight_bytes(both) - weight_bytes(own_layer) == bytes_of(mtp_weights("qwen3.5"))
    spec, theirs = assistant("gemma4 K = V", centroids=True)
    both = gemma.with_drafter(drafter_for(gemma, spec))
    assert both.caches == gemma.caches, "an assistant keeps nothing"
    own = {key: tensor for key, tensor in theirs.state_dict().items() if key != "lm_head.weight"}
    assert weight_bytes(both) - weight_bytes(gemma) == bytes_of(own)


def bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_a_drafter_that_does_not_fit_is_one_clear_error() -> None:
    gemma, llama = spec_of("gemma4 K = V"), spec_of("llama")
    helper, _ = assistant("gemma4 K = V", centroids=False)
    cases = [
        (llama, None, "llama carries no layer for multi-token prediction"),
        (llama, helper, "assistant drafts for Gemma 4, and llama is of the family llama"),
        (replace(gemma, hidden_size=128), helper, "a model of width 64, and that of gemma4 K = V is 128"),
        (spec_of("gemma4"), helper, "reads 1 KV heads of 64 dims in full_attention layers, and gemma4 keeps 2 of 64"),
        (replace(gemma, vocab_size=200), helper, "vocabulary of 160 tokens and gemma4 K = V of 200"),
        (replace(gemma, vocab_size=200), llama, "vocabulary of 160 tokens and gemma4 K = V of 200"),
        (gemma, spec_of("qwen3.5"), "qwen3.5 keeps recurrent states"),
    ]
    for target, model, told in cases:
        with pytest.raises(ModelError) as refusal:
            drafter_for(target, model)
        assert told in str(refusal.value) and "\n" not in str(refusal.value)


# -- end to end --------------------------------------------------------------------------------------------------------

PROMPTS = [(1, 77), (2, 5), (3, 30)]
NEW_TOKENS = 20


def drafted(
    target: str, drafting: Drafter, own: dict[str, Any] | None, knobs: Knobs, also: dict[str, Any] | None = None,
    new_tokens: int = NEW_TOKENS,
) -> Run:  # fmt: skip
    """Greedy answers with a drafter; `also` are its tensors in the target's own checkpoint."""
    spec, weights = spec_of(target).with_drafter(drafting), {**weights_of(target), **(also or {})}

    def make_runner(layout: Layout, slabs: int, length: int) -> Runner:
        sizes = (layout, slabs, knobs.num_slots, length)
        return Runner(
            spec, weights, *sizes, device=CPU, dtype=torch.float32, draft_tokens=knobs.drafts, drafter_weights=own
        )  # fmt: skip

    return generate_by(make_runner, list(spec.caches), [prompt(*p) for p in PROMPTS], new_tokens, knobs)


def knobs_for(drafts: int, **rest: Any) -> Knobs:
    return Knobs(chunk_tokens=40, block_tokens=16, drafts=drafts, **rest)


@pytest.mark.parametrize("drafts", [1, 3])
def test_an_assistant_changes_no_answer(drafts: int) -> None:
    target = "gemma4 K = V"
    spec, theirs = assistant(target, centroids=drafts == 3)
    state = {key: tensor.clone() for key, tensor in theirs.state_dict().items() if key != "lm_head.weight"}
    run = drafted(target, drafter_for(spec_of(target), spec), state, knobs_for(drafts))
    assert_same(run, target, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("target", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_layer_for_multi_token_prediction_changes_no_answer(target: str, drafts: int) -> None:
    run = drafted(target, drafter_for(spec_of(target)), None, knobs_for(drafts), mtp_weights(target))
    assert_same(run, target, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("target", ["gemma3", "gemma4 everything"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_drafter_equal_to_its_target_has_every_draft_accepted(target: str, drafts: int) -> None:
    run = drafted(target, drafter_for(spec_of(target), spec_of(target)), weights_of(target), knobs_for(drafts))
    assert_same(run, target, PROMPTS, NEW_TOKENS)
    # All but each prompt's own token and one in every 1 + `drafts`, and fewer drafts at an answer's end.
    assert run.accepted_drafts >= len(PROMPTS) * ((NEW_TOKENS - 1) * drafts // (1 + drafts) - drafts)


def test_restore_points_and_preemption_leave_a_drafter_what_it_needs() -> None:
    target = "gemma4 everything"
    drafting = drafter_for(spec_of(target), spec_of(target))
    squeezed = knobs_for(3, room=1.4, growth_tokens=4, keep=True)
    run = drafted(target, drafting, weights_of(target), squeezed, new_tokens=40)
    assert run.scheduler.preemptions > 0
    assert_same(run, target, PROMPTS, 40)
    assert run.accepted_drafts > 40


@pytest.mark.parametrize(
    ("target", "who", "flags"),
    [
        ("qwen3-next", OWN_LAYER, {"enable_return_routed_experts": True}),
        ("qwen3.5", OWN_LAYER, {"mamba_ssm_cache_dtype": "bfloat16", "kv_cache_dtype": "int8_per_token_head"}),
        ("qwen3 experts", ITSELF, {"enable_return_routed_experts": True}),
        ("llama int4", ITSELF, {"block_tokens": 32}),
        ("gpt-oss mxfp4", ITSELF, {"enable_prefix_caching": True, "kv_offloading_size": "8MiB"}),
    ],
)
def test_a_started_engine_takes_what_was_planned_and_says_the_same(
    target: str, who: str, flags: dict[str, Any]
) -> None:
    answers_stay(target, who, "float32", "cpu", (1, 5, 40), 12, **flags)
