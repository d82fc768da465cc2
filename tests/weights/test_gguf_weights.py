"""GGUF weights are those of the Hugging Face model: names, row order and norms put back.

`golden_sums.json` holds, for tensors of both embedded models, Σ|w| and a sum weighted by position, which notices rows
in a wrong order, over some 100,000 values spread evenly. They were taken from transformers 5.22.2:

    AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=torch.float32,
                                         quantization_config=GgufConfig(dequantize=True))
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.models.test_gguf import GEMMA3, LLAMA, write_gguf
from tests.weights.gguf_files import write as write_family
from windowpane.lowering.strips import StripWeight
from windowpane.models import load
from windowpane.models.config import ModelError
from windowpane.models.embedded import EMBEDDED, embedded_path
from windowpane.models.gguf import read_header
from windowpane.models.gguf_families import stored_types
from windowpane.models.tensors import RankPlace
from windowpane.models.weights import sharding_problem, text_tensors, weight_bytes
from windowpane.weights import WeightsError, kept_strips, load_weights
from windowpane.weights import gguf as gguf_weights
from windowpane.weights.gguf import GgufCheckpoint

CPU = torch.device("cpu")
GOLDEN = json.loads((Path(__file__).parent / "golden_sums.json").read_text())

BLOCK = {
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_gate": (128, 64),
    "ffn_up": (128, 64),
    "ffn_down": (64, 128),
    "attn_norm": (64,),
    "ffn_norm": (64,),
}
GEMMA_NORMS = {"attn_q_norm": (16,), "attn_k_norm": (16,), "post_attention_norm": (64,), "post_ffw_norm": (64,)}


def made_up(parts: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    shapes = {"token_embd.weight": (96, 64), "output_norm.weight": (64,)}
    shapes |= {f"blk.{layer}.{part}.weight": shape for layer in range(2) for part, shape in parts.items()}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def read(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(path, load(path).expanded(), dtype=dtype, device=CPU)


def test_weights_in_several_files_are_those_in_one(tmp_path: Path) -> None:
    tensors = made_up(BLOCK)
    whole = read(write_gguf(tmp_path / "whole.gguf", "llama", LLAMA, tensors))
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors, split_max_tensors=6)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == 4
    split = read(files[2])
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_llama_rows_are_put_back_where_the_converter_took_them(tmp_path: Path) -> None:
    tensors = made_up(BLOCK)
    loaded = read(write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors))

    def as_converted(weight: torch.Tensor, heads: int) -> np.ndarray:
        rows, columns = weight.shape
        halves = weight.numpy().reshape(heads, 2, rows // heads // 2, columns)
        return halves.swapaxes(1, 2).reshape(rows, columns)

    for part, heads in (("q", 4), ("k", 2)):
        weight = loaded[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert np.array_equal(as_converted(weight, heads), tensors[f"blk.1.attn_{part}.weight"])
    for ours, theirs in (("self_attn.v_proj", "attn_v"), ("post_attention_layernorm", "ffn_norm")):
        assert np.array_equal(loaded[f"model.layers.0.{ours}.weight"].numpy(), tensors[f"blk.0.{theirs}.weight"])


def test_gemma_norms_lose_the_one_before_they_lose_precision(tmp_path: Path) -> None:
    tensors = made_up(BLOCK | GEMMA_NORMS)
    path = write_gguf(tmp_path / "m.gguf", "gemma3", GEMMA3, tensors)
    for ours, theirs in (
        ("input_layernorm", "attn_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
    ):
        expected = torch.from_numpy(tensors[f"blk.0.{theirs}.weight"] - 1).to(torch.bfloat16)
        assert torch.equal(read(path, torch.bfloat16)[f"model.layers.0.{ours}.weight"], expected)
    q_proj = read(path)["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(q_proj.numpy(), tensors["blk.0.attn_q.weight"])


def test_types_are_dequantised_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = made_up(BLOCK)["blk.0.ffn_up.weight"]
    kind = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    for name, tensor in made_up(BLOCK).items():
        if name == "blk.0.ffn_up.weight":
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_weights, "PIECE_BYTES", 5 * 64 * 4)
    loaded = read(path)
    expected = gguf.dequantize(gguf.quantize(values, kind), kind)
    assert np.array_equal(loaded["model.layers.0.mlp.up_proj.weight"].numpy(), expected)
    assert np.allclose(loaded["model.embed_tokens.weight"].numpy(), made_up(BLOCK)["token_embd.weight"], atol=2e-3)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_weights_stay_as_stored_and_are_those_that_transformers_loads(name: str) -> None:
    path = embedded_path(name)
    spec = load(path)
    expanded = load_weights(path, spec.expanded(), dtype=torch.float32, device=CPU)
    assert expanded.keys() == {tensor.name for tensor in text_tensors(spec)}
    for tensor, (magnitude, weighted) in GOLDEN[name].items():
        flat = expanded[tensor].flatten()
        flat = flat[:: len(flat) // 100_003 + 1].double()
        position = torch.arange(1, len(flat) + 1, dtype=torch.float64) / len(flat)
        assert flat.abs().sum().item() == pytest.approx(magnitude, rel=1e-6, abs=1e-3), tensor
        assert (flat * position).sum().item() == pytest.approx(weighted, rel=1e-6, abs=1e-3), tensor
    loaded = load_weights(path, spec, dtype=torch.float32, device=CPU)
    assert sum(weight.nbytes for weight in loaded.values()) == weight_bytes(replace(spec, dtype="float32"))
    assert sum(weight.nbytes for weight in loaded.values()) < path.stat().st_size
    for tensor, weight in loaded.items():
        packed = not isinstance(weight, torch.Tensor)
        assert packed == (weight.shape[-1:] != weight.shape)  # all matrices, and no vector
        assert torch.equal(weight.dequantize(torch.float32) if packed else weight, expanded[tensor]), tensor


def test_ranks_read_their_parts_of_packed_weights(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q5_1)
    spec = load(path)
    whole = load_weights(path, spec, dtype=torch.float32, device=CPU)
    for rank in range(2):
        place = RankPlace(rank, 2)
        parts = load_weights(path, spec, dtype=torch.float32, device=CPU, place=place)
        for tensor in text_tensors(spec):
            expected, found = whole[tensor.name], parts[tensor.name]
            if isinstance(found, StripWeight):
                expected, found = expected.dequantize(torch.float32), found.dequantize(torch.float32)
            if (cut := tensor.cut(place)) is not None:
                index = torch.cat([torch.arange(some.start, some.stop) for some in cut.ranges])
                expected = expected.index_select(cut.axis, index)
            assert torch.equal(found, expected), tensor.name


def test_repacked_weights_are_kept_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q5_1)
    repacked = []
    strips = GgufCheckpoint.strips
    monkeypatch.setattr(GgufCheckpoint, "strips", lambda *args: (repacked.append(args), strips(*args))[1])

    def loaded() -> dict[str, torch.Tensor]:
        repacked.clear()
        weights = load_weights(path, load(path), dtype=torch.float32, device=CPU)
        packed = {name: weight for name, weight in weights.items() if isinstance(weight, StripWeight)}
        return {name: weight.dequantize(torch.float32) for name, weight in packed.items()}

    expected = loaded()
    assert repacked and not (tmp_path / "cache" / "windowpane" / "weights").exists(), "few bytes are not kept"
    monkeypatch.setattr(kept_strips, "LEAST_BYTES", 1)
    loaded()
    (kept,) = (tmp_path / "cache" / "windowpane" / "weights").iterdir()
    found = loaded()
    assert not repacked and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        kept.unlink()  # pages that are mapped stay what they were
        kept.write_bytes(damaged)
        assert torch.equal(loaded()["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
        assert repacked and kept.read_bytes() == whole
    os.utime(path, ns=(1, 1))
    loaded()
    (newer,) = kept.parent.iterdir()
    assert repacked and newer != kept


def test_ranks_cannot_cut_through_blocks(tmp_path: Path) -> None:
    spec = load(write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0))
    problem = sharding_problem(spec, 4)
    assert problem is not None and "16 inputs per rank cut through Q8_0 blocks of 32; --dtype float32" in problem


def test_strips_are_for_cpus_in_float32(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(WeightsError, match=r"run on CPUs with float32, not on cpu with torch\.bfloat16"):
        load_weights(path, load(path), dtype=torch.bfloat16, device=CPU)


def test_unknown_types_and_broken_rows_are_named(tmp_path: Path) -> None:
    header = read_header(write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0))
    tensors = dict(header.tensors)
    up = tensors["blk.0.ffn_up.weight"]
    for broken, message in (
        (replace(up, kind=35), r"model.layers.0.mlp.up_proj.weight has ggml type 35, which is not run; types"),
        (
            replace(up, kind=12),
            r"up_proj.weight has 64 inputs, which Q4_K blocks of 256 do not divide: the file is dam",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            stored_types(replace(header, tensors=tensors | {up.name: broken}))


def write_quantized(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A Llama whose matrices are all of this type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in LLAMA.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    for name, tensor in made_up(BLOCK).items():
        if tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_decay_that_is_none_is_damage(tmp_path: Path) -> None:
    """Files have −exp(A_log), whose logarithm would be no number."""
    path = tmp_path / "m.gguf"
    write_family(path, "qwen35", gguf.GGMLQuantizationType.F32)
    decay = next(t for t in read_header(path).tensors.values() if t.name == "blk.0.ssm_a")
    with path.open("r+b") as file:
        file.seek(decay.offset)
        file.write(struct.pack("<f", 0.5))
    with pytest.raises(
        WeightsError, match=r"m.gguf is damaged: a value of model.layers.0.linear_attn.A_log decays nothing"
    ):
        read(path)


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = made_up(BLOCK)
    tensors["blk.0.mystery.weight"] = tensors.pop("blk.1.ffn_down.weight")
    with pytest.raises(WeightsError) as caught:
        read(write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors))
    assert "missing: model.layers.1.mlp.down_proj.weight" in str(caught.value)
    assert "unexpected: blk.0.mystery.weight" in str(caught.value)


def test_a_layer_beyond_those_that_the_header_counts_is_unexpected(tmp_path: Path) -> None:
    tensors = made_up(BLOCK)
    tensors["blk.2.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"]
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.2\.mlp\.up_proj\.weight"):
        read(write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors))


@pytest.mark.parametrize("missing_bytes", [1, 5000, 300_000])
def test_a_file_that_ends_early_is_an_error(tmp_path: Path, missing_bytes: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA, made_up(BLOCK))
    path.write_bytes(path.read_bytes()[:-missing_bytes])
    with pytest.raises(WeightsError, match=r"m.gguf is cut short or damaged: \S+ ends at byte [\d,]+ of"):
        read(path)


def test_whatever_is_wrong_with_a_header_is_one_error_of_ours(tmp_path: Path) -> None:
    """Cut anywhere, or with any bit flipped: it loads, or says what is wrong."""
    whole = write_gguf(tmp_path / "m.gguf", "llama", LLAMA, made_up(BLOCK)).read_bytes()
    header_bytes, random, refused = (
        min(t.offset for t in read_header(tmp_path / "m.gguf").tensors.values()),
        Random(1),
        0,
    )
    broken = [whole[:length] for length in range(0, header_bytes, 97)]
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[random.randrange(header_bytes)] ^= 1 << random.randrange(8)
        broken.append(bytes(flipped))
    for number, data in enumerate(broken):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        try:
            read(path)
        except (ModelError, WeightsError):
            refused += 1
        path.unlink()
    assert refused > len(broken) // 2


@dataclass
class Info:
    """A tensor as a header describes it: its axes, ggml's number of its type, and its offset."""

    name: str
    axes: tuple[int, ...]
    kind: int
    offset: int

    def packed(self) -> bytes:
        name = self.name.encode()
        axes = struct.pack(f"<I{len(self.axes)}Q", len(self.axes), *self.axes)
        return struct.pack("<Q", len(name)) + name + axes + struct.pack("<IQ", self.kind, self.offset)


