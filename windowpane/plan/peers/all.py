"""Every peer, in the order in which they are shown."""

from __future__ import annotations

from windowpane.plan.peers import llama_cpp, sglang, tensorrt_llm, vllm
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting


def reports(setting: Setting) -> tuple[PeerReport, ...]:
    return tuple(peer for module in (vllm, sglang, tensorrt_llm, llama_cpp) for peer in module.reports(setting))
