"""Greedy choices of the vocabulary head, a block of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.heads import head_model
from mtp_exporter.source import Source
from mtp_plugins.arrays import Array
from mtp_plugins.graph import CONTRIB, GraphBuilder

_BLOCK_BYTES = 128 << 20


def choices(
    spec: ModelSpec,
    backbone: Path,
    source: Source,
    hidden: npt.NDArray[np.float32],
    compare: Callable[[str, Array, Array], None],
) -> npt.NDArray[np.int64]:
    """int64[rows]: the first best id of each row float32[rows, hidden_size].

    Each block of logits is computed by the written graph and compared with NumPy over the checkpoint.
    """
    weight = head_weight(backbone)
    best = np.full(len(hidden), -np.inf, np.float32)
    picked = np.zeros(len(hidden), np.int64)
    block = max(_BLOCK_BYTES // (4 * spec.hidden_size), 1)
    for start in range(0, spec.vocab_size, block):
        rows = min(block, spec.vocab_size - start)
        session = open_session(_block_model(spec, weight, start, rows), backbone.parent)
        (logits,) = session.run([names.LOGITS], {names.HIDDEN: hidden})
        compare(names.LOGITS, logits, hidden @ source.rows("head", start, rows).T)
        top = logits.argmax(-1)
        value = logits[np.arange(len(hidden)), top]
        picked = np.where(value > best, top + start, picked)
        best = np.maximum(best, value)
    return picked


def head_weight(backbone: Path) -> ir.ExternalTensor:
    """The vocabulary head's matrix as the backbone graph refers to it."""
    (value,) = head_model(ir.load(backbone)).graph.initializers.values()
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return tensor


def _block_model(spec: ModelSpec, weight: ir.ExternalTensor, start: int, rows: int) -> ir.Model:
    """The head restricted to `rows` ids from `start`: the same bytes of the weight file."""
    width = spec.hidden_size
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
    scores = g.op("FusedMatMul", hidden, g.initializer("head.block", part), domain=CONTRIB, transB=1)
    g.output(names.LOGITS, scores, "float32", ["rows", rows])
    return g.model(domains=[CONTRIB])
