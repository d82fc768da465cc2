"""The devices an engine runs on, and what they decide: flags that were left out, and the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windowpane.models.ggml import StoredTypes
from windowpane.models.quantization import Quantization
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import weight_bytes
from windowpane.plan.config import ConfigError, EngineConfig, for_device
from windowpane.plan.memory import Device
from windowpane.plan.planner import Plan, make_plan
from windowpane.plan.sizes import format_bytes

if TYPE_CHECKING:
    import torch

# A CPU shares its memory with everything else on the machine.
CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE = 4

DTYPES = ("float32", "bfloat16", "float16")


def resolve_devices(name: str, ranks: int) -> tuple[torch.device, ...]:
    """One device per rank: cards one after another from the one that is named, or the CPU for all."""
    import torch

    first = resolve_device(name)
    if first.type == "cpu":
        return (first,) * ranks
    count = torch.cuda.device_count()
    if first.index + ranks > count:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} needs {ranks} CUDA devices from {first} on, and this machine has {count}; "
            f"the most is --tensor-parallel-size {count - first.index}"
        )
    return tuple(torch.device("cuda", first.index + rank) for rank in range(ranks))


def resolve_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ConfigError(f"--device {name!r} is not known; use auto, cpu, cuda or cuda:1")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise ConfigError(f"--device {name}: this machine has {count} CUDA devices; use --device cpu")
        return torch.device("cuda", int(number or 0))
    return torch.device("cpu")


def resolve_config(config: EngineConfig, flags: Mapping[str, Any], devices: Sequence[torch.device]) -> EngineConfig:
    """With what the device decides where the user did not."""
    on_cpu = devices[0].type == "cpu"
    config = for_device(config, flags, on_cpu=on_cpu)
    if on_cpu and config.kv_cache_memory_bytes is None:
        kv_bytes = min(CPU_KV_BYTES, free_memory_bytes() // CPU_KV_SHARE)
        config = replace(config, kv_cache_memory_bytes=kv_bytes // len(devices))
    return config


def resolve_plan(spec: ModelSpec, config: EngineConfig, devices: Sequence[torch.device], dtype: str) -> Plan:
    """The plan that every rank follows; a PlanError says by how much it does not fit, and the longest that would."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}")
    if devices[0].type == "cpu":
        if dtype not in ("auto", "float32"):
            raise ConfigError(
                f"--dtype {dtype}: CPUs compute in float32 here, other types are far slower; leave it out"
            )
        return make_plan(_with_drafter(on_cpu(spec, dtype), partial(on_cpu, dtype=dtype)), config, gpu="cpu")
    import torch

    if isinstance(spec.quantization, StoredTypes):
        spec = on_gpu(spec, dtype)
    spec = _with_drafter(spec, partial(on_gpu, dtype=dtype))

    # Ranks are equal, so the smallest card decides.
    card = min(map(torch.cuda.get_device_properties, devices), key=lambda c: c.total_memory)
    if dtype != "auto":
        spec = replace(spec, dtype=dtype)
    plan = make_plan(spec, config, gpu_memory_bytes=card.total_memory)
    return replace(plan, device=Device(card.name, card.total_memory, (card.major, card.minor)))


def _with_drafter(spec: ModelSpec, arranged: Callable[[ModelSpec], ModelSpec]) -> ModelSpec:
    """The model with its drafter as the device runs that, where it is a GGUF file too."""
    drafter = spec.drafter
    if drafter is None or drafter.spec is None or not isinstance(drafter.spec.quantization, StoredTypes):
        return spec
    return replace(spec, drafter=replace(drafter, spec=arranged(drafter.spec)))


def on_cpu(spec: ModelSpec, dtype: str) -> ModelSpec:
    """Weights of a GGUF file stay as they are stored where kernels can read them, unless float32 is asked for. Those of
    other checkpoints stay packed either way, and are multiplied exactly where it is.
    """
    quantized = spec.quantization
    if quantized is None or (isinstance(quantized, Quantization) and dtype == "float32"):
        return spec
    if dtype == "float32":
        return spec.expanded()
    from windowpane.native import build

    why_not = build.why_not()
    if isinstance(quantized, Quantization):
        return replace(spec, quantization=replace(quantized, rounds_inputs=why_not is None))
    if why_not is None:
        return spec
    return replace(spec.expanded(), notes=(*spec.notes, f"weights are expanded to float32: {why_not}"))


def on_gpu(spec: ModelSpec, dtype: str) -> ModelSpec:
    """A GGUF model as a GPU runs it: expanded, and never without being asked to."""
    if dtype == "auto":
        expanded_bytes = weight_bytes(spec.expanded())
        raise ConfigError(
            f"{spec.name} is stored as {spec.weight_scheme}, which GPUs do not read; --dtype {spec.dtype} expands it "
            f"to {format_bytes(expanded_bytes)}, and --device cpu runs it as it is"
        )
    return spec.expanded()


def check_host_memory(config: EngineConfig) -> None:
    """Refuse a host tier that the machine has no memory for, before a byte is loaded."""
    asked, free = config.offloading_bytes, free_memory_bytes()
    if asked > free:
        raise ConfigError(
            f"--kv-offloading-size {config.kv_offloading_size} is {format_bytes(asked)}, and {format_bytes(free)} of "
            f"host memory are free; the most is --kv-offloading-size {free // 2**30}"
        )


def free_memory_bytes() -> int:
    """Memory that this process could still take, by the kernel's estimate and the container's limit."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free.append(max(0, int(limit[0]) - int(used[0])))
    return min(free)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
