"""Who takes part: every engine with its weight formats, sorted into groups that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from mtp_tools.neighbours.conversions import (
    Prepare,
    prepare_llama_cpp,
    prepare_onnxruntime_genai,
    prepare_openvino,
    prepare_ours,
    prepare_transformers,
)

GROUPS = ("fp32", "int8", "int4")


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        worker: file in `workers/`.
        formats: group -> the engine's own name of the format.
        prepare: installs and converts.
    """

    name: str
    worker: str
    formats: dict[str, str]
    prepare: Prepare


OURS = Engine("ours", "ours.py", {"fp32": "fp32", "int8": "int8", "int4": "int4"}, prepare_ours)
NEIGHBOURS = (
    Engine("transformers", "transformers_model.py", {"fp32": "float32"}, prepare_transformers),
    Engine("llama.cpp", "llama_cpp_server.py", {"fp32": "f32", "int8": "q8_0", "int4": "q4_0"}, prepare_llama_cpp),
    Engine(
        "onnxruntime-genai",
        "onnxruntime_genai_model.py",
        {"fp32": "fp32", "int4": "int4"},
        prepare_onnxruntime_genai,
    ),
    Engine("openvino", "openvino_model.py", {"fp32": "fp32", "int8": "int8", "int4": "int4"}, prepare_openvino),
)
ENGINES = (OURS, *NEIGHBOURS)


@dataclass(frozen=True)
class Contender:
    """One engine with one weight format."""

    engine: Engine
    group: str

    @property
    def weights(self) -> str:
        """The format, as the engine calls it."""
        return self.engine.formats[self.group]

    @property
    def name(self) -> str:
        return f"{self.engine.name} {self.weights}"

    @property
    def is_ours(self) -> bool:
        return self.engine.name == OURS.name


def contenders_from(only: str | None, groups: str | None) -> list[Contender]:
    """Group by group, ours first in each.

    Args:
        only: names of engines with commas; None for all.
        groups: names of groups with commas; None for all.

    Raises:
        UsageError: an unknown name.
    """
    names = _names(only, "--only", [engine.name for engine in ENGINES])
    kinds = _names(groups, "--weights", GROUPS)
    return [
        Contender(engine, group)
        for group in GROUPS
        for engine in ENGINES
        if group in kinds and group in engine.formats and engine.name in names
    ]


def _names(text: str | None, option: str, known: Sequence[str]) -> list[str]:
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise click.UsageError(f"{option} names {name!r}; expected some of {', '.join(known)}.")
    return names
