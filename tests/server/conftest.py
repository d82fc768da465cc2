"""One tiny server per test module: starting one takes a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Running, running
from tests.tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    with running(model) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The same server for every test; each leaves it idle, with nothing live."""
    yield shared
    shared.wait_until_idle()
