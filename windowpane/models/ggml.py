"""ggml's types of weights, and how a weight lies in memory where it is computed with as it is stored. Torch-free.

A GGUF file says the type of every tensor by itself, so `StoredTypes` stands where other checkpoints have one
`Quantization`. `native/packed.h` has the layout: sixteen outputs side by side, and their scales apart. Values take the
bits they have in the file; of scales only those of six bits grow, to a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from windowpane.kv.retention import ceil_div
from windowpane.models.config import ModelError
from windowpane.models.tensors import TensorSpec

STRIP_OUTPUTS = 16
F32 = 0
MXFP4 = 39
# Numbers in native/packed.h of what other checkpoints store: int4 around 8, int4 with zero points, and fp8 (E4M3).
INT4, INT4_ZEROS, FP8 = 256, 257, 258
_BITS = {INT4: 4, INT4_ZEROS: 4, FP8: 8}


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type: a block of `inputs` takes `stored_bytes` in a file.

    In memory a value takes `bits`, and the scales of sixteen outputs and 256 inputs take `scale_bytes`, the first
    `half_bytes` of which are float16.
    """

    scheme: str
    inputs: int
    stored_bytes: int
    bits: int
    scale_bytes: int = 0
    half_bytes: int = 0


# By ggml's numbers.
GGML_TYPES: dict[int, GgmlType] = {
    F32: GgmlType("F32", 1, 4, 32),
    1: GgmlType("F16", 1, 2, 16),
    2: GgmlType("Q4_0", 32, 18, 4, 256, 256),
    3: GgmlType("Q4_1", 32, 20, 4, 512, 512),
    6: GgmlType("Q5_0", 32, 22, 5, 256, 256),
    7: GgmlType("Q5_1", 32, 24, 5, 512, 512),
    8: GgmlType("Q8_0", 32, 34, 8, 256, 256),
    10: GgmlType("Q2_K", 256, 84, 2, 576, 64),
    11: GgmlType("Q3_K", 256, 110, 3, 288, 32),
    12: GgmlType("Q4_K", 256, 144, 4, 320, 64),
    13: GgmlType("Q5_K", 256, 176, 5, 320, 64),
    14: GgmlType("Q6_K", 256, 210, 6, 288, 32),
    20: GgmlType("IQ4_NL", 32, 18, 4, 256, 256),
    23: GgmlType("IQ4_XS", 256, 136, 4, 160, 32),
    30: GgmlType("BF16", 1, 2, 16),
    MXFP4: GgmlType("MXFP4", 32, 17, 4, 128),
}


def ggml_type(number: int, tensor: str) -> GgmlType:
    """The type of this number; an unknown one is refused by the name of the tensor that has it."""
    known = GGML_TYPES.get(number)
    if known is None:
        names = ", ".join(kind.scheme for kind in GGML_TYPES.values())
        raise ModelError(f"{tensor} has ggml type {number}, which is not run; types that run: {names}")
    return known


@dataclass(frozen=True, slots=True)
class StripForm:
    """One weight in memory: strips of sixteen outputs, the last one padded. `kind` is ggml's number, or one beyond.

    `padded_inputs` are held where that is more than `inputs`. Of kinds that are not ggml's, `scaled_inputs` share a
    float32 scale, and so do `scaled_outputs`.
    """

    kind: int
    outputs: int
    inputs: int
    padded_inputs: int = 0
    scaled_inputs: int = 0
    scaled_outputs: int = 1

    @property
    def strips(self) -> int:
        return ceil_div(self.outputs, STRIP_OUTPUTS)

    @property
    def held_inputs(self) -> int:
        return self.padded_inputs or self.inputs

    @property
    def rounds_inputs(self) -> bool:
        """Rows are multiplied in 8 bits; else as they are."""
        return self.kind in (INT4, INT4_ZEROS) or (self.kind != FP8 and GGML_TYPES[self.kind].scale_bytes > 0)

    @property
    def values_bytes(self) -> int:
        bits = _BITS.get(self.kind) or GGML_TYPES[self.kind].bits
        return self.strips * STRIP_OUTPUTS * self.held_inputs * bits // 8

    @property
    def scales_bytes(self) -> int:
        if self.kind not in _BITS:
            return self.strips * self.held_inputs * GGML_TYPES[self.kind].scale_bytes // 256
        scales = ceil_div(self.inputs, self.scaled_inputs)
        zeros = ceil_div(scales, 8) if self.kind == INT4_ZEROS else 0  # eight to a word
        return 4 * ceil_div(self.strips * STRIP_OUTPUTS, self.scaled_outputs) * (scales + zeros)

    def held_bytes(self, _compute_dtype: str) -> int:
        return self.values_bytes + self.scales_bytes


@dataclass(frozen=True, slots=True)
class StoredTypes:
    """The types of a GGUF file's matrices by their Hugging Face names, as a ModelSpec's `quantization`."""

    kinds: Mapping[str, int] = field(hash=False, repr=False)
    scheme: str
    method: str = "gguf"
    kv_cache_scheme: str | None = None

    @classmethod
    def of(cls, shapes_and_kinds: Mapping[str, tuple[tuple[int, ...], int]]) -> StoredTypes | None:
        """None where no matrix is in fewer than 32 bits."""
        kinds: dict[str, int] = {}
        sizes: Counter[str] = Counter()
        for name, (shape, kind) in shapes_and_kinds.items():
            found = ggml_type(kind, name)
            if shape[-1] % found.inputs:
                blocks = f"{found.scheme} blocks of {found.inputs}"
                raise ModelError(f"{name} has {shape[-1]} inputs, which {blocks} do not divide: the file is damaged")
            # Kernels take floats of 16 bits four at a time, and whole strips of an expert.
            fits = len(shape) == 2 or (len(shape) == 3 and shape[1] % STRIP_OUTPUTS == 0)
            if fits and kind != F32 and shape[-1] % 4 == 0:
                kinds[name] = kind
                sizes[found.scheme] += prod(shape)
        return cls(kinds, f"GGUF ({' + '.join(name for name, _ in sizes.most_common(2))})") if kinds else None

    def format_of(self, weight: TensorSpec) -> GgmlType | None:
        kind = self._kind_of(weight)
        return None if kind is None else GGML_TYPES[kind]

    def _kind_of(self, weight: TensorSpec) -> int | None:
        """None for what is no projection and no table, such as routers: those are held in the dtype of the rest."""
        return self.kinds.get(weight.name) if weight.linear or weight.part == "embedding" else None

    def stored(self, weight: TensorSpec) -> list[TensorSpec]:
        return [weight]

    def held(self, weight: TensorSpec) -> StripForm | None:
        """Of experts, what one takes."""
        kind = self._kind_of(weight)
        return None if kind is None else StripForm(kind, *weight.shape[-2:])

    def cut_problem(self, weight: TensorSpec, ranks: int) -> str | None:
        """Say so where splitting `weight` over ranks would cut through blocks of its inputs."""
        stored = self.format_of(weight)
        if stored is None or weight.shard is None or weight.shard.axis != 1:
            return None
        length = weight.shard.rank_length(ranks)
        if length % max(stored.inputs, 4) == 0:
            return None
        return (
            f"{weight.name}: {length} inputs per rank cut through {stored.scheme} blocks of {stored.inputs}; "
            "--dtype float32 expands the weights"
        )
