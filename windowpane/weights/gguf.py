"""GGUF weights: Hugging Face names for ggml's, types dequantised, and what llama.cpp's converter changed put back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from windowpane.models.gguf import GgufTensor, read_header
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import RankSlice
from windowpane.weights.checkpoint import PIECE_BYTES, WeightsError, row_pieces

if TYPE_CHECKING:
    from types import ModuleType

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# ggml's names of a block's parts, and what they are called in each family.
_ATTENTION_AND_MLP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = {
    "llama": {**_ATTENTION_AND_MLP, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_ATTENTION_AND_MLP,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Gemma multiplies by 1 + w. Hugging Face stores w, GGUF the sum.
_NORMS_PLUS_ONE = ("gemma3",)
# ggml rotates neighbouring rows of llama's queries and keys, Hugging Face rows half a head apart.
_INTERLEAVED_ROTATION = ("llama",)

# Made anew from the config, so not loaded.
_SKIPPED = ("rope_freqs.weight",)


class GgufCheckpoint:
    """A GGUF model, in one file or several, under Hugging Face names."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        header = read_header(path)
        family = header.text("general.architecture") or ""
        if family not in _BLOCK:
            raise WeightsError(f"{path.name}: {family!r} weights are not read from GGUF; known: {', '.join(_BLOCK)}")
        self._gguf = _gguf_package()
        self._plus_one = family in _NORMS_PLUS_ONE
        self._interleaved = family in _INTERLEAVED_ROTATION
        self._heads = {"q_proj": spec.query_heads, "k_proj": spec.token_caches[0].kv_heads}
        self._tensors = {_hf_name(t.name, family): t for t in header.tensors.values() if t.name not in _SKIPPED}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def pieces(self, name: str, cut: RankSlice | None = None) -> Iterator[torch.Tensor]:
        tensor = self._tensors[name]
        projection = name.split(".")[-2]
        if self._interleaved and projection in self._heads:
            head_rows = tensor.shape[0] // self._heads[projection]
            for rows in self._rows(tensor, cut, tensor.shape[0]):  # ranks hold whole heads
                yield _undo_interleaving(rows, len(rows) // head_rows)
            return
        # Subtracted in float32: in bfloat16, 1 + w has lost most of w.
        offset = 1.0 if self._plus_one and name.endswith("norm.weight") else 0.0
        for rows in self._rows(tensor, cut, max(1, PIECE_BYTES // (4 * tensor.shape[-1]))):
            yield rows - offset if offset else rows

    def _rows(self, tensor: GgufTensor, cut: RankSlice | None, at_once: int) -> Iterator[torch.Tensor]:
        """Dequantised rows, `at_once` at a time; a vector is one row. Types are packed along rows, so a cut through
        rows is made once they are dequantised.
        """
        kind = self._kind(tensor)
        block_values, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        is_vector = len(tensor.shape) == 1
        row_values = tensor.shape[-1]
        row_bytes = row_values // block_values * block_bytes
        through_rows = cut is not None and cut.axis == len(tensor.shape) - 1
        columns = [i for some in cut.ranges for i in some] if cut is not None and through_rows else None
        row_shape, row_cut = ((1,), None) if is_vector else (tensor.shape, cut)
        with tensor.file.open("rb") as file:
            for rows in row_pieces(row_shape, row_cut, at_once):
                count = len(rows)
                file.seek(tensor.offset + rows.start * row_bytes)
                raw = file.read(count * row_bytes)
                if len(raw) < count * row_bytes:
                    raise WeightsError(f"{tensor.file} is cut short: {tensor.name} passes its end; fetch it again")
                data = np.frombuffer(raw, np.uint8).reshape(count, row_bytes)
                values: npt.NDArray[np.float32] = self._gguf.dequantize(data, kind)
                shape = tensor.shape if is_vector else (count, row_values)
                # Unquantized types come as a view of the bytes read, which torch must not take for writable.
                found = torch.from_numpy(np.require(values, requirements="W").reshape(shape))
                yield found if columns is None else found[..., columns]

    def _kind(self, tensor: GgufTensor) -> Any:
        try:
            return self._gguf.GGMLQuantizationType(tensor.kind)
        except ValueError:
            raise WeightsError(f"{tensor.name}: ggml type {tensor.kind} is not known; try a newer `gguf`") from None


def _hf_name(name: str, family: str) -> str:
    """The Hugging Face name, or ggml's own for a tensor that the family does not have: it is then unexpected."""
    block = _BLOCK_NAME.fullmatch(name)
    if block is None or block[2] not in _BLOCK[family]:
        return _TOP.get(name, name)
    return f"model.layers.{block[1]}.{_BLOCK[family][block[2]]}.{block[3]}"


def _undo_interleaving(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 0, 2, 4, … of each head first, then 1, 3, 5, …: neighbours become rows half a head apart."""
    paired = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


def _gguf_package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise WeightsError("GGUF weights need the `gguf` package: pip install 'gguf>=0.19'") from None
    module: ModuleType = gguf
    return module
