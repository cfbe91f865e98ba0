"""A checkpoint directory: its configuration, its tensors by header, and what is missing."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised import StoredTensor, logical_tensors
from mtp_exporter.reading.safetensors_file import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_BLOCK_BYTES = 32 << 20
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Small files that a bundle takes over where a checkpoint has them."""


@dataclass(frozen=True)
class MissingShard:
    """A file that the index names and the directory lacks, with the tensors it should hold."""

    file: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a checkpoint; no tensor data is read until a tensor's `read` or `rows`."""

    directory: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    stored: dict[str, TensorInfo]
    """What the files hold."""
    tensors: dict[str, StoredTensor]
    """What it stands for: quantised tensors under the names and shapes of the floats that they encode."""
    missing: tuple[MissingShard, ...] = ()
    declared_bytes: int | None = None
    """`total_size` of the index, if it has one."""
    ignored_files: tuple[str, ...] = ()
    _index: Path | None = field(default=None, repr=False)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors found."""
        return sum(tensor.size for tensor in self.stored.values())

    def require(self, name: str) -> None:
        """Refuse if `name` should lie in a shard that is not on disk.

        Raises:
            CheckpointError: names the shard, the index, how many tensors it held and this one.
        """
        for shard in self.missing:
            if name in shard.tensors or self._lacks_part(name, shard):
                raise CheckpointError(
                    f"{self.directory / shard.file} is missing: {self._index} names it for {len(shard.tensors)} "
                    f"tensors, among them {name!r}. Fetch the file, or the whole checkpoint, again."
                )

    def _lacks_part(self, name: str, shard: MissingShard) -> bool:
        """Whether the shard should hold a part of a quantised tensor, such as its scales or zero points."""
        if isinstance(self.tensors.get(name), TensorInfo):
            return False
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        return any(part.startswith(stem) for part in shard.tensors)

    def names(self, name: str) -> bool:
        """Whether the files or the index know a tensor of this name."""
        return name in self.tensors or any(name in shard.tensors for shard in self.missing)

    def digest(self, digests: Mapping[str, str]) -> str:
        """sha256 over every small file that a bundle copies and over the digests of the values it uses."""
        state = hashlib.sha256()
        for name in COPIED:
            path = self.directory / name
            state.update(name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b"") + b"\0")
        state.update(repr(sorted(digests.items())).encode())
        return state.hexdigest()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the configuration and every header of a checkpoint directory.

    With an index, only its files are read; otherwise there must be exactly one safetensors file.

    Raises:
        CheckpointError: no such directory, no readable config.json, no or several candidate files.
    """
    if not directory.exists():
        raise CheckpointError(f"{directory} does not exist; give the directory of a checkpoint.")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give the directory that holds it and its config.json.")
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    index = directory / INDEX
    found = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    if index.is_file():
        return _open_sharded(directory, config, generation_config, index, found)
    if not found and (directory / "manifest.json").is_file():
        raise CheckpointError(f"{directory} is a bundle, not a checkpoint; it is built already.")
    if not found:
        raise CheckpointError(f"{directory} holds no .safetensors file; fetch the checkpoint's weights.")
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} holds {len(found)} safetensors files ({', '.join(found)}) and no {INDEX} that says which "
            "belong together. Fetch the index, or remove the files that do not belong."
        )
    tensors = read_header(directory / found[0])
    return Checkpoint(directory, config, generation_config, tensors, logical_tensors(tensors, config))


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have one shape and equal values everywhere."""
    if a.shape != b.shape:
        return False
    step = max(_BLOCK_BYTES // max(4 * math.prod(a.shape[1:]), 1), 1)
    counts = [(start, min(step, a.shape[0] - start)) for start in range(0, a.shape[0], step)]
    return all(np.array_equal(a.rows(*part), b.rows(*part)) for part in counts)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: missing, not JSON (with line and column), or not an object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint directory has a {path.name}.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}. Mend the file or "
            "fetch it again."
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text; fetch it again.") from error
    except (ValueError, RecursionError) as error:  # Numbers of thousands of digits, nesting without end.
        raise CheckpointError(f"{path} is no sensible JSON: {error}. Mend the file or fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object; fetch it again.")
    return value


def _open_sharded(
    directory: Path, config: dict[str, Any], generation: dict[str, Any], index: Path, found: list[str]
) -> Checkpoint:
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again.")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(str(file), []).append(str(name))
    tensors: dict[str, TensorInfo] = {}
    missing: list[MissingShard] = []
    for file, expected in sorted(names.items()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names the shard {file!r}, expected a plain file name; fetch it again.")
        if not (directory / file).is_file():
            missing.append(MissingShard(file, tuple(expected)))
            continue
        header = read_header(directory / file)
        absent = [name for name in expected if name not in header]
        if absent:
            raise CheckpointError(
                f"{directory / file} lacks {len(absent)} of {len(expected)} tensors that {index} promises, first "
                f"{absent[0]!r}. The index and the file belong to different downloads; fetch both again."
            )
        # A stale copy of a tensor that the index puts elsewhere does not count; one it does not know at all does.
        tensors |= {name: tensor for name, tensor in header.items() if weight_map.get(name, file) == file}
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Checkpoint(
        directory,
        config,
        generation,
        tensors,
        logical_tensors(tensors, config),
        tuple(missing),
        int(total) if isinstance(total, (int, float)) and math.isfinite(total) else None,
        tuple(name for name in found if name not in names),
        index,
    )
