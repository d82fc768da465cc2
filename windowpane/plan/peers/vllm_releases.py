"""What differs between vLLM's releases, as far as KV memory goes.

Read in the source distributions of 0.10.2 to 0.32.0 (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What differs between releases. `version` stands for all those that `covers` names.

    Kinds of layers form groups of the smallest kind's size, or of the largest's where that is less than `group_factor`
    times as many. `charges_drafts`: every drafted token takes one more block of each state group.
    """

    version: str
    covers: str
    group_factor: float
    pads_odd_pages: bool
    charges_drafts: bool
    charges_batches_in_flight: bool
    reports_concurrency: bool
    kv_dtypes: frozenset[str]


# Those of our names that vLLM knows too; float32 is only reached through `auto`.
_KV_DTYPES = frozenset({"bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"})
_KV_DTYPES_0_20 = _KV_DTYPES | {"fp8_per_token_head", "int8_per_token_head"}
_KV_DTYPES_0_24 = _KV_DTYPES_0_20 | {"int4_per_token_head"}

_0_20 = Release(
    version="0.20.0",
    covers="0.20.0",
    group_factor=1.5,
    pads_odd_pages=False,
    charges_drafts=True,
    charges_batches_in_flight=False,
    reports_concurrency=False,
    kv_dtypes=_KV_DTYPES_0_20,
)
# Padding and int4 are those of 0.24 and 0.25; from 0.20.1 to 0.23 both are refused as in 0.20.0.
_0_25 = replace(
    _0_20,
    version="0.25.0",
    covers="0.20.1–0.25",
    pads_odd_pages=True,
    reports_concurrency=True,
    kv_dtypes=_KV_DTYPES_0_24,
)
_0_26 = replace(_0_25, version="0.26.0", covers="0.26+", charges_batches_in_flight=True)

# Those that `plan` compares with.
RELEASES: tuple[Release, ...] = (_0_20, _0_25, _0_26)

_0_18 = replace(_0_20, version="0.19.1", covers="0.18–0.19", kv_dtypes=_KV_DTYPES)
_0_12 = replace(_0_18, version="0.17.1", covers="0.12–0.17", group_factor=1.25)
_0_11 = replace(_0_12, version="0.11.0", covers="up to 0.11", group_factor=1.0, charges_drafts=False)
# All that logs are explained with, the oldest first.
HISTORY: tuple[Release, ...] = (_0_11, _0_12, _0_18, *RELEASES)

_FIRST = ((0, 0, 0), (0, 12, 0), (0, 18, 0), (0, 20, 0), (0, 20, 1), (0, 26, 0))
_PADS_FROM = (0, 24, 0)


def release_of(version: str) -> Release:
    """The release that behaves as `version` (0.19.1rc1.dev301+g60995c05b, say)."""
    numbers = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        raise ValueError(f"cannot read vLLM version {version!r}; write it as in 0.26.0")
    at = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
    release = next(known for first, known in reversed(list(zip(_FIRST, HISTORY, strict=True))) if at >= first)
    if release is _0_25 and at < _PADS_FROM:
        return replace(release, version=version, pads_odd_pages=False, kv_dtypes=_KV_DTYPES_0_20)
    return release


def neighbours(version: str) -> tuple[Release, ...]:
    """The releases that a build between two of them may behave as: its own first, then those beside it."""
    own = release_of(version)
    at = next(i for i, known in enumerate(HISTORY) if known.covers == own.covers)
    if not re.search(r"dev|rc|\+g|^v?0\.[01](?:\.|$)", version):
        return (own,)
    if re.match(r"v?0\.[01](?:\.|$)", version):  # 0.1.dev20073+g8e685d198: built without tags, so of any release
        return tuple(reversed(HISTORY))
    return (own, *HISTORY[at + 1 : at + 2], *HISTORY[max(at - 1, 0) : at])
