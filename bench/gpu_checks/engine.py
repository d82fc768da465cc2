"""The engine on a GPU against the plain torch path: the same tokens, with graphs and overlapping steps or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.known_drafts import Eager, KnownAnswers, Overheard, Told, sample_drafts
from bench.random_adapters import engine_adapters
from tests.running.small_models import CONFIGS, FULL, QUANTIZED, SLIDING, WIDE_QUANTIZED, WINDOW, spec_of, weights_of
from windowpane.drafts.drafter import ModelDrafter
from windowpane.engine.engine import Engine
from windowpane.engine.sampler import Sampler
from windowpane.kv.caches import StateCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.changes import NO_CHANGES
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats, rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Routes
from windowpane.lowering.gpu.chaining import ChainedLayer
from windowpane.lowering.gpu.kernels.hopper_tiled import is_hopper
from windowpane.lowering.linear import Weights
from windowpane.models import ModelSpec, from_config
from windowpane.models.adapters import AdapterRoom
from windowpane.models.drafters import drafter_for
from windowpane.runners.assistant import Assistant
from windowpane.runners.cuda import CudaRunner
from windowpane.runners.plain import Runner
from windowpane.schedule.adapters import AdapterSlots
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler
from windowpane.weights import load_weights

ASSISTANT, ITSELF, OWN_LAYER = "assistant", "drafting for itself", "own layer"
DRAFTERS = (
    ("gemma4 K = V", ASSISTANT), ("gemma4 everything", ASSISTANT), ("gemma4 everything", ITSELF), ("qwen3", ITSELF),
    ("qwen3-next", OWN_LAYER), ("qwen3.5", OWN_LAYER),
)  # fmt: skip
RESTORED = ("qwen3", "gemma3", "gemma4 everything", "llama 4")
RESTORED_STATES = ("qwen3.5", "nemotron-h", "lfm2")
ADAPTED = ("llama", "gemma4 everything", "gemma4 int4", "qwen3 experts", "gpt-oss", "qwen3-next", "falcon-h1")
ROUTED = ("qwen3 experts", "gpt-oss", "gemma4 experts", "glm 4.5")

Checks = list[tuple[str, Callable[[], str]]]

NAMES = (*CONFIGS, *QUANTIZED)

NEW_TOKENS = 48
ADAPTER_RANK = 3
TEACHER_TOKENS = 1024
FEW_TEACHER_TOKENS = 128  # where plain torch is slow
MOST_KL = 1e-3
LEAST_AGREEMENT = 0.99
CLEAR = 4.0  # times the plain path's rounding noise


@dataclass(frozen=True)
class Setting:
    """How a run differs: none of it may show in the tokens. `routes`: the experts that they visited are told too.

    `drafts`: so many at most, of which some are wrong. `drafter`: beside the model there is an assistant, the same
    model once more, or its own layer for that. `adapters`: requests have so many in turn, and none.
    """

    fused: bool = True
    graphs: bool = True
    overlapped: bool = True
    chunk_tokens: int = 64
    kv_cache_dtype: str = "auto"
    routes: bool = False
    drafts: int = 0
    adapters: int = 0
    drafter: str | None = None


def checks() -> Checks:
    return [
        *((f"engine fp32: {name}", partial(greedy_equals_reference, name)) for name in NAMES),
        *((f"engine bf16: {name}", partial(teacher_forced, name)) for name in CONFIGS),
        *((f"engine bf16: {name}", partial(teacher_forced, name, FEW_TEACHER_TOKENS)) for name in WIDE_QUANTIZED),
        *((f"engine restoring: {name}", partial(restored_equals_cold, name)) for name in (*RESTORED, *RESTORED_STATES)),
        *(
            (f"engine restoring, states in one slot: {name}", partial(restored_equals_cold, name, overlapped=False))
            for name in RESTORED_STATES
        ),
        *((f"engine routes: {name}", partial(greedy_equals_reference, name, routes=True)) for name in ROUTED),
        *((f"engine adapters: {name}", partial(greedy_equals_reference, name, adapters=2)) for name in ADAPTED),
        *((f"engine {who}: {name}", partial(drafter_equals_reference, name, who)) for name, who in DRAFTERS),
    ]


def greedy_equals_reference(name: str, *, routes: bool = False, adapters: int = 0) -> str:
    """Greedy tokens of mixed prompts in float32: plain torch, and every way the fused path can run."""
    expected = run(name, Setting(fused=False, overlapped=False, routes=routes, adapters=adapters))
    settings = [
        Setting(),
        Setting(graphs=False),
        Setting(overlapped=False),
        Setting(graphs=False, overlapped=False, chunk_tokens=17),
        Setting(chunk_tokens=512),
        Setting(drafts=4),
        Setting(drafts=8, graphs=False, overlapped=False),
    ]
    for setting in settings:
        got = run(name, replace(setting, routes=routes, adapters=adapters), answers=expected)
        if got != expected:
            where = [(i, _first_difference(a, b)) for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
            raise AssertionError(f"{setting}: request and place of the first difference {where}")
    return f"{sum(map(len, expected))} tokens × {len(settings)} ways"


def drafter_equals_reference(
    name: str, who: str, device: str = "cuda", lengths: tuple[int, ...] = (1, 5, 130), new_tokens: int = NEW_TOKENS
) -> str:
    """What a model drafts in float32, beside drafts of which some are right: plain torch, and the fused path. And
    answers with its own drafts, accepted by chance: whether or not they stay on the device until they are verified. Of
    an assistant, whose steps are sent ahead of what the host knows, answers with drafts that are right by chance.
    """
    answers = run(name, Setting(fused=False, overlapped=False), device, lengths, new_tokens)
    found = []
    ways = [Setting(fused=False, overlapped=False), Setting(graphs=False, overlapped=False)]
    ways += [Setting(), Setting(chunk_tokens=17)] if device == "cuda" else []
    for setting in ways:
        setting = replace(setting, drafts=3, drafter=who)
        engine = _engine(name, setting, torch.device(device), max(lengths) + new_tokens, len(lengths))
        runner = engine.runner
        assert isinstance(runner, Runner | CudaRunner) and runner.drafter is not None
        known = KnownAnswers(lambda request: answers[int(request.id)])
        overheard = Overheard(ModelDrafter(runner.drafter), known)
        engine.speculator = Eager(overheard, setting.drafts)
        if greedy(engine, lengths, new_tokens) != answers:
            raise AssertionError(f"{setting}: tokens differ")
        found.append(overheard.said)
        if isinstance(runner.drafter, Assistant):
            answers_ahead(name, setting, device, lengths, answers)
            continue
        said = []
        for kind in (ModelDrafter, Told):
            engine = _engine(name, setting, torch.device(device), max(lengths) + new_tokens, len(lengths))
            assert isinstance(engine.runner, Runner | CudaRunner) and engine.runner.drafter is not None
            sample_drafts(engine, 0.7)
            engine.speculator = Eager(kind(engine.runner.drafter), setting.drafts)
            said.append(greedy(engine, lengths, new_tokens))
        if said[0] != said[1]:
            raise AssertionError(f"{setting}: tokens differ where drafts stay on the device")
    compared = 0
    for said in found[1:]:
        for at in said.keys() & found[0].keys():
            drafts = list(zip(said[at], found[0][at], strict=False))
            compared += len(drafts)
            if any(a != b for a, b in drafts):
                raise AssertionError(f"request {at[0]} behind {at[1]} tokens: {said[at]}, plain torch {found[0][at]}")
    if compared < new_tokens:
        raise AssertionError(f"only {compared} drafts could be compared")
    return f"{compared} drafts"


def answers_ahead(
    name: str, setting: Setting, device: str, lengths: tuple[int, ...], answers: Sequence[Sequence[int]]
) -> None:
    """Greedy answers where the device alone knows drafts, of which it has seven of ten right, and what is accepted."""
    ahead = replace(setting, overlapped=True)
    new_tokens = len(answers[0])
    engine = _engine(name, ahead, torch.device(device), max(lengths) + new_tokens, len(lengths))
    runner, forward, steps_ahead = engine.runner, engine.runner.forward, list[bool]()
    assert isinstance(runner, CudaRunner) and isinstance(runner.drafter, Assistant)
    drafts_from(runner.drafter, engine, answers)

    def counting(batch: Batch, **rest: Any) -> Any:
        steps_ahead.append(batch.is_ahead)
        return forward(batch, **rest)

    runner.forward = counting  # type: ignore[method-assign]
    engine.speculator = Eager(ModelDrafter(runner.drafter), ahead.drafts)
    said = greedy(engine, lengths, new_tokens)
    del runner.forward, runner.drafter._graphs.run  # a cycle would be freed while the next engine captures its graphs
    if said != answers:
        raise AssertionError(f"{ahead}: tokens differ where steps go ahead")
    stats = engine.speculator.stats
    if sum(steps_ahead) < len(steps_ahead) / 4 or stats.accepted_tokens < stats.draft_tokens / 3:
        raise AssertionError(
            f"{ahead}: {sum(steps_ahead)} of {len(steps_ahead)} steps went ahead, and {stats.accepted_tokens} of "
            f"{stats.draft_tokens} drafts were accepted"
        )


def drafts_from(drafter: Assistant, engine: Engine, answers: Sequence[Sequence[int]]) -> None:
    """Let an assistant draft, and put tokens of these answers in the place of its drafts, or wrong ones: which, is
    found on the device, by the position that it has drafted from.
    """
    run, made = drafter._graphs.run, drafter.drafts.made

    def draft(own: Callable[[int], None], size: int) -> None:
        run(own, size)
        longest = engine.manager.max_model_len + 2 + len(made)
        texts = np.zeros((engine.manager.num_slots, longest), dtype=np.int32)
        for slot, request in engine.scheduler.running.items():
            whole = [*request.prompt.tolist(), *answers[int(request.id)]]
            texts[slot, : len(whole)] = whole
        slots, positions = drafter._segments[:size, 0].long(), drafter._places[0, :size].long().clamp(min=0)
        there = torch.from_numpy(texts).to(made.device)
        for place, column in enumerate(made[:, :size], start=2):  # the token behind the last one is sampled
            at = positions + place
            column.copy_(there[slots, at] + ((at * 7 + slots) % 10 < 3))

    drafter._graphs.run = draft  # type: ignore[method-assign]


def with_drafter(
    spec: ModelSpec, drafter: str, dtype: torch.dtype, device: torch.device
) -> tuple[ModelSpec, Weights, Weights | None]:
    """The model with this drafter, what its own checkpoint has for it, and the drafter's own checkpoint."""
    if drafter == ITSELF:
        return spec.with_drafter(drafter_for(spec, spec)), {}, weights_of(spec.name, dtype, device)
    other = assistant_of(spec.name) if drafter == ASSISTANT else None
    spec = spec.with_drafter(drafter_for(spec, other))
    found = load_weights(None, other or spec, dtype=dtype, device=device, load_format="dummy", seed=3)
    assert spec.drafter is not None
    return spec, {t.name: found[t.name] for t in spec.drafter.tensors}, found if other else None


