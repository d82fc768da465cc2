"""What `windowpane deploy` starts on Ray: ranks that Ray places, and replicas that come with a queue.

These tests are the last of those that share a Ray: a rolling update needs room that their replicas take.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import openai
import pytest
from ray import serve

from tests.cluster.conftest import SEEDED
from tests.server.harness import PATIENCE_S
from windowpane.cluster.autoscaling import Autoscaling
from windowpane.cluster.ingress import Served, application
from windowpane.cluster.serve import run_application
from windowpane.server.run import ServerOptions

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def deployed(local_ray: None, tiny: Path) -> str:
    """Two models: one of two ranks, and one that scales."""
    options = {name: ServerOptions(port=0, served_model_names=(name,)) for name in ("ranks", "scaled")}
    quick = Autoscaling(1, 2, upscale_delay_s=0.1, downscale_delay_s=600.0, look_back_period_s=2.0)
    models = [
        Served(str(tiny), {**SEEDED, "tensor_parallel_size": 2}, options["ranks"], 1),
        Served(str(tiny), SEEDED, options["scaled"], quick),
    ]
    host, port = run_application(application(models), "several").address.remote().result(timeout_s=PATIENCE_S)
    return f"http://{host}:{port}/v1"


def test_ranks_that_ray_places_say_what_one_says(deployed: str) -> None:
    client = openai.OpenAI(base_url=deployed, api_key="none", max_retries=0, timeout=PATIENCE_S)
    said = [
        client.completions.create(model=name, prompt="The window", max_tokens=8, temperature=0).choices[0].text
        for name in ("ranks", "scaled")
    ]
    assert said[0] == said[1] != ""


def test_a_queue_brings_another_replica(deployed: str) -> None:
    client = openai.OpenAI(base_url=deployed, api_key="none", max_retries=0, timeout=PATIENCE_S)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            client.completions.create(model="scaled", prompt="On", max_tokens=400, logit_bias={"257": -100})

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(24)]
    for one in asking:
        one.start()

    def states() -> dict[str, int]:
        return dict(serve.status().applications["several"].deployments["scaled"].replica_states)

    try:
        give_up = time.monotonic() + 2 * PATIENCE_S
        while states().get("RUNNING") != 2:
            assert time.monotonic() < give_up, states()
            time.sleep(0.5)
    finally:
        over.set()
        for one in asking:
            one.join(PATIENCE_S)
