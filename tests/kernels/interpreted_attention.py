"""Checks of the attention kernels for a process with TRITON_INTERPRET=1; named on the command line.

Lengths sit at the edges of pages, tiles and windows; rows that no token fills are NaN.
"""

from __future__ import annotations

import sys
import warnings
from unittest.mock import patch

import numpy as np
import torch

from bench.gpu_checks.attention_cases import Layer, error, make_pages, run_decode, run_prefill, run_rows, run_write
from windowpane.attention.mask import CAUSAL, Mask
from windowpane.attention.segments import prefill_tiles
from windowpane.attention.triton import decode as decoding
from windowpane.attention.triton.decode import MAX_ROWS, plan_decode
from windowpane.kv.retention import Chunk, Full, Window

LIMIT = 1e-5
FLOAT = torch.float32
BEYOND_4_GIB = 4 * 2**30 + 12345 * 256

LAYERS = {
    "64 dims": Layer(2, 1, 64),
    "64 dims, window, blocks of 8, 3 stripes": Layer(1, 3, 64, window_tokens=50, block_tokens=8, stripes=3),
    "128 dims, 7 query heads to a KV head, window of a block": Layer(1, 7, 128, window_tokens=16),
    "256 dims, window that begins in a page": Layer(1, 2, 256, window_tokens=41),
    "512 dims, 2 stripes": Layer(1, 4, 512, stripes=2),
    "window of one token": Layer(2, 2, 64, window_tokens=1),
    "latent, 1/8 of the head rotates": Layer(2, 4, 64, rotary=8),
    "latent, 1/4 of the head rotates, window": Layer(1, 16, 64, rotary=16, window_tokens=40),
    "latent, 1/2 of the head rotates, blocks of 64": Layer(1, 2, 64, rotary=32, block_tokens=64),
    "latent, 512 dims": Layer(1, 8, 512, rotary=64),
    "soft-capped": Layer(2, 3, 64, softcap=0.7),
    "soft-capped far above all scores, window": Layer(1, 2, 64, window_tokens=50, softcap=50.0),
    "soft-capped latent, sinks": Layer(2, 4, 64, rotary=8, softcap=0.7, has_sinks=True),
    "sinks, window": Layer(2, 3, 64, window_tokens=50, has_sinks=True),
}

CHUNKED = {
    "chunks of whole blocks": Layer(1, 3, 64, chunk_tokens=32),
    "chunks that begin in a page, 2 stripes": Layer(2, 2, 64, chunk_tokens=21, block_tokens=8, stripes=2),
    "chunks in a page": Layer(2, 2, 64, chunk_tokens=5),
    "chunks of one token": Layer(2, 2, 64, chunk_tokens=1),
    "latent chunks, soft-capped": Layer(1, 4, 64, rotary=16, chunk_tokens=24, softcap=0.7),
    "coded chunks": Layer(1, 2, 64, chunk_tokens=24, kv_format="int8_per_token_head"),
}


def decode() -> None:
    for name, layer in LAYERS.items():
        window = layer.window_tokens or 64
        lengths = [0, 1, 2 * layer.block_tokens, window, 3 * window + 1]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=1)
        got, exact, _ = run_decode(paged, padding=2)
        require(error(got, exact), f"decode, {name}")


SEVERAL = {
    "pair, soft-capped, sinks": Layer(2, 3, 64, softcap=0.7, has_sinks=True),
    "window of a few pages, 2 stripes": Layer(1, 2, 64, window_tokens=41, stripes=2, block_tokens=8),
    "window shorter than the rows": Layer(1, 1, 64, window_tokens=3),
    "chunks": Layer(1, 2, 64, chunk_tokens=21),
    "latent, window, soft-capped, sinks": Layer(1, 2, 64, rotary=8, window_tokens=70, softcap=0.7, has_sinks=True),
    "int8 pair, chunks": Layer(1, 2, 64, chunk_tokens=64, kv_format="int8_per_token_head"),
    "int4 pair, window, sinks": Layer(1, 2, 64, window_tokens=41, kv_format="int4_per_token_head", has_sinks=True),
    "fp8 latent": Layer(1, 2, 64, rotary=8, kv_format="fp8_per_token_head"),
    "int4 latent, soft-capped": Layer(1, 2, 64, rotary=16, kv_format="int4_per_token_head", softcap=0.7),
}


