"""`windowpane serve` as people type `vllm serve`: a file of flags, several keys after one flag."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from windowpane.cli import main as cli
from windowpane.cli.words import spelled_out


def test_several_words_after_one_flag() -> None:
    words = ["serve", "m", "--api-key", "a", "b", "--port", "1", "--served-model-name", "x", "y"]
    assert spelled_out(words) == [
        *("serve", "m", "--api-key", "a", "--api-key", "b", "--port", "1"),
        *("--served-model-name", "x", "--served-model-name", "y"),
    ]
    unnamed = ["serve", "--api-key", "a", "m"]
    assert spelled_out(unnamed) == unnamed, "the last word is the model"
    assert spelled_out(["plan", "--config", "x"]) == ["plan", "--config", "x"]
    assert spelled_out(["serve", "--model", "m", "--api_key", "a_b"]) == ["serve", "m", "--api-key", "a_b"]


def test_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: some/model\nport: 9000\nmax_model_len: 8K\nenable-prefix-caching: false\nswa-full: true\n"
        "api-key: [a, b]\nallowed-origins: ['*']\nenable-admin: false\ntrust-remote-code: true\n"
    )
    flags = ["--port", "9000", "--max-model-len", "8K", "--no-enable-prefix-caching", "--swa-full"]
    flags += ["--api-key", "a", "--api-key", "b", "--allowed-origins", '["*"]']
    assert spelled_out(["serve", "--config", str(file)]) == ["serve", "some/model", *flags]
    typed = spelled_out(["serve", "mine", f"--config={file}", "--port", "1", "--api-key", "c"])
    assert typed == ["serve", "mine", *flags[2:6], *flags[10:], "--port", "1", "--api-key", "c"], "what is typed wins"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("- a\n- b\n", "maps names of flags"),
        ("{", "cannot be read"),
        ("nonsense: 1\n", "--nonsense"),
        ("enable-chunked-prefill: false\n", "--no-enable-chunked-prefill of `vllm serve` is not a flag here"),
        ("block-size: 16\n", "--block-size of `vllm serve` is not a flag here"),
    ],
)
def test_one_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "flags.yaml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", "m", "--config", str(file)])
    assert cli.main() == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--enable-admin"], "--admin-key"),
        (["--admin-key", "x"], "--enable-admin"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--allowed-origins", "*"], "no JSON list"),
        (["--requests-per-minute", "5"], "--api-key"),
    ],
)
def test_flags_that_need_others_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", "m", *words])
    assert cli.main() == 2
    assert message in capsys.readouterr().err
