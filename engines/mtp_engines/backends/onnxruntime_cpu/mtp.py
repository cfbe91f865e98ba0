"""The MTP head of a batch of sequences: its cache, committed rows and chained draft rows."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, Bound
from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.state import kv_cache
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, ModelSpec
from mtp_engines.engine import Floats, Ids


class MtpHead:
    """Consumes committed (token, hidden) rows and chains drafts behind them.

    Chained rows stand in the cache behind the committed length and are written over by the next
    committed rows, so dropping them costs nothing.
    """

    def __init__(
        self, session: ort.InferenceSession, spec: ModelSpec, limits: Limits, batch: int, head: VocabularyHead
    ) -> None:
        assert spec.mtp is not None and isinstance(spec.mtp.layer.mixer, AttentionSpec)
        self._session, self._spec, self._batch, self._head = session, spec, batch, head
        self._key, self._value = kv_cache(spec.mtp.layer.mixer, limits, batch)
        self._steps: dict[int, _HeadStep] = {}
        self._lengths: Ids = np.zeros(batch, np.int64)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
        """See `mtp_engines.engine.Sequences.draft`."""
        out = self._run(tokens, hidden, self._lengths)
        self._lengths += rows
        drafted: list[Ids] = []
        last = out[np.arange(self._batch), rows - 1][:, None]
        for depth in range(draft_tokens):
            if depth:
                last = self._run(drafted[-1][:, None], last, self._lengths + depth - 1)
            ids, finite = self._head.choose(last)
            if not finite.all():
                break
            drafted.append(ids[:, 0])
        return np.stack(drafted, axis=1) if drafted else np.zeros((self._batch, 0), np.int64)

    def reset(self) -> None:
        """Empty the cache."""
        self._lengths[:] = 0

    def _run(self, tokens: Ids, hidden: Floats, lengths: Ids) -> Floats:
        rows = tokens.shape[1]
        if rows not in self._steps:
            self._steps[rows] = _HeadStep(self._session, self._spec, self._key, self._value, rows)
        step = self._steps[rows]
        np.copyto(step.tokens, tokens)
        np.copyto(step.hidden, hidden)
        step.positions[:] = lengths[:, None] + np.arange(rows)
        step.past_length[:] = lengths
        step.bound.run()
        return step.out


class _HeadStep:
    """Buffers and binding of a head run over a fixed number of rows."""

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, key: Floats, value: Floats, rows: int) -> None:
        batch = key.shape[0]
        self.tokens = np.zeros((batch, rows), np.int64)
        self.positions = np.zeros((batch, rows), np.int64)
        self.past_length = np.zeros(batch, np.int64)
        self.hidden = np.zeros((batch, rows, spec.hidden_size), np.float32)
        self.out = np.zeros_like(self.hidden)
        inputs: dict[str, AnyArray] = {
            names.INPUT_IDS: self.tokens,
            names.HIDDEN: self.hidden,
            names.POSITION_IDS: self.positions,
            names.PAST_LENGTH: self.past_length,
            names.past_key(0): key,
            names.past_value(0): value,
        }
        outputs = {names.HIDDEN_OUT: self.out, names.present_key(0): key, names.present_value(0): value}
        self.bound = Bound(session, inputs, outputs)
