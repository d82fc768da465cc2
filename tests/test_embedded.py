"""Embedded models: complete, checked, and when they are missing the command to type."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from windowpane.models import embedded
from windowpane.models.embedded import EMBEDDED, EmbeddedError, EmbeddedModel, Part, embedded_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "windowpane"


def install(site: Path, part: Part, data: bytes) -> None:
    """A distribution as pip would leave it."""
    info = site / f"{part.package.replace('-', '_')}-{part.version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
    (site / part.file).parent.mkdir(parents=True, exist_ok=True)
    (site / part.file).write_bytes(data)


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A model of two installed parts."""
    parts = tuple(Part(f"wp-test-part{n}", "1.0.0", f"wp_test_part{n}/data/part{n}") for n in (1, 2))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for part, data in zip(parts, (b"GGUF", b" and the rest"), strict=True):
        install(tmp_path / "site", part, data)
    sha256 = hashlib.sha256(b"GGUF and the rest").hexdigest()
    model = EmbeddedModel("tiny", "tiny.gguf", parts, sha256, "none", "pip install wp-test==1.0.0")
    monkeypatch.setitem(EMBEDDED, "tiny", model)
    return model


@pytest.mark.parametrize("name", ["gemma-3-270m", "smollm2-135m-instruct"])
def test_the_installed_models_are_whole(name: str) -> None:
    path = embedded_path(name)
    assert path.name == EMBEDDED[name].file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == EMBEDDED[name].sha256


def test_every_model_names_its_licence_and_pins() -> None:
    for model in EMBEDDED.values():
        assert model.licence
        assert "==" in model.install
        assert all(part.version in model.install for part in model.parts)


def test_parts_are_joined_once(small_model: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded_path("tiny")
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == b"GGUF and the rest"
    assert [file.name for file in cache.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(embedded, "_join", lambda *_: pytest.fail("joined again"))
    assert embedded_path("tiny") == path


def test_a_damaged_cache_is_made_anew(small_model: EmbeddedModel, cache: Path) -> None:
    embedded_path("tiny").write_bytes(b"GGUF and the dust")
    assert embedded_path("tiny").read_bytes() == b"GGUF and the rest"


def test_a_file_is_read_again_only_when_it_has_changed(
    small_model: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = embedded_path("tiny")
    embedded_path("tiny")
    assert not list(cache.glob("*.checked")), "a file that was just written may change unseen"
    monkeypatch.setattr(embedded, "SETTLED_NS", 0)
    embedded_path("tiny")
    with monkeypatch.context() as unread:
        unread.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert embedded_path("tiny") == path
    path.write_bytes(b"GGUF and the dust")
    os.utime(path, ns=(0, 0))
    assert embedded_path("tiny").read_bytes() == b"GGUF and the rest"


def test_a_record_that_makes_no_sense_is_not_believed(small_model: EmbeddedModel, cache: Path) -> None:
    path = embedded_path("tiny")
    (cache / "tiny.gguf.checked").write_text(small_model.sha256)
    path.write_bytes(b"GGUF and the dust")
    assert embedded_path("tiny").read_bytes() == b"GGUF and the rest"


def test_wrong_parts_leave_nothing_behind(small_model: EmbeddedModel, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "site" / small_model.parts[1].file).write_bytes(b" and the dust")
    with pytest.raises(EmbeddedError, match=r"SHA-256 .* pip install wp-test==1\.0\.0 --force-reinstall"):
        embedded_path("tiny")
    assert list(cache.iterdir()) == []


def test_a_wrong_single_file_is_refused(small_model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDED, "tiny", replace(small_model, parts=small_model.parts[:1]))
    with pytest.raises(EmbeddedError, match="SHA-256"):
        embedded_path("tiny")


def test_a_missing_package_is_an_error_with_the_command(
    small_model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (small_model.parts[0], Part("wp-not-there", "1.0.0", "x"))
    monkeypatch.setitem(EMBEDDED, "tiny", replace(small_model, parts=parts))
    with pytest.raises(EmbeddedError, match=r"needs the package wp-not-there: pip install wp-test==1\.0\.0$"):
        embedded_path("tiny")


def test_another_version_is_refused(small_model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(replace(part, version="2.0.0") for part in small_model.parts)
    monkeypatch.setitem(EMBEDDED, "tiny", replace(small_model, parts=parts))
    with pytest.raises(EmbeddedError, match=r"needs wp-test-part1 2\.0\.0, but 1\.0\.0 is installed: pip install"):
        embedded_path("tiny")


def test_a_package_without_its_file_is_refused(small_model: EmbeddedModel, tmp_path: Path) -> None:
    (tmp_path / "site" / small_model.parts[0].file).unlink()
    with pytest.raises(EmbeddedError, match=r"lacks its file wp_test_part1/data/part1"):
        embedded_path("tiny")


def test_an_unwritable_cache_is_an_error_with_the_way_out(
    small_model: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EmbeddedError, match="set XDG_CACHE_HOME"):
        embedded_path("tiny")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(EmbeddedError, match="gemma-3-270m, smollm2-135m-instruct"):
        embedded_path("gpt-7")
