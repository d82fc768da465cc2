"""Configs of released models: what their layers keep, how large they are, and which of them run."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from tests.models.published import PUBLISHED, nas_block
from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Window
from windowpane.models import ModelError, from_config
from windowpane.models.running import runnable
from windowpane.models.weights import parameter_count, weight_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_and_parameters_are_the_published_ones(name: str) -> None:
    published = PUBLISHED[name]
    spec = from_config(published.config, name)
    kept = Counter(
        f"{c.retention.name} {c.kv_heads}x{c.key_dim}" + (" latent" if c.latent else "")
        if isinstance(c, TokenCache)
        else "state"
        for c in spec.caches
    )
    assert kept == published.caches
    # Makers round: 355B is 352.8 here.
    assert parameter_count(spec) / 1e9 == pytest.approx(published.billions, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_runs_or_says_in_one_line_why_not(name: str) -> None:
    published = PUBLISHED[name]
    spec = from_config(published.config, name)
    if published.runs:
        assert runnable(spec) is spec.decoder
        return
    with pytest.raises(ModelError) as caught:
        runnable(spec)
    message = str(caught.value)
    assert name in message and "run yet" in message and "\n" not in message


def test_fp8_and_int4_experts_are_counted_as_they_are_stored() -> None:
    """Kimi's quantization stands in the text model's part, MiniMax's under another word for E4M3."""
    kimi = from_config(PUBLISHED["moonshotai/Kimi-K2.5"].config, "kimi")
    assert kimi.weight_scheme == "int4"
    assert weight_bytes(kimi) / 1e9 == pytest.approx(594, rel=0.01)  # the repository's 595 GB hold a vision tower too
    minimax = from_config(PUBLISHED["MiniMaxAI/MiniMax-M2"].config, "minimax")
    assert minimax.weight_scheme == "fp8"
    assert weight_bytes(minimax) / 1e9 == pytest.approx(230, rel=0.01)


def test_glm_4_7_flash_is_exactly_the_recorded_checkpoint() -> None:
    """62,442,983,168 bytes, of which the drafting layer has 2,556,189,440; router corrections are float32."""
    spec = from_config(PUBLISHED["zai-org/GLM-4.7-Flash"].config, "flash")
    assert 2 * parameter_count(spec) + 2 * 46 * 64 == 62_442_983_168 - 2_556_189_440


def test_k_and_v_of_different_widths_are_both_kept() -> None:
    spec = from_config(PUBLISHED["XiaomiMiMo/MiMo-V2-Flash"].config, "mimo")
    assert {(c.key_dim, c.value_dim) for c in spec.token_caches} == {(192, 128)}
    # SGLang's count of earlier tokens, and this token itself.
    assert spec.token_caches[1].retention == Window(129)


