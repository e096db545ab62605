"""Reads values out of a parsed JSON config: every key by name, every type checked."""

import math
from collections.abc import Mapping
from typing import Any

from jpaged.errors import CheckpointError, UnsupportedModelError

_REQUIRED = object()


class ConfigReader:
    """Typed access to one JSON object; `CheckpointError` names the key that does not fit.

    A key that is absent or null has the default; without one it is an error.
    """

    def __init__(self, values: object, *, name: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{name} must be a JSON object, got {values!r:.80}")
        self.values = values
        self.name = name

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < minimum:
            raise self._bad(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Read a number above 0: numbers in model configs are sizes, bases and factors."""
        value = self._get(key, default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self._bad(key, value, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is not default and not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def string(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is not default and not isinstance(value, str):
            raise self._bad(key, value, "a string")
        return value

    def strings(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._get(key, default)
        if value is default:
            return value
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(string, str) for string in value):
            raise self._bad(key, value, "a list of strings")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, _REQUIRED)
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(number, int | float) for number in value):
            raise self._bad(key, value, "a list of numbers")
        return tuple(float(number) for number in value)

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """Read one id, a list of ids, or nothing; ids must be below vocab_size."""
        value = self.values.get(key)
        token_ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise self._bad(key, value, "a token id or a list of token ids")
            if token_id >= vocab_size:
                raise CheckpointError(
                    f"{key} in {self.name} has the token id {token_id}, but the model's vocabulary "
                    f"ends at {vocab_size - 1}: correct the file"
                )
        return tuple(token_ids)

    def section(self, key: str) -> "ConfigReader":
        """Return the object under the key, an empty one when the key is absent or null."""
        values = self.values.get(key)
        return ConfigReader({} if values is None else values, name=f"{key} in {self.name}")

    def refuse_unless(self, key: str, *supported: object) -> None:
        """Refuse a feature that is not implemented, unless the key says it is not used."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            listed = "".join(f"{value!r} or " for value in supported)
            raise UnsupportedModelError(
                f"{key} in {self.name} is {value!r:.120}, which is not supported: "
                f"it must be {listed}absent"
            )

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.name} has no {key}")
        return default

    def _bad(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{key} in {self.name} must be {wanted}, got {value!r:.80}")
