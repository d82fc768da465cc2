"""Mamba-2's kernels on a GPU in real shapes, against the reference in float32; pages that nobody writes stay NaN."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu_checks.fused import CUDA, Checks
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.lowering.gpu.kernels.mamba2 import Mamba2Layer, chunk_mamba2, decode_mamba2
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces
from windowpane.lowering.reference.recurrence import causal_convolution, mamba2_scan
from windowpane.models.families.mamba import Mamba

SHAPES = {
    "nemotron 3 nano": (Mamba(64, 64, 8, 128, 4, "float32"), {"norms_groups": True}),
    "granite 4 small": (Mamba(128, 64, 1, 128, 4, "float32"), {}),
    "falcon-h1 7b": (Mamba(24, 128, 1, 256, 4, "float32"), {"norm": False, "multipliers": (1.1, 0.9, 1.2, 0.8, 1.0)}),
}
# Tokens that sequences have in this step, and where they start: decoding ones first.
DECODING, LENGTHS, STARTS = 3, (1, 1, 1, 2, 65, 1000), (7, 0, 30, 0, 9, 0)
# Relative errors of outputs and states. In bf16, chunks round the state and what they weigh by.
ALLOWED = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 2e-2)}


def checks() -> Checks:
    return [
        (f"mamba2 {name}, {dtype}", partial(agrees, *shape, dtype))
        for name, shape in SHAPES.items()
        for dtype in ALLOWED
    ]


def agrees(sizes: Mamba, rest: dict[str, object], dtype: torch.dtype, device: torch.device = CUDA) -> str:
    """A step of decoding rows, one of them padding, and segments: outputs, tails and states."""
    described = sizes.mixer("", 64, 0, 1e-5, **rest)  # type: ignore[arg-type]
    inner, channels = described.heads * described.head_dim, described.conv.shape[0]
    states = described.groups * described.state_dim
    tail_bytes, x_bytes = channels * 3 * dtype.itemsize, inner * 3 * dtype.itemsize
    matrix_first = -(-tail_bytes // OFFSET_UNIT_BYTES) * OFFSET_UNIT_BYTES
    page_units = (matrix_first + inner * described.state_dim * 4) // OFFSET_UNIT_BYTES
    pages = 2 * len(LENGTHS) + 1
    arena = torch.full((pages * page_units * OFFSET_UNIT_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    unit = OFFSET_UNIT_BYTES // dtype.itemsize
    tails = (
        StatePart(arena.view(dtype), 0, unit, described.heads, described.head_dim * 3),
        StatePart(arena.view(dtype), x_bytes // dtype.itemsize, unit, described.groups, 2 * described.state_dim * 3),
    )
    matrix = StatePart(arena.view(torch.float32), matrix_first // 4, OFFSET_UNIT_BYTES // 4, described.heads, 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    rates, dt_bias, skip = random(3, sizes.heads)
    norm = None if described.norm is None else random(inner)
    conv, conv_bias = random(channels, 4) / 2, random(channels)
    layer = Mamba2Layer(described, tails, matrix, conv, conv_bias, rates.exp(), dt_bias - 2, skip, norm)
    order = torch.randperm(2 * len(LENGTHS)).tolist()
    at = [page * page_units for page in order]
    before, after = at[: len(LENGTHS)], at[len(LENGTHS) :]

    def stored(page: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = arena[page * OFFSET_UNIT_BYTES :]
        matrices = own[matrix_first:].view(torch.float32)[: inner * described.state_dim]
        return own[:tail_bytes].view(dtype).view(channels, 3), matrices.view(sizes.heads, sizes.head_dim, -1)

    for page, start in zip(before, STARTS, strict=True):
        if start:
            for part in stored(page):
                part.normal_()
    made = random(sum(LENGTHS) + 1, 2 * inner + 2 * states + sizes.heads).to(dtype)
    rows = DECODING + 1  # a padding row behind the decoding ones
    table, row = [], rows
    for slot, (count, start) in enumerate(zip(LENGTHS[DECODING:], STARTS[DECODING:], strict=True)):
        table.append((slot, start, start + count, row, row, count))
        row += count

    def ints(*values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    out = torch.full((len(made), inner), torch.nan, dtype=dtype, device=device)
    decoding = StatePlaces(
        ints(*before[:DECODING], before[0]), ints(*after[:DECODING], after[0]), ints(*STARTS[:DECODING], -1)
    )
    decode_mamba2(made[:rows], decoding, layer, out[:rows])
    segments = StatePlaces(ints(*before[DECODING:]), ints(*after[DECODING:]), ints(*STARTS[DECODING:]))
    chunk_mamba2(made, segments, ints(*table), max(LENGTHS), rows, layer, out)
    assert not out[DECODING].any(), "a padding row is not 0"
    firsts = [*range(DECODING), *(entry[3] for entry in table)]
    worst = [0.0, 0.0]
    for first, count, start, old, new in zip(firsts, LENGTHS, STARTS, before, after, strict=True):
        tail, state = (part.float() if start else torch.zeros_like(part, dtype=torch.float32) for part in stored(old))
        expected, tail, state = _plain(made[first : first + count], layer, tail, state)
        found_tail, found_state = stored(new)
        assert torch.equal(found_tail.float(), tail), "a convolution's tail is wrong"
        errors = _relative(out[first : first + count], expected), _relative(found_state, state)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    assert all(error <= most for error, most in zip(worst, ALLOWED[dtype], strict=True)), worst
    assert (arena[2 * len(LENGTHS) * page_units * OFFSET_UNIT_BYTES :] == 0xFF).all(), "a page of nobody was written"
    return f"outputs {worst[0]:.1e}, states {worst[1]:.1e}"


def _plain(
    made: torch.Tensor, layer: Mamba2Layer, tail: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence's rows, and the tail and state behind them."""
    described, inner = layer.described, layer.inner
    states, norm = described.groups * described.state_dim, described.norm
    widths = [inner, inner, states, states, described.heads]
    factors = [torch.full((w,), m, device=made.device) for w, m in zip(widths, layer.multipliers, strict=True)]
    z, xbc, steps = (made.float() * torch.cat(factors)).to(made.dtype).float().split(
        [inner, inner + 2 * states, described.heads], dim=-1
    )  # fmt: skip
    mixed, tail = causal_convolution(xbc[None], tail[None], layer.conv, layer.conv_bias)
    x, write, read = F.silu(mixed).split([inner, states, states], dim=-1)
    x = x.unflatten(-1, (described.heads, -1))
    write, read = (part.unflatten(-1, (described.groups, -1)) for part in (write, read))
    steps = F.softplus(steps + layer.dt_bias).clamp(*described.dt_limits)[None]
    y, state = mamba2_scan(x, write, read, steps, layer.rates, state[None])
    y = (y + layer.skip[:, None] * x)[0].flatten(1) * F.silu(z)
    if norm is not None and layer.norm is not None:
        parts = y.unflatten(1, (described.groups if described.norms_groups else 1, -1))
        y = F.rms_norm(parts, (parts.shape[-1],), None, norm.eps).flatten(1) * layer.norm
    return y, tail[0], state[0]


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())
