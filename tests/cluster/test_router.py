"""The router: nobody who is gone is chosen, salts share nothing, holders come first, and the rest is spread evenly."""

from __future__ import annotations

import time
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windowpane.kv.speeds import Speeds
from windowpane.routing.digest import Digest, Load
from windowpane.routing.hashes import BLOCK_TOKENS, prefix_hashes
from windowpane.routing.router import EXPECTED_S, TOKENS_A_LOOK, Router

PROMPT = np.arange(1000, dtype=np.int32)


def digest(*prefixes: tuple[str, np.ndarray], load: Load | None = None, tier: int = 0) -> Digest:
    """What a replica publishes that can resume behind each of these tokens, under each key."""
    held = sorted((int(prefix_hashes(key, tokens)[-1]), len(tokens)) for key, tokens in prefixes)
    hashes, tokens = np.array(held, dtype=np.uint64).reshape(-1, 2).T
    return Digest(load or Load(), hashes, tokens.astype(np.uint32), np.full(len(held), tier, dtype=np.uint8))


def test_a_hash_covers_whole_blocks_and_what_is_before_them() -> None:
    hashes = prefix_hashes("0:", PROMPT[:100])
    assert len(hashes) == 100 // BLOCK_TOKENS
    changed = PROMPT[:100].copy()
    changed[20] += 1
    other = prefix_hashes("0:", changed)
    assert hashes[0] == other[0] and not set(hashes[1:].tolist()) & set(other[1:].tolist())
    swapped = PROMPT[:16][::-1]
    assert prefix_hashes("0:", swapped)[0] != hashes[0]


