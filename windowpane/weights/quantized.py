"""Quantized checkpoints into `PackedWeight`s: each scheme's layout is turned into the one form, a tile at a time.

What is stored is brought to the device packed, as it is; only a tile of outputs is ever unpacked there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from windowpane.lowering.packed import TILE_VALUES, PackedWeight, pack_mxfp4, pack_units, pack_zeros
from windowpane.models.packing import PackedForm
from windowpane.models.quantization import Awq, Fp8, Gptq, Mxfp4, PackedIntegers, Quantization, WeightFormat
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import ONLY_RANK, RankPlace, TensorSpec
from windowpane.models.weights import text_tensors
from windowpane.weights.checkpoint import WeightsError

# AWQ interleaves the outputs of a word: these are the outputs at bits 0, 4, 8, …
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NATURAL_ORDER = tuple(range(8))

# What a rank needs of a stored tensor by its name, or by the suffix that it has behind a weight's: as it is, on the
# device.
Read = Callable[[str], torch.Tensor]
# The values of some outputs [outputs, inputs], one byte each.
Values = Callable[[int, int], torch.Tensor]


def check_runs(spec: ModelSpec) -> None:
    """Raises a WeightsError where a weight is quantized in a way that is planned with but not run."""
    if not isinstance(spec.quantization, Quantization):
        return
    for weight in text_tensors(spec):
        if spec.quantization.format_of(weight) is not None:
            held_form(spec.quantization, weight)


def held_form(quantization: Quantization, weight: TensorSpec) -> PackedForm:
    """How a quantized weight is held."""
    form = quantization.held(weight)
    if form is None:
        stored = quantization.format_of(weight)
        assert stored is not None
        raise WeightsError(
            f"{weight.name} is stored as {stored.scheme} ({quantization.method}), which is not run; schemes that run: "
            "int4 (compressed-tensors, awq, gptq), fp8 and mxfp4 (experts)"
        )
    if form.problem:
        raise WeightsError(f"{weight.name} has {form.problem}")
    if len(weight.shape) == 3:
        return _of_experts(form, weight)
    return form


def _of_experts(form: PackedForm, weight: TensorSpec) -> PackedForm:
    """One weight for all: their outputs lie one below another."""
    if form.has_order:
        raise WeightsError(f"{weight.name}: experts whose inputs are sorted by group (desc_act, actorder) are not run")
    if form.outputs % form.scale_outputs:
        raise WeightsError(
            f"{weight.name}: experts of {form.outputs} outputs with a scale for {form.scale_outputs} are not run"
        )
    if weight.transposed and form.kind != "mxfp4":
        raise WeightsError(f"{weight.name}: experts that are stored input-first are run in mxfp4 or unquantized")
    return replace(form, outputs=weight.shape[0] * form.outputs)


def read_packed(
    weight: TensorSpec,
    quantization: Quantization,
    read: Read,
    dtype: torch.dtype,
    device: torch.device,
    place: RankPlace = ONLY_RANK,
) -> PackedWeight:
    """This rank's part of `weight`; `read` is given names. Experts are read one by one."""
    stored = quantization.format_of(weight)
    assert stored is not None
    form = held_form(quantization, weight.on_rank(place.ranks))
    if isinstance(stored, Mxfp4):
        return pack_mxfp4(read(f"{weight.module}_blocks"), read(f"{weight.module}_scales"))
    out = PackedWeight.empty(form, dtype, device)
    if len(weight.shape) == 2:
        _fill(out, weight, form, stored, lambda suffix: read(weight.module + suffix), _first_input(weight, place))
        return out
    cut, (experts, outputs, inputs) = weight.cut(place), weight.shape
    mine = [index for some in cut.ranges for index in some] if cut is not None else range(experts)
    one = replace(weight, shape=(outputs, inputs), stacked=False, shard=None)
    of_one = replace(form, outputs=outputs)
    for place_here, expert in enumerate(mine):
        rows = out[place_here * outputs : (place_here + 1) * outputs]
        _fill(rows, one, of_one, stored, partial(_read_expert, read, weight, expert, place_here), 0)
    return out


def _read_expert(read: Read, weight: TensorSpec, expert: int, place: int, suffix: str) -> torch.Tensor:
    """Of one expert, from a tensor of its own or from the rank's part of the one for all."""
    if weight.stacked:
        return read(weight.module.replace("{}", str(expert)) + suffix)
    return read(weight.module + suffix)[place]


