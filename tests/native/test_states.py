"""Recurrent states in compiled kernels: what the reference gives, and the same bits however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.native.compiled import compiled_library
from tests.native.test_experts import both
from tests.native.test_kernels import assert_close
from tests.running.harness import Knobs, layout_of
from tests.running.small_models import spec_of
from windowpane.device.pages import KVPages
from windowpane.kv.changes import Changes, Snapshot
from windowpane.kv.retention import State
from windowpane.lowering.cpu.states import CpuGatedDelta, CpuMamba2, CpuShortConv
from windowpane.lowering.reference.context import StepState
from windowpane.lowering.reference.states import GatedDeltaMixer, Mamba2Mixer, ShortConvMixer
from windowpane.schedule.step import Segment, Step

StateMixer = GatedDeltaMixer | Mamba2Mixer | ShortConvMixer

# Norms of groups behind the gate, and before it; queries and keys that several value heads share; tails alone.
FAMILIES = [
    ("qwen3.5", GatedDeltaMixer),
    ("nemotron-h", Mamba2Mixer),
    ("lfm2", ShortConvMixer),
    ("granite hybrid", Mamba2Mixer),
]


@pytest.fixture(autouse=True)
def kernels() -> None:
    torch.manual_seed(5)
    compiled_library()


class Sequences:
    """Pages of a small model with one sequence in each slot, at the positions that earlier calls brought them to."""

    def __init__(self, name: str, slots: int, state_slots: int = 2) -> None:
        layout = layout_of(list(spec_of(name).caches), Knobs(state_slots=state_slots))
        pages_each = 4 * sum(len(g.slices) for g in layout.groups)
        page_bytes = max(g.page_bytes for g in layout.groups)
        slabs = -(-slots * pages_each * page_bytes // layout.slab_bytes) + 1
        self.pages = KVPages(layout, slabs, slots, 256, torch.device("cpu"))
        self.pages.arena.fill_(0xFF)
        self._free = iter(np.random.default_rng(3).permutation(slots * pages_each) * (page_bytes // 256))
        for tables in zip(self.pages.reading, self.pages.writing, strict=True):
            for at in np.ndindex(tables[0][:, :2].shape):
                tables[0][at] = tables[1][at] = next(self._free)
        self.positions, self.present, self._state_slots = [0] * slots, [0] * slots, state_slots

    def snapshots(self, slot: int, positions: list[int]) -> list[Snapshot]:
        """Of a slot's next step, in pages of their own."""
        group, found = next(g for g, of in enumerate(self.pages.layout.groups) if isinstance(of.retention, State)), []
        for position in positions:
            offsets = [next(self._free) for _ in range(self.pages.layout.groups[group].stripes)]
            found.append(Snapshot(group, slot, position, np.array(offsets, dtype=np.int32)))
        self.pages.before_step(Changes(snapshots=tuple(found)))
        return found

    def states(self, mixer: StateMixer) -> list[torch.Tensor]:
        """Each part of all sequences' present states."""
        stored = self.pages.states[mixer.described.layer]
        offsets = self.pages.reading[stored.group][np.arange(len(self.present)), self.present, stored.stripe]
        return [part[torch.from_numpy(offsets).long()] for part in stored.parts]

    def step(self, tokens: list[int]) -> StepState:
        """So many tokens of each slot; those with one that are not new decode."""
        decoding = [s for s, n in enumerate(tokens) if n == 1 and self.positions[s]]
        segments, row = [], len(decoding)
        for slot, count in enumerate(tokens):
            if count and slot not in decoding:
                start = self.positions[slot]
                segments.append(Segment(slot, start, start + count, row, row, count))
                row += count
        slots = [*decoding, *(s.slot for s in segments)]
        positions = [*(self.positions[s] for s in decoding), *(p for s in segments for p in range(s.start, s.stop))]
        step = Step(
            np.zeros(row, dtype=np.int32), np.array(positions), np.array(decoding, dtype=np.int64), tuple(segments),
            tuple(segments), np.arange(row), np.array([self.present[s] for s in slots], dtype=np.int8),
        )  # fmt: skip
        for slot in slots:
            self.positions[slot] += tokens[slot]
            self.present[slot] = (self.present[slot] + 1) % self._state_slots
        self.pages._states.clear()
        at = torch.arange(row)
        return StepState(step, self.pages, None, torch.tensor(positions), at, tuple(segments))


