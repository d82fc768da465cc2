"""`windowpane serve --replicas`: replicas on Ray Serve, and the server in front of them in this process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from importlib.util import find_spec
from threading import Thread
from typing import Any

from rich.console import Console

from windowpane import __version__
from windowpane.cluster import autoscaling
from windowpane.cluster.autoscaling import Autoscaling
from windowpane.cluster.replica import Facts, Replica
from windowpane.engine.devices import resolve_device
from windowpane.engine.find import find_model, text_source
from windowpane.engine.options import read_flags
from windowpane.server.run import ServerOptions, http_serve, listen, service_of, with_defaults
from windowpane.server.service import Service

APPLICATION = "windowpane"
ROUTER = "windowpane.cluster.ray_router.RestorePointRouter"
DIGEST_PERIOD_S = 1.0
STARTS_S = 1800.0  # large weights from a slow disk, and replicas that are replaced drain for minutes
MAX_ONGOING_REQUESTS = 4096  # of a replica: its own queue and its memory decide, not Ray's count


def serve_replicas(
    model: str | None, flags: Mapping[str, Any], options: ServerOptions, replicas: int, ray_address: str | None
) -> int:
    """Start the replicas, answer until a signal comes, and end what was started here."""
    check("--replicas", flags, options)
    console = Console(stderr=True)
    with listen(options) as listener:
        connect(replicas * ranks_of(flags), ray_address)
        try:
            handle, facts = deploy(model, with_defaults(flags), replicas, console)
            return http_serve(remote_service(model, flags, options, handle, facts, console), options, listener, console)
        finally:
            shut_down(is_ours=ray_address is None)


def check(what: str, flags: Mapping[str, Any], options: ServerOptions) -> None:
    """Refuse what replicas cannot do. `what` asks for them."""
    if find_spec("ray") is None:
        raise ValueError(f'{what} needs Ray: pip install "windowpane[ray]"')
    if options.lora_modules or options.lora_dir is not None or flags.get("enable_lora"):
        raise ValueError(f"{what} serves models without adapters so far; leave --enable-lora out")
    if options.kv_events.publishes:
        raise ValueError(f"{what} goes without --kv-events-config so far; leave it out")


def connect(cpus: int, address: str | None) -> None:
    """To a cluster, or to a Ray of this machine that is started now, for so many CPUs as its replicas ask for."""
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
    cpus = max(os.cpu_count() or 1, cpus + 2)
    ray.init(num_cpus=cpus, object_store_memory=128 * 2**20, include_dashboard=False, **quiet)


def ranks_of(flags: Mapping[str, Any]) -> int:
    return flags.get("tensor_parallel_size") or 1


def deploy(
    model: str | None,
    flags: Mapping[str, Any],
    replicas: int,
    console: Console | None = None,
    router: str = ROUTER,
    application: str = APPLICATION,
) -> tuple[Any, Facts]:
    """A handle to the replicas, once all of them are there. `router` is the class that chooses, by its full name."""
    if console is not None:
        console.print(f"starting {replicas} replicas on Ray", highlight=False)
    handle = run_application(replica_deployment(model, flags, replicas, router=router), application)
    return handle, handle.facts.remote().result(timeout_s=600)


def replica_deployment(
    model: str | None,
    flags: Mapping[str, Any],
    replicas: int | Autoscaling,
    name: str = "Replica",
    router: str = ROUTER,
) -> Any:
    """The replicas of one model, as an application of Ray Serve that has not been started."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    routing: dict[str, Any] = {
        "request_router_class": router,
        "request_routing_stats_period_s": DIGEST_PERIOD_S,
    }
    more: dict[str, Any] = {}
    if isinstance(replicas, Autoscaling):
        scaling = asdict(replicas)
        policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=autoscaling.POLICY, policy_kwargs={"target_load": scaling.pop("target_load")}
        )
        more["autoscaling_config"] = AutoscalingConfig(policy=policy, **scaling)
    else:
        more["num_replicas"] = replicas
    on_cards = resolve_device(flags.get("device") or "auto").type == "cuda"
    if ranks_of(flags) > 1:  # on one machine where there is room, else on several
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_cards else {})}
        more |= {"placement_group_bundles": [bundle] * ranks_of(flags), "placement_group_strategy": "PACK"}
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 1, **({"num_gpus": 1} if on_cards else {})},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=300.0,
        request_router_config=RequestRouterConfig(**routing),
        **more,
    )(Replica)
    # Ray would take everything that is deployed again for a new version, and replace what has not changed.
    made_of = repr((__version__, model, sorted(flags.items()), router))
    version = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    return deployment.options(version=version, _internal=True).bind(model, dict(flags))


def run_application(deployed: Any, application: str = APPLICATION) -> Any:
    """A handle to what was started, once all of it is there. After `STARTS_S` that is an error; Ray goes on with it."""
    from ray import serve

    serve.start(proxy_location="Disabled")
    started: Future[Any] = Future()

    def start() -> None:
        try:
            started.set_result(serve.run(deployed, name=application, route_prefix=None))
        except Exception as error:
            started.set_exception(error)

    Thread(target=start, name="deploying", daemon=True).start()
    try:
        return started.result(STARTS_S)
    except TimeoutError:
        states = {name: dict(each.replica_states) for name, each in _deployments(application).items()}
        raise ValueError(f"not all replicas are there after {STARTS_S:.0f} s: {states}; see `serve status`") from None
    except RuntimeError:
        told = [line for each in _deployments(application).values() for line in each.message.strip().splitlines()[-1:]]
        raise ValueError(f"the replicas did not start: {'; '.join(told) or 'see `serve status`'}") from None


def _deployments(application: str) -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications[application].deployments)


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
    loop = RemoteLoop(facts, handle, ClusterMetrics(names[0], handle.deployment_name))
    service = service_of(loop, text_source(source), facts.max_model_len, names, options, console)
    service.hardware = (facts.device, facts.compute_dtype, ())
    service.replicas = loop.replicas
    return service


def shut_down(*, is_ours: bool) -> None:
    """End the replicas; the Ray of this machine too, if it was started for them."""
    import ray
    from ray import serve

    serve.delete(APPLICATION)
    if is_ours:
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
