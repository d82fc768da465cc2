"""The Hopper kernels, compiled for Hopper from the arguments that the engine would launch them with. Needs no GPU."""

from __future__ import annotations

import inspect
import re
import subprocess

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windowpane.attention.chunk_attention import heads_of
from windowpane.attention.hopper import prefill as hopper
from windowpane.attention.hopper import prepare
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import CAUSAL, Mask
from windowpane.attention.scores import Scores
from windowpane.attention.segments import Launch
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.kv.retention import Window
from windowpane.schedule.step import Segment

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
FEW_SPILLED_BYTES = 32
# Three warp groups have 160 registers to a thread, and keep what tiles at the mask's edge need besides on the stack.
MASK_SPILLED_BYTES = 96
TYPES = {
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
CPU = torch.device("cpu")
BF16 = torch.bfloat16
LAYERS = {
    "31B window": (LayerView(16, 256, 16, 65, True, (0, 131_072), 0, 1, BF16), 32, Mask(Window(1024))),
    "31B full, latent": (LayerView(4, 512, 16, 80, False, (0,), 0, 1, BF16), 32, CAUSAL),
    "E4B full, pair": (LayerView(2, 512, 16, 80, False, (0, 32_768), 1, 2, BF16), 8, CAUSAL),
    "gpt-oss window, sinks": (LayerView(8, 64, 16, 24, True, (0, 16_384), 0, 1, BF16), 64, Mask(Window(128))),
    "Qwen3.5-27B": (LayerView(4, 256, 16, 80, False, (0, 32_768), 0, 1, BF16), 24, CAUSAL),
    "Qwen3": (LayerView(8, 128, 16, 80, False, (0, 32_768), 0, 1, BF16), 16, CAUSAL),
}


class Recorder:
    """Stands in for a kernel: keeps the arguments of a launch by name."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launched: dict[str, object] = {}

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg=None, launch_pdl=False, launch_cooperative_grid=False, **constants):
            self.launched = inspect.signature(self.kernel.fn).bind(*args, **constants).arguments
            self.options = {"num_warps": num_warps, "maxnreg": maxnreg, "launch_pdl": launch_pdl}
            self.options |= {"launch_cooperative_grid": launch_cooperative_grid}

        return launch

    def compile(self, aligned=()):
        """`aligned`: tensors that begin at whole 16 bytes, as all do that torch makes."""
        names = self.kernel.arg_names
        constant = {p.name for p in self.kernel.params if p.is_constexpr or self.launched[p.name] is None}
        signature = {name: "constexpr" if name in constant else _type(x) for name, x in self.launched.items()}
        constants = {(names.index(name),): x for name, x in self.launched.items() if name in constant}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constant}
        source = GluonASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=HOPPER, options=self.options)


def _type(x):
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{TYPES[x.base.dtype]}{list(x.block_shape)},{x.layout!r}>"
    if isinstance(x, torch.Tensor):
        return f"*{TYPES[x.dtype]}"
    return "fp32" if isinstance(x, float) else "i32"


@pytest.mark.parametrize("name", LAYERS)
def test_a_launch_compiles_for_hopper_within_its_memory(name, monkeypatch, tmp_path):
    view, query_heads, mask = LAYERS[name]
    for kernel in ("_edges_kernel", "_rotate_kernel"):
        monkeypatch.setattr(prepare, kernel, Recorder(getattr(prepare, kernel)))
    kernels = {kernel: Recorder(getattr(hopper, kernel)) for kernel in ("pair_kernel", "wide_kernel")}
    for kernel, recorder in kernels.items():
        monkeypatch.setattr(hopper, kernel, recorder)
    heads = heads_of(view, query_heads, mask)
    rope = (torch.zeros(4096, 64), torch.zeros(4096, 64), torch.zeros(512)) if view.latent else None
    arena, table = torch.zeros(2**20, dtype=torch.uint8), torch.zeros(2, view.columns, view.stripes, dtype=torch.int32)
    sinks = torch.zeros(query_heads) if "sinks" in name else None
    layer = PagedLayer(arena, view, table, query_heads, mask, Scores(0.1, sinks=sinks), rope)
    attention = hopper.HopperPrefill(layer, heads, PrefillScratch([heads], 4096, CPU))
    q = torch.zeros(1000, query_heads, view.dim, dtype=BF16)
    k = torch.zeros(1100, view.kv_heads, view.dim, dtype=BF16)
    segments = torch.tensor([Segment(1, 100, 1100, 9, 7, 900)], dtype=torch.int32)
    attention(
        q, k, k, segments, Launch(segments[:, :2], torch.zeros(10, 2, dtype=torch.int32), 1100), torch.zeros_like(q)
    )
    recorder = kernels["wide_kernel" if view.dim == 512 else "pair_kernel"]
    assert recorder.launched["q"].shape[0] == 1000 and recorder.launched["out"].shape[0] == 1000
    assert recorder.launched["v_present"].shape == torch.Size([1100, view.kv_heads * view.dim])
    compiled = recorder.compile()
    assert "wgmma" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES
    spilled = MASK_SPILLED_BYTES if view.dim == 64 else FEW_SPILLED_BYTES
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= spilled


def stack_bytes(cubin, folder):
    """What a thread spills. Nearly nothing: a kernel that spills in its loop loses its point."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told).group(1))