def several() -> None:
    """Rows of drafts: no past, part of a tile, whole tiles; one row, some, and as many as there may be."""
    for name, layer in SEVERAL.items():
        lengths, counts = [0, 1, 64, 130], [3, 16, 1, 5]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=16)
        got, exact, _ = run_rows(paged, counts, padding=1, programs=3)
        require(error(got, exact), f"several rows, {name}")
    paged = make_pages(Layer(2, 1, 64), [130, 3], "cpu", FLOAT, room_tokens=16)
    for programs in (1, 8):
        got, exact, _ = run_rows(paged, [2, 4], programs=programs)
        require(error(got, exact), f"several rows, {programs} programs")
    wide = make_pages(Layer(1, 12, 64), [70], "cpu", FLOAT, room_tokens=16)
    got, exact, _ = run_rows(wide, [16])
    require(error(got, exact), "more rows than a tile takes")


def prefill() -> None:
    for name, layer in LAYERS.items():
        window = layer.window_tokens or 40
        lengths = [0, window - 1, 2 * window + 3]
        chunks = [(layer.block_tokens + 2, layer.block_tokens + 2), (1, 1), (19, 4)]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=80)
        got, exact, _ = run_prefill(paged, chunks)
        require(error(got, exact), f"prefill, {name}")
    check_tiles()


def check_tiles() -> None:
    """Every asking token is in exactly one tile."""
    segments = [(3, 10, 50, 0, 0, 40), (1, 0, 7, 40, 40, 1), (2, 5, 22, 47, 41, 0), (0, 900, 933, 64, 41, 33)]
    tiles = prefill_tiles(segments, 16)
    covered = [(s, i * 16 + t) for s, i in tiles.tolist() for t in range(16) if i * 16 + t < segments[s][5]]
    assert sorted(covered) == [(s, t) for s, segment in enumerate(segments) for t in range(segment[5])]
    assert len(tiles) == 3 + 1 + 0 + 3, "tiles without a token"
    assert tiles.dtype == np.int32 and tiles[0].tolist() == [3, 2], "the tile that sees most comes first"


def chunks() -> None:
    _chunked_decode()
    _chunked_prefill()


def _chunked_decode() -> None:
    """Before, at and behind the ends of chunks: right behind one there is no past, and its pages may be anybody's."""
    several_tiles = {"chunks of several tiles, sinks": Layer(1, 2, 64, chunk_tokens=150, has_sinks=True)}
    for name, layer in (CHUNKED | several_tiles).items():
        chunk = layer.chunk_tokens
        lengths = [0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 3 * chunk + 1, 4 * chunk - 2]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=1)
        got, exact, _ = run_decode(paged, padding=2, programs=3)
        require(error(got, exact), f"decode, {name}")


def _chunked_prefill() -> None:
    """Segments that begin and end before, at and behind the ends of chunks, across none, one and several of them."""
    # Rows of a tile that ask nothing may see nothing: 0 / 0, which is stored nowhere.
    warnings.filterwarnings("ignore", "invalid value encountered in divide", RuntimeWarning)
    for name, layer in CHUNKED.items():
        chunk = layer.chunk_tokens
        lengths = [0, chunk - 1, chunk, chunk // 2, 2 * chunk + 1, 3 * chunk - 1]
        tokens = [chunk + 2, 1, chunk, 3 * chunk + 3, chunk + 2, 2]
        asking = [chunk + 2, 1, chunk, 3 * chunk + 3, 3, 2]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=max(tokens))
        got, exact, _ = run_prefill(paged, list(zip(tokens, asking, strict=True)))
        require(error(got, exact), f"prefill, {name}")


def write() -> None:
    for layer in LAYERS.values():
        if layer.window_tokens != 1:  # which keeps nothing
            run_write(layer, "cpu", FLOAT)
    run_write(Layer(3, 1, 64), "cpu", FLOAT)


