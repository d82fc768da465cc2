"""Mixers with a recurrent state in Triton's interpreter against the reference, over pages that begin as NaN. Run by its
test.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.kv.changes import NO_CHANGES, Changes, Snapshot
from windowpane.kv.delta_workspace import CHUNK_TOKENS, delta_workspace_bytes
from windowpane.kv.layout import plan_layout
from windowpane.lowering.gpu.mixers import GpuContext, GpuStepState
from windowpane.lowering.gpu.states import STATE_MIXERS
from windowpane.lowering.gpu.step import NO_DRAFT, PADDING_ROW, DeviceStep, StepBuilder, row_segments
from windowpane.lowering.group import ALONE
from windowpane.lowering.linear import Parameters
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.mixers import make_mixer
from windowpane.lowering.reference.ops import PLAIN
from windowpane.lowering.rope import RopeTables
from windowpane.models.blocks import BY_KEY_HEAD, Block, Decoder, GatedDeltaNet, Layer, Norm, StateMixer, tensors_of
from windowpane.models.families.lfm2 import _convolution
from windowpane.models.families.mamba import Mamba
from windowpane.models.families.qwen3_next import GatedDelta, _linear_attention
from windowpane.models.tensors import TensorSpec
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.schedule.step import Step

HIDDEN, SLOTS, LENGTH, EPS = 24, 4, 128, 1e-5
CPU = torch.device("cpu")


def mamba(heads: int, dim: int, groups: int, **rest) -> Callable[[int], StateMixer]:
    sizes = Mamba(heads, dim, groups, 8, 4, "float32")
    return lambda layer: sizes.mixer(f"{layer}.", HIDDEN, layer, EPS, **rest)


MIXERS: dict[str, Callable[[int], StateMixer]] = {
    "delta": lambda layer: _linear_attention(
        f"{layer}.", GatedDelta(1, 2, 16, 32, 4, "float32"), layer, HIDDEN, EPS, BY_KEY_HEAD
    ),
    "mamba, groups normed apart": mamba(4, 16, 2, norms_groups=True),
    "mamba, odd heads normed together": mamba(3, 20, 1, dt_limits=(0.2, 1.1), conv_bias=False),
    "mamba, multiplied, normed before gates": mamba(2, 32, 1, norms_first=True, multipliers=(1.2, 0.7, 1.3, 0.8, 0.9)),
    "mamba without norm": mamba(2, 16, 2, norm=False, in_bias=True),
    "short convolution": lambda layer: _convolution(f"{layer}.", HIDDEN, layer, 3, True),
}


class Both:
    """The mixer of the second of two layers that are alike, by the reference and by kernels."""

    def __init__(self, make: Callable[[int], StateMixer], state_slots: int) -> None:
        described = [make(layer) for layer in range(2)]
        embedding = TensorSpec("embedding", (8, HIDDEN))
        norm = Norm(EPS, TensorSpec("norm", (HIDDEN,)))
        decoder = Decoder(embedding, tuple(Layer((Block(mixer),)) for mixer in described), norm)
        weights = {name: torch.randn(spec.shape) * 0.5 for name, spec in tensors_of(decoder).items()}
        layout = plan_layout([replace(mixer.cache, slots=state_slots) for mixer in described], {}, "float32")
        (group,) = layout.groups
        self.pages = [KVPages(layout, self._slabs(layout), SLOTS, LENGTH, CPU) for _ in range(2)]
        offsets = np.random.default_rng(1).permutation(SLOTS * 3 * group.stripes) * group.page_units
        in_tables, self._free = np.split(offsets.astype(np.int32), [SLOTS * state_slots * group.stripes])
        for pages in self.pages:
            pages.arena.fill_(0xFF)
            for table in (pages.reading[0], pages.writing[0]):
                table[:] = in_tables.reshape(table.shape)
        self._tables = DeviceTables([self.pages[1].reading[0].shape], CPU)
        for table in (self._tables.reading[0], self._tables.writing[0]):
            table.copy_(torch.from_numpy(self.pages[1].reading[0]))
        parameters = [Parameters(decoder, dict(weights)) for _ in range(2)]
        mixer = described[1]
        self._plain = make_mixer(mixer, Context(parameters[0], PLAIN, ALONE, RopeTables(LENGTH), frozenset()))
        context = GpuContext(
            parameters[1], self.pages[1], self._tables, ALONE, frozenset(), LENGTH, SLOTS, torch.float32, False
        )
        if isinstance(mixer, GatedDeltaNet):  # room for one chunk: longer segments go in strips
            context.delta_workspace = torch.empty(delta_workspace_bytes(mixer, 4, CHUNK_TOKENS), dtype=torch.uint8)
        self._fused = make_mixer(mixer, context, STATE_MIXERS)
        self._builder = StepBuilder(self.pages[1], self._tables, frozenset())

    @staticmethod
    def _slabs(layout) -> int:
        (group,) = layout.groups
        return -(-SLOTS * 3 * group.stripes * group.page_bytes // layout.slab_bytes)

    def snapshots(self, *wanted: tuple[int, int]) -> Changes:
        """Of these slots in front of these positions, in pages of their own."""
        stripes = self.pages[0].layout.groups[0].stripes
        pages, self._free = np.split(self._free, [len(wanted) * stripes])
        pages = pages.reshape(-1, stripes)
        return Changes(snapshots=tuple(Snapshot(0, *at, of) for at, of in zip(wanted, pages, strict=True)))

    def mixed(self, batch: Batch, *, narrowed: bool) -> None:
        """A step with segments; `narrowed`: only wanted rows go on from this mixer."""
        step = self._begin(batch)
        x = torch.randn(len(step.positions), HIDDEN)
        positions, wanted = torch.from_numpy(step.positions), torch.from_numpy(step.wanted)
        plain = StepState(step, self.pages[0], None, positions, wanted, step.segments)
        fused = self._state(self._builder.mixed(step, batch.changes))
        if narrowed:
            self._plain.keep(x, plain)
            self._fused.keep(x, fused)
            x = x[wanted]
        self._compare(self._fused(x, fused), self._plain(x, plain))

    def decode(self, rows: list[tuple[int, int, int]]) -> None:
        """Slots, positions and present states of decoding rows, of which some are padding."""
        batch_rows = [row for row in rows if row != PADDING_ROW]
        slots, positions, state_slots = (np.array(column) for column in zip(*batch_rows, strict=True))
        step = self._begin(Batch(0, slots, positions, [], state_slots.astype(np.int8), NO_CHANGES))
        real = torch.tensor([row != PADDING_ROW for row in rows])
        x = torch.randn(len(rows), HIDDEN)
        plain = StepState(step, self.pages[0], None, torch.from_numpy(positions), torch.arange(len(slots)), ())
        fused = self._state(DeviceStep.decoding(torch.tensor(rows, dtype=torch.int32).t().contiguous()))
        found = self._fused(x, fused)
        assert found[~real].isfinite().all(), "padding rows go on as numbers"
        self._compare(found[real], self._plain(x[real], plain))

    def verify(self, batch: Batch, padded: int) -> None:
        """A step whose chunks are drafts, as decoding rows of which the last are padding; all rows by the reference."""
        step, rows, host = self._begin(batch).whole(), batch.num_tokens, Step.of_rows(batch)
        x = torch.randn(padded, HIDDEN)
        positions, wanted = torch.from_numpy(step.positions), torch.from_numpy(step.wanted)
        plain = StepState(step, self.pages[0], None, positions, wanted, step.segments)
        fused = self._state(
            DeviceStep.decoding(inputs_of(host, padded), torch.tensor(row_segments(host, 8, padded)), 8)
        )
        found = self._fused(x, fused)
        assert found[rows:].isfinite().all(), "padding rows go on as numbers"
        self._compare(found[:rows], self._plain(x[:rows], plain))

    def _begin(self, batch: Batch) -> Step:
        for pages in self.pages:
            pages.before_step(batch.changes)
        return Step.of(batch)

    def _state(self, step: DeviceStep) -> GpuStepState:
        pages = {0: self._tables.state_pages(0, step.sequences.slots, step.sequences.state_slots)}
        return GpuStepState(step, step.positions, step.chunks, {}, None, state_pages=pages)

    def _compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        # All pages: whatever no sequence of the step has written is still what it was.
        fused, plain = (pages.arena.view(torch.float32) for pages in reversed(self.pages))
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4, equal_nan=True)


def inputs_of(step: Step, padded: int) -> torch.Tensor:
    """As the runner puts them together, for sequences of several rows with states."""
    inputs = np.tile(np.array([[0], [-1], [0], [NO_DRAFT], [0], [-1]]), padded)
    inputs[:2, : step.num_decoding] = step.decode_slots, step.positions
    inputs[2, : len(step.state_slots)] = step.state_slots
    for index, segment in enumerate(step.decoding_segments()):
        inputs[4:, index] = segment.slot, segment.start
    return torch.tensor(inputs, dtype=torch.int32)


def check_one_slot(name: str) -> None:
    """Kernels overwrite the states that they read; snapshots lie within chunks and tiles, at their ends, and so early
    that the convolution remembers what came before the step.
    """
    torch.manual_seed(4)
    both = Both(MIXERS[name], 1)
    nobody, tokens, present = np.zeros(0, dtype=np.int64), np.zeros(80, dtype=np.int32), np.zeros(3, dtype=np.int8)
    chunks = [PromptChunk(0, 0, tokens[:1], True), PromptChunk(1, 0, tokens[:75], True)]
    both.mixed(Batch(0, nobody, nobody, chunks, present[:2], both.snapshots((1, 1), (1, 16), (1, 70))), narrowed=True)
    chunks = [PromptChunk(1, 75, tokens[:20], False), PromptChunk(2, 0, tokens[:4], True)]
    wanted = both.snapshots((1, 77), (1, 80), (2, 3))
    both.mixed(Batch(1, np.array([0]), np.array([1]), chunks, present, wanted), narrowed=False)
    both.decode([(1, 95, 0), PADDING_ROW, (0, 2, 0), (2, 4, 0)])


def check(name: str) -> None:
    torch.manual_seed(3)
    both = Both(MIXERS[name], 2)
    nobody = np.zeros(0, dtype=np.int64)
    tokens = np.zeros(70, dtype=np.int32)
    # Shorter than the convolution remembers, and longer than a chunk.
    chunks = [PromptChunk(0, 0, tokens[:2], True), PromptChunk(1, 0, tokens, True)]
    both.mixed(Batch(0, nobody, nobody, chunks, np.zeros(2, dtype=np.int8), NO_CHANGES), narrowed=True)
    chunks = [PromptChunk(1, 70, tokens[:2], False), PromptChunk(2, 0, tokens[:1], True)]
    mates = np.array([0]), np.array([2])
    both.mixed(Batch(1, *mates, chunks, np.array([1, 1, 0], dtype=np.int8), NO_CHANGES), narrowed=False)
    both.decode([(1, 72, 0), PADDING_ROW, (0, 3, 0), (3, 0, 0), (2, 1, 1)])
    # Fewer rows than the convolution remembers, more, a single one, and a sequence that begins here.
    starts = {1: 73, 2: 2, 3: 0}
    chunks = [PromptChunk(slot, starts[slot], tokens[:n], True, drafts=n - 1) for slot, n in ((1, 2), (2, 6), (3, 4))]
    mates = np.array([0]), np.array([4])
    both.verify(Batch(3, *mates, chunks, np.array([1, 1, 0, 0], dtype=np.int8), NO_CHANGES), padded=16)


def main() -> None:
    torch.set_num_threads(1)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NaN pages are cast
        for name in sys.argv[1:] or MIXERS:
            try:
                check(name)
                check_one_slot(name)
            except AssertionError as error:
                sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
