"""Recurrent states: what chunks compute is what tokens one by one do, and two steps in flight change nothing."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from tests.running.harness import Knobs, generate, layout_of
from tests.running.small_models import CONFIGS, save, spec_of, weights_of
from tests.running.test_against_transformers import prompt
from windowpane.engine.accounts import accounts
from windowpane.engine.start import start
from windowpane.kv.capacity import Capacity
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.lowering.reference.recurrence import causal_convolution, gated_delta_rule, mamba2_scan
from windowpane.models import from_config, load
from windowpane.models.config import ModelError
from windowpane.models.running import runnable
from windowpane.runners.plain import Runner
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler


def rolled(rule, inputs: list[torch.Tensor], rest: list[torch.Tensor], state: torch.Tensor, tokens: list[int]):
    """Apply `rule` to runs of so many tokens, one after another."""
    outputs = []
    for first, count in zip(np.cumsum([0, *tokens]), tokens, strict=False):
        out, state = rule(*(x[:, first : first + count] for x in inputs), *rest, state)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def delta_rule_by_hand(queries, keys, values, log_decays, rates, state):
    """The recurrence as papers write it, in double precision."""
    unit = [x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (queries, keys)]
    state, reads = state.double(), []
    for t in range(queries.shape[1]):
        key, query = unit[1][:, t], unit[0][:, t] * queries.shape[-1] ** -0.5
        state = state * log_decays[:, t].double().exp()[..., None, None]
        learned = rates[:, t, :, None] * (values[:, t] - torch.einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * learned[:, :, None]
        reads.append(torch.einsum("bhkv,bhk->bhv", state, query))
    return torch.stack(reads, dim=1), state


def scan_by_hand(x, write, read, steps, rates, state):
    state, outputs, per_group = state.double(), [], x.shape[2] // write.shape[2]
    for t in range(x.shape[1]):
        b, c = (part[:, t].double().repeat_interleave(per_group, dim=1) for part in (write, read))
        step = steps[:, t].double()[..., None, None]
        state = state * (-rates.double()[:, None, None] * step).exp() + step * x[:, t, :, :, None] * b[:, :, None]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("tokens", [[1] * 5, [130], [64, 64], [3, 1, 63, 65, 1]])
def test_the_delta_rule_in_chunks_is_the_recurrence(tokens):
    random = torch.Generator().manual_seed(1)
    count = sum(tokens)
    queries, keys = (torch.randn(2, count, 3, 8, generator=random) for _ in range(2))
    values, state = torch.randn(2, count, 3, 6, generator=random), torch.randn(2, 3, 8, 6, generator=random)
    log_decays, rates = -torch.rand(2, count, 3, generator=random), torch.rand(2, count, 3, generator=random)
    inputs = [queries, keys, values, log_decays, rates]
    read, behind = rolled(gated_delta_rule, inputs, [], state, tokens)
    expected_read, expected_behind = delta_rule_by_hand(*inputs, state)
    assert (read - expected_read).abs().max() < 1e-5
    assert (behind - expected_behind).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [[1] * 5, [130], [64, 64], [3, 1, 63, 65, 1]])
def test_mamba_2_in_chunks_is_the_recurrence(tokens):
    random = torch.Generator().manual_seed(2)
    count = sum(tokens)
    x, state = torch.randn(2, count, 4, 6, generator=random), torch.randn(2, 4, 6, 5, generator=random)
    write, read = (torch.randn(2, count, 2, 5, generator=random) for _ in range(2))
    steps, rates = torch.rand(2, count, 4, generator=random), torch.rand(4, generator=random)

    def scan(x, write, read, steps, rates, state):
        return mamba2_scan(x, write, read, steps, rates, state)

    y, behind = rolled(scan, [x, write, read, steps], [rates], state, tokens)
    expected_y, expected_behind = scan_by_hand(x, write, read, steps, rates, state)
    assert (y - expected_y).abs().max() < 2e-5
    assert (behind - expected_behind).abs().max() < 2e-5


def test_a_convolution_goes_on_where_its_tail_ends():
    random = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((2, 11, 5), (5, 4), (5,)))
    at_once, tail = causal_convolution(x, torch.zeros(2, 5, 3), weight, bias)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=5).transpose(1, 2)
    assert torch.allclose(at_once, expected, atol=1e-5)
    first, between = causal_convolution(x[:, :2], torch.zeros(2, 5, 3), weight, bias)
    rest, end = causal_convolution(x[:, 2:], between, weight, bias)
    assert torch.allclose(torch.cat([first, rest], dim=1), expected, atol=1e-5)
    assert torch.equal(end, tail) and torch.equal(end, x[:, -3:].transpose(1, 2))


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "lfm2"])
def test_two_steps_in_flight_change_nothing_and_leave_the_whole_answer(name):
    """A stop arrives while the next step computes the stop token: the answer's point then holds that token too."""
    first = prompt(1, 40)
    answer = generate(name, [first], 12, Knobs()).outputs[0]
    stop = next(at for at in range(4, 12) if answer.index(answer[at]) == at)
    again = [*first, *answer[: stop + 1], *prompt(2, 7)]
    spec, layout = spec_of(name), layout_of(list(spec_of(name).caches), Knobs())
    slabs = 6 * Capacity(layout, 0).slabs_for(1, 128)
    manager = KVManager(layout, slabs, 2, 128)
    scheduler = Scheduler(manager, 64, 32, RestorePoints(manager))
    cpu = torch.device("cpu")
    runner = Runner(spec, weights_of(name), layout, slabs, 2, 128, device=cpu, dtype=torch.float32)
    turn = Request("1", np.array(first), SamplingParams(max_tokens=12, stop_token_ids=(answer[stop],)))
    _run_overlapped(scheduler, runner, [turn, Request("2", np.array(prompt(3, 30)), SamplingParams(max_tokens=20))])
    assert turn.output == answer[: stop + 1]
    next_turn = Request("3", np.array(again), SamplingParams(max_tokens=8))
    _run_overlapped(scheduler, runner, [next_turn])
    assert next_turn.cached_tokens == len(first) + stop + 1
    assert next_turn.output == generate(name, [again], 8, Knobs()).outputs[0]


