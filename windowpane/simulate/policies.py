"""Ways to give out memory, which differ only in the layout and in what a sequence must reserve."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windowpane.kv.caches import Cache, TokenCache
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.plan.planner import Sizing, rank_caches
from windowpane.schedule.scheduler import DEFAULT_GROWTH_TOKENS

WHOLE_LIFE = 2**40
HOST_BYTES_PER_SECOND = 50e9  # each way: 16 lanes of PCIe 5


@dataclass(frozen=True, slots=True)
class Policy:
    """`chunks_in_flight`: windows keep so many steps' tokens beside themselves. `swa_full`: sliding layers keep every
    token. `pair`: K and V are both stored where one vector would do. `growth_tokens` is what is reserved ahead.
    `host_bytes` is what a rank has of a host tier, to and from which pages are copied at HOST_BYTES_PER_SECOND.
    """

    name: str
    why: str
    chunks_in_flight: int = 0
    swa_full: bool = False
    pair: bool = False
    growth_tokens: int = DEFAULT_GROWTH_TOKENS
    host_bytes: int = 0

    def layout(self, sizing: Sizing) -> Layout:
        config = replace(sizing.config, swa_full=sizing.config.swa_full or self.swa_full)
        caches: list[Cache] = rank_caches(sizing.spec.caches, config, sizing.ranks)
        if self.pair:
            caches = [replace(c, latent=False) if isinstance(c, TokenCache) and c.value_dim else c for c in caches]
        formats = resolve_formats(config.kv_cache_dtype, group_caches(caches), sizing.compute_dtype)
        return plan_layout(caches, formats, sizing.compute_dtype, block_tokens=config.block_tokens)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("windowpane", "windows keep their window, K = V once, 256 tokens reserved ahead"),
        Policy("window+chunk", "windows keep a step's tokens too, for each sequence", chunks_in_flight=1),
        Policy("window+2chunks", "windows keep two steps' tokens too", chunks_in_flight=2),
        Policy("full", "sliding layers are reserved for the whole prompt", swa_full=True),
        Policy("pair", "K and V are both stored where one vector would do", pair=True),
        Policy("whole-life", "every token that a request may ever have is reserved", growth_tokens=WHOLE_LIFE),
        Policy("host-tier", "restore points go to host memory too, at 50 GB/s", host_bytes=64 * 2**30),
    )
}


def parse_policies(text: str, host_bytes: int = 0) -> list[Policy]:
    """Names with commas between them, or `all`. `host_bytes`: of the host tier of a rank, 64 GiB unless given."""
    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}, and all")
    if host_bytes and not any(POLICIES[name].host_bytes for name in names):
        raise ValueError(
            "--kv-offloading-size is for the policy host-tier; add it to --policy, as in windowpane,host-tier"
        )
    found = [POLICIES[name] for name in dict.fromkeys(names)]
    return [
        replace(policy, host_bytes=host_bytes or policy.host_bytes) if policy.host_bytes else policy for policy in found
    ]
