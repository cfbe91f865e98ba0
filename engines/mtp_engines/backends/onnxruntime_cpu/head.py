"""The vocabulary head: token ids of hidden rows, chosen inside the graph, and the logits where they are asked for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, Bound
from mtp_engines.backends.onnxruntime_cpu.sessions import HeadSessions
from mtp_engines.contracts import names
from mtp_engines.engine import Choose, Floats, Ids
from mtp_engines.lowering.heads import CHECKSUM, IDS

Finite = npt.NDArray[np.bool_]


class VocabularyHead:
    """Choices over a whole vocabulary; greedy ones leave the logits inside the session."""

    def __init__(self, sessions: HeadSessions, hidden_size: int) -> None:
        self._sessions, self._hidden_size = sessions, hidden_size
        (logits,) = (output for output in sessions.score.get_outputs() if output.name == names.LOGITS)
        self._vocab_size = int(logits.shape[-1])
        self._runs: dict[tuple[int, bool], _Run] = {}
        self._logits = np.zeros((0, self._vocab_size), np.float32)

    def choose(self, hidden: Floats) -> tuple[Ids, Finite]:
        """int64[batch, rows] ids for float32[batch, rows, hidden_size], and which rows were finite."""
        run = self._run(hidden, scores=False)
        return run.ids.reshape(hidden.shape[:2]).copy(), np.isfinite(run.checksum).reshape(hidden.shape[:2])

    def score(self, hidden: Floats) -> tuple[Ids, Finite, Floats]:
        """As `choose`, and the logits, float32[batch, rows, vocab_size]."""
        run, shape = self._run(hidden, scores=True), hidden.shape[:2]
        finite = np.isfinite(run.checksum).reshape(shape)
        return run.ids.reshape(shape).copy(), finite, run.logits.reshape(*shape, self._vocab_size).copy()

    def draw(self, hidden: Floats, choose: Choose | None) -> Ids | None:
        """int64[batch], a draft token for each of float32[batch, 1, hidden_size]; None if a row was not finite.

        Or if `choose` ends the draft.
        """
        if choose is None:
            ids, finite = self.choose(hidden)
            return ids[:, 0] if finite.all() else None
        _, finite, logits = self.score(hidden)
        return choose(logits[:, 0]) if finite.all() else None

    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for float32[rows, hidden_size]."""
        (logits,) = self._sessions.score.run([names.LOGITS], {names.HIDDEN: hidden})
        return np.asarray(logits, np.float32)

    def _run(self, hidden: Floats, *, scores: bool) -> _Run:
        batch, rows, _ = hidden.shape
        key = (batch * rows, scores)
        if key not in self._runs:
            if scores and key[0] > len(self._logits):
                # One buffer for all widths: a row of a large vocabulary is a megabyte.
                self._logits = np.zeros((key[0], self._vocab_size), np.float32)
                self._runs = {known: run for known, run in self._runs.items() if not known[1]}
            logits = self._logits[: key[0] if scores else 0]
            session = self._sessions.score if scores else self._sessions.choose
            self._runs[key] = _Run(session, key[0], self._hidden_size, logits, scores=scores)
        run = self._runs[key]
        if run.bound is not None:
            np.copyto(run.hidden.reshape(hidden.shape), hidden)
            run.bound.run()
        return run


class _Run:
    """Buffers and binding of the head over a fixed number of rows; `bound` is None where there are none."""

    def __init__(
        self, session: ort.InferenceSession, rows: int, hidden_size: int, logits: Floats, *, scores: bool
    ) -> None:
        self.hidden = np.zeros((rows, hidden_size), np.float32)
        self.ids, self.checksum = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        self.logits = logits
        outputs: dict[str, AnyArray] = {IDS: self.ids, CHECKSUM: self.checksum}
        if scores:
            outputs[names.LOGITS] = self.logits
        self.bound = Bound(session, {names.HIDDEN: self.hidden}, outputs) if rows else None
