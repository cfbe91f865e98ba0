"""Tests of the compiled kernels; without a compiler there are none, and nothing to test."""

from __future__ import annotations

import pytest

from mtp_engines.kernels import build, library


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of our own wherever they run, whatever this processor would choose."""
    if library.why_missing() is not None and build.why_not_here() is not None:
        pytest.skip(f"there are no kernels: {library.why_missing()}")
    monkeypatch.setenv(library.CHOICE, "own")
