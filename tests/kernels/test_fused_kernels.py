"""The kernels between matrix products against plain torch, in Triton's interpreter and float32."""

from __future__ import annotations

import math
import os
import warnings

import torch
import torch.nn.functional as F

from tests.kernels.interpreting import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from windowpane.attention.triton.view import LayerView
    from windowpane.lowering.gpu.kernels.branch_norms import add_branches, rms_norms
    from windowpane.lowering.gpu.kernels.gated import gated, relu2, times_row_gate, times_sigmoid
    from windowpane.lowering.gpu.kernels.heads import PageWrite, prepare_heads
    from windowpane.lowering.gpu.kernels.logits import ARGMAX_BLOCK, ArgmaxScratch, argmax, softcap
    from windowpane.lowering.gpu.kernels.matvec import Launch, matvec
    from windowpane.lowering.gpu.kernels.norms import residual_norm, rms_norm
    from windowpane.lowering.reference.ops import Ops
    from windowpane.lowering.rope import RopeTables, rotate
    from windowpane.models.blocks import Norm, Rope

EPS = 1e-6
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}
UNTOUCHED = 0xA5


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return Ops().norm(x, weight, Norm(eps))


def test_fused_kernels_agree_with_plain_torch_in_the_interpreter():
    run_interpreted("tests.kernels.test_fused_kernels")


# -- norms ---------------------------------------------------------------------------------------------------------


def check_rms_norm_of_ragged_strided_rows() -> None:
    for rows, width in ((1, 64), (3, 100), (2, 1025)):
        x = strided(rows, width)
        weight = torch.rand(width) + 0.5
        for w in (weight, None):
            out = nans(rows, width)
            rms_norm(x, w, EPS, out)
            close(out, _rms_norm(x, w, EPS))


def check_residual_norm_adds_scales_and_norms() -> None:
    for width in (64, 96):
        post, following = torch.rand(width) + 0.5, torch.rand(width) + 0.5
        scalars = (None, torch.tensor([0.37]), 0.37)
        for post_weight, scalar in ((p, s) for p in (post, None) for s in scalars):
            hidden, x, out = strided(3, width), strided(3, width), nans(3, width)
            want = hidden + (x if post_weight is None else _rms_norm(x, post_weight, EPS))
            want = want if scalar is None else want * scalar
            residual_norm(hidden, x, post_weight, following, scalar, EPS, out)
            close(hidden, want)
            close(out, _rms_norm(want, following, EPS))


def check_norms_of_branches() -> None:
    for rows, width in ((1, 64), (3, 100)):
        x, weights = strided(rows, width), [torch.rand(width) + 0.5, None, torch.rand(width)]
        for normed, weight in zip(rms_norms(x, weights, EPS), weights, strict=True):
            close(normed, _rms_norm(x, weight, EPS))
        second = torch.randn(rows, width)
        for first_norms, second_norms in ((True, True), (True, False), (False, False)):
            want = _rms_norm(x, weights[0], EPS) if first_norms else x
            want = want + (_rms_norm(second, weights[2], EPS) if second_norms else second)
            close(add_branches([x, second], [(first_norms, weights[0]), (second_norms, weights[2])], EPS), want)


def check_residual_norm_without_a_following_norm_leaves_out_alone() -> None:
    hidden, x, post, out = torch.randn(2, 80), torch.randn(2, 80), torch.rand(80), nans(2, 80)
    want = hidden + _rms_norm(x, post, EPS)
    residual_norm(hidden, x, post, None, None, EPS, out)
    close(hidden, want)
    assert out.isnan().all()


# -- gates ---------------------------------------------------------------------------------------------------------


def check_gates() -> None:
    for name, activation in ACTIVATIONS.items():
        gate_up = 5 * strided(3, 2 * 1100)
        gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -3.0])
        out = nans(3, 1100)
        gated(gate_up, out, name)
        close(out, activation(gate_up[:, :1100]) * gate_up[:, 1100:])
        gate, per_layer, out = strided(2, 48), torch.randn(2, 5, 48)[:, 3], nans(2, 48)
        gated(gate, out, name, up=per_layer)
        close(out, activation(gate) * per_layer)


