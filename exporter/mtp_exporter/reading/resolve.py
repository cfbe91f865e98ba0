"""From what a user calls a model to a directory on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from mtp_engines.errors import CheckpointError
from mtp_exporter.reading.checkpoint import INDEX, read_json

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
_SHORT_NAME = re.compile(r"^Qwen\d", re.IGNORECASE)


def resolve(model: str) -> Path:
    """The directory of a local checkpoint, a hub id, or a short name.

    A short name such as `Qwen3.5-9B` stands for `Qwen/Qwen3.5-9B`. Looked for in this order: the
    working directory, the hub cache, the hub.

    Raises:
        CheckpointError: there is no such directory, and no such model on the hub or no way to reach it.
    """
    if not model.strip():
        raise CheckpointError("the model's name is empty; give a directory, a hub id or a short name.")
    local = Path(model).expanduser()
    if local.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        return local
    repository = model if "/" in model else f"Qwen/{model}" if _SHORT_NAME.match(model) else None
    if repository is None:
        raise CheckpointError(
            f"{model!r} is no directory here and no short name that this tool knows (such as Qwen3.5-9B). Give a "
            "directory, or a hub id of the form owner/name."
        )
    try:
        cached = _cached(repository)
    except HFValidationError as error:
        raise CheckpointError(
            f"{model!r} is no directory here and no hub id of the form owner/name. Check the name."
        ) from error
    if cached is not None and _is_complete(cached):
        return cached
    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"The hub has no model {repository!r} that you may read. Check the name, or log in with `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{model!r} is no directory here, {repository!r} is not complete in the hub cache "
            f"({constants.HF_HUB_CACHE}), and "
            f"the hub could not be asked for it. Check the name and the network, or download the checkpoint and "
            "give its directory."
        ) from error


def _cached(repository: str) -> Path | None:
    """The newest snapshot in the hub cache, complete or not."""
    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _is_complete(snapshot: Path) -> bool:
    """Whether a cached snapshot has its configuration and every weight file that it should have."""
    index = snapshot / INDEX
    if index.is_file():
        files = set(read_json(index).get("weight_map", {}).values())
    else:
        files = {path.name for path in snapshot.glob("*.safetensors")}
    return bool(files) and all((snapshot / name).is_file() for name in [*files, "config.json"])
