"""One Ray and one set of replicas for all tests that need them: starting them takes most of the time. They end with the
last of these tests, since idle ones take a quarter of two cores.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():  # Ray warns of its own code when it is imported; here warnings are errors
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401

from tests.server.harness import FLAGS, Running, serving
from tests.tiny_model import make_model
from windowpane.cluster.replica import Facts
from windowpane.cluster.serve import connect, deploy, remote_service, shut_down
from windowpane.server.run import ServerOptions

REPLICAS = 3
SEEDED: dict[str, Any] = {**FLAGS, "seed": 0, "max_model_len": 1024}


@dataclass(frozen=True, slots=True)
class Replicas:
    """Three replicas of a tiny model. An ingress before them is a server in a thread of this process."""

    model: Path
    handle: Any
    facts: Facts

    def served(self, **options: Any) -> AbstractContextManager[Running]:
        chosen = ServerOptions(**options)
        return serving(remote_service(str(self.model), SEEDED, chosen, self.handle, self.facts), chosen)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1024)


@pytest.fixture(scope="package")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")  # for the policy, ten by default
        connect(REPLICAS + 6, None)
        try:
            yield
        finally:
            shut_down(is_ours=True)


@pytest.fixture(scope="package")
def replicas(local_ray: None, tiny: Path) -> Replicas:
    return Replicas(tiny, *deploy(str(tiny), SEEDED, REPLICAS))
