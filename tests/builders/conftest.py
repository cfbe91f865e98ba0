"""The carried checkpoint as a bundle, and whether TensorRT-RTX is here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mtp_engines.bundle import Bundle, open_bundle
from tests.support import build_bundle

CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="TensorRT-RTX is not installed: python -m pip install tensorrt-rtx-cu13",
)


@pytest.fixture(scope="session")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of the carried checkpoint, for up to two sequences."""
    out = tmp_path_factory.mktemp("builders") / "bundle"
    return open_bundle(build_bundle(CARRIED, out, max_batch_size=2, max_model_len=512))
