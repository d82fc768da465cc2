"""Kernels of coded KV, compiled from the arguments that the engine would launch them with. Needs no GPU."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.test_hopper_compiles import stack_bytes
from windowpane.attention.hopper import prepare
from windowpane.attention.mask import CAUSAL, Mask
from windowpane.attention.scores import Scores
from windowpane.attention.triton import decode as decoding
from windowpane.attention.triton import prefill
from windowpane.attention.triton import widen as widening
from windowpane.attention.triton import write as writing
from windowpane.attention.triton.codes import CODES, E4M3, E5M2, INT4, INT8
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.kv.formats import FORMATS
from windowpane.kv.retention import Window
from windowpane.lowering.gpu.kernels import heads as preparing

POINTERS = {
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.float32: "*fp32", torch.bfloat16: "*bf16",
}  # fmt: skip
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
DIVISIBLE = [["tt.divisibility", 16]]
CPU = torch.device("cpu")
ROWS = 8


class Recorder:
    """Stands in for a kernel: compiles what is launched, specialised as a launch would be."""

    def __init__(self, kernel, capability: int) -> None:
        self.kernel, self.target = kernel, GPUTarget("cuda", capability, 32)
        self.compiled = None

    def __getitem__(self, grid):
        def launch(*args, launch_pdl=False, **named):
            options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
            given = inspect.signature(self.kernel.fn).bind(*args, **named).arguments
            signature, constants, attributes = {}, {}, {}
            for index, parameter in enumerate(self.kernel.params):
                x, name = given[parameter.name], parameter.name
                if (
                    parameter.is_constexpr
                    or x is None
                    or (isinstance(x, int) and x == 1 and not parameter.do_not_specialize)
                ):
                    signature[name], constants[index,] = "constexpr", x
                elif isinstance(x, TensorDescriptor):
                    signature[name] = f"tensordesc<{POINTERS[x.base.dtype][1:]}{list(x.block_shape)}>"
                elif isinstance(x, torch.Tensor):
                    signature[name] = POINTERS[x.dtype]
                    if not parameter.do_not_specialize_on_alignment:
                        attributes[index,] = DIVISIBLE
                else:
                    signature[name] = "fp32" if isinstance(x, float) else "i32"
                    if isinstance(x, int) and x % 16 == 0 and not parameter.do_not_specialize:
                        attributes[index,] = DIVISIBLE
            source = ASTSource(self.kernel, signature, constants, attributes)
            self.compiled = triton.compile(source, target=self.target, options=options)

        return launch


def view_of(name: str, *, latent: bool = False) -> LayerView:
    """A layer of Gemma 4 31B."""
    heads, dim, columns = (4, 512, 80) if latent else (16, 256, 65)
    fmt, parts = FORMATS[name], 1 if latent else 2
    row_bytes = fmt.row_bytes(dim)
    data = tuple(heads * 16 * row_bytes * i for i in range(parts))
    scales = tuple(heads * 16 * (row_bytes * parts + 4 * i) for i in range(parts)) if fmt.scale_bytes else ()
    return LayerView(
        heads,
        dim,
        16,
        columns,
        not latent,
        data,
        0,
        1,
        torch.int16,
        CODES[name],
        row_bytes // 2,
        scales,
        (0.5,) * parts,
    )


def layer_of(view: LayerView, scores: Scores) -> PagedLayer:
    """Latents see everything, pairs a window."""
    arena, table = torch.zeros(2**20, dtype=torch.uint8), ints(2, view.columns, view.stripes)
    rope = (torch.zeros(4096, 64), torch.zeros(4096, 64), torch.zeros(view.dim)) if view.latent else None
    return PagedLayer(arena, view, table, 32, CAUSAL if view.latent else Mask(Window(1024)), scores, rope)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def record(monkeypatch, module, name: str, capability: int = 90) -> Recorder:
    recorder = Recorder(getattr(module, name), capability)
    monkeypatch.setattr(module, name, recorder)
    return recorder


@pytest.mark.parametrize(
    ("fmt", "latent", "capability"),
    [
        ("int8_per_token_head", False, 90),
        ("fp8_per_token_head", False, 90),
        ("fp8_e5m2", True, 90),
        ("int4_per_token_head", True, 90),
        ("fp8_e4m3", False, 86),
    ],
)
def test_decoding(fmt, latent, capability, monkeypatch, tmp_path):
    kernel = record(monkeypatch, decoding, "_decode_kernel", capability)
    combine = record(monkeypatch, decoding, "combine_kernel", capability)
    monkeypatch.setattr(decoding, "MOST_COMBINED", 0)
    view = view_of(fmt, latent=latent)
    q, k = numbers(ROWS, 32, view.dim), numbers(ROWS, view.kv_heads, view.dim)
    scratch = decoding.DecodeScratch(ROWS, view.kv_heads, 32 // view.kv_heads, view.dim, 256, CPU)
    layer = layer_of(view, Scores(0.1))
    decoding.decode(
        q, k, k, layer, ints(ROWS), ints(ROWS), ints(ROWS + 1), scratch, torch.zeros_like(q), pdl=capability == 90
    )
    ptx = kernel.compiled.asm["ptx"]
    made = {E4M3: "mul.rn.f16x2", E5M2: "fma.rn.bf16x2", INT8: "sub.f16x2", INT4: "fma.rn.f16x2"}
    assert made[view.code] in ptx, "codes become operands two at a time"
    assert "e4m3" not in ptx and "e5m2" not in ptx, "8-bit floats are read with integer arithmetic alone"
    assert kernel.compiled.metadata.shared <= SHARED_BYTES[capability]
    # A few registers less to a thread measured faster than none spilled: more programs run at once.
    assert stack_bytes(kernel.compiled.asm["cubin"], tmp_path) <= 320
    assert stack_bytes(combine.compiled.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize(("fmt", "latent"), [("int8_per_token_head", False), ("int4_per_token_head", True)])
def test_several_rows_of_a_sequence(fmt, latent, monkeypatch):
    kernels = [record(monkeypatch, decoding, name) for name in ("_decode_kernel", "combine_rows_kernel")]
    view, rows = view_of(fmt, latent=latent), 4
    q, k = numbers(ROWS * rows, 32, view.dim), numbers(ROWS * rows, view.kv_heads, view.dim)
    scratch = decoding.DecodeScratch.of_rows(view, 32 // view.kv_heads, rows, CPU)
    layer = layer_of(view, Scores(0.1))
    decoding.decode_rows(
        q, k, k, layer, ints(ROWS, 6), ints(ROWS + 1), scratch, torch.zeros_like(q), rows=rows, pdl=True
    )
    assert all(kernel.compiled.metadata.shared <= SHARED_BYTES[90] for kernel in kernels)


@pytest.mark.parametrize(
    ("fmt", "latent"),
    [
        ("int8_per_token_head", True),
        ("fp8_per_token_head", False),
        ("fp8_e4m3", True),
        ("int4_per_token_head", False),
        ("int4_per_token_head", True),
    ],
)
def test_making_storing_and_widening(fmt, latent, monkeypatch):
    view = view_of(fmt, latent=latent)
    layer = layer_of(view, Scores(0.1))
    arena, table = layer.arena, layer.table
    making = record(monkeypatch, preparing, "_heads_kernel")
    q, k = numbers(ROWS, 32, view.dim), numbers(ROWS, view.kv_heads, view.dim)
    projected = numbers(ROWS, (32 + view.kv_heads * (1 if latent else 2)) * view.dim)
    pairs = 64 if latent else view.dim // 2
    for page_write in (None, preparing.PageWrite(arena, table, view)):
        coded = None if page_write else writing.CodedRows.empty(ROWS, view, CPU)
        preparing.prepare_heads(
            projected, ints(ROWS), torch.zeros(view.dim), torch.zeros(view.dim), q, k, torch.zeros_like(k), v_norm=True,
            angles=(torch.zeros(4096, pairs),) * 2, pair_distance=pairs, eps=1e-6, latent=latent, page_write=page_write,
            slots=ints(ROWS) if page_write else None, view=view, coded=coded,
            balance=None if latent else torch.zeros(2, view.kv_heads, view.dim), pdl=True,
        )  # fmt: skip
        assert making.compiled is not None
    storing = record(monkeypatch, writing, "_write_kernel")
    rows, lists = writing.CodedRows.empty(ROWS, view, CPU), (ints(ROWS), ints(ROWS), ints(ROWS))
    writing.write(rows.k, rows.v, arena, view, *lists, scales=(rows.k_scales, rows.v_scales))
    kernel = record(monkeypatch, widening, "_widen_kernel")
    segments = torch.tensor([(0, 100, 200, 0, 0, 100)], dtype=torch.int32)
    plan = widening.plan_past(segments.numpy(), layer, torch.bfloat16, 2**24)[0]
    widening.widen(layer, segments, plan, torch.zeros(2**24, dtype=torch.uint8), torch.bfloat16)
    assert storing.compiled is not None and kernel.compiled is not None
    assert view.dim // (4 if view.code == INT4 else 2) == writing.CodedRows.empty(1, view, CPU).k.shape[2]


@pytest.mark.parametrize(("fmt", "balanced"), [("int8_per_token_head", True), ("int4_per_token_head", False)])
def test_queries_of_a_layer_that_attends_what_another_coded(fmt, balanced, monkeypatch):
    view = view_of(fmt)
    making = record(monkeypatch, preparing, "_heads_kernel")
    nothing = numbers(ROWS, 0, view.dim)
    preparing.prepare_heads(
        numbers(ROWS, 32 * view.dim), ints(ROWS), torch.zeros(view.dim), None, numbers(ROWS, 32, view.dim), nothing,
        nothing, v_norm=True, angles=(torch.zeros(4096, view.dim // 2),) * 2, pair_distance=view.dim // 2, eps=1e-6,
        latent=False, view=view, balance=torch.zeros(2, view.kv_heads, view.dim) if balanced else None,
    )  # fmt: skip
    assert making.compiled is not None


@pytest.mark.parametrize(
    "kernel", [prefill._pair_kernel, prefill._latent_kernel, prepare._edges_kernel, prepare._rotate_kernel]
)
def test_a_decoded_past_is_read_by_kernels_that_are_compiled_once(kernel):
    """Its table is another one in every step; a kernel for each kind of width would be compiled while requests wait."""
    fixed = {p.name for p in kernel.params if p.do_not_specialize}
    assert fixed >= {"table_stride", "columns", "stripe"}
    assert next(p for p in kernel.params if p.name == "TABLE").do_not_specialize_on_alignment
