"""Where ONNX Runtime's attention rounds by the number of rows, no engine and no build promises `exact`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from mtp_engines.bundle import open_bundle
from mtp_engines.kernels import library
from mtp_engines.lowering import attention_trial
from mtp_runtime.api import load
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No answer from before, and none left behind."""
    attention_trial.first_difference.cache_clear()
    yield
    attention_trial.first_difference.cache_clear()


class Splitting:
    """Sessions of a processor whose kernel takes a last odd row otherwise."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self._session = ort.InferenceSession(*given, **options)

    def run(self, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        (output,) = self._session.run(names, feed)
        rows = output.shape[1]
        output[:, rows - rows % 2 :] *= np.float32(1.0000002)
        return [output]


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        SessionOptions = ort.SessionOptions
        InferenceSession = Splitting

    monkeypatch.setattr(attention_trial, "ort", Runtime)


@pytest.mark.parametrize("width", [256, 512])
def test_a_kernel_that_splits_rows_is_seen(width: int, splitting: None) -> None:
    assert attention_trial.first_difference(width) == max(16384 // width, 8) - 8


def test_engines_and_builds_promise_no_more_than_the_attention_holds(
    tmp_path: Path, splitting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = random_checkpoint(tmp_path / "wide", seed=1, head_dim=136)
    narrow = random_checkpoint(tmp_path / "narrow", seed=1)
    monkeypatch.setenv(library.CHOICE, "onnxruntime")
    built = open_bundle(build_bundle(wide, tmp_path / "w")).manifest.numerics
    assert (built.promise, built.first_difference) == ("near-tie", "attention over 56 cached rows of 256 values")
    assert open_bundle(build_bundle(narrow, tmp_path / "n")).manifest.numerics.promise == "exact"
    if library.why_missing() is not None:
        pytest.skip(f"there are no kernels: {library.why_missing()}")
    monkeypatch.setenv(library.CHOICE, "own")
    right = build_bundle(wide, tmp_path / "own")
    assert load(right).engine.numerics == "exact", "kernels of ours split nothing"
    monkeypatch.setenv(library.CHOICE, "onnxruntime")
    assert load(right).engine.numerics == "near-tie"
