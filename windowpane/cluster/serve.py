"""`windowpane serve --replicas`: replicas on Ray Serve, and the server in front of them in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from windowpane.cluster.replica import Facts, Replica
from windowpane.engine.devices import resolve_device
from windowpane.engine.find import find_model, text_source
from windowpane.engine.options import read_flags
from windowpane.server.run import ServerOptions, http_serve, listen, service_of, with_defaults
from windowpane.server.service import Service

APPLICATION = "windowpane"
ROUTER = "windowpane.cluster.ray_router.RestorePointRouter"
DIGEST_PERIOD_S = 1.0
MAX_ONGOING_REQUESTS = 4096  # of a replica: its own queue and its memory decide, not Ray's count


def serve_replicas(
    model: str | None, flags: Mapping[str, Any], options: ServerOptions, replicas: int, ray_address: str | None
) -> int:
    """Start the replicas, answer until a signal comes, and end what was started here."""
    if find_spec("ray") is None:
        raise ValueError('--replicas needs Ray: pip install "windowpane[ray]"')
    if options.lora_modules or options.lora_dir is not None or flags.get("enable_lora"):
        raise ValueError("--replicas serves models without adapters so far; leave --enable-lora out")
    if options.access.admin_key is not None or options.kv_events.publishes:
        raise ValueError("--replicas goes without --enable-admin and --kv-events-config so far; leave them out")
    console = Console(stderr=True)
    with listen(options) as listener:
        connect(replicas, ray_address)
        try:
            handle, facts = deploy(model, with_defaults(flags), replicas, console)
            return http_serve(remote_service(model, flags, options, handle, facts, console), options, listener, console)
        finally:
            shut_down(is_ours=ray_address is None)


def connect(replicas: int, address: str | None) -> None:
    """To a cluster, or to a Ray of this machine that is started now."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning", "namespace": APPLICATION}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"--ray-address {address} cannot be used: {str(error).splitlines()[0]}") from None
        return
    # CPUs are counted, not reserved: replicas of one machine share its cores.
    cpus = max(os.cpu_count() or 1, replicas + 2)
    ray.init(num_cpus=cpus, object_store_memory=128 * 2**20, include_dashboard=False, **quiet)


def deploy(
    model: str | None, flags: Mapping[str, Any], replicas: int, console: Console | None = None, router: str = ROUTER
) -> tuple[Any, Facts]:
    """A handle to the replicas, once all of them are there. `router` is the class that chooses, by its full name."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    device = resolve_device(flags.get("device") or "auto").type
    options: dict[str, Any] = {"num_cpus": 1}
    if device == "cuda":
        options["num_gpus"] = flags.get("tensor_parallel_size") or 1
    routing: dict[str, Any] = {
        "request_router_class": router,
        "request_routing_stats_period_s": DIGEST_PERIOD_S,
    }
    deployment = serve.deployment(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=options,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=300.0,
        request_router_config=RequestRouterConfig(**routing),
    )(Replica)
    if console is not None:
        console.print(f"starting {replicas} replicas on Ray", highlight=False)
    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(deployment.bind(model, dict(flags)), name=APPLICATION, route_prefix=None)
    except RuntimeError:
        told = serve.status().applications[APPLICATION].deployments["Replica"].message.strip().splitlines()
        raise ValueError(f"the replicas did not start: {told[-1] if told else 'see `serve status`'}") from None
    return handle, handle.facts.remote().result(timeout_s=600)


def remote_service(
    model: str | None,
    flags: Mapping[str, Any],
    options: ServerOptions,
    handle: Any,
    facts: Facts,
    console: Console | None = None,
) -> Service:
    """The server's service, with the replicas in place of its engine."""
    from windowpane.cluster.metrics import ClusterMetrics
    from windowpane.cluster.remote import RemoteLoop

    names = options.served_model_names or (facts.name,)
    _, source = find_model(model, read_flags(flags)[0])
    loop = RemoteLoop(facts, handle, ClusterMetrics(names[0]))
    service = service_of(loop, text_source(source), facts.max_model_len, names, options, console)
    service.hardware = (facts.device, facts.compute_dtype, ())
    return service


def shut_down(*, is_ours: bool) -> None:
    """End the replicas; the Ray of this machine too, if it was started for them."""
    import ray
    from ray import serve

    serve.delete(APPLICATION)
    if is_ours:
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
