"""What `quantization_config` does to the tensors: a quantized weight becomes a few stored ones. Torch-free.

Known: compressed-tensors (pack-quantized integers, float-quantized fp8), awq, gptq, fp8, mxfp4 and, in
`windowpane.models.modelopt`, ModelOpt's. Shapes follow those formats' checkpoints; a stored tensor carries the suffix
that it has in the file. Leading axes (experts) are kept.
What of it lies in memory once it is loaded is said by `windowpane.models.packing`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, Protocol

from windowpane.kv.formats import DTYPE_BYTES
from windowpane.kv.retention import ceil_div
from windowpane.models.config import Config, ModelError
from windowpane.models.packing import PackedForm
from windowpane.models.tensors import Shard, TensorSpec

STORED_BYTES: dict[str, int] = {**DTYPE_BYTES, "fp8_e4m3": 1, "uint8": 1, "int32": 4, "int64": 8}


class WeightFormat(Protocol):
    """How one Linear weight of `rows` outputs and `columns` inputs is stored."""

    @property
    def scheme(self) -> str: ...

    @property
    def cut(self) -> tuple[int, int | None]:
        """The (output, input) multiples at which a weight may be cut over ranks; None: inputs cannot be."""
        ...

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]: ...

    def held(self, rows: int, columns: int) -> PackedForm | None:
        """How it lies in memory, or None where such weights are not run: they are then counted as stored."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that match `targets` are stored in `format`."""

    targets: tuple[str, ...]
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which weights are quantized and how, and what the checkpoint asks of the KV cache, if anything.

    `rounds_inputs`: CPUs multiply them with rows in 8 bits; else they are dequantized and multiplied in float32.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    kv_cache_scheme: str | None = None
    rounds_inputs: bool = False

    @property
    def scheme(self) -> str:
        return self.rules[0].format.scheme

    def format_of(self, weight: TensorSpec) -> WeightFormat | None:
        """The format of this weight, or None where it is stored as it is."""
        if not weight.linear or any(matches(pattern, weight.module) for pattern in self.ignored):
            return None
        found = [
            (_generality(target), rule.format)
            for rule in reversed(self.rules)  # of groups with the same target the last one counts
            for target in rule.targets
            if target == "Linear" or matches(target, weight.module)
        ]
        return min(found, key=itemgetter(0))[1] if found else None

    def stored(self, weight: TensorSpec) -> list[TensorSpec]:
        """The tensors that stand for `weight` in the checkpoint, or on a rank if that is what was given.

        Each says how it is split where `weight` does: what a rank reads of them is what its part of `weight` is stored
        as.
        """
        form = self.format_of(weight)
        if form is None:
            return [weight]
        return form.stored(weight, *_rows_and_columns(weight))

    def held(self, weight: TensorSpec) -> PackedForm | None:
        """How one matrix of `weight` lies in memory, or None where it lies as it is stored."""
        form = self.format_of(weight)
        return None if form is None else form.held(*_rows_and_columns(weight))

    def cut_problem(self, weight: TensorSpec, ranks: int) -> str | None:
        """Say so where splitting `weight` over ranks would cut through a group of quantized values."""
        form = self.format_of(weight)
        if form is None or weight.shard is None:
            return None
        # Leading axes hold whole experts; only the matrix itself can be cut inside a group.
        output_axis, input_axis = _matrix_axes(weight)
        outputs, inputs = form.cut
        multiple = {output_axis: outputs, input_axis: inputs}.get(weight.shard.axis, 1)
        length = weight.shard.rank_length(ranks)
        if length == weight.shape[weight.shard.axis]:
            return None
        if multiple is None:
            return (
                f"{weight.name}: its inputs are sorted by quantization group (desc_act, actorder), so ranks cannot "
                "split them; use a checkpoint without that"
            )
        if length % multiple == 0:
            return None
        return f"{weight.name}: {length} values per rank cut through quantization groups of {multiple}"


