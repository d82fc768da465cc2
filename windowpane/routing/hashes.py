"""Hashes of a prompt's beginnings: one per whole block, equal on every machine and in every run.

The hash of the first 4n tokens is Σ mix(four_i + (i + 1) · φ + seed) modulo 2⁶⁴ for i < n. `four_i` is four tokens as
one number, (a + 2³² b) + κ (c + 2³² d); `mix` is the finalizer of splitmix64, φ is 0x9E3779B97F4A7C15, κ is
0xD6E8FEB86659FD93, and the seed is the first 8 bytes (little-endian) of BLAKE2b of the key. The key is the request's
adapter and cache salt, so what must not be shared has nothing in common. A sum gives the hashes of all beginnings at
once. Somebody could construct two prompts with one hash: a request would go to a replica that does not have its
beginning, and would be computed there. Replicas compare tokens, so nothing else can come of it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

BLOCK_TOKENS = 16
_BLOCK_FOURS = BLOCK_TOKENS // 4
_GOLDEN = 0x9E3779B97F4A7C15
_KAPPA = np.uint64(0xD6E8FEB86659FD93)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_PIECE_FOURS = 4096  # hashed at once, in memory that stays in a core's own cache
_STEPS = np.arange(1, _PIECE_FOURS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def prefix_hashes(key: str, tokens: NDArray[np.int32]) -> Hashes:
    """The hashes of the first BLOCK_TOKENS, 2 · BLOCK_TOKENS, … tokens under `key`; a partial block has none."""
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    pairs = np.ascontiguousarray(tokens[:whole], dtype="<i4").view("<u8")
    seed = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    fours = whole // 4
    mixed = np.empty(min(_PIECE_FOURS, fours), dtype=np.uint64)
    shifted = np.empty_like(mixed)
    blocks = np.empty(whole // BLOCK_TOKENS, dtype=np.uint64)
    for start in range(0, fours, _PIECE_FOURS):
        piece = pairs[2 * start : 2 * (start + _PIECE_FOURS)]
        x, y = mixed[: len(piece) // 2], shifted[: len(piece) // 2]
        np.multiply(piece[1::2], _KAPPA, out=x)
        x += piece[::2]
        x += _STEPS[: len(x)]
        x += np.uint64((seed + start * _GOLDEN) % 2**64)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
            np.right_shift(x, np.uint64(shift), out=y)
            x ^= y
            if factor is not None:
                x *= factor
        first = start // _BLOCK_FOURS
        np.add.reduce(x.reshape(-1, _BLOCK_FOURS), axis=1, out=blocks[first : first + len(x) // _BLOCK_FOURS])
    return np.cumsum(blocks, dtype=np.uint64)
