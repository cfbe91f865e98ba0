"""Bundles that the tests of this folder share; all of it runs on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtp_engines.backends import open_engine
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from tests.fixtures.checkpoints import partial_checkpoint
from tests.gpu.parts import Opened
from tests.support import build_bundle


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, and no threads that fight for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A small hybrid whose head is right sometimes; K to 5, two sequences, 64 tokens."""
    place = tmp_path_factory.mktemp("partial")
    layers = ["linear_attention", "full_attention"]
    options = {"layer_types": layers, "noise": 0.2, "head_noise": 1.0, "seed": 2}
    return opened(partial_checkpoint(place / "checkpoint", **options), place / "bundle")


def opened(checkpoint: Path, out: Path) -> Opened:
    """A built bundle and the engine of ONNX Runtime over it."""
    bundle = open_bundle(build_bundle(checkpoint, out, draft_tokens=5, max_batch_size=2))
    return Opened(bundle, open_engine(bundle, EngineOptions(threads=1)))