def programs() -> None:
    """Shares of the line that cut heads and rows anywhere: one program, few, and many that get nothing. Parts are
    merged head by head, and as for many rows all heads of a KV head at once.
    """
    capped = {"softcap": 0.7, "has_sinks": True}
    for layer, counts in (
        (Layer(2, 2, 64), (1, 5, 30)),
        (Layer(3, 2, 64, window_tokens=70), (1, 30)),
        (Layer(1, 6, 64, rotary=8), (5,)),
        (Layer(2, 4, 64, **capped), (5,)),
        (Layer(1, 2, 64, rotary=8, **capped), (1, 30)),
    ):
        paged = make_pages(layer, [200, 0, 64, 130], "cpu", FLOAT, room_tokens=1)
        for count in counts:
            for most in (decoding.MOST_COMBINED, 0):
                with patch.object(decoding, "MOST_COMBINED", most):
                    got, exact, _ = run_decode(paged, padding=1, programs=count)
                require(error(got, exact), f"{layer}, {count} programs, heads at once above {most}")
    nobody = make_pages(Layer(2, 2, 64), [0, 0], "cpu", FLOAT, room_tokens=1)
    got, exact, _ = run_decode(nobody, padding=1, programs=3)
    require(error(got, exact), "rows without a past")


def lone_rows() -> None:
    """A row by itself at all shares of its past, without one, and as padding."""
    layers = (Layer(3, 2, 64, window_tokens=200), Layer(1, 7, 128, window_tokens=130), Layer(2, 2, 64))
    for layer in layers:
        for length, count in ((0, 4), (1, 30), (64, 1), (199, 30), (500, 4), (500, 1)):
            paged = make_pages(layer, [length], "cpu", FLOAT, room_tokens=1)
            got, exact, _ = run_decode(paged, programs=count)
            require(error(got, exact), f"{layer}, {length} tokens, {count} programs")
        nobody = make_pages(layer, [], "cpu", FLOAT, room_tokens=1)
        run_decode(nobody, padding=1, programs=4)


def far_pages() -> None:
    for layer in (Layer(1, 2, 64), Layer(1, 2, 64, window_tokens=40), Layer(1, 2, 64, rotary=8)):
        paged = make_pages(layer, [70, 33], "cpu", FLOAT, room_tokens=20, offset_bytes=BEYOND_4_GIB)
        got, exact, _ = run_decode(paged)
        require(error(got, exact), f"decode beyond 4 GiB, {layer}")
        got, exact, _ = run_prefill(paged, [(3, 3), (17, 17)])
        require(error(got, exact), f"prefill beyond 4 GiB, {layer}")
        run_write(layer, "cpu", FLOAT, offset_bytes=BEYOND_4_GIB)


def replanning() -> None:
    """Running sums of tiles against counting them, and the number of rows that fits."""
    generator = np.random.default_rng(0)
    for rows in (1, 17, MAX_ROWS):
        positions = generator.integers(-1, 5000, rows).astype(np.int32)
        reaches = (1, 2, 64, 65, 1024)
        for sees in (Full(), *map(Window, reaches), *map(Chunk, reaches)):
            tiles = [len({t // 64 for t in range(sees.first_visible(max(p, 0)), p)}) for p in positions.tolist()]
            found = torch.full((rows + 1,), -1, dtype=torch.int32)
            plan_decode(torch.from_numpy(positions), found, Mask(sees))
            assert found.tolist() == [0, *np.cumsum(tiles)], f"{sees.name}, {rows} rows"
    try:
        plan_decode(torch.zeros(MAX_ROWS + 1, dtype=torch.int32), torch.zeros(MAX_ROWS + 2, dtype=torch.int32), CAUSAL)
    except ValueError as refusal:
        assert str(MAX_ROWS) in str(refusal)
    else:
        raise AssertionError("more rows than programs look at must be refused")


def require(found: float, what: str) -> None:
    """NaN never passes."""
    if not found <= LIMIT:
        raise AssertionError(f"{what}: relative error {found:.3g} exceeds {LIMIT}")


if __name__ == "__main__":
    warnings.filterwarnings("error")
    # the interpreter's own use of NumPy
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
