"""The plugin-free form against what the CPU engine runs, and its vocabulary head against the packed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.errors import BuildError
from mtp_engines.lowering.attention import KEY_VALUE_LENGTHS
from mtp_engines.lowering.heads import CHECKSUM, IDS, head_models, without_head
from mtp_engines.lowering.precision import to_precision
from mtp_engines.lowering.standard import fix_axes, head_standard, lower_standard
from mtp_plugins.graph import DOMAIN, GraphBuilder
from tests.fixtures.checkpoints import random_checkpoint
from tests.fixtures.dense_families import eagle_checkpoint, plain_checkpoint
from tests.fixtures.moe_families import MAKERS
from tests.support import build_bundle, load_model, refused

IDS_IN = np.random.default_rng(1).integers(0, 64, (1, 9))
# The same float32 sums in another order; lengths that are one row off move values by more than 1e-2.
TOLERANCE = 1e-3
MOST_ROWS = 16
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "hybrid, three value heads to a key head": lambda place: random_checkpoint(
        place, seed=3, linear_num_value_heads=15
    ),
    "latent attention and experts": lambda place: MAKERS["deepseek_v3"](place, seed=6),
    "hybrid with experts": lambda place: MAKERS["qwen3_next"](place, seed=12),
}


@dataclass(frozen=True)
class Case:
    """A bundle's folder of graphs, and its engine."""

    graphs: Path
    engine: Any


@pytest.fixture(scope="module", params=CHECKPOINTS.values(), ids=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Random weights of one kind."""
    folder = tmp_path_factory.mktemp("standard")
    bundle = build_bundle(request.param(folder / "checkpoint"), folder / "bundle")
    return Case(bundle / "graphs", load_model(bundle).engine)


def lowered(path: Path) -> ir.Model:
    """A graph without its head, in standard operators."""
    return lower_standard(without_head(ir.load(path)), MOST_ROWS)


def run(model: ir.Model, folder: Path, feed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every output of a backbone for a feed; states that it lacks are zero."""
    session = open_session(model, folder)
    full = dict(feed)
    for value in session.get_inputs():
        if value.name not in full:
            shape = [axis if isinstance(axis, int) else {"batch": 1, "capacity": 32}[axis] for axis in value.shape]
            full[value.name] = np.zeros(shape, np.float32)
    known = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    return dict(zip(outputs, session.run(None, {k: v for k, v in full.items() if k in known}), strict=True))


def feed_of(ids: np.ndarray, start: int = 0) -> dict[str, Any]:
    """Rows behind `start` committed ones."""
    return {
        names.INPUT_IDS: ids,
        names.POSITION_IDS: np.arange(start, start + ids.shape[1])[None],
        names.PAST_LENGTH: np.full(1, start),
    }


def test_two_blocks_of_rows_equal_the_engine(case: Case) -> None:
    """The second block attends to the first one's cache, behind which old rows lie that it must not see."""
    model = lowered(case.graphs / "backbone.onnx")
    first = run(model, case.graphs, feed_of(IDS_IN[:, :5]))
    stale = IDS_IN[:, ::-1].copy()
    pasts = {
        name.replace("present.", "past_key_values." if names.is_cache(name) else "past."): value
        for name, value in first.items()
        if name.startswith("present.")
    }
    beyond = run(model, case.graphs, feed_of(stale[:, :4], 5) | pasts)
    for name, value in pasts.items():
        if names.is_cache(name):
            pasts[name] = beyond[name.replace("past_key_values.", "present.")]
            assert not np.array_equal(pasts[name], value), "control: the cache holds stale rows"
    second = run(model, case.graphs, feed_of(IDS_IN[:, 5:], 5) | pasts)
    sequences = case.engine.sequences()
    sequences.verify(IDS_IN[:, :5], 0)
    sequences.commit(np.array([5]))
    hidden = sequences.verify(IDS_IN[:, 5:], 0).hidden.copy()
    sequences.commit(np.array([4]))
    np.testing.assert_allclose(second[names.HIDDEN], hidden, rtol=0, atol=TOLERANCE)
    for name, value in sequences.snapshot(0).items():
        present = second[name.replace("past_key_values", "present").replace("past.", "present.")][0]
        if names.is_cache(name):
            present, value = present[:, :9], value[..., : present.shape[-1]]
        np.testing.assert_allclose(present, value, rtol=0, atol=TOLERANCE, err_msg=name)
    off = _with_lengths_one_row_off(case.graphs / "backbone.onnx")
    wrong = run(off, case.graphs, feed_of(IDS_IN[:, 5:], 5) | pasts)
    assert np.abs(wrong[names.HIDDEN] - hidden).max() > 10 * TOLERANCE, "control: lengths one row off are seen"


def _with_lengths_one_row_off(path: Path) -> ir.Model:
    """The lowered backbone whose rows see one row further than they may."""
    model = lowered(path)
    lengths = next(value for node in model.graph for value in node.outputs if value.name == KEY_VALUE_LENGTHS)
    (node,), users = [lengths.producer()], list(lengths.uses())
    assert node is not None
    g = GraphBuilder("off")
    with g.scope("off"):
        longer = g.op("Add", lengths, g.constant(1))
    for user in users:
        user.node.replace_input_with(user.idx, longer)
    model.graph.insert_after(node, g.nodes)
    return model


def test_only_standard_operators_are_left_and_caches_are_updated_at_the_end(case: Case) -> None:
    canonical = ir.load(case.graphs / "backbone.onnx")
    assert any(node.domain == DOMAIN for node in canonical.graph), "control: the canonical graph has custom nodes"
    model = lowered(case.graphs / "backbone.onnx")
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    assert not model.functions
    updates = [node for node in model.graph if node.op_type == "TensorScatter"]
    caches = [value for value in model.graph.outputs if names.is_cache(str(value.name))]
    assert len(updates) == len(caches) > 0
    assert all(value.is_graph_output() for node in updates for value in node.outputs)
    assert "Scan" not in {node.op_type for node in model.graph.all_nodes()}
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    assert len({node.inputs[1] for node in attentions} & set(caches)) == len(attentions) > 0
    assert {str(node.inputs[6].name) for node in attentions if node.inputs[6]} == {KEY_VALUE_LENGTHS}
    assert all(node.inputs[3] is None and node.attributes["is_causal"].as_int() == 1 for node in attentions)


def test_an_operator_without_a_body_is_refused_by_name() -> None:
    g = GraphBuilder("backbone")
    x = g.input("x", "float32", [1])
    g.output("y", g.op("Unheard", x, domain=DOMAIN), "float32", [1])
    with refused("backbone", "mtp.Unheard", "Build the bundle again", error=BuildError):
        lower_standard(g.model(domains=[DOMAIN]), MOST_ROWS)


def test_axes_get_a_size_by_their_name(case: Case) -> None:
    model = fix_axes(lowered(case.graphs / "backbone.onnx"), {"capacity": 72})
    for value in (*model.graph.inputs, *model.graph.outputs):
        axes = [str(axis) for axis in value.shape or ()]
        assert "capacity" not in axes
        assert ("72" in axes) == names.is_cache(str(value.name)), value.name
    assert "batch" in [str(axis) for axis in model.graph.inputs[0].shape or ()], "control: others keep their name"


def heads(graph: Path) -> tuple[ort.InferenceSession, ort.InferenceSession, int]:
    """The plugin-free and the packed head of a graph, and the width of their rows."""
    ours = open_session(head_standard(ir.load(graph)), graph.parent)
    return ours, open_session(head_models(ir.load(graph)).score, graph.parent), ours.get_inputs()[0].shape[1]


@pytest.mark.parametrize("graph", ["backbone.onnx", "mtp.onnx"])
def test_the_head_equals_the_packed_one(case: Case, graph: str) -> None:
    ours, packed, width = heads(case.graphs / graph)
    rows = np.random.default_rng(0).standard_normal((6, width)).astype(np.float32)
    got, want = (session.run([IDS, CHECKSUM], {names.HIDDEN: rows}) for session in (ours, packed))
    np.testing.assert_array_equal(got[0], want[0])
    assert len(set(got[0].tolist())) > 1, "one id for every row would hide anything"
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=TOLERANCE)
    reversed_rows = ours.run([IDS], {names.HIDDEN: rows[::-1].copy()})[0]
    assert not np.array_equal(reversed_rows, want[0]), "control: other rows have other ids"


