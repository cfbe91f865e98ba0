"""The check at the end of a build: each fault in a graph, a kernel or a number is found and named."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.bundle import open_bundle
from mtp_engines.errors import BuildError
from mtp_engines.kernels.library import CHOICE
from mtp_engines.lowering import cached_attention
from mtp_exporter.checking.check import _Record
from mtp_exporter.checking.pieces import LayerPiece
from mtp_exporter.checking.trace import Pair
from mtp_exporter.graphs import backbone_graph, mtp_graph
from mtp_exporter.reading.source import Source
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle, leftovers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("check") / "model", seed=3, linear_num_value_heads=15)


def test_control_an_honest_build_is_exact_and_on_par(checkpoint: Path, tmp_path: Path) -> None:
    manifest = open_bundle(build_bundle(checkpoint, tmp_path / "out")).manifest
    assert manifest.numerics.promise == "exact"
    assert manifest.numerics.first_difference is None
    assert 0 < manifest.parity.worst < manifest.parity.tolerance / 10


def swapped_head(spec: Any, *rest: Any) -> ir.Model:
    return mtp_graph(replace(spec, mtp=replace(spec.mtp, concat="hidden_first")), *rest)


def other_epsilon(spec: Any, *rest: Any) -> ir.Model:
    return backbone_graph(replace(spec, norm_epsilon=0.5), *rest)


@pytest.mark.parametrize(
    ("name", "fault", "where"),
    [("mtp_graph", swapped_head, r"head\.concatenation"), ("backbone_graph", other_epsilon, r"residual\.1")],
)
def test_a_graph_that_computes_something_else_is_refused_with_its_first_stage(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, where: str
) -> None:
    # The package exports the function of this name, so the module is asked for by its path.
    monkeypatch.setattr(import_module("mtp_exporter.build"), name, fault)
    with pytest.raises(BuildError, match=f"disagree with a NumPy forward of the checkpoint at {where}"):
        build_bundle(checkpoint, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_a_wrong_vocabulary_head_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(Source):
        """Another head than the one that was written."""

        def rows(self, role: str, start: int, count: int) -> Any:
            values = super().rows(role, start, count)
            return np.roll(values, 1, axis=0) if role == "head" else values

    module = import_module("mtp_exporter.build")
    honest = module.check_graphs
    monkeypatch.setattr(module, "check_graphs", lambda *args: honest(*args[:4], Shifted(args[4]._claimed), *args[5:]))
    with pytest.raises(BuildError, match="at logits"):
        build_bundle(checkpoint, tmp_path / "out")


def test_a_value_that_is_not_a_number_is_no_parity() -> None:
    for got, want in (([np.nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [np.nan, 1.0])):
        with pytest.raises(BuildError, match="at stage"):
            _Record().compare(Pair("stage", np.array(got), np.array(want)))
    record = _Record()
    record.compare(Pair("stage", np.ones(2), np.ones(2)))
    assert record.worst == 0


class Piece(LayerPiece):
    """A layer that sums rows into a state, with a fault that depends on how many rows a call has."""

    def __init__(self, fault: str | None) -> None:
        self._fault, self._states, self._attends, self._target = fault, {"sum": np.zeros(1)}, False, "residual.1"

    def _run(self, x: Any, states: Any, start: int) -> Any:
        nudge = 1e-9 * x.shape[1]
        output = x + (nudge if self._fault == "output" else 0)
        return output, {"sum": states["sum"] + x.sum() + (nudge if self._fault == "state" else 0)}


@pytest.mark.parametrize(("fault", "found"), [(None, None), ("output", "residual.1"), ("state", "sum")])
def test_rows_or_states_that_depend_on_the_row_count_are_found(fault: str | None, found: str | None) -> None:
    assert Piece(fault).first_difference(np.ones((1, 8, 4))) == found


def test_a_difference_makes_the_bundle_near_tie_and_is_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerPiece, "first_difference", lambda self, x: self._target)
    notes: list[str] = []
    manifest = open_bundle(build_bundle(checkpoint, tmp_path / "out", notes=notes)).manifest
    assert (manifest.numerics.promise, manifest.numerics.first_difference) == ("near-tie", "residual.1")
    assert any("rows depend on their number" in note for note in notes)


def test_attention_over_a_lone_row_is_found(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that decision 0004 is about: one query row takes another kernel."""
    monkeypatch.setenv(CHOICE, "onnxruntime")
    monkeypatch.setattr(cached_attention, "_even", lambda g, rows: rows)
    monkeypatch.setattr(cached_attention, "MOST_FOLDED_HEADS", 1)
    manifest = open_bundle(build_bundle(checkpoint, tmp_path / "out")).manifest
    assert manifest.numerics.promise == "near-tie"