def assistant_of(name: str, *, centroids: bool = False) -> ModelSpec:
    """A small assistant for this model, which reads the same KV heads."""
    target = spec_of(name)
    own = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "num_kv_shared_layers": 0, "hidden_size": 32}
    own |= {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "enable_moe_block": False}
    fields = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}
    fields |= {"text_config": {**CONFIGS[name], **own}, "backbone_hidden_size": target.hidden_size}
    if centroids:
        fields |= {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 3}
    return from_config(fields, "assistant")


def restored_equals_cold(
    name: str, device: str = "cuda", ends: tuple[int, int] = (40, 111), new_tokens: int = 24, *,
    overlapped: bool = True,
) -> str:  # fmt: skip
    """Greedy tokens in float32 of prompts that branch off each other, with restore points and without."""
    rng = np.random.default_rng(3)
    first, second = ends
    tokens = rng.integers(3, CONFIGS[name]["vocab_size"], size=4 * second).astype(np.int32)
    prompts = [tokens[: second + first], np.append(tokens[:second], tokens[-first:])]
    prompts += [np.append(tokens[:first], tokens[-2 * first :]), prompts[0]]  # in the end, only the output layer runs
    found, length = [], max(map(len, prompts)) + new_tokens
    for restoring in (False, True):
        setting = Setting(graphs=device == "cuda", overlapped=overlapped, chunk_tokens=512)
        engine = _engine(name, setting, torch.device(device), length, 4, restoring=restoring)
        answers, cached = [], 0
        for i, prompt in enumerate(prompts):
            request = Request(str(i), prompt, SamplingParams(max_tokens=new_tokens, temperature=0), message_ends=ends)
            engine.add(request)
            while engine.has_work:
                engine.step()
            if request.error is not None:
                raise request.error
            answers.append(request.output)
            cached += request.cached_tokens
        found.append(answers)
    if found[0] != found[1]:
        raise AssertionError("tokens differ from a cold run's")
    if cached < sum(ends) + len(prompts[0]) - 1:
        raise AssertionError(f"only {cached} prompt tokens were found cached")
    return f"{cached} prompt tokens found cached"


