"""What tests of several packages share: building, generating, refusals, and the installed commands."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import MtpError
from mtp_exporter.build import Reporter, build
from mtp_exporter.options import BuildOptions
from mtp_runtime import Finished, Model, load

MAX_MODEL_LEN = 64


def build_bundle(checkpoint: Path, out: Path, *, notes: list[str] | None = None, **options: Any) -> Path:
    """Build `checkpoint` at `out` and return `out`.

    notes: takes what the build tells its user. options: fields of BuildOptions; max_model_len is 64
        unless given.
    """
    report = Reporter(note=notes.append) if notes is not None else None
    build(BuildOptions(str(checkpoint), out, **{"max_model_len": MAX_MODEL_LEN, **options}), report)
    return out


def load_model(bundle: Path) -> Model:
    """A loaded bundle that uses one thread."""
    return load(bundle, threads=1)


def generate(
    bundle: Path | Model, prompt_ids: Sequence[int], max_new_tokens: int, draft_tokens: int, **options: Any
) -> Finished:
    """The last event of one generation; options: further fields of a request."""
    model = bundle if isinstance(bundle, Model) else load_model(bundle)
    return model.complete(
        prompt_ids=list(prompt_ids), max_new_tokens=max_new_tokens, draft_tokens=draft_tokens, **options
    )


def ids_of(
    bundle: Path | Model, prompt_ids: Sequence[int], max_new_tokens: int, draft_tokens: int = 0, **options: Any
) -> list[int]:
    """The ids of one generation."""
    return list(generate(bundle, prompt_ids, max_new_tokens, draft_tokens, **options).token_ids)


def leftovers(out: Path) -> list[str]:
    """What a refused build left behind: `out` itself and partial directories beside it."""
    if not out.parent.is_dir():
        return []
    return sorted(path.name for path in out.parent.iterdir() if path == out or path.name.endswith(".partial"))


@contextlib.contextmanager
def refused(*parts: str, error: type[MtpError] = MtpError) -> Iterator[None]:
    """The block must raise an MtpError of one line that ends as a sentence and has every text of `parts`."""
    with pytest.raises(error, match="" if not parts else re.escape(parts[0])) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, f"more than one line: {message!r}"
    assert message.endswith("."), f"not a sentence: {message!r}"
    absent = [part for part in parts if part not in message]
    assert not absent, f"{message!r} does not say {absent}"


def build_refused(checkpoint: Path, out: Path, *parts: str, **options: Any) -> None:
    """Building must be refused in one sentence with every text of `parts`, and leave nothing behind."""
    with refused(*parts):
        build_bundle(checkpoint, out, **options)
    assert leftovers(out) == [], "a refused build left something behind"


def copy_of(directory: Path, target: Path) -> Path:
    """A copy of a checkpoint or bundle that a test may damage."""
    shutil.copytree(directory, target)
    return target


def top_two_margin(logits: np.ndarray) -> float:
    """How far the best logit is ahead of the second one: the least over all rows."""
    ordered = np.sort(logits, axis=-1)
    return float((ordered[..., -1] - ordered[..., -2]).min())


def run_command(name: str, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an installed command, `mtp-export` or `mtp-run`, as a user would; it costs one to two seconds."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def command_refused(result: subprocess.CompletedProcess[str], *parts: str, code: int = 1) -> None:
    """A command must have ended with `code` and one sentence on stderr that has every text of `parts`."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, f"expected one line on stderr, found {lines}"
    absent = [part for part in parts if part not in lines[0]]
    assert not absent, f"{lines[0]!r} does not say {absent}"
