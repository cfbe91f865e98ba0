"""Greedy choices of a vocabulary head, a block of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.kernels.packing import packed_matrices
from mtp_engines.lowering.own_kernels import KERNELS, keep
from mtp_engines.lowering.products import WIDE, Matrix, Products, matrix_of
from mtp_engines.lowering.unused import drop_unused
from mtp_exporter.checking.trace import Pair
from mtp_exporter.reading.source import Source
from mtp_plugins.graph import CONTRIB, GraphBuilder

_BLOCK_BYTES = 128 << 20


def choices(
    graph: Path, source: Source, role: str, hidden: npt.NDArray[np.float32], compare: Callable[[Pair], None]
) -> npt.NDArray[np.int64]:
    """int64[rows]: the first best row of the vocabulary head for each row float32[rows, width].

    Each block of logits is computed by the head of the written graph and compared with NumPy over the
    checkpoint's tensor of this role.
    """
    best = np.full(len(hidden), -np.inf, np.float32)
    picked = np.zeros(len(hidden), np.int64)
    for start, logits in head_logits(graph, hidden, WIDE):
        compare(Pair(names.LOGITS, logits, hidden @ source.rows(role, start, logits.shape[1]).T))
        top = logits.argmax(-1)
        value = logits[np.arange(len(hidden)), top]
        picked = np.where(value > best, top + start, picked)
        best = np.maximum(best, value)
    return picked


def head_logits(
    graph: Path, hidden: npt.NDArray[np.float32], accuracy: int
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """The logits of a written graph's vocabulary head for float32[rows, width].

    Args:
        accuracy: of products with matrices of integers.

    Yields:
        For each block of the vocabulary its first id and float32[rows, ids].
    """
    matrix = _head_matrix(graph)
    vocab_size, width = matrix.shape
    block = max(_BLOCK_BYTES // (4 * width), 1)
    for start in range(0, vocab_size, block):
        model = _block_model(matrix, width, start, min(block, vocab_size - start), accuracy)
        (logits,) = open_session(model, graph.parent).run([names.LOGITS], {names.HIDDEN: hidden})
        yield start, logits


def _head_matrix(graph: Path) -> Matrix:
    """The vocabulary head's matrix as a graph refers to it."""
    logits = next(output for output in ir.load(graph).graph.outputs if output.name == names.LOGITS)
    producer = logits.producer()
    matrix = None if producer is None else matrix_of(producer)
    assert matrix is not None
    return matrix


def _block_model(matrix: Matrix, width: int, start: int, rows: int, accuracy: int) -> ir.Model:
    """The head restricted to `rows` rows from `start`: the same bytes of the weight file."""
    g = GraphBuilder("head block")
    hidden = g.input(names.HIDDEN, "float32", ["rows", width])
    parts = [_rows(value, start, rows) for value in matrix.tensors]
    block = matrix.with_tensors([g.initializer(str(part.name), part) for part in parts])
    packed = packed_matrices()
    g.output(names.LOGITS, Products(accuracy, packed).add(g, hidden, block, axis=0), "float32", ["rows", rows])
    model = keep(g.model(domains=[CONTRIB, KERNELS]), packed)
    drop_unused(model.graph)
    return model


def _rows(value: ir.Value, start: int, rows: int) -> ir.ExternalTensor:
    """Some entries of the first axis of a tensor in the weight file."""
    whole = value.const_value
    assert isinstance(whole, ir.ExternalTensor) and whole.offset is not None and whole.length is not None
    count, *others = whole.shape.numpy()
    size = whole.length // count
    return ir.ExternalTensor(
        whole.location,
        whole.offset + start * size,
        rows * size,
        whole.dtype,
        shape=ir.Shape([rows, *others]),
        name=f"{value.name}.block",
        base_dir=whole.base_dir,
    )