def teacher_forced(name: str, count: int = TEACHER_TOKENS) -> str:
    """bf16 logits of a fixed text, half of it in one chunk and half decoded, against the plain path in float32.

    The models are random, so the two likeliest tokens are often closer than what bf16 rounds away, in any
    implementation: the plain path in bf16 shows how much that is. Tokens must agree where the margin is clear of it.
    """
    tokens = np.random.default_rng(5).integers(3, spec_of(name).vocab_size, size=count)
    exact = forced_logits(name, tokens, torch.float32, fused=False)
    plain = forced_logits(name, tokens, torch.bfloat16, fused=False)
    got = forced_logits(name, tokens, torch.bfloat16, fused=True)
    noise = (plain - exact).square().mean().sqrt()
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR * noise
    kl, plain_kl = _divergence(got, exact), _divergence(plain, exact)
    same, plain_same = (x.argmax(-1) == exact.argmax(-1) for x in (got, plain))
    agreement, plain_agreement = (x[clear].double().mean().item() for x in (same, plain_same))
    told = (
        f"mean KL {kl:.1e} (torch {plain_kl:.1e}), top-1 {agreement:.2%} of {clear.double().mean():.0%} clear, "
        f"{same.double().mean():.2%} of all (torch {plain_agreement:.2%} and {plain_same.double().mean():.2%})"
    )
    # A router whose scores are close sends a token elsewhere, in plain torch as well.
    if not (kl <= max(MOST_KL, 1.2 * plain_kl) and agreement >= min(LEAST_AGREEMENT, plain_agreement - 0.01)):
        raise AssertionError(told)
    return told


