"""Lines of a run: what was checked or measured, and what came out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """One result.

    Attributes:
        holds: of a claim; None for a measurement.
    """

    section: str
    name: str
    value: str
    holds: bool | None = None

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[self.holds]
        return f"{mark} {self.section:<10} {self.name:<58} {self.value}"


@dataclass
class Results:
    """Everything that a run found, printed as it comes."""

    about: dict[str, Any]
    show: Callable[[str], None]
    lines: list[Line] = field(default_factory=list)

    def claim(self, section: str, name: str, holds: bool, value: str = "") -> None:
        """A claim that holds or does not."""
        self._add(Line(section, name, value, holds))

    def measured(self, section: str, name: str, value: str) -> None:
        """A measurement."""
        self._add(Line(section, name, value))

    @property
    def failed(self) -> list[Line]:
        """Claims that do not hold."""
        return [line for line in self.lines if line.holds is False]

    def write(self, path: Path) -> None:
        """The run as JSON."""
        content = {"about": self.about, "lines": [asdict(line) for line in self.lines]}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.show(str(line))
