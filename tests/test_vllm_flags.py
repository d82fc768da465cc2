"""Commands carried over from `vllm serve`: a flag that is not here is answered by name. Help shows whole names."""

from __future__ import annotations

import re
import sys

import pytest
import typer

from windowpane.cli import main as cli
from windowpane.cli.vllm_flags import INSTEAD, SHORT, instead_of

COMMANDS = ("plan", "simulate", "doctor", "generate", "chat", "bench", "serve")


def options(command: str) -> set[str]:
    group = typer.main.get_command(cli.app)
    found = group.get_command(None, command)  # type: ignore[attr-defined]
    names = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in names if name.startswith("-")}


HERE = set().union(*map(options, COMMANDS))


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["windowpane", *words])
    assert cli.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_the_table_lists_nothing_that_is_here() -> None:
    assert not INSTEAD.keys() & (options("serve") | options("plan"))
    assert set(SHORT.values()) <= INSTEAD.keys()
    assert all(re.fullmatch(r"--[a-z0-9][a-z0-9-]+", flag) for flag in INSTEAD)
    assert len(INSTEAD) > 310


def test_every_flag_that_is_named_instead_exists() -> None:
    for flag, instead in INSTEAD.items():
        for named in re.findall(r"--[a-z][a-z-]*[a-z]", instead):
            assert named in HERE, f"{flag} points to {named}"


def test_each_is_answered_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, instead in INSTEAD.items():
        assert instead_of(["serve", "some-model", flag], flag) == (
            f"{flag} of `vllm serve` is not a flag here: {instead}"
        )
    message = answer(monkeypatch, capsys, "serve", "some-model", "--max-num-queued-reqs", "9")
    assert message.startswith("windowpane: --max-num-queued-reqs of `vllm serve` is not a flag here: use --max-queue")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill"),
        (["--data_parallel_size=2"], "--data-parallel-size"),
        (["--compilation-config.mode", "3"], "--compilation-config"),
        (["-pp", "2"], "--pipeline-parallel-size"),
        (["-O3"], "--optimization-level"),
        (["-dpm"], "--data-parallel-multi-port-external-lb"),
        (["--spec-tokens", "3"], "--spec-tokens"),
    ],
)
def test_vllms_other_spellings_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], flag: str
) -> None:
    message = answer(monkeypatch, capsys, "serve", *words)
    assert INSTEAD[flag] in message and words[0].partition("=")[0] in message


def test_a_slip_of_the_pen_still_gets_the_nearest_spelling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = answer(monkeypatch, capsys, "plan", "gemma-3-4b", "--max-modle-len", "1024")
    assert "--max-model-len" in message


def test_tensor_parallelism_has_vllms_short_form() -> None:
    assert "-tp" in options("serve") & options("plan") & options("simulate")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_shows_whole_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["windowpane", command, "--help"])
    assert cli.main() == 0
    out, _ = capsys.readouterr()
    words = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", out))
    assert options(command) <= words
    assert max(map(len, out.splitlines())) <= max(80, columns)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "24"], "24 is 24 bytes, too few for a model; did you mean 24GiB?"),
        (["--kv-cache-memory-bytes", "11.54"], "11.54 is 11 bytes, too few for a model; did you mean 11.54GiB?"),
        (
            ["--max-model-len", "200K"],
            "--max-model-len 204,800 is beyond what gemma-3-4b was made for; its limit is 131,072 "
            "(max_position_embeddings in its config): write --max-model-len 131072 or leave it out",
        ),
        (["--concurrency", "4", "--json"], "--concurrency 4 needs to know how much memory there is: add --gpu"),
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
    ],
)
def test_a_slip_of_the_unit_says_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in answer(monkeypatch, capsys, "plan", "gemma-3-4b", *words)


def test_concurrency_without_a_card_lists_cards_that_hold_so_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["windowpane", "plan", "gemma-3-4b", "--concurrency", "12"])
    assert cli.main() == 0
    out, _ = capsys.readouterr()
    assert "Cards that hold 12 sequences at once" in out
    rows = dict(re.findall(r"--gpu (\S+) +[\d.]+ GiB +\d+ +([\d,]+)", out))
    assert int(rows["4090"].replace(",", "")) < 131_072 == int(rows["h200"].replace(",", ""))
