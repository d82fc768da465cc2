from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windowpane.kv.formats import FORMATS, kv_format
from windowpane.plan.gates import Verdict, gate

VOLTA, TURING, AMPERE, GA10X, ADA, HOPPER, BLACKWELL = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)

capabilities = st.none() | st.sampled_from([VOLTA, TURING, AMPERE, GA10X, ADA, HOPPER, BLACKWELL])
schemes = st.none() | st.sampled_from(["int4", "fp8", "mxfp4", "awq"])
formats = st.sampled_from(sorted(FORMATS))


@pytest.mark.parametrize(
    ("format_name", "capability", "verdict"),
    [
        ("fp8_e4m3", GA10X, "software"),
        ("fp8_e4m3", AMPERE, "software"),
        ("fp8_e4m3", ADA, "native"),
        ("fp8_e4m3", HOPPER, "native"),
        ("fp8_per_token_head", GA10X, "software"),
        ("fp8_per_token_head", BLACKWELL, "native"),
        ("fp8_e5m2", GA10X, "native"),
        ("fp8_e5m2", TURING, "software"),
        ("bfloat16", TURING, "software"),
        ("bfloat16", VOLTA, "software"),
        ("bfloat16", AMPERE, "native"),
        ("float16", VOLTA, "native"),
        ("float32", VOLTA, "native"),
        ("int8_per_token_head", VOLTA, "native"),
        ("int4_per_token_head", TURING, "native"),
        ("float32", None, "native"),
        ("bfloat16", None, "software"),
        ("int4_per_token_head", None, "software"),
    ],
)
def test_hardware_decides_between_native_and_software(
    format_name: str, capability: tuple[int, int] | None, verdict: Verdict
) -> None:
    assert gate(format_name, capability, None, None).verdict == verdict


def test_e5m2_goes_with_int4_weights() -> None:
    answer = gate("fp8_e5m2", GA10X, "int4", None)
    assert answer.verdict == "native"
    assert "int4 weights do not matter" in answer.why


def test_calibrated_scales_refuse_the_other_fp8_and_say_what_works() -> None:
    answer = gate("fp8_e5m2", HOPPER, "fp8", "fp8_e4m3")
    assert answer.verdict == "refused"
    assert "calibrated for fp8_e4m3" in answer.why
    assert all(name in answer.instead for name in ("auto", "fp8_e4m3", "bfloat16", "fp8_per_token_head"))


@pytest.mark.parametrize("format_name", sorted(set(FORMATS) - {"fp8_e5m2"}))
def test_calibrated_scales_refuse_nothing_else(format_name: str) -> None:
    assert gate(format_name, HOPPER, "fp8", "fp8_e4m3").verdict == "native"


@given(formats, capabilities, schemes)
def test_without_calibrated_scales_everything_runs(
    format_name: str, capability: tuple[int, int] | None, weight_scheme: str | None
) -> None:
    answer = gate(format_name, capability, weight_scheme, None)
    assert answer.verdict != "refused"
    assert answer.why
    assert answer.instead == ""


@given(formats, capabilities, schemes, st.sampled_from(["fp8_e4m3", "fp8_e5m2", "int8"]))
def test_what_a_refusal_recommends_is_not_refused(
    format_name: str, capability: tuple[int, int] | None, weight_scheme: str | None, kv_cache_scheme: str
) -> None:
    answer = gate(format_name, capability, weight_scheme, kv_cache_scheme)
    if answer.verdict != "refused":
        return
    assert kv_format(format_name).family == "fp8"
    for name in FORMATS:
        if name in answer.instead.replace(",", " ").split():
            assert gate(name, capability, weight_scheme, kv_cache_scheme).verdict != "refused"


def test_a_scheme_that_is_no_format_is_not_recommended() -> None:
    assert gate("fp8_e4m3", HOPPER, None, "int8").instead.startswith("use a format that ignores those scales: bfloat16")


def test_an_unknown_format_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'fp7'.*bfloat16"):
        gate("fp7", HOPPER, None, None)
