"""Bundles that the engine tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime import Model
from tests.fixtures.checkpoints import partial_checkpoint, random_checkpoint
from tests.support import build_bundle, load_model

SIZES: dict[str, dict[str, Any]] = {
    "tied, as many value heads as key heads": {"tied": True, "linear_num_key_heads": 5, "linear_num_value_heads": 5},
    "untied, three value heads to a key head": {"linear_num_value_heads": 15},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint and its loaded bundle."""

    checkpoint: Path
    model: Model


@pytest.fixture(scope="package", params=SIZES.values(), ids=SIZES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Random weights in two shapes."""
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = random_checkpoint(folder / "checkpoint", seed=3, **request.param)
    return Case(checkpoint, load_model(build_bundle(checkpoint, folder / "bundle", max_batch_size=3)))


@pytest.fixture(scope="package")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A noisy chain whose head is right about half of the time, so that every accepted count occurs."""
    folder = tmp_path_factory.mktemp("chain")
    checkpoint = partial_checkpoint(folder / "checkpoint", seed=0)
    return Case(checkpoint, load_model(build_bundle(checkpoint, folder / "bundle")))