def test_vision_models_compute_text_as_the_models_they_were_made_from() -> None:
    for vision, text, prefix in (
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3ForCausalLM", "model.language_model."),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen2ForCausalLM", "model."),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "MistralForCausalLM", "language_model.model."),
    ):
        config = PUBLISHED[vision].config
        seeing = from_config(config, vision)
        # Positions of text are alike in every section of a multimodal rotation.
        plain = {"rope_parameters": {"rope_theta": 1e6}} if "2.5" in vision else {}
        flat = {**config["text_config"], "architectures": [text], **plain}
        flat |= {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        reading = from_config(flat, text)
        assert seeing.decoder is not None and reading.decoder is not None
        assert len(seeing.tensors) == len(reading.tensors)
        first, other = seeing.decoder.attentions[0], reading.decoder.attentions[0]
        assert (first.rope, first.scale, first.cache) == (other.rope, other.scale, other.cache)
        assert first.qkv.weights[0].name == f"{prefix}layers.0.self_attn.q_proj.weight"


def test_models_that_are_planned_only_divide_as_other_engines_divide_them() -> None:
    """Vocabularies that are no multiple of the ranks are padded, and blocks of fp8 that two ranks share are in both."""
    for name, ranks in (("stepfun-ai/step3", 8), ("tencent/Hunyuan-A13B-Instruct", 8), ("XiaomiMiMo/MiMo-V2-Flash", 8)):
        spec = from_config(PUBLISHED[name].config, name)
        whole, part = weight_bytes(spec), weight_bytes(spec, ranks)
        assert whole / ranks < part < 1.1 * whole / ranks, name


def changed(name: str, **fields: Any) -> dict[str, Any]:
    config = deepcopy(PUBLISHED[name].config)
    text = config.get("text_config", config)
    text |= fields
    return config


SUPER = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts before an MLP": (
        changed("zai-org/GLM-4.7-Flash", mlp_layer_types=["sparse"] + ["dense"] * 46),
        r"mlp_layer_types must be dense for some layers and sparse for the rest of 47",
    ),
    "more experts than there are": (
        changed("mistralai/Mixtral-8x7B-v0.1", num_experts_per_tok=9),
        r"num_experts_per_tok is 9, but a layer has only 8 experts",
    ),
    "more experts under another name": (
        changed("baidu/ERNIE-4.5-21B-A3B-PT", moe_k=65),
        r"moe_k is 65, but a layer has only 64",
    ),
    "more experts in a list": (
        changed("tencent/Hunyuan-A13B-Instruct", moe_topk=[65] * 32),
        r"moe_topk is 65, but a layer has only 64",
    ),
    "linear attention": (
        changed("MiniMaxAI/MiniMax-M2", attn_type_list=[0] + [1] * 61),
        r"attn_type_list: unknown value 0; known: 1",
    ),
    "shared experts": (changed("MiniMaxAI/MiniMax-M2", shared_intermediate_size=8), r"shared_intermediate_size is 8"),
    "other norms": (
        changed("MiniMaxAI/MiniMax-M2", qk_norm_type="per_head"),
        r"qk_norm_type: unknown value 'per_head'",
    ),
    "layers that share KV": (changed("tencent/Hunyuan-A13B-Instruct", use_cla=True), r"use_cla is true"),
    "layers of different sizes": (
        changed("tencent/Hunyuan-A13B-Instruct", moe_intermediate_size=[3072] * 31 + [1024]),
        r"moe_intermediate_size differs between layers \(1024 to 3072\)",
    ),
    "another text model": (
        changed("mistralai/Mistral-Small-3.2-24B-Instruct-2506", model_type="mistral4"),
        r"text_config.model_type: unknown value 'mistral4'; known: ministral3, mistral",
    ),
    "another text model of Kimi": (
        changed("moonshotai/Kimi-K2.5", architectures=["KimiLinearForCausalLM"]),
        r"text_config.architectures: unknown value 'KimiLinearForCausalLM'",
    ),
    "a pattern of other flags": (
        changed("XiaomiMiMo/MiMo-V2-Flash", hybrid_layer_pattern=[2] * 48),
        r"hybrid_layer_pattern: unknown value 2; known: 0, 1",
    ),
    "a pattern of another length": (
        changed("XiaomiMiMo/MiMo-V2-Flash", hybrid_layer_pattern=[0, 1]),
        r"hybrid_layer_pattern has 2 entries for 48 layers",
    ),
    "sliding heads of another size": (changed("XiaomiMiMo/MiMo-V2-Flash", swa_head_dim=128), r"swa_head_dim is 128"),
    "layer numbers that are none": (changed("stepfun-ai/step3", moe_layers_enum="4,five"), r"moe_layers_enum must be"),
    "a sliding layer without a window": (
        changed("stepfun-ai/Step-3.5-Flash", sliding_window=None),
        r"some layers are sliding_attention, but the config has no sliding_window",
    ),
    "no blocks": (changed(SUPER, block_configs=None), r"no list block_configs"),
    "too few blocks": (changed(SUPER, block_configs=[nas_block(8, 1.0)]), r"block_configs has 1 entries for 80"),
    "blocks without attention": (changed(SUPER, block_configs=[nas_block(0, 1.0)] * 80), r"no layer has attention"),
    "heads that do not group": (
        changed(SUPER, block_configs=[nas_block(7, 1.0)] * 80),
        r"block_configs\[0\].attention.n_heads_in_group is 7, which does not divide 64",
    ),
    "an MLP of no size": (
        changed(SUPER, block_configs=[nas_block(8, 0.0)] * 80),
        r"ffn_mult is 0, but must be above 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as caught:
        from_config(config, case)
    assert "\n" not in str(caught.value)


def test_sinks_in_nemotron_blocks_are_refused_and_windows_read() -> None:
    windowed, sinking = nas_block(8, 1.0), nas_block(8, 1.0)
    windowed["attention"]["window_length"] = 4096
    spec = from_config(changed(SUPER, block_configs=[windowed] * 80), "windows")
    assert {c.retention for c in spec.token_caches} == {Window(4096)}
    sinking["attention"]["num_sink_tokens"] = 4
    with pytest.raises(ModelError, match=r"num_sink_tokens is 4; known: null"):
        from_config(changed(SUPER, block_configs=[sinking] * 80), "sinks")
