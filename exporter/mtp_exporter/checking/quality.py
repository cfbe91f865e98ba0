"""What rounding the weights costs: the built model beside the checkpoint in float32, over a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import Limits, Quality
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.products import FAST
from mtp_exporter.checking.pieces import Backbone
from mtp_exporter.checking.vocabulary import head_logits
from mtp_exporter.reading.source import Floats, Source
from mtp_exporter.reference import final_hidden, layer_output

QUALITY_ROWS = 192
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
    built, full = _Scores(ids), _Scores(ids)
    hidden = _built_hidden(spec, limits, backbone, ids)
    # All rows at once, since the vocabulary head is read for every call.
    built.add(np.concatenate([logits for _, logits in head_logits(backbone, hidden, FAST)], axis=1))
    hidden = _reference_hidden(spec, source, ids, advance)
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


def _built_hidden(spec: ModelSpec, limits: Limits, path: Path, ids: npt.NDArray[np.int64]) -> Floats:
    """float32[rows, hidden_size] after the final norm, by the kernels that will run, one layer in memory at a time."""
    backbone = Backbone(path, spec, limits, FAST)
    x = backbone.embed(ids)
    for index in range(len(spec.layers)):
        x = backbone.layer(index).run(x)
    hidden: Floats = backbone.final(x)[0]
    return hidden


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
