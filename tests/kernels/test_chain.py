"""All products between two layers' attention in one launch, from the host's side: what is taken, how it is cut, if it
compiles.

The kernel has no interpreter; `python3 -m bench.gpu_check "layer chain"` checks it on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_hopper_compiles import FEW_SPILLED_BYTES, SHARED_BYTES, Recorder, stack_bytes
from tests.tiny_model import make_model
from windowpane.engine import start
from windowpane.lowering.gpu import chaining
from windowpane.lowering.gpu.kernels import chain
from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links, cut, is_chain, run_chain, try_chain
from windowpane.lowering.gpu.kernels.chain_forms import AT_A_TURN, GATED, LONG, TALL
from windowpane.lowering.packed import PackedWeight
from windowpane.models.packing import PackedForm

BF16 = torch.bfloat16
H200 = 132
META = torch.device("meta")
CHAIN_KERNEL = chain.chain_kernel


def weight(outputs: int, inputs: int, group: int = 32, zeros: bool = False, dtype: torch.dtype = BF16) -> PackedWeight:
    return PackedWeight.empty(PackedForm("int4", outputs, inputs, group, has_zeros=zeros), dtype, META)


def links(attended=8192, width=5376, inner=21504, following=16384, *, sandwich=True) -> Links:
    norm = torch.zeros(width)
    return Links(
        out=weight(width, attended),
        gate_up=weight(2 * inner, width),
        down=weight(width, inner),
        following=weight(following, width) if following else None,
        post_attention_norm=norm if sandwich else None,
        pre_mlp_norm=norm,
        post_mlp_norm=norm if sandwich else None,
        next_norm=norm,
        scalar=torch.zeros(1, dtype=BF16) if sandwich else None,
        eps=1e-6,
        gelu=sandwich,
    )


class TestCuts:
    @given(st.integers(1, 60_000), st.integers(1, 100).map(lambda n: 256 * n), st.integers(1, 200), st.booleans())
    def test_turns_cover_every_output_of_a_program_and_every_input(self, outputs, inputs, programs, gated):
        found = cut(outputs, inputs, programs, gated=gated)
        most = max((p + 1) * outputs // programs - p * outputs // programs for p in range(programs))
        assert found.parts * chain.PART_OUTPUTS[found.form] >= most
        step = 256 * (chain.LONG_STEPS if found.form == LONG else 1)
        portions = found.turns * AT_A_TURN
        assert portions % found.parts == 0, "every part has every step"
        assert portions // found.parts * step >= inputs
        assert (found.form == GATED) == gated
        assert found.parts == 1 or found.parts % AT_A_TURN == 0

    def test_of_a_large_model(self):
        """41 outputs of a program are long, 125 are tall, 140 would leave most of a second part empty."""
        assert cut(5376, 8192, H200) == (LONG, 3, 4)
        assert cut(21504, 5376, H200, gated=True) == (GATED, 3, 21)
        assert cut(5376, 21504, H200) == (LONG, 3, 11)
        assert cut(16384, 5376, H200) == (TALL, 1, 7)
        assert cut(18432, 5376, H200) == (LONG, 9, 9)

    def test_steps_that_do_not_come_in_threes_are_not_taken_three_at_a_time(self):
        assert cut(16384, 8192, H200).parts != 1


class TestWhatIsTaken:
    def test_layers_of_gemma_4_31b(self):
        assert is_chain(links(), BF16, H200)
        assert is_chain(links(following=18432), BF16, H200)
        assert is_chain(links(attended=16384, following=0), BF16, H200)
        assert is_chain(links(sandwich=False), BF16, H200)

    def test_bfloat16_and_symmetric_groups_of_32_only(self):
        whole = links()
        assert not is_chain(whole, torch.float16, H200)
        assert not is_chain(replace(whole, down=weight(5376, 21504, group=128)), BF16, H200)
        assert not is_chain(replace(whole, down=weight(5376, 21504, zeros=True)), BF16, H200)
        assert not is_chain(replace(whole, down=weight(5376, 21504, dtype=torch.float32)), BF16, H200)
        ordered = replace(whole.out, order=torch.zeros(8192, dtype=torch.int32))
        assert not is_chain(replace(whole, out=ordered), BF16, H200)

    def test_weights_that_do_not_fit_together_are_left_alone(self):
        whole = links()
        assert not is_chain(replace(whole, gate_up=weight(40_000, 5376)), BF16, H200)
        assert not is_chain(replace(whole, gate_up=weight(43_008, 5120)), BF16, H200)
        assert not is_chain(replace(whole, down=weight(5120, 21504)), BF16, H200)
        assert not is_chain(replace(whole, following=weight(16384, 5120)), BF16, H200)

    def test_weights_lie_side_by_side_and_begin_at_whole_16_bytes(self):
        whole = links(attended=4096, width=2304, inner=8192, following=0)
        own = PackedWeight.empty(PackedForm("int4", 2304, 4096, 32), BF16, torch.device("cpu"))
        assert is_chain(replace(whole, out=own), BF16, H200)
        wider = torch.empty(2304, 2048, dtype=torch.int16)
        assert not is_chain(replace(whole, out=replace(own, units=wider[:, :1024])), BF16, H200)
        late = torch.empty(2304 * 1024 + 1, dtype=torch.int16)[1:].view(2304, 1024)
        assert not is_chain(replace(whole, out=replace(own, units=late)), BF16, H200)

    def test_whole_steps_of_inputs_only(self):
        assert not is_chain(links(attended=8192 + 128), BF16, H200)

    def test_products_that_end_before_the_next_can_be_asked_for_are_left_alone(self):
        assert not is_chain(links(attended=2048), BF16, H200)

    def test_what_does_not_fit_into_shared_memory_is_left_alone(self):
        assert not is_chain(links(inner=65_536), BF16, H200)

    def test_a_cpu_has_none(self):
        whole = links(attended=4096, width=2304, inner=8192, following=0)
        on_cpu = PackedWeight.empty(PackedForm("int4", 2304, 4096, 32), BF16, torch.device("cpu"))
        assert is_chain(whole, BF16, H200) and not chain.has_chain(replace(whole, out=on_cpu), BF16)


LAYERS = {
    "31B sliding": links(),
    "31B before a full layer": links(following=18432),
    "31B last": links(attended=16384, following=0),
    "no norms behind products, inputs that end within a step": links(5120, 2560, 9728, 3333, sandwich=False),
    "Llama 70B": links(8192, 8192, 28672, 10240, sandwich=False),
    "three parts of whole rows": links(4096, 2304, 9216, 30_000, sandwich=False),
    "twelve parts": links(4096, 2304, 9216, 20_000, sandwich=False),
}


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return record_chain(monkeypatch)


def record_chain(monkeypatch) -> Recorder:
    """Keeps launches on an H200."""
    found = Recorder(CHAIN_KERNEL)
    monkeypatch.setattr(chain, "chain_kernel", found)
    monkeypatch.setattr(chain, "processors_of", lambda device: H200)
    return found


def launch(layer: Links, most_following: int = 0) -> None:
    """As a step does."""
    scratch = ChainScratch(len(layer.out), layer.down.inputs, torch.device("cpu"), most_following)
    attended, hidden = torch.zeros(1, layer.out.inputs, dtype=BF16), torch.zeros(1, len(layer.out), dtype=BF16)
    made, updated = run_chain(attended, hidden, layer, scratch, pdl=True)
    assert updated.shape == hidden.shape
    assert made.shape == (1, len(layer.out) if layer.following is None else len(layer.following))


def compiled_from(recorder: Recorder):
    return recorder.compile(aligned=[name for name, x in recorder.launched.items() if isinstance(x, torch.Tensor)])


@pytest.mark.parametrize("name", LAYERS)
def test_a_launch_compiles_for_hopper_with_weights_on_their_way(name, recorder, tmp_path):
    layer = LAYERS[name]
    launch(layer)
    compiled = compiled_from(recorder)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= chain._shared_bytes(layer) <= SHARED_BYTES
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= FEW_SPILLED_BYTES
    # 16 bytes at a time, and the tensor cores' byte form: two products for each half of a block.
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx
    # Three parts of the outputs at a time, or three steps of the only one, in one loop for each product.
    assert ptx.count("mma.sync.aligned.m16n8k32") == len(chain._cuts(layer, H200)) * AT_A_TURN * 8
    # A fence would wait for weights too. What programs leave for each other is written and read two bytes at a time, by
    # operations that PTX orders: none of them races.
    assert not re.search(r"\b(fence|membar|atom)\b|\.release|\.acquire", ptx)
    assert set(re.findall(r"\S+\.relaxed\S+", ptx)) == {"st.relaxed.gpu.global.b16", "ld.relaxed.gpu.global.v4.b16"}
    assert compiled.metadata.launch_pdl and not compiled.metadata.launch_cooperative_grid
    assert "griddepcontrol.wait" in ptx


def test_what_is_tried_at_start_up_is_the_code_that_steps_launch(recorder):
    """What a cooperative launch shows about the card holds for steps: registers and shared memory are the same."""
    layer = links(attended=4096, width=2304, inner=8192, following=6144)
    launch(layer)
    of_steps = compiled_from(recorder)
    scratch = ChainScratch(2304, 8192, torch.device("cpu"))
    try_chain(layer, scratch, BF16, pdl=True)
    tried = compiled_from(recorder)
    assert tried.metadata.launch_cooperative_grid and not tried.metadata.launch_pdl
    assert tried.asm["cubin"] == of_steps.asm["cubin"] and tried.metadata.shared == of_steps.metadata.shared


def test_layers_of_a_model_are_one_kernel(recorder):
    """Whatever their attention leaves, and however many outputs the next layer's projections have."""
    constant = {p.name for p in CHAIN_KERNEL.params if p.is_constexpr}
    for_any_number = {p.name for p in CHAIN_KERNEL.params if p.do_not_specialize}
    assert for_any_number == {"out_steps", "next_outputs"}, "what these layers differ in"
    kinds = set()
    for layer in (links(), links(following=18432), links(attended=16384)):
        launch(layer, most_following=18432)
        kinds.add(tuple((name, x) for name, x in recorder.launched.items() if name in constant))
    assert len(kinds) == 1


