"""`PackedChoice` against the greatest of the products that `PackedProduct` gives, whose bits it sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.sessions import HeadSessions, load_graph, open_head, open_session
from mtp_engines.bundle import open_bundle
from mtp_engines.kernels import library
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.heads import head_models
from mtp_engines.lowering.own_kernels import KERNELS
from mtp_plugins.graph import GraphBuilder
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle

from .sessions import normal, open_model
from .test_products import KINDS, Made, Maker, open_product, run

ROWS = (1, 2, 3, 4, 5, 8, 9, 40)


def open_choice(made: Made, threads: int = 1) -> ort.InferenceSession:
    g = GraphBuilder("choice")
    x = g.input("x", "float32", ["rows", "columns"])
    ids, checksum = g.op_multi("PackedChoice", x, outputs=("i", "c"), domain=KERNELS, matrices=[made.address])
    g.output("ids", ids, "int64", ["rows"])
    g.output("checksum", checksum, "float32", ["rows"])
    return open_model(g.model(domains=[KERNELS]), threads)


@pytest.fixture(autouse=True, params=library.INSTRUCTIONS)
def used(request: pytest.FixtureRequest, own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of instructions that this processor has."""
    if library.INSTRUCTIONS.index(request.param) > library.INSTRUCTIONS.index(library.instructions()):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv(library.CHOICE, "own-avx2" if request.param == "avx2" else "own")


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("shape", [(5000, 192), (1, 1), (7, 64), (17, 21), (300, 1088)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_choice_is_the_first_of_the_greatest_products(
    make: Maker, limit: float, shape: tuple[int, int], threads: int
) -> None:
    made, x = make(*shape), normal(3, 40, shape[1])
    choice, product = open_choice(made, threads), run(open_product(made), x)
    for rows in ROWS:
        ids, checksum = choice.run(None, {"x": x[:rows]})
        np.testing.assert_array_equal(ids, product[:rows].argmax(axis=1))
        assert not checksum.any()
    if shape[0] > 16:
        worse = product.copy()
        worse[np.arange(40), product.argmax(axis=1)] = -np.inf
        assert (ids != worse.argmax(axis=1)).all(), "control: the second best is seen"


@pytest.mark.parametrize("place", [0, 3, 8, 15, 16, 4097, 4999])
def test_of_equal_products_the_first_is_chosen_wherever_it_lies(place: int) -> None:
    weight = np.full((5000, 8), -1.0, np.float32)
    weight[place::1][: 5000 - place] = 2.0
    memory = PackedMatrices(threads=2)
    choice = open_choice(Made(memory, memory.whole(weight), weight), threads=2)
    (ids, _) = choice.run(None, {"x": np.ones((3, 8), np.float32)})
    assert ids.tolist() == [place] * 3
    (ids, _) = choice.run(None, {"x": np.zeros((2, 8), np.float32)})
    assert ids.tolist() == [0, 0], "all are equal"


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_checksum_of_its_row_alone(make: Maker, limit: float, bad: float) -> None:
    made, x = make(700, 192), normal(5, 6, 192)
    clean, _ = open_choice(made).run(None, {"x": x})
    x[2, 77] = bad
    ids, checksum = open_choice(made).run(None, {"x": x})
    assert np.isfinite(checksum).tolist() == [True, True, False, True, True, True]
    assert 0 <= ids[2] < 700
    np.testing.assert_array_equal(np.delete(ids, 2), np.delete(clean, 2))


@pytest.mark.parametrize("column", [0, 7, 8, 96, 2047, 2048, 4095, 4999])
def test_one_product_that_is_not_finite_is_enough(column: int) -> None:
    """In whichever part of the columns it lies: 5,000 are three parts."""
    weight = normal(1, 5000, 8)
    weight[column] = np.inf
    memory = PackedMatrices()
    choice = open_choice(Made(memory, memory.whole(weight), weight))
    _, checksum = choice.run(None, {"x": np.abs(normal(2, 2, 8))})
    assert not np.isfinite(checksum).any()


def test_no_rows_give_no_ids() -> None:
    made = KINDS[0][0](40, 192)
    ids, checksum = open_choice(made).run(None, {"x": np.zeros((0, 192), np.float32)})
    assert ids.shape == checksum.shape == (0,)


@pytest.mark.parametrize("graph", ["backbone.onnx", "mtp.onnx"])
def test_a_head_that_leaves_its_logits_inside_chooses_what_the_other_does(tmp_path: Path, graph: str) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", seed=4, hidden_size=64)
    folder = build_bundle(checkpoint, tmp_path / "b", weights="int8", head_weights="int4", draft_vocab=24)
    packed = PackedMatrices()
    path = next(path for path in open_bundle(folder).directory.rglob(graph))
    sessions = open_head(head_models(load_graph(path), packed), lambda model: open_session(model, path.parent))
    assert sessions.choose is not sessions.score
    width = sessions.score.get_inputs()[0].shape[1]
    head = VocabularyHead(sessions, width)
    hidden = normal(6, 2, 5, width)
    chosen, finite = head.choose(hidden)
    ids, _, logits = head.score(hidden)
    np.testing.assert_array_equal(chosen, ids)
    assert finite.all()
    assert logits.shape == (2, 5, 24 if graph == "mtp.onnx" else 112)
    assert len(set(chosen.ravel().tolist())) > 2, "one id for every row would hide anything"
    both = VocabularyHead(HeadSessions(sessions.score, sessions.score), width)
    np.testing.assert_array_equal(both.choose(hidden)[0], chosen)
