"""Which KV format runs how on which card, and what a checkpoint forbids: one table, read by `plan` and by `serve`.

A format is *native* where the card or its compiler converts it, *software* where the kernel decodes it with integer
arithmetic (same values, some throughput less), and *refused* only where the answer would be wrong. No format is refused
for want of hardware.

The one real conflict: a checkpoint that carries calibrated KV scales (its `kv_cache_scheme`) chose them for that
scheme's number range. Another 8-bit float with one scale per layer would apply them to a different range, so it is
refused. 16- and 32-bit formats need no scale, and the per-token-head formats measure their own as they write; both
ignore the calibrated ones and are fine. How the *weights* are quantized never matters: K and V are computed in the
compute dtype whatever the weights were stored as.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windowpane.kv.formats import FORMATS, kv_format

Verdict = Literal["native", "software", "refused"]


@dataclass(frozen=True, slots=True)
class Gate:
    """`why` is one sentence for people. `instead` is the way out of a refusal, empty otherwise."""

    verdict: Verdict
    why: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    """One format: the first compute capability that is native, and what happens at and below it."""

    native_from: tuple[int, int]
    native_why: str
    software_why: str = ""


_ANY_CARD = (0, 0)
_E4M3 = _Row(
    (8, 9), "SM 8.9 and newer convert E4M3 in hardware", "E4M3 conversion needs SM 8.9: decoded by bit operations"
)

_TABLE: dict[str, _Row] = {
    "float32": _Row(_ANY_CARD, "every card computes in float32"),
    "float16": _Row(_ANY_CARD, "every supported card computes in float16"),
    "bfloat16": _Row(
        (8, 0),
        "SM 8.0 and newer compute in bfloat16",
        "bfloat16 arithmetic needs SM 8.0: stored as bfloat16, widened to float32 by a shift",
    ),
    "fp8_e4m3": _E4M3,
    "fp8_per_token_head": _E4M3,
    "fp8_e5m2": _Row(
        (8, 0),
        "E5M2 is the upper byte of a float16, which Triton converts on SM 8.0 and newer",
        "E5M2 conversion needs SM 8.0: decoded by a shift, as the upper byte of a float16",
    ),
    "int8_per_token_head": _Row(_ANY_CARD, "every card converts int8"),
    "int4_per_token_head": _Row(_ANY_CARD, "two codes a byte, unpacked by a mask and a shift on every card"),
}


def gate(
    format_name: str, capability: tuple[int, int] | None, weight_scheme: str | None, kv_cache_scheme: str | None
) -> Gate:
    """The verdict for one KV format (already resolved: not `auto`) on one device with one checkpoint.

    `capability` None is a CPU. `weight_scheme` names how the weights are quantized and `kv_cache_scheme` the format
    that the checkpoint's KV scales were calibrated for, each None where there is none. An unknown format is a
    ValueError.
    """
    format_name = kv_format(format_name).name
    if kv_cache_scheme is not None and _needs_other_scales(format_name, kv_cache_scheme):
        return _refused(format_name, kv_cache_scheme)
    verdict, why = _on_device(format_name, capability)
    if format_name == "fp8_e5m2" and weight_scheme is not None:
        # Worth a word, because vLLM refuses this pair.
        why += f"; {weight_scheme} weights do not matter, K and V are computed before they are stored"
    return Gate(verdict, why)


def _needs_other_scales(format_name: str, kv_cache_scheme: str) -> bool:
    fmt = kv_format(format_name)
    return fmt.family == "fp8" and fmt.scale_bytes == 0 and format_name != kv_cache_scheme


def _refused(format_name: str, kv_cache_scheme: str) -> Gate:
    why = f"the checkpoint's KV scales were calibrated for {kv_cache_scheme} and would be wrong for {format_name}"
    same = f"auto or {kv_cache_scheme}, or " if kv_cache_scheme in FORMATS else ""
    instead = (
        f"use {same}a format that ignores those scales: "
        "bfloat16, float16, float32, fp8_per_token_head, int8_per_token_head or int4_per_token_head"
    )
    return Gate("refused", why, instead)


def _on_device(format_name: str, capability: tuple[int, int] | None) -> tuple[Verdict, str]:
    row = _TABLE[format_name]
    if capability is None:
        if format_name == "float32":
            return "native", "CPUs compute in float32"
        return "software", f"CPUs compute in float32: {format_name} is decoded by the reference attention"
    if capability >= row.native_from:
        return "native", row.native_why
    return "software", row.software_why
