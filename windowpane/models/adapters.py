"""Low-rank adapters without torch: what the engine holds room for, what an adapter's config may say, and how many bytes
that takes.

An adapter adds B · A · x to what a projection makes of x: A is [rank, inputs], B [outputs, rank] and holds the scale
already. Every projection of a layer can have one; embeddings, the head, routers and norms cannot.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windowpane.models.blocks import Decoder, ExpertProjection, Projection, each
from windowpane.models.quantization import STORED_BYTES

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
DEFAULT_RANK = 16
MOST_RANK = 512
SHRUNK_SPLITS = 8  # of A · x, at most, that are kept until they are added

Adaptable = Projection | ExpertProjection


class AdapterError(ValueError):
    """An adapter that cannot be used; the message names what is wrong with it."""


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """`slots` adapters lie on the device at a time, each of a rank of at most `rank`. `targets` are the last parts of
    the names of the modules that adapters may change, None for all.
    """

    slots: int
    rank: int
    targets: tuple[str, ...] | None = None

    def covers(self, projection: Adaptable) -> bool:
        names = {weight.module.rpartition(".")[2] for weight in projection.weights}
        names |= {"experts"} if isinstance(projection, ExpertProjection) else set()
        return self.targets is None or not names.isdisjoint(self.targets)


def adaptable(decoder: Decoder, room: AdapterRoom) -> Iterator[Adaptable]:
    """The projections that there is room for, in the order in which they run."""
    found: Iterator[Adaptable] = each(decoder, Projection | ExpertProjection)
    return (one for one in found if one is not decoder.head and room.covers(one))


def adapter_name(projection: Adaptable) -> str:
    """By which ranks and files know a projection, whole or cut."""
    return projection.weights[0].name


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What one projection holds of each adapter: A [experts, parts, rank, inputs] and B [experts, outputs, rank].

    Parts are weights that were joined: each has an A of its own. There is one expert where there are none.
    """

    experts: int
    part_outputs: tuple[int, ...]
    inputs: int

    @classmethod
    def of(cls, projection: Adaptable) -> AdapterShape:
        if isinstance(projection, Projection):
            return cls(1, tuple(weight.shape[0] for weight in projection.weights), projection.inputs)
        experts = projection.weights[0].shape[0]
        outputs = tuple(weight.shape[2 if weight.transposed else 1] for weight in projection.weights)
        return cls(experts, outputs, projection.inputs)

    @property
    def outputs(self) -> int:
        return sum(self.part_outputs)

    def elements(self, rank: int) -> int:
        return self.experts * rank * (len(self.part_outputs) * self.inputs + self.outputs)


def adapter_bytes(decoder: Decoder, room: AdapterRoom, dtype: str) -> int:
    """Bytes of all slots, for a decoder as one rank has it."""
    elements = sum(AdapterShape.of(one).elements(room.rank) for one in adaptable(decoder, room))
    return room.slots * elements * STORED_BYTES[dtype]


# -- adapter_config.json -------------------------------------------------------------------------------------------

# What changes more than the products of projections, by field.
_REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens", "use_qalora", "kasa_config", "arrow_config", "monteclora_config", "velora_config",
)  # fmt: skip
# Ways to begin a training that change the base model's own weights.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of PEFT's adapter_config.json that say how strongly an adapter works."""

    path: Path
    rank: int
    alpha: float
    base_model: str
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))


def read_adapter_config(path: Path) -> AdapterConfig:
    """Raises AdapterError for an adapter of a kind that is not run."""
    file = path / CONFIG_FILE
    try:
        fields = json.loads(file.read_text("utf-8"))
    except OSError:
        raise AdapterError(f"{path} holds no {CONFIG_FILE}: it is no adapter as PEFT saves one") from None
    except ValueError as error:
        raise AdapterError(f"cannot read {file}: {error}") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{file} is no JSON object")
    kind = str(fields.get("peft_type", "LORA"))
    if kind.upper() != "LORA":
        raise AdapterError(f"{file}: peft_type {kind!r} is not run; adapters are LoRA")
    for name in _REFUSED:
        if fields.get(name):
            raise AdapterError(f"{file}: {name} {fields[name]!r} is not run; train or convert the adapter without it")
    if fields.get("bias", "none") != "none":
        raise AdapterError(f"{file}: bias {fields['bias']!r} is not run; train the adapter with bias 'none'")
    begun = str(fields.get("init_lora_weights", ""))
    if begun.lower().startswith(_CHANGED_BASES):
        raise AdapterError(
            f"{file}: init_lora_weights {begun!r} changes the base model's weights; convert the adapter as PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=…) does"
        )
    return AdapterConfig(
        path,
        _number(fields, "r", file),
        _number(fields, "lora_alpha", file),
        str(fields.get("base_model_name_or_path") or ""),
        bool(fields.get("use_rslora")),
        _patterns(fields, "rank_pattern", file),
        _patterns(fields, "alpha_pattern", file),
    )


def _number(fields: Mapping[str, Any], name: str, file: Path) -> Any:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise AdapterError(f"{file}: {name} is {value!r}, not a number above 0")
    return value


def _patterns(fields: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any] | None:
    patterns = fields.get(name) or {}
    try:
        valid = all(re.compile(pattern) and _number(patterns, pattern, file) for pattern in patterns)
    except (re.error, TypeError):
        valid = False
    if not valid or not isinstance(patterns, dict):
        raise AdapterError(f"{file}: {name} is {patterns!r}, not numbers by patterns of modules")
    return patterns or None


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """As PEFT matches: the first pattern that the end of the module's name fits."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
