"""What a verify leaves for a commit: the last rows that were asked for, and of a prompt nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph, open_session
from mtp_engines.contracts import names
from mtp_engines.lowering.factors import FACTOR_ROWS, packed
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from tests.engines.conftest import Case
from tests.engines.feeds import empty_feed

ROWS = 5


def backbone(case: Case) -> ir.Model:
    return lower(without_head(load_graph(case.model.bundle.backbone)))


def factors_of(case: Case, wanted: int) -> dict[str, np.ndarray]:
    """Of five rows of a text of its own."""
    spec = case.model.engine.spec
    session = open_session(backbone(case), case.model.bundle.backbone.parent, threads=1)
    feed = empty_feed(session, np.arange(ROWS)[None]) | {FACTOR_ROWS: np.array([wanted])}
    found = [packed(layer) for layer, _ in spec.delta_layers()]
    return dict(zip(found, session.run(found, feed), strict=True))


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_a_run_leaves_the_factors_of_the_last_rows(case: Case, wanted: int) -> None:
    whole, some = factors_of(case, ROWS), factors_of(case, wanted)
    for layer, mixer in case.model.engine.spec.delta_layers():
        width = sum(mixer.factor_widths.values())
        assert whole[packed(layer)].shape == (1, ROWS, width)
        assert some[packed(layer)].shape == (1, wanted, width)
        np.testing.assert_array_equal(some[packed(layer)], whole[packed(layer)][:, ROWS - wanted :])
        rows = whole[packed(layer)][0]
        assert len(np.unique(rows, axis=0)) == ROWS, "control: no two rows are alike, so another one would be seen"


def test_no_layer_keeps_its_rows_while_the_next_one_runs(case: Case) -> None:
    """Sessions run nodes in the order of the graph, and free what no later node reads."""
    nodes = list(backbone(case).graph)
    places = {node: place for place, node in enumerate(nodes)}
    outputs = {str(value.name): value for node in nodes for value in node.outputs}
    recurrences = [place for node, place in places.items() if node.op_type == "LinearAttention"]
    layers = [layer for layer, _ in case.model.engine.spec.delta_layers()]
    assert len(recurrences) == len(layers) > 1
    for following, layer in zip(recurrences[1:], layers, strict=False):
        for name in (packed(layer), names.present_conv(layer)):
            producer = outputs[name].producer()
            assert producer is not None
            assert places[producer] < following