def _fill(
    out: PackedWeight, weight: TensorSpec, form: PackedForm, stored: WeightFormat, read: Read, first_input: int
) -> None:
    """One matrix from what is stored of it; `read` is given suffixes."""
    values, zeros, scales, group_of = _open(weight, form, stored, read)
    if form.kind == "fp8" and not (isinstance(stored, Fp8) and stored.block):
        scales = scales.reshape(-1, 1).expand(form.outputs, 1)
    if tuple(scales.shape) != tuple(out.scales.shape):
        raise WeightsError(f"{weight.name}: scales are {list(scales.shape)}, not {list(out.scales.shape)}")
    out.scales.copy_(scales)
    if out.zeros is not None:
        assert zeros is not None
        out.zeros.copy_(pack_zeros(zeros))
    order = _order(weight, form, group_of, first_input)
    if out.order is not None:
        assert order is not None
        out.order.copy_(order)
    at_once = max(8, TILE_VALUES // form.inputs // 8 * 8)  # words hold 8 outputs in some schemes
    for start in range(0, form.outputs, at_once):
        tile = values(start, min(start + at_once, form.outputs))
        tile = tile[:, : form.inputs] if out.order is None else tile.index_select(1, out.order)
        out.units[start : start + at_once] = pack_units(tile, form.kind)


def _open(
    weight: TensorSpec, form: PackedForm, stored: WeightFormat, read: Read
) -> tuple[Values, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Values by output, zero points [outputs, groups], scales as held, and each input's group where that is stored."""
    rows = form.outputs
    if isinstance(stored, PackedIntegers):
        shape = tuple(read(".weight_shape").tolist())
        if shape != weight.shape:
            raise WeightsError(f"{weight.module}.weight_shape says {list(shape)}, not {list(weight.shape)}")
        packed = read(".weight_packed")
        zeros = None if stored.symmetric else _unpack(read(".weight_zero_point").t())[:, :rows].t()
        group_of = read(".weight_g_idx") if stored.reordered else None
        return lambda a, b: _unpack(packed[a:b]), zeros, read(".weight_scale"), group_of
    if isinstance(stored, Awq):
        words = read(".qweight")
        zeros = _unpack(read(".qzeros"), AWQ_ORDER)[:, :rows].t()
        values: Values = lambda a, b: _unpack(words[:, a // 8 : -(-b // 8)], AWQ_ORDER)[:, : b - a].t()  # noqa: E731
        return values, zeros, _scales(read), None
    if isinstance(stored, Gptq):
        qweight = read(".qweight")
        # What wraps around at 0 is taken back.
        zeros = (_unpack(read(".qzeros"))[:, :rows].t() + stored.zero_offset) & 15
        return lambda a, b: _unpack(qweight[:, a:b].t()), zeros, _scales(read), read(".g_idx")
    assert isinstance(stored, Fp8)
    raw = read(".weight")
    if raw.dtype != torch.float8_e4m3fn:
        raise WeightsError(f"{weight.name} is stored as {raw.dtype}, not float8_e4m3fn as its config says")
    return lambda a, b: raw[a:b].view(torch.uint8), None, read(stored.scale_suffix), None


def _scales(read: Read) -> torch.Tensor:
    """AWQ and GPTQ store [groups, outputs]."""
    return read(".scales").t()


def _unpack(words: torch.Tensor, order: tuple[int, ...] = _NATURAL_ORDER) -> torch.Tensor:
    """int32 [rows, words] → uint8 [rows, 8 × words]: the value at bits 4i is number order[i] of its word."""
    found = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for place, number in enumerate(order):
        found[..., number] = (words >> 4 * place & 15).to(torch.uint8)
    return found.flatten(1)


def _first_input(weight: TensorSpec, place: RankPlace) -> int:
    """Where a rank's inputs begin in the whole weight."""
    cut = weight.cut(place)
    return cut.ranges[0].start if cut is not None and cut.axis == 1 else 0


def _order(
    weight: TensorSpec, form: PackedForm, group_of: torch.Tensor | None, first_input: int
) -> torch.Tensor | None:
    """The order that sorts inputs by group, or None where they lie so already. Groups are those of the whole weight."""
    if group_of is None:
        return None
    size = form.group_inputs or weight.shape[1]
    in_place = (torch.arange(form.inputs, device=group_of.device) + first_input) // size
    # Some writers fill in -1 where they did not reorder.
    if bool((group_of == in_place).all()) or bool((group_of < 0).all()):
        return torch.arange(form.inputs, device=group_of.device)
    if not form.has_order:
        raise WeightsError(
            f"{weight.module}: inputs are reordered by group (g_idx), but the config does not say so; set desc_act in "
            "its quantization_config to true"
        )
    if not torch.equal(group_of.sort().values, in_place.to(group_of.dtype)):
        raise WeightsError(f"{weight.module}: g_idx must give each group {size} inputs")
    return group_of.argsort(stable=True)