def test_layers_share_scratch_with_those_of_the_same_inner_width(monkeypatch):
    """A launch clears what the one before it left, wherever that lies."""
    monkeypatch.setattr(chaining, "has_chain", lambda link, dtype: link.down.inputs > 8192)
    monkeypatch.setattr(chaining, "try_chain", lambda link, scratch, dtype, *, pdl: None)
    widths, following = [21504, 9728, 21504, 8192, 9728], [16384, 18432, 16384, 30_000, 0]
    found = [links(inner=inner, following=next_) for inner, next_ in zip(widths, following, strict=True)]
    layers = [SimpleNamespace(blocks=[SimpleNamespace(mixer=None)], link=link) for link in found]
    monkeypatch.setattr(chaining, "_links", lambda layer, next_layer: layer.link)
    chained = chaining.chain_layers(layers, 5376, BF16, torch.device("cpu"), pdl=False)
    assert chained[3] is layers[3]
    chains = [(c.links, c._scratch) for c in chained if isinstance(c, chaining.ChainedLayer)]
    assert [link for link, _ in chains] == [found[i] for i in (0, 1, 2, 4)]
    (_, a), (_, b), (_, c), (_, d) = chains
    assert a is c and b is d and a is not b
    assert all(scratch.results.shape == (2, 2 * 5376 + link.down.inputs) for link, scratch in chains)
    assert {scratch.most_following for _, scratch in chains} == {18432}, "of layers that have a chain"