def test_a_hash_is_what_the_documentation_says() -> None:
    """Other machines and later releases must agree."""
    seed = int.from_bytes(blake2b(b"0:salt", digest_size=8).digest(), "little")
    total, expected = 0, []
    tokens = np.arange(18_000, dtype=np.int32)  # more than are hashed at once
    for at, (a, b, c, d) in enumerate(tokens[: len(tokens) // 16 * 16].reshape(-1, 4).tolist()):
        four = a + 2**32 * b + 0xD6E8FEB86659FD93 * (c + 2**32 * d)
        x = (four + (at + 1) * 0x9E3779B97F4A7C15 + seed) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        total = (total + (x ^ (x >> 31))) % 2**64
        if (at + 1) % (BLOCK_TOKENS // 4) == 0:
            expected.append(total)
    assert prefix_hashes("0:salt", tokens).tolist() == expected
    strided = np.repeat(tokens, 2)[::2]
    assert prefix_hashes("0:salt", strided).tolist() == expected


def test_a_digest_comes_back_as_it_was() -> None:
    sent = digest(("0:", PROMPT[:64]), ("0:", PROMPT[:300]), load=Load(3, 2, 0.5, 123.0, 2**40), tier=1)
    came = Digest.unpack(sent.pack())
    assert came.load == sent.load
    for name in ("hashes", "tokens", "tiers"):
        assert getattr(came, name).tolist() == getattr(sent, name).tolist()


def test_a_prompt_goes_where_most_of_it_is_held() -> None:
    router = Router(seed=0)
    for name in "abcdef":
        router.update(name, digest())
    router.update("c", digest(("0:", PROMPT[:400])))
    router.update("e", digest(("0:", PROMPT[:800])))
    choice = router.choose(prefix_hashes("0:", PROMPT), len(PROMPT))
    assert (choice.replica, choice.reused_tokens) == ("e", 800)


def test_turns_that_have_ended_do_not_count_against_who_knows_the_chat() -> None:
    """More of them than a prompt's worth of tokens, before a digest comes."""
    hashes = prefix_hashes("0:", PROMPT)

    def chosen(tell: bool) -> Counter[str]:
        router = Router(seed=0, clock=lambda: 0.0)
        for name in "abc":
            router.update(name, digest(load=Load(tokens_per_s=1e9)))
        router.update("b", digest(("0:", PROMPT[:992]), load=Load(tokens_per_s=1e9)))
        found: Counter[str] = Counter()
        for _ in range(40):
            choice = router.choose(hashes, len(PROMPT))
            router.sent(choice, hashes, len(PROMPT))
            found[choice.replica] += 1
            if tell:
                router.ended(choice.replica)
        router.ended("nobody")
        return found

    assert chosen(tell=True) == {"b": 40}
    assert chosen(tell=False)["b"] < 40  # those that run do count


def test_an_end_that_is_told_behind_its_digest_makes_nobody_faster_than_idle() -> None:
    router = Router(seed=0, clock=lambda: 0.0)
    for name in "ab":
        router.update(name, digest(load=Load(tokens_per_s=1000.0)))
    router.ended("a")
    found = {router.choose(prefix_hashes("0:", PROMPT), len(PROMPT)).expected_s for _ in range(8)}
    assert found == {1.0}


def test_what_lies_on_the_host_is_worth_less_than_what_lies_on_the_device() -> None:
    router = Router(seed=0)
    router.update("host", digest(("0:", PROMPT[:800]), tier=1))
    router.update("device", digest(("0:", PROMPT[:800])))
    assert router.choose(prefix_hashes("0:", PROMPT), len(PROMPT)).replica == "device"


def test_who_holds_it_but_is_busy_loses_to_who_is_not() -> None:
    router = Router(seed=0)
    router.update("idle", digest())
    router.update("busy", digest(("0:", PROMPT[:800]), load=Load(running=8, waiting=4, wait_s=30.0)))
    assert router.choose(prefix_hashes("0:", PROMPT), len(PROMPT)).replica == "idle"


def test_who_has_computed_nothing_yet_is_as_fast_as_others() -> None:
    router = Router(seed=0)
    router.update("busy", digest(("0:", PROMPT[:800]), load=Load(running=1, wait_s=0.5, tokens_per_s=10_000.0)))
    router.update("new", digest())
    assert router.choose(prefix_hashes("0:", PROMPT), len(PROMPT)).replica == "new"


def test_salts_and_adapters_have_nothing_in_common() -> None:
    router = Router(seed=0)
    for name in "ab":
        router.update(name, digest(("0:mine", PROMPT[:800]) if name == "a" else ("1:", PROMPT[:800])))
    for key in ("0:", "0:yours", "1:mine"):
        assert router.choose(prefix_hashes(key, PROMPT), len(PROMPT)).reused_tokens == 0
    assert router.choose(prefix_hashes("0:mine", PROMPT), len(PROMPT)).replica == "a"
    assert router.choose(prefix_hashes("1:", PROMPT), len(PROMPT)).replica == "b"


def test_what_was_sent_is_known_before_the_next_digest_and_forgotten_if_none_confirms_it() -> None:
    now = 0.0
    router = Router(seed=0, clock=lambda: now)
    for name in "abcdefgh":
        router.join(name)
    hashes = prefix_hashes("0:", PROMPT)
    first = router.choose(hashes[:20], 20 * BLOCK_TOKENS)
    router.sent(first, hashes[:20], 20 * BLOCK_TOKENS)
    now = 1.0  # it is computed by then
    later = router.choose(hashes, len(PROMPT))
    assert (later.replica, later.reused_tokens) == (first.replica, 20 * BLOCK_TOKENS)
    now = EXPECTED_S + 1
    assert router.choose(hashes, len(PROMPT)).reused_tokens == 0


def test_a_digest_says_what_is_gone() -> None:
    router = Router(seed=0)
    router.update("a", digest(("0:", PROMPT[:400]), ("0:", PROMPT[:800])))
    router.update("a", digest(("0:", PROMPT[:400])))
    assert router.choose(prefix_hashes("0:", PROMPT), len(PROMPT)).reused_tokens == 400


def test_unknown_prompts_are_spread_evenly() -> None:
    router = Router(seed=0)
    for number in range(32):
        router.join(str(number))
    taken: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    for _ in range(320):
        hashes = prefix_hashes("0:", rng.integers(0, 30_000, 200).astype(np.int32))
        choice = router.choose(hashes, 200)
        router.sent(choice, hashes, 200)
        taken[choice.replica] += 1
    assert len(taken) == 32 and max(taken.values()) <= 13  # 10 each; one at random would give some 18 and others 3


def test_a_long_prompt_that_nobody_holds_finds_the_one_who_is_idle() -> None:
    router = Router(seed=0)
    names = [f"replica-{number}" for number in range(40)]
    for name in names:
        router.update(name, digest(load=Load(1, 0, 0.0 if name == "replica-17" else 9.0, 8000.0)))
    tokens = np.arange(40 * TOKENS_A_LOOK, dtype=np.int32)
    for number in range(8):
        assert router.choose(prefix_hashes(f"{number}:", tokens), len(tokens)).replica == "replica-17"


def test_the_speed_of_prompts_is_that_of_steps_with_many_of_their_tokens() -> None:
    speeds = Speeds()
    assert speeds.prompt_tokens_per_second is None
    for _ in range(20):
        speeds.computed(8192, seconds=1.0)
        speeds.computed(16, seconds=0.01)  # others decoded meanwhile
        speeds.computed(1, seconds=0.5)  # of which only the last token was missing
    assert speeds.prompt_tokens_per_second == pytest.approx(8192, rel=0.02)
    for _ in range(60):
        speeds.computed(8192, seconds=2.0)
    assert speeds.prompt_tokens_per_second == pytest.approx(4096, rel=0.02)
    speeds.computed(64, seconds=5.0)  # the machine did something else
    assert speeds.prompt_tokens_per_second == pytest.approx(4096, rel=0.02)
    for _ in range(60):
        speeds.computed(8192, seconds=80.0)  # it is slow indeed
    assert speeds.prompt_tokens_per_second == pytest.approx(102.4, rel=0.02)


def test_nobody_is_there() -> None:
    router = Router()
    with pytest.raises(LookupError, match="no replica"):
        router.choose(prefix_hashes("0:", PROMPT), len(PROMPT))
    router.join("a")
    with pytest.raises(LookupError):
        router.choose(prefix_hashes("0:", PROMPT), len(PROMPT), among=["b"])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("jujurs"), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_only_replicas_that_are_there_are_chosen_and_books_agree(steps: list[tuple[str, int, int]]) -> None:
    """j: joins, u: publishes, r: is removed, s: a request is routed and sent. Prompts are 4 of 16 to 64 blocks."""
    router, alive = Router(seed=1), set[str]()
    for what, number, chat in steps:
        name = f"replica-{number}"
        tokens = np.arange(chat * 1000, chat * 1000 + 16 * BLOCK_TOKENS * (1 + chat), dtype=np.int32)
        if what == "r":
            router.remove(name)
            alive.discard(name)
        elif what in "ju":
            router.join(name) if what == "j" else router.update(name, digest(("0:", tokens)))
            alive.add(name)
        elif alive:
            hashes = prefix_hashes("0:", tokens)
            choice = router.choose(hashes, len(tokens))
            assert choice.replica in alive and 0 <= choice.reused_tokens < len(tokens)
            router.sent(choice, hashes, len(tokens))
        assert set(router.replicas) == alive
        index = router._index
        assert {holder for holders in index.holders.values() for holder in holders} <= alive
        assert all(index.holders.values()) and index._counts.sum() == len(index.holders)


def test_a_decision_costs_about_the_same_among_256_replicas_as_among_four() -> None:
    """A shared beginning that everybody holds, and chats of their own."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 30_000, 512).astype(np.int32)

    def decision_s(replicas: int) -> float:
        router, prompts = Router(seed=0), []
        for number in range(replicas):
            own = [np.concatenate([shared, rng.integers(0, 30_000, 2000).astype(np.int32)]) for _ in range(16)]
            router.update(str(number), digest(("0:", shared), *(("0:", chat) for chat in own)))
            prompts += own
        spent = []
        for prompt in prompts[:64]:
            began = time.thread_time()
            hashes = prefix_hashes("0:", prompt)
            choice = router.choose(hashes, len(prompt))
            router.sent(choice, hashes, len(prompt))
            spent.append(time.thread_time() - began)
        return float(np.median(spent))

    assert decision_s(256) < 4 * decision_s(4)
