"""The check at the end of a build: the written graphs against NumPy, and rows against their number.

The graphs are cut at the residual stream and run one layer at a time in the form that the backend will
run, so that a model larger than memory can be checked in one pass over its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import DraftAgreement, Limits, Numerics, Parity
from mtp_engines.contracts.model import AttentionSpec, LayerSpec, ModelSpec
from mtp_engines.errors import BuildError
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_exporter.reference import head_output, target_stages
from mtp_exporter.source import Source
from mtp_exporter.vocabulary import choices
from mtp_plugins.arrays import Array
from mtp_plugins.graph import IR_VERSION

Floats = npt.NDArray[np.float32]
Feed = dict[str, npt.NDArray[Any]]

TOLERANCE = 1e-3
"""Greatest difference over the greatest reference value. Rounding gave 1.5e-5 in 32 layers (the 4B shape, made-up
weights); each fault of `tests/exporter/test_check.py` is far above."""
_EXACT_ROWS = 8


@dataclass(frozen=True)
class Check:
    """What a check measured."""

    parity: Parity
    numerics: Numerics
    agreement: DraftAgreement | None


@dataclass
class _Record:
    worst: float = 0.0
    where: str = "residual.0"
    first_difference: str | None = None

    def compare(self, name: str, got: Array, want: Array) -> None:
        error = float(np.abs(got - want).max() / max(float(np.abs(want).max()), 1e-30))
        if not error <= self.worst:
            self.worst, self.where = error, name
        if not error <= TOLERANCE:
            raise BuildError(
                f"The built graphs disagree with a NumPy forward of the checkpoint at {name}: the difference is "
                f"{error:.1e} of the greatest value, at most {TOLERANCE:.0e} is allowed. Nothing was written; report "
                "this with the output of `mtp-export inspect`."
            )


# exp of great values is inf in the reference, and a gate of it 0 or 1: right, and not worth a warning.
@np.errstate(over="ignore", under="ignore")
def check_graphs(
    spec: ModelSpec,
    limits: Limits,
    backbone: Path,
    mtp: Path | None,
    source: Source,
    ids: npt.NDArray[np.int64],
    advance: Callable[[int], None] = lambda layers: None,
) -> Check:
    """Run the graphs in `backbone` and `mtp` over one text and compare every layer with NumPy.

    Args:
        source: the checkpoint's tensors by role.
        ids: int64[rows], a text of at least two tokens that fits the context.
        advance: told of every layer that was checked.

    Raises:
        BuildError: a stage differs by more than the tolerance.
    """
    record = _Record()
    graph = lower(without_head(ir.load(backbone))).graph
    folder = backbone.parent
    embed = open_piece(graph, [names.INPUT_IDS], [names.residual(0)], folder)
    x: Floats = embed.run([names.residual(0)], {names.INPUT_IDS: ids[None]})[0]
    del embed
    stages = target_stages(spec, source, source.gather("embedding", ids))
    record.compare("residual.0", x[0], next(stages).value)
    for index, layer in enumerate(spec.layers):
        piece = _LayerPiece(graph, folder, layer, index, names.residual(index), names.residual(index + 1), limits)
        record.first_difference = record.first_difference or piece.first_difference(x[:, :_EXACT_ROWS])
        x = piece.run(x)
        record.compare(names.residual(index + 1), x[0], next(stages).value)
        del piece
        advance(1)
    final = open_piece(graph, [names.residual(len(spec.layers))], [names.HIDDEN], folder)
    hidden: Floats = final.run([names.HIDDEN], {names.residual(len(spec.layers)): x})[0]
    reference_hidden = next(stages).value
    record.compare(names.HIDDEN, hidden[0], reference_hidden)
    picked = choices(spec, backbone, source, hidden[0], record.compare)
    agreement = None
    if mtp is not None:
        out = _run_mtp(spec, limits, mtp, ids, hidden)
        expected = head_output(spec, source, source.gather("embedding", ids[1:]), reference_hidden[:-1])
        record.compare(names.HIDDEN_OUT, out[0], expected)
        drafts = choices(spec, backbone, source, out[0], record.compare)
        agreement = DraftAgreement(len(drafts), int((drafts == picked[1:]).sum()))
    parity = Parity(len(ids), record.worst, record.where, TOLERANCE)
    promise = Numerics("near-tie" if record.first_difference else "exact", _EXACT_ROWS, record.first_difference)
    return Check(parity, promise, agreement)


def open_piece(graph: ir.Graph, inputs: list[str], outputs: list[str], folder: Path) -> Any:
    """A session over the part of a lowered graph between named values."""
    piece = ir.convenience.extract(graph, inputs, outputs)
    return open_session(ir.Model(piece, ir_version=IR_VERSION), folder)


class _LayerPiece:
    """One decoder layer of a lowered graph as a session of its own."""

    def __init__(
        self, graph: ir.Graph, folder: Path, layer: LayerSpec, index: int, source: str, target: str, limits: Limits
    ) -> None:
        self._source, self._target = source, target
        self._states = _empty_states(layer, index, limits)
        self._attends = isinstance(layer.mixer, AttentionSpec)
        inputs = [source, *self._states]
        if self._attends:
            inputs += [names.POSITION_IDS, names.PAST_LENGTH]
        self._outputs = [target, *(_present(name) for name in self._states)]
        self._session = open_piece(graph, inputs, self._outputs, folder)

    def run(self, x: Floats) -> Floats:
        """float32[1, rows, hidden_size] through the layer from an empty state."""
        return self._run(x, self._states, 0)[0]

    def first_difference(self, x: Floats) -> str | None:
        """Name of the first value that one-row calls and uneven blocks compute differently, bit by bit."""
        whole, states = self._run(x, self._states, 0)
        rows = x.shape[1]
        for blocks in ([1] * rows, [3, rows - 3] if rows > 3 else [rows]):
            outputs, part, start = [], self._states, 0
            for width in blocks:
                output, part = self._run(x[:, start : start + width], part, start)
                outputs.append(output)
                start += width
            if not np.array_equal(np.concatenate(outputs, axis=1), whole):
                return self._target
            for name, value in part.items():
                # The spare row of a cache, behind the committed ones, may hold anything.
                ours, theirs = (v[:, :, :rows] if self._attends else v for v in (value, states[name]))
                if not np.array_equal(ours, theirs):
                    return name
        return None

    def _run(self, x: Floats, states: Feed, start: int) -> tuple[Floats, Feed]:
        feed: Feed = {self._source: np.ascontiguousarray(x), **states}
        if self._attends:
            feed[names.POSITION_IDS] = np.arange(start, start + x.shape[1])[None]
            feed[names.PAST_LENGTH] = np.array([start])
        results = self._session.run(self._outputs, feed)
        return results[0], dict(zip(states, results[1:], strict=True))


def _empty_states(layer: LayerSpec, index: int, limits: Limits) -> Feed:
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        shape = (1, mixer.num_kv_heads, min(limits.capacity, 128), mixer.head_dim)
        return {name(index): np.zeros(shape, np.float32) for name in (names.past_key, names.past_value)}
    recurrent = (1, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
    return {
        names.past_conv(index): np.zeros((1, mixer.conv_kernel - 1, mixer.conv_width), np.float32),
        names.past_recurrent(index): np.zeros(recurrent, np.float32),
    }


def _present(past: str) -> str:
    return past.replace("past_key_values.", "present.").replace("past.", "present.")


def _run_mtp(spec: ModelSpec, limits: Limits, mtp: Path, ids: npt.NDArray[np.int64], hidden: Floats) -> Floats:
    """The head over the whole text: row p takes token p + 1 and the target's hidden state p."""
    assert spec.mtp is not None
    graph = lower(without_head(ir.load(mtp))).graph
    states = _empty_states(spec.mtp.layer, 0, limits)
    inputs = [names.INPUT_IDS, names.HIDDEN, names.POSITION_IDS, names.PAST_LENGTH, *states]
    session = open_piece(graph, inputs, [names.HIDDEN_OUT], mtp.parent)
    feed: Feed = {
        names.INPUT_IDS: ids[None, 1:],
        names.HIDDEN: hidden[:, :-1],
        names.POSITION_IDS: np.arange(len(ids) - 1)[None],
        names.PAST_LENGTH: np.array([0]),
        **states,
    }
    out: Floats = session.run([names.HIDDEN_OUT], feed)[0]
    return out