def _divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return (
        torch.nn.functional.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .mean()
        .item()
    )


def run(
    name: str,
    setting: Setting,
    device: str = "cuda",
    lengths: tuple[int, ...] = (1, 5, WINDOW - 1, WINDOW, 3 * WINDOW + 7, 130),
    new_tokens: int = NEW_TOKENS,
    answers: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Greedy continuations of a few prompts, several windows long, run together. Drafts are made from `answers`."""
    engine = _engine(name, setting, torch.device(device), max(lengths) + new_tokens, len(lengths))
    if setting.drafts:
        engine.speculator = Eager(KnownAnswers(lambda request: answers[int(request.id)]), setting.drafts)
    return greedy(engine, lengths, new_tokens)


def greedy(engine: Engine, lengths: Sequence[int], new_tokens: int) -> list[list[int]]:
    """What this engine says to prompts of these lengths, which are the same each time. Where it keeps routed experts,
    all of them follow.
    """
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, engine.sampler.vocab_size, size=n) for n in lengths]
    routes = any(isinstance(group.retention, Routes) for group in engine.manager.layout.groups)
    requests = [
        Request(str(i), p, SamplingParams(max_tokens=new_tokens - i, temperature=0, return_routed_experts=routes))
        for i, p in enumerate(prompts)
    ]
    if engine.adapters is not None:
        numbers = [0, *(loaded.number for loaded in engine.adapters.loaded.values())]
        for i, request in enumerate(requests):
            request.adapter = numbers[i % len(numbers)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [
        request.output + ([] if request.routed_experts is None else request.routed_experts.flatten().tolist())
        for request in requests
    ]


def _engine(
    name: str, setting: Setting, device: torch.device, length: int, slots: int, *, restoring: bool = False
) -> Engine:
    runner, manager = make_runner(
        name, device, torch.float32, length, slots, fused=setting.fused, graphs=setting.graphs,
        kv_cache_dtype=setting.kv_cache_dtype, routes=setting.routes, drafts=setting.drafts,
        drafter=setting.drafter, adapters=setting.adapters,
        state_slots=2 if setting.overlapped or setting.drafts else 1,
    )  # fmt: skip
    adapter_slots = AdapterSlots(setting.adapters) if setting.adapters else None
    adapters = None
    if adapter_slots is not None and runner.adapters is not None:
        adapters = engine_adapters(runner.adapters, adapter_slots, setting.adapters)
    points = RestorePoints(manager) if restoring else None
    budget = max(setting.chunk_tokens, slots * (1 + setting.drafts))
    scheduler = Scheduler(
        manager, budget, growth_tokens=32, restore_points=points, draft_tokens=setting.drafts,
        adapter_slots=adapter_slots,
    )  # fmt: skip
    sampler = Sampler(spec_of(name).vocab_size, device)
    return Engine(scheduler, runner, sampler, async_scheduling=setting.overlapped, adapters=adapters)


def make_runner(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    length: int,
    slots: int,
    *,
    fused: bool,
    graphs: bool,
    hopper: bool = True,
    kv_cache_dtype: str = "auto",
    routes: bool = False,
    drafts: int = 0,
    adapters: int = 0,
    drafter: str | None = None,
    state_slots: int = 2,
) -> tuple[Runner | CudaRunner, KVManager]:
    spec = spec_of(name).with_routes() if routes else spec_of(name)
    weights, own = weights_of(name, dtype, device), None
    if drafter is not None:
        spec, more, own = with_drafter(spec, drafter, dtype, device)
        weights |= more
    stored = str(dtype).removeprefix("torch.")
    caches = [replace(c, slots=state_slots) if isinstance(c, StateCache) else c for c in spec.caches]
    formats = resolve_formats(kv_cache_dtype, group_caches(caches), stored)
    layout = plan_layout([*caches, *((spec.routes,) if spec.routes else ())], formats, stored)
    rollback = rollback_for(drafts, layout)
    slabs = (slots + 1) * Capacity(layout, 0, rollback).slabs_for(1, length)
    manager = KVManager(layout, slabs, slots, length, rollback)
    args = (spec, weights, layout, slabs, slots, length)
    common = {"device": device, "dtype": dtype, "draft_tokens": drafts, "drafter_weights": own}
    common["adapter_room"] = AdapterRoom(adapters, ADAPTER_RANK) if adapters else None
    if fused:
        runner: Runner | CudaRunner = CudaRunner(*args, **common, use_graphs=graphs, use_hopper=hopper)
    else:
        runner = Runner(*args, **common)
    runner.arena.fill_(0xFF)  # whatever is read before it is written is NaN
    return runner, manager


def forced_logits(
    name: str, tokens: np.ndarray, dtype: torch.dtype, *, fused: bool, kv_cache_dtype: str = "auto"
) -> torch.Tensor:
    """Logits after each of `tokens`, half of them in one chunk, the rest decoded one by one."""
    device, length = torch.device("cuda"), len(tokens)
    runner, manager = make_runner(
        name, device, dtype, length, 1, fused=fused, graphs=True, kv_cache_dtype=kv_cache_dtype
    )
    if isinstance(runner, CudaRunner) and name in WIDE_QUANTIZED and is_hopper(device):
        chained = [isinstance(layer, ChainedLayer) for layer in runner.model.layers]
        assert all(chained), "not every layer is chained to the next"
    manager.start(0, length)
    prompt = length // 2
    nobody = np.zeros(0, dtype=np.int64)
    manager.extend(0, prompt)
    chunk = PromptChunk(0, 0, tokens[:prompt].astype(np.int32), samples=True)
    batch = Batch(0, nobody, nobody, [chunk], manager.state_slot.copy(), manager.take_changes())
    logits = [runner.forward(batch, all_logits_slots=frozenset({0})).prompt_logits[0](slice(0, prompt)).clone()]
    slot = np.zeros(1, dtype=np.int64)
    for position in range(prompt, length):
        runner.take_sampled(torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([tokens[position]]).cuda())
        manager.extend(0, position + 1)
        changes = manager.take_changes() or NO_CHANGES
        manager.flip_states(slot)
        batch = Batch(0, slot, np.array([position]), [], manager.state_slot.copy(), changes)
        logits.append(runner.forward(batch).logits.clone())
    return torch.cat(logits).double()


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
