"""A random GGUF in the shape of Gemma 3 270M Q4_K_M, written without the `gguf` package: for machines that cannot fetch
the real one. It has the real file's types and sizes, tensor by tensor, and a tokenizer of as many made-up tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from windowpane.models.ggml import F32, GGML_TYPES

LAYERS, HIDDEN, MLP, HEAD_DIM, QUERY_HEADS, VOCAB = 18, 640, 2048, 256, 4, 262_144
FINER_LAYERS = (0, 1, 4, 7, 10, 13, 15, 16, 17)  # in which Q4_K_M gives values and down projections more bits
ALIGNMENT = 32
# Where a block has its float16 scales.
_SCALES = {"Q8_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
_SCALE = np.float16(0.002)
_METADATA: dict[str, object] = {
    "general.architecture": "gemma3",
    "general.file_type": 15,
    "gemma3.context_length": 32_768,
    "gemma3.embedding_length": HIDDEN,
    "gemma3.block_count": LAYERS,
    "gemma3.feed_forward_length": MLP,
    "gemma3.attention.head_count": QUERY_HEADS,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": HEAD_DIM,
    "gemma3.attention.value_length": HEAD_DIM,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1e6,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
}
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_CONTROL, _NORMAL, _BYTE = 3, 1, 6


def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape (rows first) of each."""
    queries = QUERY_HEADS * HEAD_DIM
    yield "token_embd.weight", "Q8_0", (VOCAB, HIDDEN)
    yield "output_norm.weight", "F32", (HIDDEN,)
    for layer in range(LAYERS):
        finer = layer in FINER_LAYERS
        matrices = {
            "attn_q": ("Q5_0", (queries, HIDDEN)),
            "attn_k": ("Q5_0", (HEAD_DIM, HIDDEN)),
            "attn_v": ("Q8_0" if finer else "Q5_0", (HEAD_DIM, HIDDEN)),
            "attn_output": ("Q4_K", (HIDDEN, queries)),
            "ffn_gate": ("Q5_0", (MLP, HIDDEN)),
            "ffn_up": ("Q5_0", (MLP, HIDDEN)),
            "ffn_down": ("Q6_K" if finer else "Q4_K", (HIDDEN, MLP)),
        }
        norms = dict.fromkeys(("attn_q_norm", "attn_k_norm"), HEAD_DIM)
        norms |= dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), HIDDEN)
        for part, (kind, shape) in matrices.items():
            yield f"blk.{layer}.{part}.weight", kind, shape
        for part, width in norms.items():
            yield f"blk.{layer}.{part}.weight", "F32", (width,)


def write(path: Path, seed: int = 0) -> None:
    random, numbers = np.random.default_rng(seed), {kind.scheme: number for number, kind in GGML_TYPES.items()}
    listed = list(tensors())
    with path.open("wb") as file:
        metadata = {**_METADATA, **_tokenizer()}
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, kind, shape in listed:
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            file.write(_string(name) + dims + struct.pack("<IQ", numbers[kind], offset))
            offset += -(-_stored_bytes(numbers[kind], shape) // ALIGNMENT) * ALIGNMENT
        _align(file)
        for _, kind, shape in listed:
            file.write(_random(numbers[kind], shape, random).tobytes())
            _align(file)


def _tokenizer() -> dict[str, object]:
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_CONTROL] * len(_SPECIAL) + [_BYTE] * 256
    tokens += [f"w{number}" for number in range(VOCAB - len(tokens))]
    kinds += [_NORMAL] * (VOCAB - len(kinds))
    scores = [-float(number) for number in range(VOCAB)]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
    }


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: object) -> bytes:
    """With GGUF's number of its type: uint32, float32, string or array in front."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, list)
    kind = {str: 8, int: 5, float: 6}[type(value[0])]
    if kind == 8:
        items = b"".join(map(_string, value))
    else:
        items = np.array(value, np.int32 if kind == 5 else np.float32).tobytes()
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _stored_bytes(number: int, shape: tuple[int, ...]) -> int:
    kind = GGML_TYPES[number]
    return int(np.prod(shape)) // kind.inputs * kind.stored_bytes


def _random(number: int, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.generic]:
    """Blocks of any bytes with small scales; norms that change little."""
    kind = GGML_TYPES[number]
    if number == F32:
        return random.normal(1.0, 0.1, shape).astype(np.float32)
    blocks = random.integers(0, 256, (_stored_bytes(number, shape) // kind.stored_bytes, kind.stored_bytes), np.uint8)
    for at in _SCALES[kind.scheme]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), _SCALE).view(np.uint8)
    return blocks
