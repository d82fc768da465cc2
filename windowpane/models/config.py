"""Reading `config.json` strictly: a missing field, a wrong type or an unknown value is an error that names it.

Flat configs carry every field of their class, so sizes are required there. Nested ones (`text_config`) are saved as
differences from the class defaults, so their readers pass those defaults; the layer count and the widths are required
everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeGuard

from windowpane.kv.formats import DTYPE_BYTES

CONFIG, QUANT_CONFIG = "config.json", "hf_quant_config.json"

# No released model comes near: beyond them a config is damaged, and is refused before anything is built from it.
MOST_LAYERS = 4096
LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 3.4028234663852886e38  # of float32; NaN and infinity are none


class ModelError(ValueError):
    """The configuration cannot be read as a model; the message names the field and the way out."""


class Config:
    """One JSON object of a config. `where` is its path in errors, such as `text_config.`; null counts as missing."""

    def __init__(self, fields: Mapping[str, object], where: str = "") -> None:
        self.fields = fields
        self.where = where

    def has(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
        """A whole number from `minimum` to `maximum`; required where no default is given."""
        value = self.fields.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"the config has no {self.where}{key}, which is needed to size the model")
            return default
        # JSON true is an int in Python, and no size.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong_type(key, "a whole number")
        if value < minimum:
            raise ModelError(f"{self.where}{key} is {value}, but must be at least {minimum}")
        if value > maximum:
            raise ModelError(f"{self.where}{key} is {value!r:.40}, but must be at most {maximum:,}")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """How many layers there are: few enough to be listed."""
        return self.integer(key, default, maximum=MOST_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; required where no default is given."""
        value = self.fields.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"the config has no {self.where}{key}, which is needed to run the model")
            return default
        if not is_number(value):
            raise self.wrong_type(key, "a number")
        return float(value)

    def divisor(self, key: str, default: float) -> float:
        """A number other than 0."""
        value = self.number(key, default)
        if value == 0:
            raise self.wrong_type(key, "a number other than 0")
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number that may be missing: null is None, and an absent field the config class's default."""
        if key not in self.fields:
            return default
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(key, "a string")
        return value

    def choice(self, key: str, known: Collection[str]) -> str | None:
        """A string that must be one of `known`, or None where it is missing."""
        value = self.text(key)
        if value is not None and value not in known:
            raise self.unknown_value(key, value, known)
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where it is missing."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong_type(key, "a list of strings")
        return tuple(value)

    def numbers(self, key: str, length: int | None = None) -> tuple[float, ...] | None:
        """A list of numbers (of `length` where given), or None where it is missing."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(map(is_number, value)):
            raise self.wrong_type(key, "a list of numbers")
        if length is not None and len(value) != length:
            raise self.wrong_type(key, f"a list of {length} numbers")
        return tuple(map(float, value))

    def integers(self, key: str, length: int | None = None) -> tuple[int, ...] | None:
        """A list of whole numbers (of `length` where given), or None where it is missing."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise self.wrong_type(key, "a list of whole numbers")
        if length is not None and len(value) != length:
            raise ModelError(f"{self.where}{key} has {len(value)} entries for {length} layers")
        return tuple(value)

    def section(self, key: str) -> Config:
        """A nested object; required."""
        if not self.has(key):
            raise ModelError(f"the config has no {self.where}{key}")
        value = self.fields[key]
        if not isinstance(value, dict):
            raise self.wrong_type(key, "an object")
        return Config(value, f"{self.where}{key}.")

    def dtype(self, *keys: str) -> str | None:
        """The first of `keys` that is set, as a dtype this project knows."""
        for key in keys:
            value = self.choice(key, DTYPE_BYTES)
            if value is not None:
                return value
        return None

    def layer_types(self, layers: int, known: Collection[str], rule: Iterable[str]) -> tuple[str, ...]:
        """One kind per layer: the config's own `layer_types`, or the family's `rule` for configs from before it."""
        kinds = self.texts("layer_types")
        if kinds is None:
            return tuple(rule)
        if len(kinds) != layers:
            raise ModelError(f"{self.where}layer_types has {len(kinds)} entries for {layers} layers")
        for kind in kinds:
            if kind not in known:
                raise self.unknown_value("layer_types", kind, known)
        return kinds

    def unknown_value(self, key: str, value: object, known: Iterable[str]) -> ModelError:
        return ModelError(f"{self.where}{key}: unknown value {value!r}; known: {', '.join(sorted(known))}")

    def wrong_type(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.where}{key} must be {wanted}, not {self.fields[key]!r:.60}")


def is_number(value: object) -> TypeGuard[float]:
    """Of float32, finite. JSON true is an int in Python, and no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def every(interval: int, last: str, others: str, layers: int) -> tuple[str, ...]:
    """`others`, with every `interval`-th layer `last`: the rule of most hybrids."""
    return tuple(last if (layer + 1) % interval == 0 else others for layer in range(layers))