def matches(pattern: str, module: str) -> bool:
    """`re:` patterns match from the start; others name a module, a parent, or a run of its path, with * as wildcard."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ModelError(f"quantization_config: {pattern[3:]!r:.60} is no regular expression: {error}") from None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."


def _generality(target: str) -> tuple[bool, bool, str]:
    """The order in which compressed-tensors tries targets: a module's name, then patterns, then `Linear`."""
    return target == "Linear", target.startswith("re:"), target


def _matrix_axes(weight: TensorSpec) -> tuple[int, int]:
    last = len(weight.shape) - 1
    return (last, last - 1) if weight.transposed else (last - 1, last)


def _rows_and_columns(weight: TensorSpec) -> tuple[int, int]:
    output_axis, input_axis = _matrix_axes(weight)
    return weight.shape[output_axis], weight.shape[input_axis]


# An axis of a stored tensor, and how many outputs or inputs of the weight each entry along it stands for.
_Place = tuple[int, int]


def _part(
    weight: TensorSpec,
    suffix: str,
    shape: tuple[int, ...],
    dtype: str | None,
    *,
    outputs: _Place | None = None,
    inputs: _Place | None = None,
) -> TensorSpec:
    """`outputs` and `inputs` say where those of the weight lie; None: this tensor serves all of them."""
    return replace(
        weight,
        name=f"{weight.module}{suffix}",
        shape=(*weight.shape[:-2], *shape),
        dtype=dtype or weight.dtype,
        shard=_part_shard(weight, outputs, inputs),
        linear=False,
        transposed=False,
    )


