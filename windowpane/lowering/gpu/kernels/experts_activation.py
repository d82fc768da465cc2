"""What experts do between their two products, for kernels; and which rows of a weight are a gate and what it gates."""

from __future__ import annotations

import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.gated import activate

NO_ACTIVATION, SILU, GELU, CLAMPED, RELU2 = (tl.constexpr(i) for i in range(5))
ACTIVATIONS: dict[str, int] = {"silu": SILU.value, "gelu_pytorch_tanh": GELU.value, "relu2": RELU2.value}


def code_of(activation: str, limit: float | None) -> int:
    """`limit`: gates and what they gate are cut there, as in gpt-oss."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"no expert kernel for activation {activation!r}; there is {', '.join(ACTIVATIONS)}")
    code: int = ACTIVATIONS[activation] if limit is None else CLAMPED.value
    return code


@triton.constexpr_function
def is_gated(activation):
    return 1 <= activation <= 3


@triton.jit
def weight_rows(tile, outputs, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, RUN: tl.constexpr):
    """Rows of one expert's weight for a tile of ROWS; of a gated one, RUN of the gate and the same of what it gates in
    turn. Beyond the last output the last row is read again: loads need no mask, and the result is not stored.
    """
    r = tile * ROWS + tl.arange(0, ROWS)
    if is_gated(ACTIVATION):
        width = outputs // 2
        gate = r // (2 * RUN) * RUN + r % RUN
        return tl.minimum(gate, width - 1) + r // RUN % 2 * width
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        return tl.minimum(r, outputs - 1)


@triton.jit
def gate_values(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """In float32."""
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:  # noqa: RET505 - as above
        return activate(gate, ACTIVATION == GELU) * up


@triton.jit
def ungated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == RELU2:
        x = tl.maximum(x, 0.0)
        return x * x
    else:  # noqa: RET505 - as above
        return x
