"""What rounding the weights costs: the built model beside the checkpoint in float32, over a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.contracts.manifest import Limits, Quality
from mtp_engines.contracts.model import ModelSpec
from mtp_exporter.reference import final_hidden, layer_output
from mtp_exporter.source import Floats, Source

QUALITY_ROWS = 192
_ROWS = 16
"""Rows whose logits are in memory at once."""
_BLOCK_BYTES = 64 << 20


def measure_quality(
    spec: ModelSpec,
    limits: Limits,
    backbone: Path,
    source: Source,
    ids: npt.NDArray[np.int64],
    advance: Callable[[int], None] = lambda layers: None,
) -> Quality:
    """Perplexity of both and how often their greedy choices agree, teacher-forced.

    Args:
        backbone: the written graph, run by the kernels that will run it.
        source: the checkpoint's values, before they were rounded.
        ids: int64[rows], a text.
        advance: told of every layer of the reference.
    """
    built = _Scores(ids)
    engine = CpuEngine(spec, limits, "near-tie", backbone, ())
    sequences = engine.sequences()
    for start in range(0, len(ids), _ROWS):
        rows = ids[None, start : start + _ROWS]
        hidden = sequences.verify(rows, 0).hidden[0]
        built.add(sequences.logits(_final(spec, hidden)))
        sequences.commit(np.array([rows.shape[1]]))
    full = _Scores(ids)
    hidden = _reference_hidden(spec, source, ids, advance)
    # All rows at once, since the vocabulary head is read for every call.
    full.add(_logits(spec, source, hidden))
    same = sum(a == b for a, b in zip(built.best, full.best, strict=True))
    return Quality(len(ids), full.perplexity, built.perplexity, same)


class _Scores:
    """Negative log likelihood of the tokens that follow, and the best token of every row."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._ids, self._sum = ids, 0.0
        self.best: list[int] = []

    def add(self, logits: Floats) -> None:
        """float32[rows, vocab_size] of the next rows."""
        for narrow in logits:
            row = narrow.astype(np.float64)
            place = len(self.best) + 1
            if place < len(self._ids):
                top = row.max()
                self._sum += top + math.log(np.exp(row - top).sum()) - row[self._ids[place]]
            self.best.append(int(row.argmax()))

    @property
    def perplexity(self) -> float:
        """exp of the mean over the rows whose next token is known."""
        return math.exp(min(self._sum / max(len(self._ids) - 1, 1), 700.0))


def _final(spec: ModelSpec, tap: Floats) -> Floats:
    assert tap.shape[-1] == spec.hidden_size, "a bundle without taps hands on the state after the final norm"
    return tap


def _reference_hidden(
    spec: ModelSpec, source: Source, ids: npt.NDArray[np.int64], advance: Callable[[int], None]
) -> Floats:
    """float32[rows, hidden_size] after the final norm, by NumPy, one layer's weights at a time."""
    x = source.gather("embedding", ids)
    with np.errstate(over="ignore", under="ignore"):
        for index in range(len(spec.layers)):
            x = layer_output(spec, source, index, x)
            advance(1)
        return np.asarray(final_hidden(spec, source, x), np.float32)


def _logits(spec: ModelSpec, source: Source, hidden: Floats) -> Floats:
    step = max(_BLOCK_BYTES // (4 * spec.hidden_size), 1)
    parts = [
        hidden @ source.rows("head", start, min(step, spec.vocab_size - start)).T
        for start in range(0, spec.vocab_size, step)
    ]
    return np.concatenate(parts, axis=1)