class TestStartUp:
    @pytest.fixture
    def layers(self, monkeypatch):
        monkeypatch.setattr(chaining, "has_chain", lambda link, dtype: True)
        monkeypatch.setattr(chaining, "_links", lambda layer, next_layer: layer.link)
        monkeypatch.setattr(chain, "processors_of", lambda device: H200)
        shapes = [(8192, 6144), (9728, 6144), (8192, 6144), (9728, 0)]
        found = [links(attended=4096, width=2304, inner=inner, following=following) for inner, following in shapes]
        return [SimpleNamespace(blocks=[SimpleNamespace(mixer=None)], link=link) for link in found]

    def launches(self, monkeypatch, multiprocessors):
        """Of a card with so many multiprocessors at hand: the inner width and attributes of each."""
        asked = []

        class Kernel:
            def __getitem__(self, grid):
                def launch(*args, INNER_WIDTH, NEXT_PARTS, launch_pdl, launch_cooperative_grid, **constants):
                    asked.append((INNER_WIDTH, NEXT_PARTS > 0, launch_pdl, launch_cooperative_grid))
                    if launch_cooperative_grid and grid[0] > multiprocessors:
                        raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

                return launch

        monkeypatch.setattr(chain, "chain_kernel", Kernel())
        return asked

    def test_each_inner_width_is_tried_once_and_layers_are_chained(self, layers, monkeypatch, caplog):
        asked = self.launches(monkeypatch, H200)
        chained = chaining.chain_layers(layers, 2304, BF16, META, pdl=True)
        assert all(isinstance(layer, chaining.ChainedLayer) and layer._pdl for layer in chained)
        assert sorted(asked) == [(8192, True, False, True), (9728, True, False, True)]
        assert not caplog.messages

    def test_layers_run_block_by_block_where_the_card_refuses_and_one_line_says_so(self, layers, monkeypatch, caplog):
        asked = self.launches(monkeypatch, H200 - 2)
        assert chaining.chain_layers(layers, 2304, BF16, META, pdl=True) == layers
        assert len(asked) == 1, "what one layer's programs need, others' do too"
        (line,) = caplog.messages
        assert "block by block" in line and "too many blocks in cooperative launch" in line


@pytest.mark.parametrize(("flags", "chained"), [({}, True), ({"enable_layer_chain": False}, False)])
def test_the_flag_reaches_every_rank(flags, chained, monkeypatch, tmp_path):
    jobs = []

    def no_ranks(job, *_others):
        jobs.append(job)
        raise InterruptedError

    monkeypatch.setattr(start, "start_ranks", no_ranks)
    with pytest.raises(InterruptedError):
        start.start(make_model(tmp_path / "model"), {"device": "cpu", "load_format": "dummy", **flags})
    assert [job.use_chain for job in jobs] == [chained]
