"""Hashes of a prompt's beginnings: one per whole block, equal on every machine and in every run.

The hash of the first n tokens is Σ mix(token_i + (i + 1) · φ + seed) modulo 2⁶⁴ for i < n, where `mix` is the finalizer
of splitmix64, φ is 0x9E3779B97F4A7C15, and the seed is the first 8 bytes (little-endian) of BLAKE2b of the key. The key
is the request's adapter and cache salt, so what must not be shared has nothing in common. A sum gives the hashes of all
beginnings at once. Somebody could construct two prompts with one hash: a request would go to a replica that does not
have its beginning, and would be computed there. Replicas compare tokens, so nothing else can come of it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

BLOCK_TOKENS = 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def prefix_hashes(key: str, tokens: NDArray[np.int32]) -> Hashes:
    """The hashes of the first BLOCK_TOKENS, 2 · BLOCK_TOKENS, … tokens under `key`; a partial block has none."""
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    seed = np.frombuffer(blake2b(key.encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    mixed = np.arange(1, whole + 1, dtype=np.uint64)
    mixed *= _GOLDEN
    mixed += seed
    mixed += tokens[:whole].astype(np.uint64)
    shifted = np.empty_like(mixed)  # in place from here on: a prompt of 65,536 tokens takes half as long
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        np.right_shift(mixed, np.uint64(shift), out=shifted)
        mixed ^= shifted
        if factor is not None:
            mixed *= factor
    return np.cumsum(mixed, dtype=np.uint64)[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
