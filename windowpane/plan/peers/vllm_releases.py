"""What differs between vLLM's releases, as far as KV memory goes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What differs between releases. `version` stands for all those that `covers` names."""

    version: str
    covers: str
    pads_odd_pages: bool
    charges_batches_in_flight: bool
    reports_concurrency: bool
    kv_dtypes: frozenset[str]


# Those of our names that vLLM knows too; float32 is only reached through `auto`.
_KV_DTYPES_0_20 = frozenset(
    {"bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"}
)
_KV_DTYPES_0_24 = _KV_DTYPES_0_20 | {"int4_per_token_head"}

RELEASES: tuple[Release, ...] = (
    Release(
        version="0.20.0",
        covers="0.20.0",
        pads_odd_pages=False,
        charges_batches_in_flight=False,
        reports_concurrency=False,
        kv_dtypes=_KV_DTYPES_0_20,
    ),
    # Padding and int4 are those of 0.24 and 0.25; from 0.20.1 to 0.23 both are refused as in 0.20.0.
    Release(
        version="0.25.0",
        covers="0.20.1–0.25",
        pads_odd_pages=True,
        charges_batches_in_flight=False,
        reports_concurrency=True,
        kv_dtypes=_KV_DTYPES_0_24,
    ),
    Release(
        version="0.26.0",
        covers="0.26+",
        pads_odd_pages=True,
        charges_batches_in_flight=True,
        reports_concurrency=True,
        kv_dtypes=_KV_DTYPES_0_24,
    ),
)

_PADS_FROM = (0, 24, 0)


def release_of(version: str) -> Release:
    """The release that behaves as `version` (0.19.1rc1.dev301+g60995c05b, say); what is older counts as 0.20.0."""
    numbers = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        raise ValueError(f"cannot read vLLM version {version!r}; write it as in 0.26.0")
    at = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
    oldest, middle, newest = RELEASES
    if at <= (0, 20, 0):
        return oldest
    if at >= (0, 26, 0):
        return newest
    if at < _PADS_FROM:
        return replace(middle, version=version, pads_odd_pages=False, kv_dtypes=oldest.kv_dtypes)
    return middle
