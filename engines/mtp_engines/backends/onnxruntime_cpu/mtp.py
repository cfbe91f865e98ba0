"""The draft head of a batch of sequences: its caches, committed rows and chained draft rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, Bound
from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.state import Cache
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import CachedMixer, ModelSpec, MtpSpec
from mtp_engines.engine import Choose, Floats, Ids
from mtp_engines.lowering.last_row import LAST_ROW


class Rows(NamedTuple):
    """Result of a head run, written over by the next one.

    float32[batch, rows, hidden_size] each; one row of each sequence where the graph finishes no more. `output` goes to
    the vocabulary head, `chain` to the next draft step.
    """

    output: Floats
    chain: Floats


class ChainedHead:
    """One trained depth, fed its own states for every draft after the first.

    Chained rows stand in the cache behind the committed length and are written over by the next
    committed rows, so dropping them costs nothing.
    """

    def __init__(self, graph: HeadGraph, batch: int, head: VocabularyHead) -> None:
        self._graph, self._batch, self._head = graph, batch, head
        self._lengths: Ids = np.zeros(batch, np.int64)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """See `mtp_engines.engine.Sequences.draft`."""
        last = self._graph.run(tokens, hidden, self._lengths, last=rows - 1)
        self._lengths += rows
        drafted: list[Ids] = []
        for depth in range(draft_tokens):
            if depth:
                last = self._graph.run(drafted[-1][:, None], last.chain, self._lengths + depth - 1, chained=True)
            ids = self._head.draw(last.output, choose)
            if ids is None:
                break
            drafted.append(ids)
        return _stack(drafted, self._batch)

    def reset(self) -> None:
        """Empty the cache."""
        self._lengths[:] = 0

    def window(self, start: int, stop: int) -> ChainedHead:
        """The head of some of the sequences, in the same memory."""
        window = ChainedHead(self._graph.window(start, stop), stop - start, self._head)
        window._lengths = self._lengths[start:stop]
        return window


class HeadGraph:
    """The session of one trained depth with its cache."""

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, cache: Cache, batch: int) -> None:
        assert spec.mtp is not None
        self._session, self._spec, self._mtp, self._batch = session, spec, spec.mtp, batch
        self.cache = cache
        self._steps: dict[tuple[int, bool], _HeadStep] = {}

    @classmethod
    def of_depth(
        cls, session: ort.InferenceSession, spec: ModelSpec, depth: int, limits: Limits, batch: int
    ) -> HeadGraph:
        """One trained depth with an empty cache."""
        assert spec.mtp is not None
        mixer = spec.mtp.layers[depth].mixer
        assert isinstance(mixer, CachedMixer)
        return cls(session, spec, Cache.empty(0, mixer, limits, batch), batch)

    def window(self, start: int, stop: int) -> HeadGraph:
        """The same over some of the sequences."""
        return HeadGraph(self._session, self._spec, self.cache.window(start, stop), stop - start)

    def run(self, tokens: Ids, hidden: Floats, lengths: Ids, *, chained: bool = False, last: Ids | int = 0) -> Rows:
        """Run int64[batch, rows] tokens with their hidden states behind `lengths` rows of the cache.

        Args:
            hidden: float32[batch, rows, width]: the target's tap, or with `chained` the head's own states.
            last: the row of each sequence that a graph which finishes only one gives.
        """
        rows = tokens.shape[1]
        key = (rows, chained and self._mtp.tap_projection)
        if key not in self._steps:
            self._steps[key] = _HeadStep(self._session, self._spec, self._mtp, self.cache, self._batch, *key)
        step = self._steps[key]
        np.copyto(step.tokens, tokens)
        np.copyto(step.hidden, hidden)
        step.positions[:] = lengths[:, None] + np.arange(rows)
        step.past_length[:] = lengths
        step.last_row[:, 0, 0] = last
        step.bound.run()
        return step.rows


class _HeadStep:
    """Buffers and binding of a head run over a fixed number of rows."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: ModelSpec,
        mtp: MtpSpec,
        cache: Cache,
        batch: int,
        rows: int,
        chained: bool,
    ) -> None:
        self.tokens = np.zeros((batch, rows), np.int64)
        self.positions = np.zeros((batch, rows), np.int64)
        self.past_length = np.zeros(batch, np.int64)
        taps = np.zeros((batch, 0 if chained else rows, mtp.tap_width(spec.hidden_size)), np.float32)
        chain = np.zeros((batch, rows if chained else 0, mtp.hidden_size), np.float32)
        self.hidden = chain if chained else taps
        self.last_row = np.zeros((batch, 1, 1), np.int64)
        known = {value.name for value in session.get_inputs()}
        output = np.zeros((batch, 1 if LAST_ROW in known else rows, mtp.hidden_size), np.float32)
        inputs: dict[str, AnyArray] = {
            names.INPUT_IDS: self.tokens,
            names.tap_of(mtp): taps,
            names.CHAIN: chain,
            names.POSITION_IDS: self.positions,
            names.PAST_LENGTH: self.past_length,
            LAST_ROW: self.last_row,
            **cache.past,
        }
        outputs: dict[str, AnyArray] = {names.HIDDEN_OUT: output, **cache.present}
        self.rows = Rows(output, output)
        if names.CHAIN_OUT in {value.name for value in session.get_outputs()}:
            self.rows = Rows(output, np.zeros_like(output))
            outputs[names.CHAIN_OUT] = self.rows.chain
        self.bound = Bound(session, {name: array for name, array in inputs.items() if name in known}, outputs)


def _stack(drafted: list[Ids], batch: int) -> Ids:
    return np.stack(drafted, axis=1) if drafted else np.zeros((batch, 0), np.int64)
