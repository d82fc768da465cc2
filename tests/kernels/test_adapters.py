"""Kernels of adapters in Triton's interpreter, and the tables that they read."""

from __future__ import annotations

import numpy as np

from tests.kernels.interpreting import run_interpreted
from windowpane.lowering.gpu.adapters import host_tables, most_tiles, tile_rows
from windowpane.lowering.gpu.kernels.adapters import NO_ROW, UNUSED


def test_products_and_gates_get_what_plain_torch_adds():
    run_interpreted("tests.kernels.interpreted_adapters")


def test_every_row_is_in_one_tile_of_its_adapter():
    rng = np.random.default_rng(5)
    for rows, slots in ((1, 1), (40, 3), (256, 16), (1500, 2)):
        for _ in range(20):
            given = rng.integers(0, rng.integers(1, slots + 1), rng.integers(1, rows + 1), endpoint=True)
            tiles, at_once = most_tiles(rows, slots), tile_rows(rows)
            found = np.split(host_tables(given.astype(np.int32), rows, slots), [rows, rows + tiles])
            indices, places, of_tiles = found[0], found[1], found[2].reshape(tiles, at_once)
            assert np.array_equal(indices, np.pad(given, (0, rows - len(given))))
            assert sorted(of_tiles[of_tiles != NO_ROW].tolist()) == list(range(rows))
            for place, own in zip(places, of_tiles, strict=True):
                assert (place == UNUSED) == (own == NO_ROW).all()
                assert (indices[own[own != NO_ROW]] == place + 1).all()
