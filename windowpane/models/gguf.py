"""GGUF files without torch: the header (metadata and where tensors lie), and the Hugging Face config it amounts to.

Only the header is read here: `windowpane.weights.gguf` reads the tensors, `windowpane.text` the tokenizer. A model in
several files (`name-00001-of-00003.gguf`) is read as a whole, whichever of them is named.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isclose, pi
from pathlib import Path
from typing import TypeVar, cast

from windowpane.models.config import ModelError, every
from windowpane.models.ggml import StoredTypes
from windowpane.models.parts import FULL, SLIDING

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

T = TypeVar("T")
Value = int | float | bool | str | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in `file`. `shape` is in torch's order (rows first); `kind` is ggml's number of the type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data, of all shards together. Tensor offsets count from the start of their file."""

    path: Path
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    def integer(self, key: str) -> int | None:
        """A whole number, or None where it is missing."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelError(f"{self.path.name}: {key} must be a whole number, not {value!r:.60}")
        return value

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ModelError(f"{self.path.name}: {key} must be a number, not {value!r:.60}")
        return value

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path.name}: {key} must be a string, not {value!r:.60}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path.name}: {key} must be true or false, not {value!r:.60}")
        return value

    def items(self, key: str) -> list[Value]:
        """An array; empty where it is missing."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list):
            raise ModelError(f"{self.path.name}: {key} must be an array, not {value!r:.60}")
        return value

    def integers(self, key: str) -> list[int]:
        return self._all_of(key, int)

    def numbers(self, key: str) -> list[float]:
        return self._all_of(key, float) or list(self._all_of(key, int))

    def texts(self, key: str) -> list[str]:
        return self._all_of(key, str)

    def _all_of(self, key: str, kind: type[T]) -> list[T]:
        """An array of this kind, empty where it is of another; all values of an array are of one."""
        values = self.items(key)
        return cast("list[T]", values) if values and isinstance(values[0], kind) else []


