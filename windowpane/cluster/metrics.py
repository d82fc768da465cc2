"""An ingress's /metrics: its own counts, which are those of all replicas together, and what each replica published."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from windowpane.cluster.published import LATEST
from windowpane.engine.engine import Engine
from windowpane.routing.digest import Digest
from windowpane.server.metrics import PREFIX, Metrics

GAUGES = {
    "replica_requests_running": "Requests in the batch of a replica.",
    "replica_requests_waiting": "Requests that wait to be admitted by a replica.",
    "replica_wait_seconds": "How long a request that comes now would wait at a replica.",
    "replica_kv_free_bytes": "Bytes of a replica's arena that any group can use.",
    "replica_prefixes": "Beginnings of prompts that a replica has published.",
    "replica_digest_bytes": "Bytes of a replica's last digest.",
}


class ClusterMetrics(Metrics):
    def __init__(self, model_name: str, deployment: str) -> None:
        super().__init__(model_name)
        self._deployment = deployment

    def engine_families(self, engine: Engine, alive: bool) -> Iterator[Metric]:
        by_replica = {name: _row(stats["digest"]) for name, stats in list(LATEST[self._deployment].items())}
        yield self.gauge("engine_up", "1 while a replica has published.", int(alive and bool(by_replica)))
        yield self.gauge("replicas", "Replicas that have published.", len(by_replica))
        for name, replica_name in (("running", "replica_requests_running"), ("waiting", "replica_requests_waiting")):
            total = sum(row[replica_name] for row in by_replica.values())
            yield self.gauge(f"num_requests_{name}", f"Requests that are {name}, at all replicas.", total)
        for name, help in GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, help, labels=[*self.labels, "replica"])
            for replica, row in by_replica.items():
                family.add_metric([*self.labels.values(), replica], row[name])
            yield family


def _row(packed: bytes) -> dict[str, float]:
    digest = Digest.unpack(packed)
    load = digest.load
    values = (load.running, load.waiting, load.wait_s, load.free_kv_bytes, len(digest.hashes), len(packed))
    return dict(zip(GAUGES, values, strict=True))
