"""How one token of one KV head is stored: dtype, scale bytes and the alignment of a row.

A *row* is one vector (K, V or a latent) of one token and one head. Rows stay 16-byte aligned so that a thread can load
16 bytes; scales live in their own section of a layer's slice, never between rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.retention import ceil_div

ROW_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`scale_bytes` is per row (one scale per token and head); formats with one scale per layer keep it outside the
    pages.
    """

    name: str
    element_bits: int
    scale_bytes: int = 0
    family: str = "float"

    def row_bytes(self, dim: int) -> int:
        return ceil_div(ceil_div(dim * self.element_bits, 8), ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("float32", 32),
        KVFormat("bfloat16", 16),
        KVFormat("float16", 16),
        KVFormat("fp8_e4m3", 8, family="fp8"),
        KVFormat("fp8_e5m2", 8, family="fp8"),
        KVFormat("fp8_per_token_head", 8, scale_bytes=4, family="fp8"),
        KVFormat("int8_per_token_head", 8, scale_bytes=4, family="int"),
        # int4 keeps a half-precision scale and zero point per row: asymmetric codes are what 4 bits need.
        KVFormat("int4_per_token_head", 4, scale_bytes=4, family="int"),
    )
}

# vLLM's `fp8` is E4M3 on the cards that both run on.
OTHER_NAMES = {"fp8": "fp8_e4m3"}

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_bytes(name: str) -> int:
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise ValueError(f"unknown compute dtype {name!r}; known: {', '.join(DTYPE_BYTES)}") from None


def kv_format(name: str) -> KVFormat:
    try:
        return FORMATS[OTHER_NAMES.get(name, name)]
    except KeyError:
        raise ValueError(f"unknown KV dtype {name!r}; use auto or one of: {', '.join(FORMATS)}") from None
