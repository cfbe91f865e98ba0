"""A head that drafts from the first ids only: no token changes, and what it loses is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.bundle import WEIGHTS, open_bundle
from mtp_exporter import BuildOptions, build
from mtp_runtime import EngineOptions, load
from mtp_tools.verify.checks import checks
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle, build_refused, run_command

CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
COUNT = 512
PROMPT = list(range(3, 15))


@pytest.fixture(scope="module", params=["fp32", "int4"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocabulary") / "bundle"
    build(BuildOptions(str(CARRIED), out, request.param, max_model_len=128, draft_tokens=3, draft_vocab=COUNT))
    return out


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocabulary") / "cut"
    build(BuildOptions(str(CARRIED), out, max_model_len=128, draft_tokens=3, draft_vocab=COUNT))
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vocabulary") / "whole"
    build(BuildOptions(str(CARRIED), out, max_model_len=128, draft_tokens=3))
    return out


def test_speculation_changes_nothing(bundle: Path) -> None:
    assert [line.text for line in checks(load(bundle, threads=1), 12, 24) if not line.holds] == []


def test_drafts_are_the_best_of_the_first_ids(cut: Path, whole: Path) -> None:
    """Where the whole head's choice is one of them it stays, elsewhere another takes its place."""
    kept = lost = 0
    for start in range(1, 25):
        tokens = np.array([[start, start + 7, 3 * start, start + 2]])
        drafts = []
        for path in (cut, whole):
            sequences = load(path, threads=1).engine.sequences()
            hidden = sequences.verify(tokens, 1).hidden.copy()
            drafts.append(int(sequences.draft(tokens, hidden, np.array([4]), 1)[0, 0]))
        assert drafts[0] < COUNT
        kept += drafts[1] < COUNT
        lost += drafts[1] >= COUNT
        assert drafts[0] == drafts[1] or drafts[1] >= COUNT
    assert kept
    assert lost, "control: some choices are outside"


def test_what_it_costs_is_said(bundle: Path, whole: Path) -> None:
    agreement = open_bundle(bundle).manifest.draft_agreement
    assert agreement is not None
    assert agreement.accepted_whole is not None
    assert 0 < agreement.accepted <= agreement.accepted_whole
    assert open_bundle(whole).manifest.draft_agreement.accepted_whole is None  # type: ignore[union-attr]


def test_the_head_has_the_first_rows_and_no_table(bundle: Path, whole: Path) -> None:
    graph = ir.load(bundle / "graphs" / "mtp.onnx").graph
    assert "mtp.ids" not in graph.initializers
    name = "mtp.head" if "mtp.head" in graph.initializers else "mtp.head.scales"
    assert graph.initializers[name].shape[0] == COUNT  # type: ignore[index]
    if name == "mtp.head":
        head = ir.load(whole / "graphs" / "backbone.onnx").graph.initializers
        tensor = head["head" if "head" in head else "embedding"].const_value
        rows = graph.initializers[name].const_value
        assert tensor is not None
        assert rows is not None
        np.testing.assert_array_equal(rows.numpy(), tensor.numpy()[:COUNT])
        assert (bundle / WEIGHTS).stat().st_size > (whole / WEIGHTS).stat().st_size


def test_the_torch_backend_drafts_the_same(cut: Path) -> None:
    """In float32: ONNX Runtime rounds the rows of products with blocks."""
    tokens = []
    for options in (EngineOptions(threads=1), EngineOptions(backend="torch", device="cpu")):
        finished = load(cut, options=options).complete(prompt_ids=PROMPT, max_new_tokens=16, draft_tokens=3)
        tokens.append((finished.token_ids, finished.stats.accepted))
    assert tokens[0] == tokens[1]


def test_check_takes_the_number_from_the_bundle(bundle: Path) -> None:
    assert run_command("mtp-export", "check", str(CARRIED), str(bundle)).returncode == 0


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_number_out_of_range_is_refused(tmp_path: Path, count: int) -> None:
    build_refused(CARRIED, tmp_path / "b", f"--draft-vocab is {count}", "a part of the vocabulary", draft_vocab=count)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", seed=2)
    build_refused(checkpoint, tmp_path / "b", "has no head", "Leave it out", draft_vocab=8, mtp=False)
    assert build_bundle(checkpoint, tmp_path / "b", draft_vocab=8), "control: with its head it is built"
