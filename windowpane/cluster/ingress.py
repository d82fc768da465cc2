"""`windowpane deploy`: replicas of several models, and the server before them as a deployment of its own.

All of it belongs to the cluster and stays when the command has ended; Ray starts an ingress that dies again. On a Ray
that was started for it, the command stays instead.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from windowpane.cluster.autoscaling import Autoscaling
from windowpane.cluster.front import make_front
from windowpane.cluster.serve import (
    check,
    connect,
    ranks_of,
    remote_service,
    replica_deployment,
    run_application,
    shut_down,
)
from windowpane.server import log as server_log
from windowpane.server.run import Server, ServerOptions, http_config, listen, with_defaults
from windowpane.server.service import Service

DRAIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """One model of a deployment. Of its `options`, those of the server itself are those of all models."""

    model: str | None
    flags: Mapping[str, Any]
    options: ServerOptions
    replicas: int | Autoscaling

    @property
    def deployment(self) -> str:
        """What Ray calls its replicas."""
        name = self.options.served_model_names[0] if self.options.served_model_names else self.model or "default"
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)

    @property
    def most_replicas(self) -> int:
        return self.replicas.max_replicas if isinstance(self.replicas, Autoscaling) else self.replicas


def deploy_models(models: Sequence[Served], ray_address: str | None) -> int:
    """Deploy and return; on a Ray of this machine, stay until a signal comes."""
    for each in models:
        check("windowpane deploy", each.flags, each.options)
    names = [each.deployment for each in models]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have one name: {', '.join(names)}; give each its own served-model-name")
    console = Console(stderr=True)
    connect(sum(each.most_replicas * ranks_of(each.flags) for each in models), ray_address)
    try:
        options = models[0].options
        console.print(f"deploying {', '.join(names)}", highlight=False)
        host, port = run_application(application(models)).address.remote().result(timeout_s=60)
        scheme = "http" if options.tls is None else "https"
        console.print(f"{', '.join(names)} at {scheme}://{host}:{port} (see `serve status`)", highlight=False)
        if ray_address is None:
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
            return 0
    finally:
        if ray_address is None:
            shut_down(is_ours=True)
    console.print("It stays; `serve shutdown` ends it, and `windowpane deploy` again changes it.", highlight=False)
    return 0


def application(models: Sequence[Served]) -> Any:
    """All of it, as Ray Serve runs it."""
    from ray import serve

    replicas = []
    for each in models:
        flags = with_defaults(each.flags)
        replicas.append(replica_deployment(each.model, flags, each.replicas, each.deployment))
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        # On the machine where the cluster's head is, so that its address is known.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=DRAIN_S,
    )(Ingress)
    return ingress.bind(list(models), *replicas)


class Ingress:
    """Listens by itself: Ray's proxies see nothing of it."""

    async def __init__(self, models: Sequence[Served], *handles: Any) -> None:  # type: ignore[misc]
        services: list[Service] = []
        for each, handle in zip(models, handles, strict=True):
            facts = await handle.facts.remote()
            services.append(remote_service(each.model, each.flags, each.options, handle, facts))
        options = models[0].options
        server_log.set_up(options.log_level, options.uvicorn_log_level)
        app = make_front(services, options.access)
        self._services = services
        self._listener = await _listen(options)
        self._server = Server(http_config(app, options), services[0])
        self._serving = asyncio.create_task(self._server.serve([self._listener]))

    async def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    async def check_health(self) -> None:
        """Ray Serve starts another where this raises."""
        if self._serving.done():
            raise RuntimeError("the server has ended")

    async def __del__(self) -> None:
        """Ray calls it before the process ends: let nobody in, and what runs finish."""
        for service in self._services:
            service.draining = True
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=DRAIN_S)


async def _listen(options: ServerOptions) -> Any:
    """One that is being replaced may still have the port."""
    for _ in range(int(DRAIN_S)):
        try:
            return listen(options)
        except ValueError:
            await asyncio.sleep(1)
    return listen(options)
