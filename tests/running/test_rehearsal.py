"""The step that a GPU runs before its first request can be told row by row, as every other one."""

from __future__ import annotations

import pytest

from tests.running.harness import Knobs, layout_of
from tests.running.small_models import spec_of
from windowpane.runners.cuda import rehearsal, rehearsal_of_snapshots
from windowpane.schedule.step import Step


@pytest.mark.parametrize(("tokens", "longest"), [(8192, 131_072), (8192, 4096), (100, 64), (1, 16), (65, 64)])
def test_rehearsal_runs_all_tokens_of_a_step_from_within_a_page_on(tokens: int, longest: int) -> None:
    step = Step.of(rehearsal(tokens, longest))
    lengths = [segment.stop - segment.start for segment in step.segments]
    assert len(step.state_slots) == len(step.segments)
    assert lengths[0] == 1
    assert all(segment.start == 1 and segment.stop <= longest for segment in step.segments[1:])
    assert tokens - len(lengths) <= sum(lengths) <= tokens


@pytest.mark.parametrize("most_tokens", [1, 100, 8192])
def test_a_chunk_that_leaves_snapshots_is_rehearsed_too(most_tokens: int) -> None:
    layout = layout_of(list(spec_of("qwen3-next").caches), Knobs())
    batch = rehearsal_of_snapshots(most_tokens, layout)
    (chunk,), (snapshot,) = batch.chunks, batch.changes.snapshots
    assert 0 < snapshot.position <= len(chunk.tokens) <= most_tokens
    group = layout.groups[snapshot.group]
    assert group.name == "state" and len(snapshot.offsets) == group.stripes
