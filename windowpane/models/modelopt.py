"""NVIDIA ModelOpt checkpoints: `quant_method: modelopt` in config.json, or a file hf_quant_config.json beside it.

Known: FP8 (one scale per tensor), NVFP4 with and without quantized inputs, and MIXED_PRECISION, which names a format
for each module. FP8 runs; NVFP4 is planned with. `exclude_modules` (`ignore` in config.json) are stored as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from windowpane.models.config import Config, ModelError
from windowpane.models.quantization import Fp8, Quantization, Rule, WeightFormat, _groups, _kv_cache_scheme, _part
from windowpane.models.tensors import TensorSpec

MIXED = "MIXED_PRECISION"
# 16 inputs share a scale of 8 bits; nothing else is defined.
GROUP_INPUTS = 16
# Classes save the same text model under several prefixes, and lists of modules follow the class that was quantized.
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.")
_ONE_EXPERT = re.compile(r"\.experts\.\d+(?=[.*]|$)")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class NvFp4:
    """Two 4-bit floats a byte, an fp8 scale for every 16 inputs, and one float32 scale per weight (and for inputs)."""

    quantized_inputs: bool

    scheme = "nvfp4"

    @property
    def cut(self) -> tuple[int, int | None]:
        return 1, GROUP_INPUTS

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        groups = _groups(columns, GROUP_INPUTS, weight)
        by_group = (1, GROUP_INPUTS)
        parts = [
            _part(weight, ".weight", (rows, columns // 2), "uint8", outputs=(0, 1), inputs=(1, 2)),
            _part(weight, ".weight_scale", (rows, groups), "fp8_e4m3", outputs=(0, 1), inputs=by_group),
            _part(weight, ".weight_scale_2", (1,), "float32"),
        ]
        return [*parts, _part(weight, ".input_scale", (1,), "float32")] if self.quantized_inputs else parts

    def held(self, rows: int, columns: int) -> None:
        return None


FORMATS: dict[str, WeightFormat] = {
    "FP8": Fp8(scale_suffix=".weight_scale", scale_dtype="float32", static_inputs=True),
    "NVFP4": NvFp4(quantized_inputs=True),
    "W4A16_NVFP4": NvFp4(quantized_inputs=False),
}


def read_modelopt(section: Config) -> Quantization:
    """`section` is hf_quant_config.json, or `quantization_config` of config.json, which has the same fields flat."""
    body = section.section("quantization") if section.has("quantization") else section
    algorithm = body.choice("quant_algo", (*FORMATS, MIXED))
    if algorithm is None:
        raise ModelError(f"{body.where}quant_algo is missing; known: {', '.join(sorted((*FORMATS, MIXED)))}")
    excluded = body.texts("exclude_modules") or body.texts("ignore") or ()
    ignored = tuple(_any_wrapper(name) for name in excluded if not _is_draft(name))
    if single := next((name for name in ignored if _ONE_EXPERT.search(name)), None):
        raise ModelError(
            f"{body.where}exclude_modules: {single!r} names one expert; a layer's experts are known only together"
        )
    if algorithm == MIXED:
        rules = _by_module(body)
    else:
        _check_group(body, algorithm)
        rules = (Rule(("Linear",), FORMATS[algorithm]),)
    return Quantization("modelopt", rules, ignored, _kv_cache_scheme(body))


def _by_module(body: Config) -> tuple[Rule, ...]:
    """One rule per format. The experts of a layer must agree, because a plan counts them together."""
    layers = body.section("quantized_layers")
    algorithms: dict[str, str] = {}
    for module in layers.fields:
        if _is_draft(module):
            continue
        algorithm = layers.section(module).choice("quant_algo", FORMATS)
        if algorithm is None:
            raise ModelError(f"{layers.where}{module} names no quant_algo; known: {', '.join(FORMATS)}")
        _check_group(layers.section(module), algorithm)
        name = _ONE_EXPERT.sub(".experts.{}", _without_wrapper(module))
        if algorithms.setdefault(name, algorithm) != algorithm:
            raise ModelError(
                f"{layers.where}{module} is {algorithm}, but other experts of its layer are {algorithms[name]}"
            )
    if not algorithms:
        raise ModelError(f"{layers.where[:-1]} is empty, so nothing says how weights are stored")
    by_format: dict[str, list[str]] = {}
    for name, algorithm in algorithms.items():
        by_format.setdefault(algorithm, []).append(name)
    # The format of most modules comes first: it is the one that a plan names.
    ordered = sorted(by_format, key=lambda algorithm: -len(by_format[algorithm]))
    return tuple(Rule(tuple(by_format[algorithm]), FORMATS[algorithm]) for algorithm in ordered)


def _check_group(section: Config, algorithm: str) -> None:
    size = section.integer("group_size", GROUP_INPUTS)
    if isinstance(FORMATS[algorithm], NvFp4) and size != GROUP_INPUTS:
        raise ModelError(f"{section.where}group_size is {size}; {algorithm} is known with {GROUP_INPUTS}")


def _is_draft(module: str) -> bool:
    return _without_wrapper(module).startswith("mtp")


def _without_wrapper(module: str) -> str:
    return next((module.removeprefix(prefix) for prefix in _WRAPPERS if module.startswith(prefix)), module)


def _any_wrapper(pattern: str) -> str:
    """A pattern with a wildcard must match from the start of a name, whatever its wrapper."""
    plain = _without_wrapper(pattern)
    return f"*{plain}" if "*" in plain and plain != pattern else plain


def unmatched_target(quantization: Quantization, modules: list[str], layers: int) -> str | None:
    """A module of the text model that a rule names and the model does not have; layers behind the last only draft."""
    owned = {_without_wrapper(module) for module in modules}
    for rule in quantization.rules:
        for target in rule.targets:
            layer = _LAYER.match(target)
            if layer is None or int(layer[1]) >= layers:
                continue
            if target not in owned and not any(module.startswith(f"{target}.") for module in owned):
                return target
    return None
