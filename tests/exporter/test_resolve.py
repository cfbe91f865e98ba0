"""Names of models: a directory, a hub id or a short name, looked for in that order of places."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_engines.errors import CheckpointError
from mtp_exporter.reading.resolve import resolve
from tests.fixtures.checkpoints import random_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache that holds Qwen/Qwen3.5-Tiny whole and Qwen/Qwen3.5-Half without one shard."""
    cache = tmp_path_factory.mktemp("hub")
    for name in ("Tiny", "Half"):
        folder = cache / f"models--Qwen--Qwen3.5-{name}"
        snapshot = folder / "snapshots" / COMMIT
        random_checkpoint(snapshot, seed=1, shards=2)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    shards = sorted(snapshot.glob("*.safetensors"))
    shards[-1].unlink()
    return cache


def inspect(model: str, hub: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`mtp-export inspect --json` without a network, in a process of its own: the hub library reads its
    environment when it is imported."""
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    command = [str(Path(sys.executable).with_name("mtp-export")), "inspect", model, "--json"]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("model", ["Qwen3.5-Tiny", "Qwen/Qwen3.5-Tiny"])
def test_a_short_name_and_a_hub_id_are_found_in_the_cache(hub: Path, tmp_path: Path, model: str) -> None:
    done = inspect(model, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["can_build"]
    assert COMMIT in report["directory"]


def test_the_working_directory_comes_before_the_cache(hub: Path, tmp_path: Path) -> None:
    shutil.copytree(hub / "models--Qwen--Qwen3.5-Tiny" / "snapshots" / COMMIT, tmp_path / "Qwen3.5-Tiny")
    assert json.loads(inspect("Qwen3.5-Tiny", hub, tmp_path).stdout)["directory"] == "Qwen3.5-Tiny"


def test_a_snapshot_that_the_hub_cannot_complete_is_reported_with_what_is_missing(hub: Path, tmp_path: Path) -> None:
    report = json.loads(inspect("Qwen3.5-Half", hub, tmp_path).stdout)
    assert not report["can_build"]
    assert len(report["files"]["missing"]) == 1
    assert report["files"]["missing"][0]["file"] in report["problems"][0]


@pytest.mark.parametrize("model", ["Qwen3.5-Absent", "someone/else"])
def test_what_is_nowhere_is_refused_in_one_sentence(hub: Path, tmp_path: Path, model: str) -> None:
    done = inspect(model, hub, tmp_path)
    assert done.returncode == 1
    assert "is not complete in the hub cache" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_word_that_is_nothing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no directory here and no short name"):
        resolve("gibberish")


@pytest.mark.parametrize("path", ["./missing", "/missing/too", "a/b/c"])
def test_a_path_stays_a_path(path: str) -> None:
    assert resolve(path) == Path(path)
