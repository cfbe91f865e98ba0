"""Pieces of a written graph as sessions of their own, in the form that the backend runs.

A graph is cut at named values, so that a model larger than memory can be run one layer at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, GatedDeltaSpec, Mixer, ModelSpec
from mtp_engines.kernels.packing import packed_matrices
from mtp_engines.lowering.caches import cache_shape
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_engines.lowering.products import WIDE
from mtp_plugins.graph import IR_VERSION

Floats = npt.NDArray[np.float32]
Feed = dict[str, npt.NDArray[Any]]
_CAPACITY = 512


class Backbone:
    """The backbone of a bundle in pieces, each lowered by itself: packed weights of the whole would fill memory."""

    def __init__(self, path: Path, spec: ModelSpec, limits: Limits, accuracy: int = WIDE) -> None:
        """`accuracy` of products with matrices of integers."""
        self._pieces = _Pieces(without_head(ir.load(path)).graph, path.parent, accuracy)
        self._spec, self._limits = spec, limits

    @property
    def rounds_rows(self) -> bool:
        """Whether products have matrices of integers, which another accuracy computes differently."""
        return any(node.op_type in ("BlockWeight", "RotatedWeight") for node in self._pieces.graph)

    def embed(self, ids: npt.NDArray[np.int64]) -> Floats:
        """float32[1, rows, hidden_size] for int64[rows]."""
        piece = self._pieces.open([names.INPUT_IDS], [names.residual(0)])
        embedded: Floats = piece.run([names.residual(0)], {names.INPUT_IDS: ids[None]})[0]
        return embedded

    def layer(self, index: int) -> LayerPiece:
        """One layer with its empty state."""
        mixer = self._spec.layers[index].mixer
        ends = (names.residual(index), names.residual(index + 1))
        return LayerPiece(self._pieces, mixer, index, *ends, self._limits)

    def final(self, x: Floats) -> Floats:
        """The hidden state after the final norm."""
        source = names.residual(len(self._spec.layers))
        hidden: Floats = self._pieces.open([source], [names.HIDDEN]).run(None, {source: x})[0]
        return hidden


class LayerPiece:
    """One decoder layer."""

    def __init__(self, pieces: _Pieces, mixer: Mixer, index: int, source: str, target: str, limits: Limits) -> None:
        self._source, self._target = source, target
        self._states = empty_states(mixer, index, limits)
        self._attends = not isinstance(mixer, GatedDeltaSpec)
        inputs = [source, *self._states]
        if self._attends:
            inputs += [names.POSITION_IDS, names.PAST_LENGTH]
        self._outputs = [target, *(_present(name) for name in self._states)]
        if names.routing(index) in pieces.named:
            self._outputs.append(names.routing(index))
        self.routing: npt.NDArray[np.int64] | None = None
        """int64[rows, top_k], the experts that each row of the last run was sent to, if the layer has experts."""
        self._session = pieces.open(inputs, self._outputs)

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
        if len(results) > 1 + len(states):
            self.routing = results[-1][0]
        return results[0], dict(zip(states, results[1:], strict=False))


def run_head(
    path: Path, spec: ModelSpec, limits: Limits, depth: int, ids: npt.NDArray[np.int64], hidden: Floats
) -> dict[str, npt.NDArray[Any]]:
    """One depth of the draft head over a whole text, from an empty cache.

    Args:
        ids: int64[rows], the token of each row.
        hidden: float32[1, rows, width], the target's tap or the output of the depth before.

    Returns:
        float32[rows, width] of every stage that the graph names and of its outputs; int64[rows, top_k] of the
        chosen experts, if there are any.
    """
    assert spec.mtp is not None
    pieces = _Pieces(without_head(ir.load(path)).graph, path.parent, WIDE)
    wanted = [names.stage(name) for name in names.HEAD_STAGES if names.stage(name) in pieces.named]
    wanted += [name for name in (names.HIDDEN_OUT, names.CHAIN_OUT, names.routing("head")) if name in pieces.named]
    states = empty_states(spec.mtp.layers[depth].mixer, 0, limits)
    feed: Feed = {
        names.INPUT_IDS: ids[None],
        names.tap_of(spec.mtp): hidden,
        names.POSITION_IDS: np.arange(len(ids))[None],
        names.PAST_LENGTH: np.array([0]),
        **states,
    }
    if spec.mtp.tap_projection:
        feed[names.CHAIN] = np.zeros((1, 0, spec.mtp.hidden_size), np.float32)
    session = pieces.open(list(feed), wanted)
    return {name: value[0] for name, value in zip(wanted, session.run(wanted, feed), strict=True)}


class _Pieces:
    """Parts of a canonical graph between named values, as sessions."""

    def __init__(self, graph: ir.Graph, folder: Path, accuracy: int) -> None:
        """`accuracy` of products with matrices of integers."""
        self.graph, self._folder, self._accuracy = graph, folder, accuracy
        self.named = {value.name for node in graph for value in node.outputs}

    def open(self, inputs: list[str], outputs: list[str]) -> Any:
        """The part that makes `outputs` of `inputs`, lowered."""
        piece = ir.Model(ir.convenience.extract(self.graph, inputs, outputs), ir_version=IR_VERSION)
        return open_session(lower(piece, self._accuracy, packed=packed_matrices()), self._folder)


def empty_states(mixer: Mixer, index: int, limits: Limits) -> Feed:
    """The state of a layer before the first row."""
    if isinstance(mixer, GatedDeltaSpec):
        recurrent = (1, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
        return {
            names.past_conv(index): np.zeros((1, mixer.conv_kernel - 1, mixer.conv_width), np.float32),
            names.past_recurrent(index): np.zeros(recurrent, np.float32),
        }
    heads, width = cache_shape(mixer)
    shape = (1, heads, min(limits.capacity, _CAPACITY), width)
    pasts = (names.past_key, names.past_value) if isinstance(mixer, AttentionSpec) else (names.past_latent,)
    return {name(index): np.zeros(shape, np.float32) for name in pasts}


def _present(past: str) -> str:
    return past.replace("past_key_values.", "present.").replace("past.", "present.")
