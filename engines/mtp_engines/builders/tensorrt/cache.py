"""Directories of built engines: each is whole and says what it was built from, or it is absent."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from mtp_engines.backends.gpu.pages import PAGE_SIZE
from mtp_engines.builders.tensorrt.target import Target
from mtp_engines.bundle import GRAPHS, Bundle, entry_of
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.errors import BuildError
from mtp_engines.lowering.precision import Precision
from mtp_plugins.tensorrt_plugins.registry import digest_of_plugins

ENTRY_FILE = "engines.json"
ENGINES = "engines"
FORM = 2
"""Raised whenever the builder makes other engines from the same bundle."""


@dataclass(frozen=True)
class _Stored:
    size: int
    sha256: str


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class _Entry:
    key: str
    engines: tuple[EngineFile, ...]
    files: dict[str, _Stored]


_ENTRY = TypeAdapter(_Entry)


def default_directory(bundle: Bundle, target: Target, precision: Precision) -> Path:
    """Where the engines of a bundle lie if its user names no place."""
    return bundle.directory / ENGINES / f"{target.flavour.name}-{target.version}-{target.name}-{precision}"


def key_of(bundle: Bundle, target: Target, precision: Precision, rows: Sequence[int], *, skinny: bool = False) -> str:
    """sha256 over everything that an engine depends on."""
    manifest = bundle.manifest
    content = {
        "form": FORM,
        "graphs": {name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(f"{GRAPHS}/")},
        "limits": asdict(manifest.limits),
        "precision": precision,
        "rows": list(rows),
        "skinny": skinny,
        "plugins": digest_of_plugins() if target.flavour.plugins else None,
        "page_size": PAGE_SIZE,
        "backend": target.flavour.name,
        "version": target.version,
        "target": target.name,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_entry(directory: Path, key: str) -> tuple[EngineFile, ...] | None:
    """The engines in a directory; None if there are none, or others, or a file is missing or changed."""
    entry = _read(directory)
    if entry is None or entry.key != key:
        return None
    for name, stored in entry.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != stored.size or entry_of(path).sha256 != stored.sha256:
            return None
    return entry.engines


def refuse_foreign(directory: Path) -> None:
    """Refuse to build over something that holds no engines.

    Raises:
        BuildError: `directory` is a file, or a directory with other content.
    """
    if not directory.exists():
        return
    # Plans whose list was lost are ours, and built again.
    ours = directory.is_dir() and all(path.suffix == ".plan" or path.name == ENTRY_FILE for path in directory.iterdir())
    if not ours:
        raise BuildError(f"{directory} exists and holds no engines; give another directory for them.")


def publish_entry(staged: Path, directory: Path, key: str, engines: tuple[EngineFile, ...]) -> None:
    """Write the list of a staged directory and move it to `directory`, in place of what stood there."""
    files = {}
    for engine in engines:
        found = entry_of(staged / engine.file)
        files[engine.file] = _Stored(found.size, found.sha256)
    (staged / ENTRY_FILE).write_bytes(_ENTRY.dump_json(_Entry(key, engines, files), indent=1) + b"\n")
    staged.chmod(0o755)
    refuse_foreign(directory)
    # Named as `staging` names its own, which removes what a killed process left.
    name = f".{directory.name}.{os.getpid()}."
    try:
        with tempfile.TemporaryDirectory(prefix=name, suffix=".partial", dir=directory.parent) as aside:
            if directory.exists():
                directory.rename(Path(aside) / "old")
            staged.rename(directory)
    except OSError as error:
        raise BuildError(
            f"The engines could not be moved to {directory}: {error.strerror}. If another build writes there, wait for "
            "it and build again."
        ) from error


def _read(directory: Path) -> _Entry | None:
    path = directory / ENTRY_FILE
    if not path.is_file():
        return None
    try:
        entry: _Entry = _ENTRY.validate_json(path.read_bytes())
    except ValidationError:
        return None
    return entry
