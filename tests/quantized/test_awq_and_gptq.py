"""AWQ and GPTQ checkpoints, written value by value here, and every way in which a quantized one may not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.small_configs import small
from windowpane.lowering.packed import PackedWeight
from windowpane.models import ModelSpec, load
from windowpane.models.tensors import TensorSpec
from windowpane.models.weights import text_tensors, weight_bytes
from windowpane.weights import WeightsError, load_weights

CPU = torch.device("cpu")
Parts = dict[str, torch.Tensor]


def spec_of(path: Path, **quantization: Any) -> ModelSpec:
    fields = small("llama", hidden_size=128, intermediate_size=192, dtype="float16")
    (path / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))
    return load(path)


def words_of(nibbles: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """[rows, columns] of 0 … 15 → words along columns: the value of column 8c + order[i] is at bits 4i of word c."""
    rows, columns = nibbles.shape
    words = np.zeros((rows, columns // 8), dtype=np.uint32)
    for row in range(rows):
        for word in range(columns // 8):
            for place, number in enumerate(order):
                words[row, word] |= np.uint32(int(nibbles[row, 8 * word + number]) << 4 * place)
    return words.view(np.int32)


def made_up(
    weight: TensorSpec, group: int, seed: int, group_of: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantized values and zero points [outputs, …], scales, and the matrix that they mean."""
    outputs, inputs = weight.shape
    random = np.random.default_rng(seed)
    group_of = np.arange(inputs) // group if group_of is None else group_of
    values = random.integers(0, 16, (outputs, inputs))
    zeros = random.integers(0, 16, (outputs, inputs // group))
    scales = (random.random((outputs, inputs // group)) * 0.02).astype(np.float16)
    matrix = np.zeros((outputs, inputs), dtype=np.float32)
    for i in range(inputs):
        g = group_of[i]
        matrix[:, i] = (values[:, i] - zeros[:, g]).astype(np.float32) * scales[:, g].astype(np.float32)
    return values, zeros, scales, matrix


def write(path: Path, spec: ModelSpec, pack: Callable[[TensorSpec, int], tuple[Parts, np.ndarray]]) -> dict[str, Any]:
    """The checkpoint, and the matrix of each weight that it packs."""
    assert spec.quantization is not None
    stored, matrices = {}, {}
    for seed, tensor in enumerate(text_tensors(spec)):
        if spec.quantization.format_of(tensor) is None:
            stored[tensor.name] = torch.randn(tensor.shape).half()
            continue
        parts, matrices[tensor.name] = pack(tensor, seed)
        stored |= {tensor.module + suffix: part for suffix, part in parts.items()}
    save_file({key: part.contiguous() for key, part in stored.items()}, path / "model.safetensors")
    return matrices


def check(path: Path, spec: ModelSpec, matrices: dict[str, np.ndarray]) -> None:
    loaded = load_weights(path, spec, dtype=torch.float16, device=CPU)
    assert matrices
    for name, matrix in matrices.items():
        weight = loaded[name]
        assert isinstance(weight, PackedWeight)
        assert np.array_equal(weight.dequantize(torch.float32).numpy(), matrix), name
    assert sum(weight.nbytes for weight in loaded.values()) == weight_bytes(spec)


@pytest.mark.parametrize("group", [32, 64])
def test_awq(group: int, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm")
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight: TensorSpec, seed: int) -> tuple[Parts, np.ndarray]:
        values, zeros, scales, matrix = made_up(weight, group, seed)
        return {
            ".qweight": torch.from_numpy(words_of(values.T, order)),
            ".qzeros": torch.from_numpy(words_of(zeros.T, order)),
            ".scales": torch.from_numpy(scales.T),
        }, matrix

    check(tmp_path, spec, write(tmp_path, spec, pack))


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq(form: str, reordered: bool, tmp_path: Path) -> None:
    """`reordered`: each input's group is drawn; the first version stores zero points less one, around the corner."""
    flags = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": reordered, "checkpoint_format": form}
    spec = spec_of(tmp_path, **flags)

    def pack(weight: TensorSpec, seed: int) -> tuple[Parts, np.ndarray]:
        inputs = weight.shape[1]
        group_of = np.arange(inputs) // 64
        if reordered:
            # Of all projections of one input alike, as its statistics are.
            group_of = np.random.default_rng(inputs).permutation(group_of)
        values, zeros, scales, matrix = made_up(weight, 64, seed, group_of)
        shift = 1 if form == "gptq" else 0
        return {
            ".qweight": torch.from_numpy(words_of(values, tuple(range(8))).T.copy()),
            ".qzeros": torch.from_numpy(words_of((zeros.T - shift) % 16, tuple(range(8)))),
            ".scales": torch.from_numpy(scales.T),
            ".g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, matrix

    check(tmp_path, spec, write(tmp_path, spec, pack))
    loaded = load_weights(tmp_path, spec, dtype=torch.float16, device=CPU)
    weight = loaded["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(weight, PackedWeight)
    assert (weight.order is not None) is reordered
    x = torch.randn(3, 192)
    expected = x @ weight.dequantize(torch.float32).t()
    torch.testing.assert_close(weight.linear(x), expected, rtol=1e-4, atol=1e-4)


# -- what does not fit ---------------------------------------------------------------------------------------------

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
DOWN = "model.layers.0.mlp.down_proj"


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**INT4, **weights}}
    form = "float-quantized" if weights.get("type") == "float" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def written(path: Path, **quantization: Any) -> ModelSpec:
    """A checkpoint of zeros that has everything the config asks for."""
    spec = spec_of(path, **quantization)
    assert spec.quantization is not None
    stored = {}
    for tensor in text_tensors(spec):
        for part in spec.quantization.stored(tensor):
            dtype = {"int32": torch.int32, "int64": torch.int64, "fp8_e4m3": torch.float8_e4m3fn}.get(part.dtype or "")
            stored[part.name] = torch.zeros(part.shape, dtype=dtype or torch.float16)
            if part.name.endswith("weight_shape"):
                stored[part.name] = torch.tensor(tensor.shape)
            if part.name.endswith("g_idx"):
                stored[part.name] = (torch.arange(*part.shape) // 64).int()
    save_file(stored, path / "model.safetensors")
    return spec


def change(path: Path, **changes: torch.Tensor | None) -> None:
    stored = load_file(path / "model.safetensors")
    for suffix, tensor in changes.items():
        key = f"{DOWN}.{suffix}"
        del stored[key]
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, path / "model.safetensors")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
UNFIT: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "missing scales": (compressed(), {"weight_scale": None}, r"missing: .*down_proj\.weight_scale \[128, 6\]"),
    "misshapen scales": (
        compressed(),
        {"weight_scale": torch.zeros(128, 3)},
        r"misshapen: .*down_proj\.weight_scale is \[128, 3\], not \[128, 6\]",
    ),
    "misshapen words": (
        compressed(),
        {"weight_packed": torch.zeros(128, 23, dtype=torch.int32)},
        r"misshapen: .*weight_packed is \[128, 23\], not \[128, 24\]",
    ),
    "missing zero points": (compressed(symmetric=False), {"weight_zero_point": None}, r"missing: .*weight_zero_point"),
    "another shape": (
        compressed(),
        {"weight_shape": torch.tensor([192, 128])},
        r"down_proj\.weight_shape says \[192, 128\], not \[128, 192\]",
    ),
    "an order that the config does not tell": (
        GPTQ,
        {"g_idx": (torch.arange(192) % 3).int()},
        r"down_proj: inputs are reordered .* set desc_act",
    ),
    "uneven groups": (
        {**GPTQ, "desc_act": True},
        {"g_idx": torch.tensor([0] * 65 + [1] * 63 + [2] * 64).int()},
        r"down_proj: g_idx must give each group 64 inputs",
    ),
    "another dtype": (
        {"quant_method": "fp8"},
        {"weight": torch.zeros(128, 192)},
        r"down_proj\.weight is stored as torch\.float32, not float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_checkpoints_that_do_not_fit_their_config(case: str, tmp_path: Path) -> None:
    quantization, changes, message = UNFIT[case]
    spec = written(tmp_path, **quantization)
    load_weights(tmp_path, spec, dtype=torch.float16, device=CPU)
    change(tmp_path, **changes)
    with pytest.raises(WeightsError, match=message):
        load_weights(tmp_path, spec, dtype=torch.float16, device=CPU)


def test_a_scale_of_a_whole_tensor_may_be_a_scalar(tmp_path: Path) -> None:
    spec = written(tmp_path, quant_method="fp8")
    change(tmp_path, weight_scale=torch.tensor(0.25))
    weight = load_weights(tmp_path, spec, dtype=torch.float16, device=CPU)[f"{DOWN}.weight"]
    assert isinstance(weight, PackedWeight)
    assert weight.scales.tolist() == [[0.25]] * 128


NOT_RUN = {
    "int8": (compressed(num_bits=8), r"q_proj\.weight is stored as int8 \(compressed-tensors\), which is not run"),
    "gptq int8": ({**GPTQ, "bits": 8}, r"stored as int8 \(gptq\), which is not run; schemes that run: int4"),
    "small groups": (compressed(group_size=16), r"a scale for 16 inputs; group sizes that run are multiples of 32"),
}


@pytest.mark.parametrize("case", NOT_RUN)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_schemes_that_are_only_planned_with(case: str, load_format: str, tmp_path: Path) -> None:
    quantization, message = NOT_RUN[case]
    spec = spec_of(tmp_path, **quantization)
    assert weight_bytes(spec) > 0
    with pytest.raises(WeightsError, match=message):
        load_weights(tmp_path, spec, dtype=torch.float16, device=CPU, load_format=load_format)


def test_experts_with_sorted_inputs_are_refused(tmp_path: Path) -> None:
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    fields = small("qwen3 moe", moe_intermediate_size=32, quantization_config=scheme)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(WeightsError, match="experts whose inputs are sorted by group"):
        load_weights(tmp_path, load(tmp_path), dtype=torch.float16, device=CPU)


# -- weights made up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantization",
    [
        compressed(),
        compressed(symmetric=False),
        {**GPTQ, "desc_act": True},
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
    ids=["int4", "int4 with zero points", "gptq", "awq", "fp8"],
)
def test_dummy_weights_are_packed_and_lie_around_zero(quantization: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **quantization)
    made = load_weights(None, spec, dtype=torch.float16, device=CPU, load_format="dummy", seed=3)
    again = load_weights(None, spec, dtype=torch.float16, device=CPU, load_format="dummy", seed=3)
    assert sum(weight.nbytes for weight in made.values()) == weight_bytes(spec)
    weight, same = made[f"{DOWN}.weight"], again[f"{DOWN}.weight"]
    assert isinstance(weight, PackedWeight) and isinstance(same, PackedWeight)
    assert torch.equal(weight.units, same.units)
    values = weight.dequantize(torch.float32)
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0, abs=0.003)
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
