"""Which common cards, and how many of them, hold a model: the answer for people who have not bought one yet."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import ShardingError
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import ConfigError, EngineConfig
from windowpane.plan.hardware import parse_gpus
from windowpane.plan.memory import Device
from windowpane.plan.planner import PlanError, Sizing, fit, size_up

COMMON_CARDS = ("3090", "4090", "5090", "a100-80gb", "h100", "h200", "b200")
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class CardFit:
    """`gpu` is what to type after --gpu; `longest_tokens` is the most that memory or the model allows."""

    gpu: str
    kv_bytes: int
    sequences: int
    longest_tokens: int


def cards_that_fit(spec: ModelSpec, config: EngineConfig, concurrency: int = 1) -> list[CardFit]:
    """The fewest of each common card that hold so many sequences of the length asked (or, unasked, of any length)."""
    found: dict[str, CardFit] = {}
    for count in COUNTS if config.tensor_parallel_size is None else (config.tensor_parallel_size,):
        missing = [card for card in COMMON_CARDS if card not in found]
        try:
            sizing = size_up(spec, config, count)
        except (ConfigError, ShardingError):
            continue
        found |= {card: fits for card in missing if (fits := _fits(sizing, card, concurrency))}
    return [found[card] for card in COMMON_CARDS if card in found]


def _fits(sizing: Sizing, card: str, concurrency: int) -> CardFit | None:
    _, gpu = parse_gpus(card)
    try:
        _, capacity = fit(sizing, Device(gpu.title, gpu.memory_bytes, gpu.capability))
    except PlanError:
        return None
    assert capacity is not None
    limit = sizing.config.max_model_len or sizing.spec.max_position
    memory_limit = capacity.longest(concurrency)
    longest = limit if memory_limit is None else min(memory_limit, limit)
    if longest < (sizing.config.max_model_len or 1):
        return None
    typed = card if sizing.ranks == 1 else f"{sizing.ranks}x{card}"
    return CardFit(typed, capacity.kv_bytes, capacity.sequences(limit), longest)
