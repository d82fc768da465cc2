"""Simulated replicas with the real router in front of them, and the digests of their restore points."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from windowpane.cli import main as cli
from windowpane.models import load
from windowpane.plan.config import EngineConfig
from windowpane.plan.hardware import parse_gpus
from windowpane.plan.planner import make_plan
from windowpane.routing.digest import DigestMaker, Load
from windowpane.routing.hashes import BLOCK_TOKENS, prefix_hashes
from windowpane.simulate.cluster import ClusterResult, ClusterSimulation
from windowpane.simulate.policies import POLICIES
from windowpane.simulate.run import Simulation
from windowpane.simulate.traffic import Session, Turn

SYSTEM = np.arange(2, 502, dtype=np.int32)
TURNS = (Turn(1500, 20), Turn(100, 20, wait_s=2.0), Turn(100, 20, wait_s=2.0))


def replica() -> Simulation:
    config = EngineConfig(max_model_len=8192, kv_cache_memory_bytes=2**29, max_num_batched_tokens=512, max_num_seqs=16)
    plan = make_plan(load("gemma-3-1b"), config, gpu="4090")
    assert plan.capacity is not None
    card = parse_gpus("4090")[1]
    return Simulation(plan.sizing, card, plan.capacity.kv_bytes, plan.max_model_len, POLICIES["windowpane"])


def chats(count: int) -> list[Session]:
    return [Session(f"chat-{at}", 0.05 * at, SYSTEM, TURNS, seed=at) for at in range(count)]


def run(router: str) -> ClusterResult:
    return ClusterSimulation(replica, 4, router).run(chats(22))


def test_chats_find_what_they_said_before_and_nobody_gets_all_of_them() -> None:
    # 22 turns on 4 replicas: in rotation, a chat's second turn is not where its first was.
    known, blind, one = run("restore-points"), run("round-robin"), replica().run(chats(22))
    assert known.requests == blind.requests == one.requests == 66
    assert known.hit_rate >= 0.95 * one.hit_rate and known.hit_rate > blind.hit_rate
    assert np.mean(known.ttft_s) * 1.5 < np.mean(blind.ttft_s)
    assert known.busiest * 4 < 2


def test_two_choices_balance_without_knowing_anything() -> None:
    result = run("two-choices")
    assert result.requests == 66 and result.busiest * 4 < 1.6


def test_a_digest_names_what_the_next_turn_can_resume_from() -> None:
    """Window layers can go on only at a restore point; a digest names those, at their last whole block."""
    simulation = replica()
    digests = DigestMaker(simulation.scheduler)
    (session,) = chats(1)
    simulation.run([session])
    held = digests.make(Load())
    session.next_prompt()
    session.answered(20)
    prompt, _ = session.next_prompt()
    known = dict(zip(held.hashes.tolist(), held.tokens.tolist(), strict=True))
    found = [known[h] for h in prefix_hashes("0:", prompt).tolist() if h in known]
    # The ends of the system prompt, of the first message and of its answer.
    assert [tokens for tokens in found if 500 <= tokens <= 2020] == [500, 2000, 2020]
    assert all(tokens // BLOCK_TOKENS <= len(prompt) // BLOCK_TOKENS for tokens in found)
    simulation.scheduler.drop_restore_points()
    assert len(digests.make(Load()).hashes) == 0


def test_the_command_prints_a_row_per_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "gemma-3-1b", "--gpu", "4090", "--replicas", "3", "--sessions", "4", "--router", "all"]
    monkeypatch.setattr(sys, "argv", ["windowpane", *words, "--json"])
    assert cli.main() == 0
    shown = json.loads(capsys.readouterr().out)
    assert [r["router"] for r in shown["routers"]] == ["restore-points", "two-choices", "round-robin"]
    assert all(r["replicas"] == 3 and r["requests"] for r in shown["routers"])
    monkeypatch.setattr(sys, "argv", ["windowpane", *words[:-1], "nearest"])
    assert cli.main() == 2
    assert "--router 'nearest' is not known; use restore-points" in capsys.readouterr().err
