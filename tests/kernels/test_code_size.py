"""How many instructions a lone row's layer takes. Needs no GPU.

A multiprocessor fetches instructions that its cache no longer has, and a layer's weights push them out of L2 as well
(docs/performance.md). So the launches of a layer should fit into that cache together.
"""

from __future__ import annotations

import struct

import torch

from tests.kernels.test_chain import H200, compiled_from, launch, links, record_chain
from tests.kernels.test_formats_compile import CPU, ints, numbers, record
from tests.kernels.test_hopper_compiles import LAYERS
from windowpane.attention.scores import Scores
from windowpane.attention.triton import decode as decoding
from windowpane.attention.triton import decode_tunings as tunings
from windowpane.attention.triton.view import PagedLayer
from windowpane.lowering.gpu.kernels import heads as preparing

INSTRUCTION_CACHE_BYTES = 128 * 1024
QUERY_HEADS = 32


def code_bytes(cubin: bytes) -> int:
    """Of all functions in an ELF file."""
    headers, size, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<2H", cubin, 58)
    flags_and_sizes = [struct.unpack_from("<Q16xQ", cubin, headers + i * size + 8) for i in range(count)]
    executable = 4
    return sum(length for flags, length in flags_and_sizes if flags & executable)


def test_all_launches_of_a_sliding_layer_fit_the_instruction_cache(monkeypatch):
    view, _, mask = LAYERS["31B window"]
    row = (1, view.kv_heads, view.dim)
    q, k, v = numbers(1, QUERY_HEADS, view.dim), numbers(*row), numbers(*row)
    arena, table = torch.zeros(2**20, dtype=torch.uint8), ints(2, view.columns, 1)
    scratch = decoding.DecodeScratch(1, view.kv_heads, QUERY_HEADS // view.kv_heads, view.dim, 2 * H200, CPU)
    kernels = [
        record(monkeypatch, preparing, "_heads_kernel"),
        record(monkeypatch, decoding, "_decode_kernel"),
        record(monkeypatch, decoding, "combine_kernel"),
    ]
    preparing.prepare_heads(
        numbers(1, (QUERY_HEADS + 2 * view.kv_heads) * view.dim), ints(1), *torch.zeros(2, view.dim), q, k, v,
        v_norm=True, angles=(torch.zeros(4096, view.dim // 2),) * 2, pair_distance=view.dim // 2, eps=1e-6,
        latent=False, page_write=preparing.PageWrite(arena, table, view), slots=ints(1), pdl=True,
    )  # fmt: skip
    layer = PagedLayer(arena, view, table, QUERY_HEADS, mask, Scores(0.1))
    decoding.decode(q, k, v, layer, ints(1), ints(1), ints(2), scratch, torch.zeros_like(q), pdl=True)
    chained = record_chain(monkeypatch)
    launch(links(), most_following=18432)
    compiled = [*(kernel.compiled for kernel in kernels), compiled_from(chained)]
    sizes = [code_bytes(kernel.asm["cubin"]) for kernel in compiled]
    assert all(size > 1000 for size in sizes)
    assert sum(sizes) <= INSTRUCTION_CACHE_BYTES, sizes


def test_a_lone_window_has_the_programs_that_its_scratch_is_made_for():
    for key, tuning in tunings.LONE_WINDOWS.items():
        assert tuning.programs_per_sm == tunings.TUNINGS[key].programs_per_sm