def is_gguf(path: Path) -> bool:
    """Whether a file says that it is GGUF, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        # A directory, or a file whose own reader will say why it cannot be read.
        return False


def read_header(path: str | Path) -> GgufHeader:
    """Read a GGUF file's header; a file that is cut short or of an unknown version is a ModelError.

    Of a shard, the headers of all are read: metadata is the first's, and tensors are everyone's.
    """
    headers = [read_shard(shard) for shard in shards(Path(path))]
    first = headers[0]
    count = first.integer("split.count") or 1
    if count != len(headers):
        raise ModelError(
            f"{first.path.name} is one of {count} parts; name a file such as model-00001-of-{count:05}.gguf"
        )
    if count == 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise ModelError(f"{header.path.name} and {tensors[twice].file.name} both hold {twice}; fetch them again")
        tensors |= header.tensors
    expected = first.integer("split.tensors.count") or len(tensors)
    if len(tensors) != expected:
        raise ModelError(f"{first.path.name} and its parts hold {len(tensors)} of {expected} tensors; fetch them again")
    return GgufHeader(first.path, first.metadata, tensors)


_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)")


def shards(path: Path) -> list[Path]:
    """The files of the model that `path` is a part of, in order; itself where it is the only one.

    Links are not followed: the shared cache of the Hub keeps files under other names, with links that have theirs.
    """
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count, end = match.groups()
    files = [path.with_name(f"{stem}{number:05}-of-{count}{end}") for number in range(1, int(count) + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ModelError(
            f"{path.name} is one of {int(count)} parts, and {path.parent} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return files


def read_shard(path: Path) -> GgufHeader:
    """The header of one file, whatever others belong to it.

    The last few are kept: spec, weights and tokenizer each ask for them, and a vocabulary takes a second to read.
    """
    resolved = path.resolve()
    try:
        status = resolved.stat()
        return _read_header(resolved, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def hf_config(header: GgufHeader) -> dict[str, object]:
    """The Hugging Face config.json that this file amounts to, with every field the model code reads."""
    architecture, file = header.text("general.architecture"), header.path.name
    known = _ARCHITECTURES.get(architecture or "")
    if known is None:
        names = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(f"{file}: unknown GGUF architecture {architecture!r}; known: {names}")
    # What the file leaves out stays out, so that the family's reader names what is missing.
    config = {key: value for key, value in (_common(header) | known(header)).items() if value is not None}
    if "num_attention_heads" in config and "num_key_value_heads" not in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def _common(header: GgufHeader) -> dict[str, object]:
    prefix = f"{header.text('general.architecture')}."
    embedding = header.tensors.get("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0] if embedding else header.integer(f"{prefix}vocab_size"),
        "hidden_size": header.integer(f"{prefix}embedding_length"),
        "intermediate_size": header.integer(f"{prefix}feed_forward_length"),
        "num_hidden_layers": header.integer(f"{prefix}block_count"),
        "num_attention_heads": header.integer(f"{prefix}attention.head_count"),
        "num_key_value_heads": header.integer(f"{prefix}attention.head_count_kv"),
        "head_dim": _head_dim(header, prefix),
        "max_position_embeddings": header.integer(f"{prefix}context_length"),
        "rms_norm_eps": header.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{prefix}rope.freq_base"),
        "rope_scaling": _rope_scaling(header, prefix),
        # A file without an output matrix uses the embedding.
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.integer("tokenizer.ggml.padding_token_id"),
        # Quantized files do not say what they were made from; models of these families are published in bfloat16.
        "torch_dtype": _FILE_DTYPES.get(header.integer("general.file_type"), "bfloat16"),
    }


# ggml's numbers of files that are not quantized.
_FILE_DTYPES: dict[int | None, str] = {0: "float32", 1: "float16"}


def _head_dim(header: GgufHeader, prefix: str) -> int | None:
    return header.integer(f"{prefix}attention.key_length") or _even_head_dim(header, prefix)


def _even_head_dim(header: GgufHeader, prefix: str) -> int | None:
    heads, hidden = header.integer(f"{prefix}attention.head_count"), header.integer(f"{prefix}embedding_length")
    return hidden // heads if hidden and heads else None


def _gemma3(header: GgufHeader) -> dict[str, object]:
    layers = header.integer("gemma3.block_count") or 0
    # llama.cpp fixes what the file does not say: every sixth layer is full, sliding layers rotate with base 10,000.
    interval = header.integer("gemma3.attention.sliding_window_pattern") or 6
    # Queries are scaled by the head size, but for the 27B model (62 layers), which takes hidden / heads.
    scalar = _even_head_dim(header, "gemma3.") if layers == 62 else _head_dim(header, "gemma3.")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": interval,
        "layer_types": list(every(interval, FULL, SLIDING, layers)),
        "rope_theta": header.number("gemma3.rope.freq_base") or 1_000_000.0,
        "rope_local_base_freq": header.number("gemma3.rope.freq_base_swa") or 10_000.0,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": header.number("gemma3.final_logit_softcapping"),
    }


def _llama(header: GgufHeader) -> dict[str, object]:
    file = header.path.name
    if "blk.0.ffn_gate_exps.weight" in header.tensors:
        raise ModelError(f"{file}: Llama with experts is not read from GGUF; use its Hugging Face directory")
    rotated, head_dim = header.integer("llama.rope.dimension_count"), _head_dim(header, "llama.")
    if rotated is not None and rotated != head_dim:
        raise ModelError(f"{file} rotates {rotated} of {head_dim} dimensions per head; Llama rotates all of them")
    theta = header.number("llama.rope.freq_base") or 10_000.0
    scaling = _llama3_scaling(header, theta) if "rope_freqs.weight" in header.tensors else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": theta,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    } | ({"rope_scaling": scaling} if scaling else {})


def _llama3_scaling(header: GgufHeader, theta: float) -> dict[str, object]:
    """Llama 3's long-context scaling, which GGUF stores as one factor per frequency instead of its parameters.

    Published models differ in `factor` alone, the largest of the stored values; the rest is checked to be theirs.
    """
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensor = header.tensors["rope_freqs.weight"]
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        # ggml always stores these as float32.
        stored = struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))
    factor = _shortest(max(stored))
    for index, value in enumerate(stored):
        wavelength = 2 * pi * theta ** (index / len(stored))
        # 1 below 2,048 tokens, `factor` above 8,192, and in between smoothly from one to the other.
        smooth = min(1.0, max(0.0, (8192 / wavelength - 1) / 3))
        if factor < 1 or not isclose(value * ((1 - smooth) / factor + smooth), 1.0, rel_tol=1e-4):
            raise ModelError(
                f"{header.path.name} scales rotary frequencies (rope_freqs.weight) in another way than Llama 3 does; "
                "use the model's Hugging Face directory"
            )
    return scaling | {"factor": factor}


_ARCHITECTURES: dict[str, Callable[[GgufHeader], dict[str, object]]] = {"gemma3": _gemma3, "llama": _llama}


def _rope_scaling(header: GgufHeader, prefix: str) -> dict[str, object] | None:
    kind = header.text(f"{prefix}rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise ModelError(f"{header.path.name}: {prefix}rope.scaling.type: unknown value {kind!r}; known: linear, none")
    return {"rope_type": "linear", "factor": header.number(f"{prefix}rope.scaling.factor")}


@lru_cache(maxsize=32)
def _read_header(path: Path, _modified_ns: int, size_bytes: int) -> GgufHeader:
    if size_bytes < 24:
        raise ModelError(f"{path} has {size_bytes} bytes, too few for a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Parser(data).header(path)
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ModelError(f"{path} is damaged or cut short: its GGUF header cannot be read ({error})") from None


# struct formats of GGUF's scalar types by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Parser:
    """A cursor over the header's bytes, all little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self, path: Path) -> GgufHeader:
        magic, version = self.data[:4], struct.unpack_from("<I", self.data, 4)[0]
        if magic != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")
        if version not in VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} (or byte order) is not known; versions {VERSIONS} are")
        self.at = 8
        tensor_count, metadata_count = self.scalar("Q"), self.scalar("Q")
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(metadata_count)}
        infos = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment must be a positive whole number, not {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, kind, start + offset, path) for name, shape, kind, offset in infos}
        return GgufHeader(path, metadata, tensors)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = [int(self.scalar("Q")) for _ in range(int(self.scalar("I")))]
        return name, tuple(reversed(dims)), int(self.scalar("I")), int(self.scalar("Q"))

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelError(f"unknown GGUF value type {kind}")
        value = self.scalar(_SCALARS[kind])
        return _shortest(value) if _SCALARS[kind] == "f" else value

    def array(self) -> list[Value]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            values = struct.unpack_from(code, self.data, self.at)
            self.at += struct.calcsize(code)
            return list(values)
        if kind == _STRING:
            return self.strings(count)
        return [self.value(kind) for _ in range(count)]

    def strings(self, count: int) -> list[Value]:
        """As `string` so many times. Vocabularies have hundreds of thousands, so nothing is called that need not be."""
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        found: list[Value] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            found.append(data[start:at].decode("utf-8"))
        if at > len(data):
            raise IndexError(f"the strings of an array of {count} pass the end")
        self.at = at
        return found

    def scalar(self, code: str) -> int:
        value: int = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise IndexError(f"a string of {length} bytes at byte {self.at} passes the end")
        self.at += length
        return raw.decode("utf-8")