def test_the_first_of_equal_logits_wins_and_a_row_that_is_no_number_shows(case: Case) -> None:
    ours, _, width = heads(case.graphs / "backbone.onnx")
    rows = np.zeros((3, width), np.float32)
    rows[1], rows[2] = 1.0, np.nan
    ids, checksum = ours.run([IDS, CHECKSUM], {names.HIDDEN: rows})
    assert ids[0] == 0, "all logits of a zero row are equal"
    assert ids[1] > 0
    vocab = case.engine.spec.vocab_size
    assert 0 <= ids[2] < vocab, "an id from a row of NaN must still be one of the vocabulary"
    assert np.isfinite(checksum).tolist() == [True, True, False]


def test_a_head_with_a_vocabulary_of_its_own_says_the_targets_ids(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=1)
    draft = eagle_checkpoint(tmp_path / "draft", target=target, seed=2, version=3, draft_vocab=44)
    graph = build_bundle(target, tmp_path / "bundle", draft_model=str(draft)) / "graphs" / "mtp.onnx"
    ours, packed, width = heads(graph)
    rows = np.random.default_rng(0).standard_normal((9, width)).astype(np.float32)
    got, want = (session.run([IDS], {names.HIDDEN: rows})[0] for session in (ours, packed))
    np.testing.assert_array_equal(got, want)
    assert got.max() >= 44, "control: rows of the draft vocabulary would end at 43"


def test_a_head_in_half_precision_has_float32_logits_and_takes_float32_rows(case: Case) -> None:
    model = head_standard(to_precision(ir.load(case.graphs / "backbone.onnx"), "bf16"))
    (rows,) = model.graph.inputs
    assert rows.dtype is ir.DataType.FLOAT
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert [node.outputs[0].dtype for node in products] == [ir.DataType.BFLOAT16]
    (cast,) = (use.node for use in products[0].outputs[0].uses())
    assert cast.op_type == "Cast"
    assert cast.attributes["to"].as_int() == ir.DataType.FLOAT
    assert len(model.graph.initializers) == 1
