"""Many requests at once begin a few at a time, in the order they came, and none is lost when its client goes."""

from __future__ import annotations

import asyncio
from typing import Any

from windowpane.server.turnstile import PER_TURN, Entrance


def test_a_burst_is_spread_over_turns_in_order() -> None:
    begun: list[tuple[int, int]] = []  # turn of the loop, and who
    turn = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append((turn, scope["who"]))

    async def main() -> None:
        nonlocal turn
        gate = Entrance(app)
        tasks = [asyncio.create_task(gate({"type": "http", "who": who}, None, None)) for who in range(100)]
        tasks[50].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1
        await gate({"type": "http", "who": 100}, None, None)

    asyncio.run(main())
    assert [who for _, who in begun] == [*range(50), *range(51, 101)]
    turns = [turn for turn, _ in begun]
    assert max(turns.count(turn) for turn in turns) <= 2 * PER_TURN, "a turn does little"
    assert turns[-2] <= 3 * 100 // PER_TURN, "and nobody waits longer than need be"
