"""Flags by name, as the command line and `LLM` give them: those of the engine's config, and a few beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from windowpane.plan.config import ConfigError, EngineConfig, config_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What the engine's own flags do not say: where to run, in which dtype, where weights come from, and the seed.

    `auto` is the first CUDA card or else the CPU; the model's own dtype, or float32 on a CPU; and whatever weights lie
    with the model. `dummy` makes random ones from the config alone. A model on the Hub is fetched at `revision` (None:
    its main branch) to `download_dir` (None: the shared cache). `quantization` names how the checkpoint is quantized,
    which its own config says too: another name is an error.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    revision: str | None = None
    download_dir: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", OTHER_DTYPES.get(self.dtype, self.dtype))


# vLLM's other names.
OTHER_DTYPES = {"half": "float16", "float": "float32"}


def read_flags(flags: Mapping[str, Any]) -> tuple[StartOptions, EngineConfig]:
    """Flags by name; an unknown one is an error that names what may have been meant."""
    options = {f.name for f in fields(StartOptions)}
    engine = {f.name for f in fields(EngineConfig)}
    for name in flags:
        if name not in options | engine:
            close = get_close_matches(name, options | engine, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(options | engine))}"
            raise ConfigError(f"unknown argument {name!r}; {hint}")
    given = {name: value for name, value in flags.items() if name in engine}
    config = config_of(given)
    return StartOptions(**{name: value for name, value in flags.items() if name in options}), config
