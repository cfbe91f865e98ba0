"""Greedy choices of a vocabulary head, a block of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.lowering.heads import HEAD_PRODUCT, head_model
from mtp_exporter.source import Source
from mtp_exporter.trace import Pair
from mtp_plugins.graph import CONTRIB, GraphBuilder

_BLOCK_BYTES = 128 << 20


def choices(
    graph: Path, source: Source, role: str, hidden: npt.NDArray[np.float32], compare: Callable[[Pair], None]
) -> npt.NDArray[np.int64]:
    """int64[rows]: the first best row of the vocabulary head for each row float32[rows, width].

    Each block of logits is computed by the head of the written graph and compared with NumPy over the
    checkpoint's tensor of this role.
    """
    weight = _head_weight(graph)
    vocab_size, width = source.need(role).shape
    best = np.full(len(hidden), -np.inf, np.float32)
    picked = np.zeros(len(hidden), np.int64)
    block = max(_BLOCK_BYTES // (4 * width), 1)
    for start in range(0, vocab_size, block):
        rows = min(block, vocab_size - start)
        session = open_session(_block_model(weight, width, start, rows), graph.parent)
        (logits,) = session.run([names.LOGITS], {names.HIDDEN: hidden})
        compare(Pair(names.LOGITS, logits, hidden @ source.rows(role, start, rows).T))
        top = logits.argmax(-1)
        value = logits[np.arange(len(hidden)), top]
        picked = np.where(value > best, top + start, picked)
        best = np.maximum(best, value)
    return picked


def _head_weight(graph: Path) -> ir.ExternalTensor:
    """The vocabulary head's matrix as a graph refers to it."""
    model = head_model(ir.load(graph))
    (product,) = (node for node in model.graph if node.op_type == HEAD_PRODUCT)
    value = product.inputs[1]
    assert value is not None and isinstance(value.const_value, ir.ExternalTensor)
    return value.const_value


def _block_model(weight: ir.ExternalTensor, width: int, start: int, rows: int) -> ir.Model:
    """The head restricted to `rows` rows from `start`: the same bytes of the weight file."""
    assert weight.offset is not None
    part = ir.ExternalTensor(
        weight.location,
        weight.offset + start * width * 4,
        rows * width * 4,
        ir.DataType.FLOAT,
        shape=ir.Shape([rows, width]),
        name="head.block",
        base_dir=weight.base_dir,
    )
    g = GraphBuilder("head block")
    hidden = g.input(names.HIDDEN, "float32", ["rows", width])
    scores = g.op(HEAD_PRODUCT, hidden, g.initializer("head.block", part), domain=CONTRIB, transB=1)
    g.output(names.LOGITS, scores, "float32", ["rows", rows])
    return g.model(domains=[CONTRIB])
