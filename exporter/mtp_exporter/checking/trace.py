"""Stage by stage: values of the written graphs beside those of a NumPy forward from the same inputs.

Each layer of the target is computed by NumPy from the graph's own input to that layer, so that a difference
shows in the stage that makes it. Where two experts are nearly equal, NumPy follows the graph's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_exporter.checking.pieces import Backbone, Floats, LayerPiece, run_head
from mtp_exporter.reading.source import Source
from mtp_exporter.reference import final_hidden, head_stages, layer_output
from mtp_plugins.arrays import Array


@dataclass(frozen=True)
class Pair:
    """One stage, float[rows, width] each: what the graph computed, and what NumPy did.

    For a layer of the target also the layer itself and the residual stream float32[1, rows, width] that
    entered it.
    """

    name: str
    built: Array
    expected: Array
    layer: LayerPiece | None = None
    entering: Floats | None = None
    index: int | None = None
    """Number of the layer."""


class Taps:
    """What a run over the target leaves for the draft head."""

    def __init__(self, spec: ModelSpec) -> None:
        self._wanted = spec.mtp.taps if spec.mtp else ()
        self._residuals: dict[int, Floats] = {}
        self.hidden: Floats = np.zeros((1, 0, spec.hidden_size), np.float32)
        """float32[1, rows, hidden_size] after the final norm."""

    def keep(self, index: int, residual: Floats) -> None:
        """Remember a residual stream if the head consumes it."""
        if index in self._wanted:
            self._residuals[index] = residual

    @property
    def states(self) -> Floats:
        """float32[1, rows, tap_width]."""
        if not self._wanted:
            return self.hidden
        return np.concatenate([self._residuals[index] for index in self._wanted], axis=-1)


def target_pairs(
    spec: ModelSpec, pieces: Backbone, source: Source, ids: npt.NDArray[np.int64], taps: Taps
) -> Iterator[Pair]:
    """The embedding, every layer and the final norm over int64[rows]; fills `taps`."""
    x = pieces.embed(ids)
    yield Pair(names.residual(0), x[0], source.gather("embedding", ids))
    taps.keep(0, x)
    for index in range(len(spec.layers)):
        piece = pieces.layer(index)
        following = piece.run(x)
        expected = layer_output(spec, source, index, x[0], piece.routing)
        yield Pair(names.residual(index + 1), following[0], expected, piece, x, index)
        x = following
        taps.keep(index + 1, x)
    taps.hidden = pieces.final(x)
    yield Pair(names.HIDDEN, taps.hidden[0], final_hidden(spec, source, x[0]))


def head_pairs(
    spec: ModelSpec,
    limits: Limits,
    heads: tuple[Path, ...],
    source: Source,
    ids: npt.NDArray[np.int64],
    hidden: Floats,
) -> Iterator[Pair]:
    """Every stage of every trained depth, over the rows whose tokens the text has.

    Args:
        hidden: float32[1, len(ids), tap_width], the target's tap.
    """
    assert spec.mtp is not None
    embedding = "mtp.embedding" if spec.mtp.own_embedding else "embedding"
    for depth, path in enumerate(heads):
        tokens = ids[depth + 1 :]
        inputs = hidden[:, : len(tokens)]
        built = run_head(path, spec, limits, depth, tokens, inputs)
        last: Array | None = None
        routing = built.get(names.routing("head"))
        for stage in head_stages(spec, source, depth, source.gather(embedding, tokens), inputs[0], routing):
            last = stage.value
            yield Pair(_at_depth(stage.name, depth), built[stage.name], stage.value)
        assert last is not None
        yield Pair(_at_depth(names.HIDDEN_OUT, depth), built[names.HIDDEN_OUT], last)
        hidden = built[names.HIDDEN_OUT][None]


def _at_depth(name: str, depth: int) -> str:
    return f"{name} of depth {depth}" if depth else name
