"""A folder of results on disk: an entry is whole and right, or it is made again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load(path: Path, key: str) -> dict[str, Any] | None:
    """The fields stored under `key`; None if there is no such file, or it is damaged or of another key."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        fields = entry["fields"]
        whole = entry["digest"] == _digest(key, fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None  # Whatever stands there, `store` writes over it.
    return dict(fields) if whole else None


def store(path: Path, key: str, fields: Mapping[str, Any]) -> None:
    """Write an entry in one step; of two processes that write at once, one wins and both are right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"digest": _digest(key, fields), "fields": dict(fields)}, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _digest(key: str, fields: Mapping[str, Any]) -> str:
    text = json.dumps([key, dict(fields)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
