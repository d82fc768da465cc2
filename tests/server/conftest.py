"""One tiny server per test module: starting one takes a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Running, running
from tests.tiny_model import make_model
from windowpane.text.parsers import Parsers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


# Shows what a model is told of tools, calls and thoughts.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning %}({{ m.reasoning }}) {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}|"
    "{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=TEMPLATE, max_position_embeddings=1024)
    with running(model, parsers=Parsers("qwen3", "hermes", True)) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Answers begin in a thought, and a random model never ends it."""
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=TEMPLATE)
    with running(model, parsers=Parsers("deepseek_r1")) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    with running(model) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """The same server for every test; each leaves it idle, with nothing live."""
    yield shared
    shared.wait_until_idle()
