"""Attention of Llama 4's chunked layers, compiled from what the engine would launch. Needs no GPU."""

from __future__ import annotations

import torch

from tests.kernels.test_formats_compile import CPU, ROWS, SHARED_BYTES, ints, numbers, record
from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.attention.mask import Mask
from windowpane.attention.scores import Scores
from windowpane.attention.triton import decode as decoding
from windowpane.attention.triton import prefill as prefilling
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.kv.retention import Chunk

QUERY_HEADS, KV_HEADS, DIM = 40, 8, 128


def test_decoding_and_chunks_of_prompts_spill_nothing(monkeypatch, tmp_path):
    kernels = [
        record(monkeypatch, decoding, "_decode_kernel"),
        record(monkeypatch, decoding, "combine_kernel"),
        record(monkeypatch, prefilling, "_pair_kernel"),
    ]
    view = LayerView(KV_HEADS, DIM, 16, 512, True, (0, 32_768), 0, 1, torch.bfloat16)
    arena, table = torch.zeros(2**20, dtype=torch.uint8), ints(2, view.columns, view.stripes)
    layer = PagedLayer(arena, view, table, QUERY_HEADS, Mask(Chunk(8192)), Scores(0.1))
    q, k = numbers(ROWS, QUERY_HEADS, DIM), numbers(ROWS, KV_HEADS, DIM)
    scratch = decoding.DecodeScratch(ROWS, KV_HEADS, QUERY_HEADS // KV_HEADS, DIM, 256, CPU)
    lists = (ints(ROWS), ints(ROWS), ints(ROWS + 1))
    decoding.decode(q, k, k, layer, *lists, scratch, torch.zeros_like(q), pdl=True)
    prefilling.prefill(q, k, k, layer, ints(1, 6), ints(1, 2), torch.zeros_like(q))
    for kernel in kernels:
        assert kernel.compiled.metadata.shared <= SHARED_BYTES[90]
        assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) == 0