def _shortest(value: float) -> float:
    """The number that a config would say: 1e-06, where float32 has 9.99999997e-07."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


# -- names and types of tensors ----------------------------------------------------------------------------------

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
_BLOCKS = {
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
# Made anew from the config, so not loaded.
_SKIPPED = ("rope_freqs.weight",)


def tensors_by_hf_name(header: GgufHeader) -> dict[str, GgufTensor]:
    """The tensors that are loaded, by their Hugging Face names."""
    family = header.text("general.architecture") or ""
    if family not in _BLOCKS:
        raise ModelError(f"{header.path.name}: {family!r} weights are not read from GGUF; known: {', '.join(_BLOCKS)}")
    return {hf_name(t.name, family): t for t in header.tensors.values() if t.name not in _SKIPPED}


def stored_types(header: GgufHeader) -> StoredTypes | None:
    """The types of this file's matrices; None where all are float32."""
    return StoredTypes.of({name: (t.shape, t.kind) for name, t in tensors_by_hf_name(header).items()})


def hf_name(name: str, family: str) -> str:
    """The Hugging Face name, or ggml's own for a tensor that the family does not have: it is then unexpected."""
    block = _BLOCK_NAME.fullmatch(name)
    if block is None or block[2] not in _BLOCKS[family]:
        return _TOP.get(name, name)
    return f"model.layers.{block[1]}.{_BLOCKS[family][block[2]]}.{block[3]}"