def _run_overlapped(scheduler: Scheduler, runner: Runner, requests: list[Request]) -> None:
    """Each step is computed before the one before it is committed."""
    for request in requests:
        scheduler.add(request)
    sampled: deque[np.ndarray] = deque()
    while scheduler.has_work:
        batch = scheduler.schedule()
        if batch is not None:
            tokens = runner.forward(batch).logits.argmax(dim=-1)
            runner.take_sampled(torch.from_numpy(batch.sampling_slots), tokens)
            sampled.append(tokens.numpy())
        if len(sampled) == 2 or batch is None:
            scheduler.commit(sampled.popleft())


def test_gpus_run_states_and_refuse_odd_heads_in_one_line():
    spec = load("qwen3.5-35b-a3b")
    assert runnable(spec, on_gpu=True) is spec.decoder
    odd = from_config({**CONFIGS["qwen3.5"], "linear_value_head_dim": 24}, "odd")
    assert runnable(odd) is odd.decoder
    with pytest.raises(ModelError, match=r"^odd has recurrent states of 16 × 24 .* run on CPUs only .*--device cpu$"):
        runnable(odd, on_gpu=True)


def test_states_in_bfloat16_take_what_was_planned_and_change_little(tmp_path):
    save("qwen3-next", tmp_path)
    flags = {"device": "cpu", "kv_cache_memory_bytes": 2**22, "max_model_len": 256, "max_num_seqs": 4}
    logprobs = []
    for dtype in ("auto", "bfloat16"):
        started = start(tmp_path, {**flags, "mamba_ssm_cache_dtype": dtype, "enable_return_routed_experts": True})
        rows = accounts(started.plan, started.reports)
        assert {"state", "full", "routed-experts"} <= {row.name.strip() for row in rows}
        assert all(row.predicted_bytes == row.measured_bytes > 0 for row in rows)
        stored = {part.dtype for part in started.runner.pages.states[0].parts}
        assert stored == ({torch.float32} if dtype == "auto" else {torch.float32, torch.bfloat16})
        request = Request("r", np.array(prompt(1, 40)), SamplingParams(2, temperature=0, logprobs=0))
        started.engine.add(request)
        while started.engine.has_work:
            started.engine.step()
        logprobs.append([entry.logprob for entry in request.logprobs])
    assert logprobs[0] != logprobs[1] and np.allclose(*logprobs, atol=0.05)
