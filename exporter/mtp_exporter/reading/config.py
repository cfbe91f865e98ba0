"""Reading fields of a model configuration, wherever a publisher put them."""

from __future__ import annotations

import sys
from typing import Any

from mtp_engines.errors import CheckpointError


class Config:
    """The language part of a config.json: `text_config` where there is one, the top level otherwise."""

    def __init__(self, raw: dict[str, Any], path: str) -> None:
        nested = raw.get("text_config")
        self.top = raw
        self.nested: dict[str, Any] = nested if isinstance(nested, dict) else {}
        self.text = self.nested or raw
        self.path = path

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        Raises:
            CheckpointError: the field is missing without a default, or is something else.
        """
        value = self.text.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.path} has {name} = {value!r}, expected a whole number of at least 1. Mend the file."
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number.

        Raises:
            CheckpointError: the field is missing without a default, or is something else.
        """
        value = self.text.get(name, default)
        return self._number(name, value)

    def rope(self, name: str) -> float | None:
        """A rotary field from `rope_parameters`, `rope_scaling` or the level above, newest place first."""
        for group in ("rope_parameters", "rope_scaling"):
            parameters = self.text.get(group)
            if isinstance(parameters, dict) and parameters.get(name) is not None:
                return self._number(f"{group}.{name}", parameters[name])
        value = self.text.get(name)
        return None if value is None else self._number(name, value)

    def flag(self, name: str) -> bool:
        """True if the text level or the top level says so."""
        return bool(self.text.get(name) or self.top.get(name))

    def fixed(self, name: str, expected: Any) -> None:
        """Refuse a field that says something this family's graphs do not do.

        Raises:
            CheckpointError: the field is present with another value.
        """
        value = self.text.get(name, expected)
        if value != expected:
            raise CheckpointError(
                f"{self.path} has {name} = {value!r}; only {expected!r} is supported for this family. Use another "
                "checkpoint, or ask for this variant."
            )

    def _number(self, name: str, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < sys.float_info.max:
            raise CheckpointError(f"{self.path} has {name} = {value!r}, expected a positive number. Mend the file.")
        return float(value)
