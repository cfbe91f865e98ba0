"""The prompts of the measurement: three kinds, each in a file of `texts`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

KINDS = {"summarise": "summarising", "edit": "editing code", "open": "open questions"}
"""Name of the file -> what its prompts ask for."""
_FOLDER = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    kind: str
    name: str
    text: str


def load_prompts() -> tuple[Prompt, ...]:
    """All prompts, kind by kind."""
    found = []
    for kind in KINDS:
        content = tomllib.loads((_FOLDER / f"{kind}.toml").read_text(encoding="utf-8"))
        found += [Prompt(kind, entry["name"], entry["text"].strip()) for entry in content["prompts"]]
    return tuple(found)
