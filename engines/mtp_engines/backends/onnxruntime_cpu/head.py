"""The vocabulary head: token ids of hidden rows, chosen inside the graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.buffers import Bound
from mtp_engines.contracts import names
from mtp_engines.engine import Floats, Ids
from mtp_engines.lowering.heads import CHECKSUM, IDS


class VocabularyHead:
    """Greedy choices over a whole vocabulary; the logits stay inside the session."""

    def __init__(self, session: ort.InferenceSession, hidden_size: int) -> None:
        self._session, self._hidden_size = session, hidden_size
        self._bound: dict[int, tuple[Bound, Floats, Ids, Floats]] = {}

    def choose(self, hidden: Floats) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """int64[batch, rows] ids for float32[batch, rows, hidden_size], and which rows were finite."""
        batch, rows, _ = hidden.shape
        if rows == 0:
            return np.zeros((batch, 0), np.int64), np.ones((batch, 0), np.bool_)
        bound, inputs, ids, checksum = self._buffers(batch * rows)
        np.copyto(inputs.reshape(hidden.shape), hidden)
        bound.run()
        return ids.reshape(batch, rows).copy(), np.isfinite(checksum).reshape(batch, rows)

    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for float32[rows, hidden_size]."""
        (logits,) = self._session.run([names.LOGITS], {names.HIDDEN: hidden})
        return np.asarray(logits, np.float32)

    def _buffers(self, rows: int) -> tuple[Bound, Floats, Ids, Floats]:
        if rows not in self._bound:
            hidden = np.zeros((rows, self._hidden_size), np.float32)
            ids, checksum = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
            bound = Bound(self._session, {names.HIDDEN: hidden}, {IDS: ids, CHECKSUM: checksum})
            self._bound[rows] = (bound, hidden, ids, checksum)
        return self._bound[rows]