def check_gates_of_heads_and_rows_and_no_gates() -> None:
    for rows, width in ((1, 64), (3, 1100)):
        x, gate, weight = strided(rows, width), strided(rows, width), torch.randn(1, 48)
        inputs, expected = strided(rows, 48), x * gate.sigmoid()
        times_sigmoid(x, gate)
        close(x, expected)
        expected = x * (inputs @ weight.t()).sigmoid()
        times_row_gate(x, inputs, weight)
        close(x, expected)
        expected = F.relu(x).square()
        relu2(x)
        close(x, expected)


# -- heads ---------------------------------------------------------------------------------------------------------


def heads(projected: torch.Tensor, first: int, count: int, dim: int) -> torch.Tensor:
    return projected[:, first * dim : (first + count) * dim].reshape(len(projected), count, dim)


def table(rope: Rope, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return RopeTables(positions).at(rope, torch.arange(positions))


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    cos, sin = table(rope, 64)
    at = positions.clamp(min=0).long()
    return rotate(x, cos[at][:, None], sin[at][:, None])


def check_heads_of_pairs() -> None:
    """All mixes of norms and rotation, with odd numbers of heads and a padding row."""
    positions = torch.tensor([0, 63, -1, 7], dtype=torch.int32)
    for query_heads, kv_heads, dim in ((6, 3, 16), (17, 1, 64), (0, 2, 32), (5, 0, 32)):
        rope = Rope("default", dim)
        for q_norm, v_norm, rotates in ((True, True, True), (False, False, True), (True, False, False)):
            w = torch.rand(2, dim) + 0.5
            projected = strided(4, (query_heads + 2 * kv_heads) * dim)
            q, k, v = (nans(4, n, dim) for n in (query_heads, kv_heads, kv_heads))
            prepare_heads(
                projected,
                positions,
                w[0] if q_norm else None,
                w[1] if q_norm else None,
                q,
                k,
                v,
                v_norm=v_norm,
                angles=table(rope, 64) if rotates else None,
                pair_distance=dim // 2,
                eps=EPS,
                latent=False,
            )
            wants = [heads(projected, 0, query_heads, dim), heads(projected, query_heads, kv_heads, dim)]
            if q_norm:
                wants = [_rms_norm(x, weight, EPS) for x, weight in zip(wants, w, strict=True)]
            if rotates:
                wants = [rotated(x, positions, rope) for x in wants]
            close(q, wants[0])
            close(k, wants[1])
            value = heads(projected, query_heads + kv_heads, kv_heads, dim)
            close(v, _rms_norm(value, None, EPS) if v_norm else value)


def check_heads_of_which_a_quarter_turns() -> None:
    """Frequencies of 0 have no angles in the table: 4 pairs of 16 turn, with dims half a head away."""
    dim, pairs = 32, 4
    rope = Rope("proportional", dim, partial=2 * pairs / dim)
    cos, sin = table(rope, 64)
    positions = torch.tensor([50, 9], dtype=torch.int32)
    projected, q, k, v = torch.randn(2, 3 * dim), nans(2, 1, dim), nans(2, 1, dim), nans(2, 1, dim)
    given = {"v_norm": False, "pair_distance": dim // 2, "eps": EPS, "latent": False}
    prepare_heads(
        projected,
        positions,
        None,
        None,
        q,
        k,
        v,
        angles=(cos[:, :pairs].contiguous(), sin[:, :pairs].contiguous()),
        **given,
    )
    close(q, rotated(heads(projected, 0, 1, dim), positions, rope))
    close(k, rotated(heads(projected, 1, 1, dim), positions, rope))


def check_heads_of_a_latent() -> None:
    """Only the first dims turn, and they are adjacent: the reference turns them where they were."""
    query_heads, kv_heads, dim, pairs = 5, 2, 32, 4
    half = dim // 2
    every = torch.arange(dim)
    order = torch.cat([every[:pairs], every[half : half + pairs], every[pairs:half], every[half + pairs :]])
    rope = Rope("proportional", dim, partial=2 * pairs / dim)
    cos, sin = table(rope, 64)
    positions = torch.tensor([3, -1, 41], dtype=torch.int32)
    q_norm, k_norm = torch.rand(2, dim) + 0.5
    before = torch.randn(3, query_heads + kv_heads, dim)
    projected = before[:, :, order].reshape(3, -1)
    q, k, v = (nans(3, n, dim) for n in (query_heads, kv_heads, kv_heads))
    prepare_heads(
        projected,
        positions,
        q_norm[order],
        k_norm[order],
        q,
        k,
        v,
        v_norm=True,
        angles=(cos[:, :pairs].contiguous(), sin[:, :pairs].contiguous()),
        pair_distance=pairs,
        eps=EPS,
        latent=True,
    )
    latent = _rms_norm(before[:, query_heads:], None, EPS)
    close(q, rotated(_rms_norm(before[:, :query_heads], q_norm, EPS), positions, rope)[:, :, order])
    close(k, rotated(latent * k_norm, positions, rope)[:, :, order])
    close(v, latent[:, :, order])


def check_stored_values_are_rounded_to_the_dtype_of_pages() -> None:
    projected = torch.randn(2, 3 * 16)
    k = torch.zeros(2, 1, 16, dtype=torch.float16)
    v = torch.zeros_like(k)
    positions = torch.zeros(2, dtype=torch.int32)
    given = {"v_norm": False, "angles": None, "pair_distance": 8, "eps": EPS, "latent": False}
    prepare_heads(projected, positions, None, None, nans(2, 1, 16), k, v, **given)
    assert torch.equal(k[:, 0], projected[:, 16:32].half())
    assert torch.equal(v[:, 0], projected[:, 32:].half())
    # Of a latent, K comes from the rounded value, as it will when that is read back.
    weight, stored, keys = 100 * torch.rand(16), torch.zeros_like(k), torch.zeros_like(k)
    prepare_heads(
        projected[:, :32], positions, None, weight, nans(2, 1, 16), keys, stored, **(given | {"latent": True})
    )
    latent = _rms_norm(projected[:, 16:32], None, EPS).half()
    assert torch.equal(stored[:, 0], latent)
    assert torch.equal(keys[:, 0], (latent.float() * weight).half())


def check_rows_go_to_their_pages_and_nowhere_else() -> None:
    """A ring table of two stripes, pages in mixed order, one padding row; every other byte of the arena stays.

    The last token of a chunk is seen by none after it, and its table entry means nothing: it stays out.
    """
    kv_heads, dim, block, columns, width = 3, 16, 16, 3, 5
    slots = torch.tensor([2, 0, -7, 1], dtype=torch.int32)
    positions = torch.tensor([5, 16 * 4 + 15, -1, 16 * 2], dtype=torch.int32)
    row_bytes = dim * 4
    for latent in (False, True):
        section_bytes = kv_heads * block * row_bytes
        offsets = (512,) if latent else (512, 512 + section_bytes)
        page_bytes = 512 + len(offsets) * section_bytes + 256
        pages = torch.randperm(3 * width * 2, dtype=torch.int32).view(3, width, 2) * (page_bytes // 256)
        for stripe, chunk in ((0, 0), (1, 0), (1, 40)):
            view = LayerView(kv_heads, dim, block, columns, True, offsets, stripe, 2, torch.float32)
            arena = torch.full((3 * width * 2 * page_bytes,), UNTOUCHED, dtype=torch.uint8)
            want = arena.clone()
            projected = torch.randn(4, (2 + kv_heads * (1 if latent else 2)) * dim)
            k, v = nans(4, kv_heads, dim), nans(4, kv_heads, dim)
            rope = Rope("default", dim)
            prepare_heads(
                projected,
                positions,
                torch.rand(dim),
                torch.rand(dim),
                nans(4, 2, dim),
                k,
                v,
                v_norm=True,
                angles=table(rope, 128),
                pair_distance=dim // 2,
                eps=EPS,
                latent=latent,
                page_write=PageWrite(arena, pages, view, unseen_every=chunk),
                slots=slots,
            )
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                if position < 0 or (chunk and position % chunk == chunk - 1):
                    continue
                page = int(pages[slot, position // block % columns, stripe]) * 256
                for offset, stored in zip(offsets, (v,) if latent else (k, v), strict=True):
                    for head in range(kv_heads):
                        at = page + offset + (head * block + position % block) * row_bytes
                        want[at : at + row_bytes] = stored[row, head].view(torch.uint8)
            assert torch.equal(arena, want)
            assert k.isfinite().all() and v.isfinite().all()


# -- logits --------------------------------------------------------------------------------------------------------


def check_softcap() -> None:
    logits = 40 * strided(2, 2100)
    logits[0, :6] = torch.tensor([0.0, 1e-4, -1e-4, 6.0, 400.0, -400.0])
    out = nans(2, 2100)
    softcap(logits, out, 30.0)
    close(out, 30 * torch.tanh(logits / 30))
    assert (out - 30 * torch.tanh(logits.double() / 30)).abs().max() < 2e-5
    softcap(logits, out, None)
    assert torch.equal(out, logits)


def check_argmax_takes_the_first_of_several() -> None:
    for width in (1, 700, ARGMAX_BLOCK, 2 * ARGMAX_BLOCK + 3):
        values = strided(5, width)
        values[1] = 0.5
        values[2] = -math.inf
        values[3, [width // 3, width - 1]] = 9.0
        values[4, width // 2] = math.nan
        out = torch.full((5,), -1, dtype=torch.int64)
        argmax(values, out, ArgmaxScratch(8, width, "cpu"))
        assert torch.equal(out, values.max(-1).indices)


# -- products ------------------------------------------------------------------------------------------------------


def check_products_of_ragged_sizes() -> None:
    shapes = [
        (1, 256, 18, Launch(4, 1)),
        (3, 300, 9, Launch(4, 2)),
        (2, 1024, 2, Launch(1, 4)),
        (8, 520, 10, Launch(8, 1)),
        (5, 300, 70, Launch(64, 4, uses_dot=True)),
        (8, 256, 64, Launch(64, 4, uses_dot=True)),
        (5, 700, 70, Launch(64, 4, uses_dot=True, parts=3)),
        (4, 256, 64, Launch(64, 4, uses_dot=True, parts=4)),  # two of which have nothing
    ]
    for rows, inputs, outputs, launch in shapes:
        x, weight = strided(rows, inputs), strided(outputs, inputs)
        for bias in (None, torch.randn(outputs)):
            out = nans(rows, outputs)
            matvec(x, weight, out, bias, launch=launch)
            close(out, F.linear(x, weight, bias), 1e-4)


def check_products_as_planned() -> None:
    """Few outputs, and fewer inputs than threads have room for."""
    for rows, inputs, outputs in ((1, 1100, 3), (2, 96, 4), (3, 200, 70)):
        x, weight, out = strided(rows, inputs), strided(outputs, inputs), nans(rows, outputs)
        matvec(x, weight, out)
        close(out, F.linear(x, weight), 1e-4)


def check_gated_products() -> None:
    width = 7
    launches = [(1, Launch(4, 2)), (3, Launch(1, 1)), (6, Launch(64, 4, uses_dot=True)), (2, None)]
    launches.append((4, Launch(64, 4, uses_dot=True, parts=2)))
    for rows, launch in launches:
        x, gate_up = strided(rows, 264), strided(2 * width, 264) / 8
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        for name, activation in ACTIVATIONS.items():
            out = nans(rows, width)
            matvec(x, gate_up, out, activation=name, launch=launch)
            close(out, activation(gate) * up, 1e-4)


# ------------------------------------------------------------------------------------------------------------------


def strided(rows: int, width: int) -> torch.Tensor:
    """Random rows that do not follow one another in memory."""
    return torch.randn(rows, width + 24)[:, 8 : 8 + width]


def nans(*shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def main() -> None:
    # The interpreter's own use of NumPy.
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
    torch.manual_seed(0)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()


if __name__ == "__main__":
    main()
