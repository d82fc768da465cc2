"""Every shipped model: which layers keep what, how many parameters there are, and recorded checkpoint sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from windowpane.kv.caches import TokenCache
from windowpane.models import load, shipped_names
from windowpane.models.quantization import STORED_BYTES
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec
from windowpane.models.weights import parameter_count, weight_bytes


@dataclass(frozen=True)
class Facts:
    """`billions` counts towers and tied embeddings once, as transformers builds the model; `caches` counts layers."""

    billions: float
    layers: int
    max_position: int
    caches: dict[str, int]


QWEN_27B = {"state": 48, "full 4x256": 16}
QWEN_35B = {"state": 30, "full 2x256": 10}

FACTS = {
    "gemma-4-31b": Facts(31.273, 60, 262_144, {"window-1024 16x256": 50, "full 4x512 latent": 10}),
    "gemma-4-31b-awq-4bit": Facts(31.273, 60, 262_144, {"window-1024 16x256": 50, "full 4x512 latent": 10}),
    "gemma-4-26b-a4b": Facts(25.806, 30, 262_144, {"window-1024 8x256": 25, "full 2x512 latent": 5}),
    "gemma-4-12b": Facts(11.960, 48, 262_144, {"window-1024 8x256": 40, "full 1x512 latent": 8}),
    "gemma-4-e4b": Facts(7.941, 42, 131_072, {"window-512 2x256": 20, "full 2x512": 4}),
    "gemma-4-e2b": Facts(5.104, 35, 131_072, {"window-512 1x256": 12, "full 1x512": 3}),
    "gemma-3-27b": Facts(27.432, 62, 131_072, {"window-1024 16x128": 52, "full 16x128": 10}),
    "gemma-3-12b": Facts(12.187, 48, 131_072, {"window-1024 8x256": 40, "full 8x256": 8}),
    "gemma-3-4b": Facts(4.300, 34, 131_072, {"window-1024 4x256": 29, "full 4x256": 5}),
    "gemma-3-1b": Facts(1.000, 26, 32_768, {"window-512 1x256": 22, "full 1x256": 4}),
    "gemma-3-270m": Facts(0.268, 18, 32_768, {"window-512 1x256": 15, "full 1x256": 3}),
    "gemma-2-9b": Facts(9.242, 42, 8192, {"window-4096 8x256": 21, "full 8x256": 21}),
    "gemma-2-27b": Facts(27.227, 46, 8192, {"window-4096 16x128": 23, "full 16x128": 23}),
    # Text and audio: timm defines the vision tower.
    "gemma-3n-e4b": Facts(6.84 + 0.68, 35, 32_768, {"window-512 2x256": 16, "full 2x256": 4}),
    "gpt-oss-20b": Facts(20.915, 24, 131_072, {"window-128 8x64": 12, "full 8x64": 12}),
    "gpt-oss-120b": Facts(116.829, 36, 131_072, {"window-128 8x64": 18, "full 8x64": 18}),
    "qwen3-0.6b": Facts(0.596, 28, 40_960, {"full 8x128": 28}),
    "qwen3-8b": Facts(8.191, 36, 40_960, {"full 8x128": 36}),
    "qwen3-14b": Facts(14.768, 40, 40_960, {"full 8x128": 40}),
    "qwen3-32b": Facts(32.762, 64, 40_960, {"full 8x128": 64}),
    "qwen3-30b-a3b": Facts(30.532, 48, 40_960, {"full 4x128": 48}),
    "qwen3-next-80b-a3b": Facts(79.674, 48, 262_144, {"state": 36, "full 2x256": 12}),
    "qwen3.5-27b": Facts(27.357, 64, 262_144, QWEN_27B),
    "qwen3.8-27b": Facts(27.357, 64, 262_144, QWEN_27B),
    "qwen3.5-35b-a3b": Facts(35.107, 40, 262_144, QWEN_35B),
    "qwen3.6-35b-a3b": Facts(35.107, 40, 262_144, QWEN_35B),
    "llama-3.1-8b": Facts(8.030, 32, 131_072, {"full 8x128": 32}),
    "llama-3.1-70b": Facts(70.554, 80, 131_072, {"full 8x128": 80}),
    "llama-4-scout": Facts(108.642, 48, 10_485_760, {"chunk-8192 8x128": 36, "full 8x128": 12}),
    "llama-4-maverick": Facts(401.584, 48, 1_048_576, {"chunk-8192 8x128": 36, "full 8x128": 12}),
    "mistral-7b-v0.1": Facts(7.242, 32, 32_768, {"window-4096 8x128": 32}),
    "ministral-8b": Facts(8.020, 36, 32_768, {"window-32768 8x128": 36}),
    "mistral-small-24b": Facts(23.572, 40, 32_768, {"full 8x128": 40}),
    "smollm2-135m": Facts(0.135, 30, 8192, {"full 3x64": 30}),
    "smollm3-3b": Facts(3.075, 36, 65_536, {"full 4x128": 36}),
    "nemotron-h-8b": Facts(8.101, 52, 8192, {"state": 24, "full 8x128": 4}),
    "nemotron-3-nano-30b-a3b": Facts(31.578, 52, 262_144, {"state": 23, "full 2x128": 6}),
    "phi-4": Facts(14.660, 40, 16_384, {"full 10x128": 40}),
    "command-r7b": Facts(8.028, 32, 132_096, {"window-4096 8x128": 24, "full 8x128": 8}),
    "olmo-3-7b": Facts(7.298, 32, 65_536, {"window-4096 32x128": 24, "full 32x128": 8}),
    "olmo-3-32b": Facts(32.234, 64, 65_536, {"window-4096 8x128": 48, "full 8x128": 16}),
    "exaone-4-32b": Facts(32.003, 64, 131_072, {"window-4096 8x128": 48, "full 8x128": 16}),
    "deepseek-v3": Facts(671.026, 61, 163_840, {"full 1x576 latent": 61}),
    # Latents and index keys share the pages of one group.
    "deepseek-v3.2": Facts(671.878, 61, 163_840, {"full 1x576 latent": 61, "full 1x128 latent": 61}),
    "glm-5.3": Facts(743.377, 78, 1_048_576, {"full 1x576 latent": 78, "full 1x128 latent": 21}),
    "kimi-linear-48b": Facts(49.123, 27, 1_048_576, {"state": 20, "full 1x576 latent": 7}),
    "jamba-mini": Facts(51.570, 32, 262_144, {"state": 28, "full 8x128": 4}),
    "zamba2-7b": Facts(7.357, 81, 4096, {"state": 81, "full 32x224": 13}),
    "granite-4.0-h-small": Facts(32.207, 40, 131_072, {"state": 36, "full 8x128": 4}),
    "falcon-h1-7b": Facts(7.586, 44, 262_144, {"state": 44, "full 2x128": 44}),
    "recurrentgemma-9b": Facts(8.580, 38, 8192, {"state": 26, "window-2048 1x256": 12}),
    "lfm2-1.2b": Facts(1.170, 16, 128_000, {"state": 10, "full 8x64": 6}),
    "minimax-m3": Facts(427.040, 60, 1_048_576, {"full 4x128": 60, "full 1x128 latent": 57}),
    "glm-4.5-air": Facts(106.852, 46, 131_072, {"full 8x128": 46}),
    "minimax-m2": Facts(228.690, 62, 196_608, {"full 8x128": 62}),
    "mixtral-8x7b": Facts(46.703, 32, 32_768, {"full 8x128": 32}),
    "kimi-k2.5": Facts(1026.408, 61, 262_144, {"full 1x576 latent": 61}),
    "mimo-v2-flash": Facts(308.779, 48, 262_144, {"window-129 8x192": 39, "full 4x192": 9}),
    "llama-nemotron-super-49b": Facts(49.867, 80, 131_072, {"full 8x128": 49}),
    "whisper-large-v3": Facts(1.543, 32, 448, {"full 20x64": 32, "cross-1500 20x64": 32}),
}


def test_the_table_covers_every_shipped_model() -> None:
    assert sorted(FACTS) == shipped_names()


@pytest.mark.parametrize("name", FACTS)
def test_layers_keep_what_the_model_needs(name: str) -> None:
    spec, facts = load(name), FACTS[name]
    described = Counter(
        f"{c.retention.name} {c.kv_heads}x{c.key_dim}" + (" latent" if c.latent else "")
        if isinstance(c, TokenCache)
        else "state"
        for c in spec.caches
    )
    assert described == facts.caches
    assert (spec.num_layers, spec.max_position) == (facts.layers, facts.max_position)
    # MLA and index keys are one vector; only MiMo stores K and V of different widths.
    widths = {192: 128} if name == "mimo-v2-flash" else {}
    assert all(c.value_dim == (0 if c.replicated else widths.get(c.key_dim, c.key_dim)) for c in spec.token_caches)


@pytest.mark.parametrize("name", FACTS)
def test_parameter_counts_match_the_built_model(name: str) -> None:
    assert parameter_count(load(name), towers=True) == pytest.approx(FACTS[name].billions * 1e9, rel=0.01)


# Values transformers counts as buffers (layer scalars, vision standardization, clipping bounds, router corrections) are
# in the checkpoint, so they are counted here on top of its parameters.
EXACT_PARAMETERS = {
    "gemma-4-31b": 31_273_086_512 + 60 + 2 * 1152,
    "gemma-4-26b-a4b": 25_805_933_872 + 30 + 2 * 1152,
    "gemma-4-12b": 11_959_730_176 + 48,
    "gemma-4-e2b": 5_104_297_504 + 35 + 4 * (16 * 7 + 12 * 10),
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-270m": 268_098_176,
    "gemma-2-9b": 9_241_705_984,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 27_356_728_560,
    "qwen3.5-35b-a3b": 35_107_181_936,
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
    "smollm3-3b": 3_075_098_624,
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128,
    "phi-4": 14_659_507_200,
    "command-r7b": 8_028_033_024,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "exaone-4-32b": 32_003_216_384,
    "deepseek-v3": 671_026_404_352 + 58 * 256,
    "deepseek-v3.2": 671_877_929_216 + 58 * 256,
    "glm-5.3": 743_377_000_704 + 75 * 256,
    "kimi-linear-48b": 49_122_675_072 + 26 * 256,
    "jamba-mini": 51_570_323_328,
    "zamba2-7b": 7_356_749_648,
    "granite-4.0-h-small": 32_207_337_984,
    "falcon-h1-7b": 7_585_648_736,
    "recurrentgemma-9b": 8_579_977_216,
    "lfm2-1.2b": 1_170_340_608,
    "minimax-m3": 427_040_132_864 + 57 * 128,
    "whisper-large-v3": 1_543_490_560,
    "mixtral-8x7b": 46_702_792_704,
    "llama-nemotron-super-49b": 49_867_145_216,
}


@pytest.mark.parametrize("name", EXACT_PARAMETERS)
def test_parameter_counts_are_exact(name: str) -> None:
    assert parameter_count(load(name), towers=True) == EXACT_PARAMETERS[name]


def test_gemma_3n_splits_into_text_and_audio() -> None:
    spec = load("gemma-3n-e4b")
    embedders = 2 * 128 * 1536 + 128 * (2048 - 1536) + 2 * (1536 + 2048) + 2048 * (1536 + 2048)
    assert parameter_count(spec) == 6_835_235_568
    assert parameter_count(spec, towers=True) == 6_835_235_568 + 681_348_640 + embedders


# Sizes of published checkpoints, less what is not loaded.
RECORDED_TEXT_BYTES = {
    # Plus what fills the last block of 128 of an expert's 2,880 inputs: 64 values and two scales for each output.
    "gpt-oss-120b": 65_248_815_744 + 36 * 128 * (5760 + 2880) * (32 + 2),
    "qwen3-0.6b": 1_503_264_768 - 2 * 151_936 * 1024,  # the file stores the tied LM head a second time
    "qwen3-8b": 16_381_470_720,
    "qwen3-14b": 29_536_614_400,
    "qwen3-32b": 65_524_246_528,
    "llama-3.1-8b": 16_060_522_496,
    "mistral-7b-v0.1": 14_496_047_104 - 2 * 2 * 768 * 4096,  # v0.3 has 768 more tokens, in embedding and LM head
}


@pytest.mark.parametrize("name", RECORDED_TEXT_BYTES)
def test_weights_are_exactly_the_recorded_bytes(name: str) -> None:
    assert weight_bytes(load(name)) == RECORDED_TEXT_BYTES[name]


def test_gemma_4_31b_with_its_tower_is_exactly_the_recorded_checkpoint() -> None:
    assert checkpoint_bytes(load("gemma-4-31b")) == 62_546_177_752


def test_qwen_3_8_27b_with_its_tower_is_exactly_the_recorded_checkpoint_without_mtp() -> None:
    assert checkpoint_bytes(load("qwen3.8-27b")) == 55_562_855_904 - 849_398_784


def test_gemma_4_31b_in_int4_packs_410_linears_and_keeps_the_rest() -> None:
    spec = load("gemma-4-31b-awq-4bit")
    assert spec.quantization is not None
    packed = [t for t in spec.tensors if spec.quantization.format_of(t)]
    assert len(packed) == 410
    assert sum(t.elements for t in packed) == 29_286_727_680
    assert checkpoint_bytes(spec) / 1e9 == pytest.approx(20.447, abs=0.0005)


def test_a_state_has_convolution_tails_and_a_recurrent_part() -> None:
    state = load("qwen3.5-27b").state_caches[0]
    assert {p.name: p.heads * p.elements_per_head for p in state.parts} == {
        "conv_q": 16 * 128 * 3,
        "conv_k": 16 * 128 * 3,
        "conv_v": 48 * 128 * 3,
        "recurrent": 48 * 128 * 128,
    }
    assert state.bytes("bfloat16") == 2 * 10_240 * 3 + 4 * 48 * 128 * 128

    state = load("nemotron-3-nano-30b-a3b").state_caches[0]
    assert {p.name: p.heads * p.elements_per_head for p in state.parts} == {
        "conv_x": 64 * 64 * 3,
        "conv_bc": 8 * 2 * 128 * 3,
        "recurrent": 64 * 64 * 128,
    }
    assert state.bytes("bfloat16") == 2 * 6144 * 3 + 4 * 64 * 64 * 128


def test_states_of_other_kinds() -> None:
    """Kimi's deltas and RG-LRU keep float32 whatever the model computes in; Mamba-1 has a state per channel."""
    sizes = {
        "kimi-linear-48b": 2 * 3 * 32 * 128 * 3 + 4 * 32 * 128 * 128,
        "recurrentgemma-9b": 2 * 4096 * 3 + 4 * 4096,
        "jamba-mini": 2 * 8192 * 3 + 2 * 8192 * 16,
        "lfm2-1.2b": 2 * 2048 * 2,
        "zamba2-7b": 2 * (7168 + 2 * 2 * 64) * 3 + 2 * 112 * 64 * 64,
        "granite-4.0-h-small": 2 * (8192 + 2 * 128) * 3 + 2 * 128 * 64 * 128,
        "falcon-h1-7b": 2 * (3072 + 2 * 256) * 3 + 2 * 24 * 128 * 256,
    }
    assert {name: load(name).state_caches[0].bytes("bfloat16") for name in sizes} == sizes


