"""Measured costs, kept in the bundle for the machine, the libraries and the options that they hold for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import MEASURED, Bundle
from mtp_engines.contracts.manifest import MANIFEST
from mtp_engines.costs import CycleCosts, measure_costs
from mtp_engines.engine import Engine
from mtp_engines.kernels.build import source_digest
from mtp_engines.kernels.library import instructions, path_of_kernels

FORM = 1
"""Raised whenever costs are measured in another way."""
_LIBRARIES = ("mtp-export", "numpy", "onnxruntime", "onnxruntime-gpu", "torch", "triton", "tensorrt-cu13")
_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class _Entry:
    key: str
    busy: bool
    """Others used the processors too; on a quieter machine it is measured again."""
    costs: CycleCosts


_ENTRY = TypeAdapter(_Entry)


def costs_of(
    bundle: Bundle, engine: Engine, options: EngineOptions, *, answers: int = 1, whole: bool = False
) -> CycleCosts:
    """The costs that were kept, or else those that are measured now, which takes seconds, and kept if that is possible.

    Args:
        options: those that the engine was opened with.
        answers: how many run together.
        whole: of the backend's own cycles.
    """
    key = key_of(bundle, engine, options, answers=answers, whole=whole)
    path = bundle.directory / MEASURED / f"costs-{key[:16]}.json"
    found, busy = _read(path, key, engine.limits.max_draft_tokens), _is_busy()
    if found is None or (found.busy and not busy):
        found = _Entry(key, busy, measure_costs(engine, answers=answers, whole=whole))
        _write(path, found)
    return found.costs


def key_of(bundle: Bundle, engine: Engine, options: EngineOptions, *, answers: int = 1, whole: bool = False) -> str:
    """sha256 over everything that costs depend on; the name of the machine's processors is in no other form kept."""
    content = {
        "form": FORM,
        "manifest": hashlib.sha256(MANIFEST.dump_json(bundle.manifest)).hexdigest(),
        "engine": type(engine).__qualname__,
        "runs_on": engine.runs_on,
        "processors": _processors(engine.runs_on),
        "kernels": f"{source_digest()} {instructions()}" if engine.runs_on == "cpu" and path_of_kernels() else "",
        "options": [options.threads, options.backend, options.device, options.graphs],
        "answers": answers,
        "whole": whole,
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _processors(runs_on: str) -> list[str]:
    """The CPU's model and how many may be used; for a CUDA device also the models of all that there are."""
    found = [*_values([_CPUINFO], "model name")[:1], str(len(os.sched_getaffinity(0)))]
    if runs_on != "cpu":
        found += _values(sorted(_GPUS.glob("*/information")), "Model")
    return found


def _values(files: Iterable[Path], field: str) -> list[str]:
    """Values of a field in files with lines such as `field : value`."""
    lines = [line for file in files if file.is_file() for line in file.read_text(encoding="utf-8").splitlines()]
    return [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == field]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_busy() -> bool:
    """Whether more wants to run than there are processors, so that times say little."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0)) + 0.5


def _read(path: Path, key: str, max_draft_tokens: int) -> _Entry | None:
    """What a file holds; None where there is none, or it is damaged or for something else."""
    try:
        entry: _Entry = _ENTRY.validate_json(path.read_bytes())
    except (OSError, ValidationError):  # Whatever it was, measuring again mends it.
        return None
    fits = entry.key == key and entry.costs.max_draft_tokens == max_draft_tokens and entry.costs.is_sound()
    return entry if fits else None


def _write(path: Path, entry: _Entry) -> None:
    """Put a file in its place in one step, so that a reader or a second writer never meets half of one."""
    aside: Path | None = None
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent)
        aside = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_ENTRY.dump_json(entry, indent=1) + b"\n")
        aside.chmod(0o644)
        aside.replace(path)
    except OSError:
        # A bundle that cannot be written, or a full disk: the next process measures again, which costs seconds.
        if aside is not None:
            aside.unlink(missing_ok=True)