def check_states(name: str, kind: type) -> None:
    """Three sequences over several steps: new ones, chunks of few and many tokens, and decoding ones."""
    compiled, plain = both(name, kind)[0]
    assert isinstance(compiled, CpuGatedDelta | CpuMamba2 | CpuShortConv)
    ours, theirs = Sequences(name, 3), Sequences(name, 3)
    for tokens in ([130, 2, 0], [1, 1, 1], [3, 1, 70], [1, 1, 1]):
        x = torch.randn(sum(tokens), spec_of(name).decoder.hidden_size)
        assert_close(compiled(x, ours.step(tokens)), plain(x, theirs.step(tokens)), 2e-5)
    for mine, other in zip(ours.states(compiled), theirs.states(plain), strict=True):
        assert_close(mine, other, 2e-5)


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_states_give_what_the_reference_gives(name, kind):
    check_states(name, kind)


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(("name", "kind"), FAMILIES[:3])
def test_states_in_one_slot_with_snapshots_are_those_of_steps_that_end_there(name, kind, by_reference):
    mixer = both(name, kind)[0][by_reference]
    assert isinstance(mixer, CpuGatedDelta | CpuMamba2 | CpuShortConv) is not by_reference
    ours, plain, cuts = Sequences(name, 2, state_slots=1), Sequences(name, 2), (2, 66, 131)
    x = torch.randn(7 + 132, spec_of(name).decoder.hidden_size)
    for sequences in (ours, plain):
        mixer(x[:7], sequences.step([3, 4]))
    snapshots = iter(ours.snapshots(1, [4 + cut for cut in cuts[:2]]))
    stored, found, apart = ours.pages.states[mixer.described.layer], mixer(x[7:], ours.step([1, 131])), []
    for first, last in zip((0, *cuts), cuts, strict=False):
        mates = int(first == 0)
        apart.append(mixer(x[7 + first + (first > 0) : 8 + last], plain.step([mates, last - first])))
        if last < cuts[-1]:
            page = int(next(snapshots).offsets[stored.stripe])
            for part, want in zip(stored.parts, plain.states(mixer), strict=True):
                assert_close(part[page], want[1], 2e-5)
    assert_close(found, torch.cat(apart), 2e-5)
    for mine, want in zip(ours.states(mixer), plain.states(mixer), strict=True):
        assert_close(mine, want, 2e-5)


@pytest.mark.parametrize(("name", "kind"), FAMILIES[:3])
def test_what_is_read_has_the_same_bits_however_a_prompt_is_cut(name, kind):
    """Projections apart, which are products."""
    mixer, _ = both(name, kind)[0]
    made = torch.randn(150, mixer.inputs.outputs)

    def read(rows: torch.Tensor, state: StepState) -> torch.Tensor:
        if kind is ShortConvMixer:
            before, _, inner = rows.chunk(3, dim=1)
            return mixer._mixed(before, inner, state)
        if kind is Mamba2Mixer:
            return mixer._read(rows[:, mixer._inner :], state)
        return mixer._read(rows[:, : mixer._channels], rows[:, mixer._channels + mixer._values :], state)

    whole = read(made, Sequences(name, 1).step([150]))
    for cuts in ([150], [1, 2, 64, 83], [100, 1, 1, 48]):
        sequence, parts = Sequences(name, 1), torch.split(made, cuts)
        assert torch.equal(torch.cat([read(part, sequence.step([len(part)])) for part in parts]), whole)
    beside = Sequences(name, 2)
    assert torch.equal(read(torch.cat([torch.randn_like(made), made]), beside.step([150, 150]))[150:], whole)
