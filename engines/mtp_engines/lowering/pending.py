"""Commits that the next run makes: a layer's states are brought up to date where they are read anyway.

A verify that keeps a part of its rows leaves states that no one has computed. To repeat the kept rows at once would
read and write every state once more; instead the next run repeats them on its way (decision 0025).
"""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.lowering.own_kernels import KERNELS

PENDING_ROWS = "pending_rows"
"""int64[batch]: how many of the rows of `pending` each sequence keeps."""
KEEPS_ROWS = "keeps_rows"
"""int64[1]: whether states after the rows of this run are written (1), or those before them (0). In the latter case a
recurrent state without pending rows is not written at all, since it is what it was."""
_DEFERRED = {"DeltaRule": "DeferredDeltaRule", "ShortConvolution": "DeferredShortConvolution"}
_PAST = {"DeltaRule": 5, "ShortConvolution": 2}


def pending(layer: int) -> str:
    """float32[batch, most, width]: factors of rows that come before those of a run, as `factors.packed` gives them."""
    return f"pending.{layer}"


def defer_commits(model: ir.Model) -> ir.Model:
    """Give the recurrent layers of a lowered backbone their pending rows; a graph of other kernels stays as it is."""
    graph = model.graph
    nodes = [node for node in graph if node.domain == KERNELS and node.op_type in _DEFERRED]
    if not nodes:
        return model
    counts = _input(PENDING_ROWS, ir.DataType.INT64, ["batch"])
    keeps = _input(KEEPS_ROWS, ir.DataType.INT64, [1])
    rows: dict[int, ir.Value] = {}
    for node in nodes:
        past = node.inputs[_PAST[node.op_type]]
        assert past is not None
        layer = names.layer_of(str(past.name))
        if layer not in rows:
            rows[layer] = _input(pending(layer), ir.DataType.FLOAT, ["batch", PENDING_ROWS, None])
        place = len(node.inputs)
        node.op_type = _DEFERRED[node.op_type]
        node.resize_inputs(place + 3)
        for number, value in enumerate((rows[layer], counts, keeps)):
            node.replace_input_with(place + number, value)
    graph.inputs.extend([counts, keeps, *rows.values()])
    return model


def _input(name: str, kind: ir.DataType, shape: list[int | str | None]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