def _part_shard(weight: TensorSpec, outputs: _Place | None, inputs: _Place | None) -> Shard | None:
    shard, leading = weight.shard, len(weight.shape) - 2
    if shard is None or shard.axis < leading:
        return shard
    place = outputs if shard.axis == _matrix_axes(weight)[0] else inputs
    if place is None:
        return None
    axis, each = place
    return Shard(leading + axis, tuple((length // each, units) for length, units in shard.sections))


def _by_group(axis: int, group: int | None) -> _Place | None:
    """Where inputs lie in what is stored once per group; nowhere if one group has them all."""
    return None if group is None else (axis, group)


def _groups(columns: int, group: int | None, weight: TensorSpec) -> int:
    if group is None:
        return 1
    if columns % group:
        raise ModelError(f"{weight.name}: {columns} inputs are no multiple of the quantization group size, {group}")
    return columns // group


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """compressed-tensors pack-quantized. `group` None is one scale per output; asymmetric adds packed zero points."""

    bits: int
    group: int | None
    symmetric: bool
    reordered: bool

    @property
    def scheme(self) -> str:
        return f"int{self.bits}"

    @property
    def cut(self) -> tuple[int, int | None]:
        packed = 32 // self.bits
        return (1 if self.symmetric else packed), None if self.reordered else max(packed, self.group or 1)

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        packed = 32 // self.bits
        groups = _groups(columns, self.group, weight)
        parts = [
            _part(
                weight, ".weight_packed", (rows, ceil_div(columns, packed)), "int32", outputs=(0, 1), inputs=(1, packed)
            ),
            _part(weight, ".weight_scale", (rows, groups), None, outputs=(0, 1), inputs=_by_group(1, self.group)),
            _part(weight, ".weight_shape", (2,), "int64"),
        ]
        if not self.symmetric:
            shape = (ceil_div(rows, packed), groups)
            by_group = _by_group(1, self.group)
            parts.append(_part(weight, ".weight_zero_point", shape, "int32", outputs=(0, packed), inputs=by_group))
        if self.reordered:
            parts.append(_part(weight, ".weight_g_idx", (columns,), "int32", inputs=(0, 1)))
        return parts

    def held(self, rows: int, columns: int) -> PackedForm | None:
        if self.bits != 4:
            return None
        return PackedForm("int4", rows, columns, self.group, has_zeros=not self.symmetric, has_order=self.reordered)


@dataclass(frozen=True, slots=True)
class Awq:
    """AutoAWQ's gemm layout: input-first, eight 4-bit values to a word, zero points always stored."""

    group: int | None

    scheme = "int4"

    @property
    def cut(self) -> tuple[int, int | None]:
        return 8, self.group or 1

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        groups, by_group = _groups(columns, self.group, weight), _by_group(0, self.group)
        return [
            _part(weight, ".qweight", (columns, ceil_div(rows, 8)), "int32", outputs=(1, 8), inputs=(0, 1)),
            _part(weight, ".qzeros", (groups, ceil_div(rows, 8)), "int32", outputs=(1, 8), inputs=by_group),
            _part(weight, ".scales", (groups, rows), None, outputs=(1, 1), inputs=by_group),
        ]

    def held(self, rows: int, columns: int) -> PackedForm:
        return PackedForm("int4", rows, columns, self.group, has_zeros=True)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ: words packed along the inputs, and g_idx, each input's group. Zero points are stored even if symmetric.

    They are stored less `zero_offset`: 1, or 0 in the format's second version. `reordered` (desc_act): inputs of one
    group need not be neighbours.
    """

    bits: int
    group: int | None
    reordered: bool = False
    zero_offset: int = 1

    @property
    def scheme(self) -> str:
        return f"int{self.bits}"

    @property
    def cut(self) -> tuple[int, int | None]:
        packed = 32 // self.bits
        return packed, None if self.reordered else max(packed, self.group or 1)

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        groups, by_group = _groups(columns, self.group, weight), _by_group(0, self.group)
        packed = 32 // self.bits
        return [
            _part(weight, ".qweight", (ceil_div(columns, packed), rows), "int32", outputs=(1, 1), inputs=(0, packed)),
            _part(weight, ".qzeros", (groups, ceil_div(rows, packed)), "int32", outputs=(1, packed), inputs=by_group),
            _part(weight, ".scales", (groups, rows), None, outputs=(1, 1), inputs=by_group),
            _part(weight, ".g_idx", (columns,), "int32", inputs=(0, 1)),
        ]

    def held(self, rows: int, columns: int) -> PackedForm | None:
        if self.bits != 4:
            return None
        return PackedForm("int4", rows, columns, self.group, has_zeros=True, has_order=self.reordered)


@dataclass(frozen=True, slots=True)
class Fp8:
    """One byte per value. Scales are per tensor, per output (`per_channel`) or per `block` of (outputs, inputs)."""

    scale_suffix: str
    scale_dtype: str | None
    block: tuple[int, int] | None = None
    per_channel: bool = False
    static_inputs: bool = False

    scheme = "fp8"

    @property
    def cut(self) -> tuple[int, int | None]:
        return self.block or (1, 1)

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        scale: tuple[int, ...] = (1,)
        outputs: _Place | None = None
        inputs: _Place | None = None
        if self.block:
            scale = (ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))
            outputs, inputs = (0, self.block[0]), (1, self.block[1])
        elif self.per_channel:
            scale, outputs = (rows, 1), (0, 1)
        parts = [
            _part(weight, ".weight", (rows, columns), "fp8_e4m3", outputs=(0, 1), inputs=(1, 1)),
            _part(weight, self.scale_suffix, scale, self.scale_dtype, outputs=outputs, inputs=inputs),
        ]
        if self.static_inputs:
            parts.append(_part(weight, ".input_scale", (1,), self.scale_dtype))
        return parts

    def held(self, rows: int, columns: int) -> PackedForm:
        """A scale of the whole tensor is held once per output, so that projections can be stacked."""
        outputs, inputs = self.block or (1, None)
        return PackedForm("fp8", rows, columns, inputs, scale_outputs=outputs, scale_dtype="float32")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss: 32 inputs in 16 bytes with one shared exponent byte. Output-first, unlike its bfloat16 tensors."""

    scheme = "mxfp4"

    @property
    def cut(self) -> tuple[int, int | None]:
        return 1, 32

    def stored(self, weight: TensorSpec, rows: int, columns: int) -> list[TensorSpec]:
        blocks = _groups(columns, 32, weight)
        return [
            _part(weight, "_blocks", (rows, blocks, 16), "uint8", outputs=(0, 1), inputs=(1, 32)),
            _part(weight, "_scales", (rows, blocks), "uint8", outputs=(0, 1), inputs=(1, 32)),
        ]

    def held(self, rows: int, columns: int) -> PackedForm:
        return PackedForm("mxfp4", rows, columns, 32)


def read_quantization(config: Config, text: Config | None = None) -> Quantization | None:
    """The checkpoint's quantization, or None where the config has none. It may stand in the text model's part."""
    keys = ("quantization_config", "compression_config")
    parts = (config, text or config)
    for part in parts:
        if part.fields.get("quantization"):
            raise _mlx_error(f"{part.where}quantization", part.fields["quantization"])
    section = next((part.section(key) for part in parts for key in keys if part.has(key)), None)
    if section is None:
        return None
    if "producer" in section.fields or (section.text("quant_method") or "").startswith("modelopt"):
        from windowpane.models.modelopt import read_modelopt  # it builds on this module

        return read_modelopt(section)
    known = (*READERS, "modelopt")
    method = section.choice("quant_method", known)
    if method is None:
        # Newer releases of MLX repeat their fields here.
        if section.has("bits") and section.has("group_size"):
            raise _mlx_error(section.where[:-1], section.fields)
        raise ModelError(f"{section.where}quant_method is missing; known: {', '.join(sorted(known))}")
    return READERS[method](section)


def _mlx_error(where: str, value: object) -> ModelError:
    return ModelError(
        f"{where} is {value!r:.60}: that is how MLX says that it has quantized the weights, and its format is not "
        f"read; use the original checkpoint, or one with a quant_method of {', '.join(sorted((*READERS, 'modelopt')))}"
    )


def _read_compressed_tensors(section: Config) -> Quantization:
    groups = section.section("config_groups")
    if not groups.fields:
        raise ModelError(f"{groups.where[:-1]} is empty, so nothing says how weights are stored")
    default_format = section.text("format")
    rules = []
    for name in groups.fields:
        group = groups.section(name)
        targets = group.texts("targets") or ("Linear",)
        form = group.text("format") or default_format
        if form == "pack-quantized":
            rules.append(Rule(targets, _packed_integers(group.section("weights"))))
        elif form == "float-quantized":
            rules.append(Rule(targets, _compressed_fp8(group)))
        else:
            raise section.unknown_value("format", form, ("pack-quantized", "float-quantized"))
    return Quantization("compressed-tensors", tuple(rules), section.texts("ignore") or (), _kv_cache_scheme(section))


def _packed_integers(weights: Config) -> PackedIntegers:
    weights.choice("type", ("int",))
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        raise weights.unknown_value("num_bits", bits, ("4", "8"))
    strategy = weights.choice("strategy", ("group", "channel")) or "channel"
    return PackedIntegers(
        bits=bits,
        group=weights.integer("group_size") if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        reordered=weights.choice("actorder", ("group", "weight", "static", "dynamic")) in ("group", "dynamic"),
    )


def _compressed_fp8(group: Config) -> Fp8:
    weights = group.section("weights")
    weights.choice("type", ("float",))
    if weights.integer("num_bits") != 8:
        raise weights.unknown_value("num_bits", weights.fields["num_bits"], ("8",))
    strategy = weights.choice("strategy", ("tensor", "channel", "block")) or "tensor"
    inputs = group.section("input_activations") if group.has("input_activations") else None
    return Fp8(
        scale_suffix=".weight_scale",
        scale_dtype=None,
        block=_block(weights, "block_structure") if strategy == "block" else None,
        per_channel=strategy == "channel",
        static_inputs=inputs is not None and not inputs.flag("dynamic", True),
    )


def _read_awq(section: Config) -> Quantization:
    bits = section.integer("bits", section.integer("w_bit", 4))
    if bits != 4:
        raise section.unknown_value("bits", bits, ("4",))
    section.choice("version", ("gemm", "GEMM"))
    ignored = ("lm_head", *(section.texts("modules_to_not_convert") or ()))
    return Quantization(
        "awq", (Rule(("Linear",), Awq(_group_size(section))),), ignored, kv_cache_scheme=_kv_cache_scheme(section)
    )


def _read_gptq(section: Config) -> Quantization:
    bits = section.integer("bits")
    if bits not in (2, 4, 8):
        raise section.unknown_value("bits", bits, ("2", "4", "8"))
    ignored: tuple[str, ...] = () if section.flag("lm_head", False) else ("lm_head",)
    ignored += _gptq_ignored(section)
    is_second = section.choice("checkpoint_format", ("gptq", "gptq_v2")) == "gptq_v2"
    reordered = section.flag("desc_act", False)
    rule = Rule(_gptq_targets(section), Gptq(bits, _group_size(section), reordered, zero_offset=0 if is_second else 1))
    return Quantization("gptq", (rule,), ignored, _kv_cache_scheme(section))


def _gptq_ignored(section: Config) -> tuple[str, ...]:
    """GPTQModel's `dynamic`: of the rules in order, the first whose pattern matches a module's name decides about it.

    "-:" takes modules out. "+:", or no sign, gives them values of their own, which must be those of all modules.
    """
    rules = section.section("dynamic") if section.has("dynamic") else Config({})
    kept, ignored = "", []
    for rule in rules.fields:
        pattern = rule.removeprefix("-:").removeprefix("+:")
        if rule.startswith("-:"):
            ignored.append(f"re:{kept}(?:{pattern})" if kept else f"re:{pattern}")
            continue
        for key, value in rules.section(rule).fields.items():
            if value != (of_all := section.fields.get(key)):
                raise ModelError(
                    f"{rules.where}{rule} sets {key} to {value!r:.40}, and all modules have {of_all!r:.40}; "
                    "rules that give modules values of their own are not read, only -:PATTERN, which leaves them out"
                )
        kept += f"(?!{pattern})"
    return tuple(ignored)


def _gptq_targets(section: Config) -> tuple[str, ...]:
    """`modules_in_block_to_quantize` names a layer's quantized modules in one list, or in one per step; none: all."""
    key = "modules_in_block_to_quantize"
    given: Any = section.fields.get(key) or []
    lists = given if isinstance(given, list) and all(isinstance(names, list) for names in given) else [given]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise section.wrong_type(key, "a list of module names, or of such lists")
    targets = tuple(name for names in lists for name in names)
    return (*targets, "lm_head") if targets else ("Linear",)


def _read_fp8(section: Config) -> Quantization:
    section.choice("fmt", ("e4m3", "float8_e4m3fn"))
    scheme = section.choice("activation_scheme", ("dynamic", "static"))
    block = _block(section, "weight_block_size") if section.has("weight_block_size") else None
    form = Fp8(
        scale_suffix=".weight_scale_inv" if block else ".weight_scale",
        # Qwen's releases store block scales in the checkpoint's dtype.
        scale_dtype=None if block else "float32",
        block=block,
        static_inputs=scheme == "static",
    )
    ignored = ("lm_head", *(section.texts("modules_to_not_convert") or ()))
    return Quantization("fp8", (Rule(("Linear",), form),), ignored, _kv_cache_scheme(section))


def _read_mxfp4(section: Config) -> Quantization:
    ignored = section.texts("modules_to_not_convert") or ()
    return Quantization("mxfp4", (Rule(("experts",), Mxfp4()),), ignored, _kv_cache_scheme(section))


READERS = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}


def _group_size(section: Config) -> int | None:
    """-1 means one group per output."""
    size = section.integer("group_size", section.integer("q_group_size", 128, minimum=-1), minimum=-1)
    if size == 0:
        raise ModelError(f"{section.where}group_size is 0; use a positive size, or -1 for one group per output")
    return None if size < 0 else size


def _block(section: Config, key: str) -> tuple[int, int]:
    sizes = section.integers(key)
    if sizes is None or len(sizes) != 2 or min(sizes) < 1:
        raise ModelError(f"{section.where}{key} must be two positive sizes, not {section.fields.get(key)!r}")
    return sizes[0], sizes[1]


def _kv_cache_scheme(section: Config) -> str | None:
    """compressed-tensors describes it in an object, others in a word; fp8 there always means E4M3."""
    scheme = section.fields.get("kv_cache_scheme") or section.fields.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if isinstance(scheme, dict):
        scheme = {"float": "fp", "int": "int"}.get(str(scheme.get("type")), "") + str(scheme.get("num_bits"))
    return "fp8_e4m3" if str(scheme).lower() == "fp8" else str(scheme)