def test_a_latent_is_whole_on_every_rank() -> None:
    """One 576-wide vector per token and layer, at any tensor-parallel size; the indexer's 128 beside it."""
    for ranks in (1, 8):
        v3, v32 = ([c.shard(ranks) for c in load(name).token_caches] for name in ("deepseek-v3", "deepseek-v3.2"))
        assert sum(c.kv_heads * sum(c.row_dims) for c in v3) == 61 * 576
        assert sum(c.kv_heads * sum(c.row_dims) for c in v32) == 61 * (576 + 128)


def test_a_state_without_a_dtype_takes_the_compute_dtype() -> None:
    recurrent = load("nemotron-h-8b").state_caches[0].parts[-1]
    assert recurrent.dtype is None
    assert recurrent.bytes("bfloat16") == 2 * 128 * 64 * 128


def test_doubts_are_told() -> None:
    assert any("20.90 GB" in note for note in load("gemma-4-31b-awq-4bit").notes)
    assert any("names no dtype" in note for note in load("gpt-oss-20b").notes)
    assert load("llama-3.1-8b").notes == ()


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Every tensor of the checkpoint, towers included."""

    def stored(tensor: TensorSpec) -> list[TensorSpec]:
        return spec.quantization.stored(tensor) if spec.quantization else [tensor]

    return sum(p.elements * STORED_BYTES[p.dtype or spec.dtype] for tensor in spec.tensors for p in stored(tensor))
