from __future__ import annotations

import dataclasses

import pytest

from windowpane.plan.hardware import _ALIASES, GPUS, Gpu, _squeeze, parse_gpus

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("h200", 1, "h200"),
        ("2x3090", 2, "3090"),
        ("4×a100-80gb", 4, "a100-80gb"),
        ("8 * H100", 8, "h100"),
        ("2xRTX4090", 2, "4090"),
        (" 1 x l40s ", 1, "l40s"),
        ("RTX 3090 Ti", 1, "3090-ti"),
        ("rtx_6000_ada", 1, "6000-ada"),
        ("RTX A6000", 1, "a6000"),
        ("NVIDIA GeForce RTX 4090", 1, "4090"),
        ("NVIDIA A100-SXM4-40GB", 1, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 1, "h100"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1, "pro-6000"),
        ("Tesla V100-SXM2-32GB", 1, "v100-32gb"),
        ("Tesla T4", 1, "t4"),
        ("NVIDIA B300 SXM6 AC", 1, "b300"),
        ("NVIDIA GB10", 1, "gb10"),
        ("DGX Spark", 1, "gb10"),
        ("8x AMD Instinct MI300X", 8, "mi300x"),
        ("mi325x", 1, "mi325x"),
        ("MI355X", 1, "mi355x"),
        ("Apple M4 Max 128GB", 1, "m4-max-128gb"),
    ],
)
def test_cards_are_found_by_the_names_people_use(text: str, count: int, name: str) -> None:
    assert parse_gpus(text) == (count, GPUS[name])


@pytest.mark.parametrize(("text", "hint"), [("2x3091", "3090"), ("h20o", "h20"), ("4900", "4090"), ("L40x", "l40s")])
def test_an_unknown_card_gets_close_matches_the_list_and_the_way_out(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match="unknown GPU") as error:
        parse_gpus(text)
    message = str(error.value)
    assert hint in message[message.index("did you mean") : message.index("Known:")]
    assert all(name in message for name in GPUS)
    assert "--gpu-memory" in message


@pytest.mark.parametrize("text", ["a100", "v100"])
def test_a_name_of_several_sizes_is_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {text}-[0-9]+gb or {text}-[0-9]+gb"):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["", "x", "2x", "mi999x", "m4 max", "-1x3090", "a\nb"])
def test_what_is_no_card_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="GPU"):
        parse_gpus(text)


def test_what_a_caller_takes_besides_is_listed_only_for_it() -> None:
    with pytest.raises(ValueError, match="Known: v100"):
        parse_gpus("cpu")
    with pytest.raises(ValueError, match="Known: cpu, v100"):
        parse_gpus("cpuu", also=("cpu",))


def test_no_cards_are_not_a_count() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        parse_gpus("0x3090")


def test_every_alias_names_a_card_and_hides_none() -> None:
    names = {_squeeze(name) for name in GPUS}
    assert len(names) == len(GPUS)
    assert set(_ALIASES.values()) <= set(GPUS)
    assert all(alias == _squeeze(alias) and alias not in names for alias in _ALIASES)


@pytest.mark.parametrize(
    ("name", "board_mib"),
    [("h200", 143_771), ("3090", 24_576), ("4090", 24_564), ("t4", 15_360), ("h100", 81_559), ("5090", 32_607)],
)
def test_memory_is_what_cuda_sees_of_what_nvidia_smi_shows(name: str, board_mib: int) -> None:
    assert 0.97 <= GPUS[name].memory_bytes / (board_mib * 2**20) < 1


@pytest.mark.parametrize("card", GPUS.values(), ids=list(GPUS))
def test_figures_are_in_the_units_they_claim(card: Gpu) -> None:
    assert 8 * GIB < card.memory_bytes < 400 * GIB
    assert 200e9 < card.bandwidth_bytes_per_s < 10e12
    assert 15e12 < card.flops_per_s < 3e15
    assert card.capability is None or (7, 0) <= card.capability <= (12, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        card.memory_bytes = 1  # type: ignore[misc]