def rewrite(path: Path, change: Callable[[dict[str, Info]], object], more_metadata: bytes = b"") -> None:
    """The same file with other words about its tensors, and one value more where that is given."""
    whole, tensors = path.read_bytes(), list(read_header(path).tensors.values())
    data_at, first = min(t.offset for t in tensors), tensors[0].name.encode()
    infos = {t.name: Info(t.name, t.shape[::-1], t.kind, t.offset - data_at) for t in tensors}
    change(infos)
    version, _, values = struct.unpack_from("<IQQ", whole, 4)
    metadata = whole[24 : whole.index(struct.pack("<Q", len(first)) + first)] + more_metadata
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), values + bool(more_metadata)) + metadata
    head += b"".join(info.packed() for info in infos.values())
    path.write_bytes(head + bytes(-len(head) % 32) + whole[data_at:])


UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"


def metadata(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": DOWN}, "it has blk.0.ffn_down.weight twice"),
        ({"name": "blk.0.\x1b[2J"}, r"tensor 8 of 20 is called 'blk.0.\\x1b\[2J', in 10 characters"),
        ({"name": "x" * 5000}, r"tensor 8 of 20 is called 'x{40}', in 5000 characters"),
        ({"axes": ()}, "blk.0.ffn_up.weight has 0 axes, not 1 to 4"),
        ({"axes": (64,) * 5}, "blk.0.ffn_up.weight has 5 axes"),
        ({"axes": (64, 0)}, r"blk.0.ffn_up.weight has the shape \[0, 64\], which holds nothing"),
        ({"axes": (64, 2**63)}, "blk.0.ffn_up.weight ends at byte"),
        ({"axes": (2**64 - 1, 2**64 - 1)}, "up_proj.weight has 18446744073709551615 inputs, which Q8_0 blocks of 32"),
        ({"axes": (48, 128)}, "up_proj.weight has 48 inputs, which Q8_0 blocks of 32 do not divide"),
        ({"kind": 2**32 - 1}, "up_proj.weight has ggml type 4294967295, which is not run"),
        ({"offset": 33}, "blk.0.ffn_up.weight begins at byte 33, which is no multiple of 32"),
        ({"offset": 2**64 - 32}, "blk.0.ffn_up.weight ends at byte"),
        ({"offset": 32}, r"(\S+) begins inside (\S+);"),
    ],
)
def test_a_hostile_tensor_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    rewrite(path, lambda infos: infos.update({UP: replace(infos[UP], **changes)}))
    with pytest.raises((ModelError, WeightsError), match=message) as caught:
        load_weights(path, load(path), dtype=torch.float32, device=CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (metadata("general.alignment", 4, struct.pack("<I", 0)), "general.alignment must be a power of two, not 0"),
        (metadata("general.alignment", 4, struct.pack("<I", 48)), "general.alignment must be a power of two, not 48"),
        (metadata("llama.block_count", 4, struct.pack("<I", 2)), "it says llama.block_count twice"),
        (metadata("a", 13, b""), "a has GGUF value type 13"),
        (metadata("a", 9, struct.pack("<IQ", 9, 1) * 9000), "a is an array of GGUF value type 9"),
        (metadata("a", 9, struct.pack("<IQ", 8, 2**64 - 1)), r"cannot be read at a \("),
        (metadata("a", 9, struct.pack("<IQQQ", 8, 2, 2**64 - 1, 1)), r"cannot be read at a \("),
        (metadata("a", 9, struct.pack("<IQ", 4, 2**62)), r"cannot be read at a \("),
        (metadata("a", 8, struct.pack("<Q", 2**64 - 1)), r"cannot be read at a \("),
    ],
)
def test_a_hostile_value_is_named(tmp_path: Path, value: bytes, message: str) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    rewrite(path, lambda infos: None, value)
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize(("tensors", "values"), [(2**64 - 1, None), (None, 2**64 - 1), (21, None), (2**40, 2**40)])
def test_counts_that_no_file_holds_are_errors(tmp_path: Path, tensors: int | None, values: int | None) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    for at, count in ((8, tensors), (16, values)):
        if count is not None:
            struct.pack_into("<Q", data, at, count)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"damaged"):
        load(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, kind: str) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    spec, up = load(path), read_header(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[up.offset : up.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"m.gguf is damaged: a scale of blk.1.ffn_up.weight is no number"):
        load_weights(path, spec, dtype=torch.float32, device=CPU)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_weights(path, load(path), dtype=torch.float32, device=CPU)  # packed weights do without
    with pytest.raises(WeightsError, match="pip install 'gguf"):
        read(path)
