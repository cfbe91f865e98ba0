"""Sequences of the ONNX Runtime CPU engine: stage rows, commit some of them, draft."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, Bound
from mtp_engines.backends.onnxruntime_cpu.depths import draft_head
from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.sessions import Sessions
from mtp_engines.backends.onnxruntime_cpu.state import Arrays, Scratch, TargetState, copies
from mtp_engines.checks import check_choose, check_draft, check_rows
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Choose, Floats, Ids, Saved, Verified
from mtp_engines.errors import ContractError, EngineBusyError, NumericsError
from mtp_engines.lowering.factors import FACTOR_ROWS


class _Memory:
    """What all windows of some sequences share."""

    def __init__(self, spec: ModelSpec, limits: Limits, sessions: Sessions, batch: int) -> None:
        self.state = TargetState.empty(spec, limits, batch)
        self.lengths: Ids = np.zeros(batch, np.int64)
        self.head = VocabularyHead(sessions.head, spec.hidden_size)
        self.mtp = draft_head(sessions, spec, limits, batch, self.head) if sessions.mtp else None
        self.scratch = Scratch(spec, batch * (limits.max_draft_tokens + 1))
        self.lock = threading.Lock()
        self.staged: _Step | None = None


class CpuSequences:
    """See `mtp_engines.engine.SlotSequences`."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        sessions: Sessions,
        batch: int,
        memory: _Memory | None = None,
        start: int = 0,
    ) -> None:
        """Fresh sequences, or those of a memory from `start` on."""
        self._spec, self._limits, self._sessions, self._batch = spec, limits, sessions, batch
        self._memory = memory = memory or _Memory(spec, limits, sessions, batch)
        self._start, stop = start, start + batch
        self._state = memory.state.window(start, stop)
        self._steps: dict[int, _Step] = {}
        self._windows: dict[tuple[int, int], CpuSequences] = {}
        self._head = memory.head
        self._mtp = memory.mtp and memory.mtp.window(start, stop)
        self.lengths: Ids = memory.lengths[start:stop]

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Run the target over rows after the committed ones and stage the result."""
        with self._exclusive():
            self._memory.staged = None
            check_rows(tokens, self.lengths, self._spec, self._limits)
            rows = tokens.shape[1]
            if not 0 <= logit_rows <= rows:
                raise ContractError(f"verify got logit_rows = {logit_rows}, expected 0..{rows}.")
            step = self._step(rows)
            np.copyto(step.tokens, tokens)
            step.positions[:] = self.lengths[:, None] + np.arange(rows)
            step.past_length[:] = self.lengths
            step.run(self._state.committed())
            scored, hidden = None, step.hidden[:, rows - logit_rows :]
            if logits:
                ids, finite, scored = self._head.score(hidden)
            else:
                ids, finite = self._head.choose(hidden)
            if not finite.all():
                sequence, row = np.argwhere(~finite)[0]
                position = self.lengths[sequence] + rows - logit_rows + row
                raise NumericsError(
                    f"The target produced a value that is not a number at position {position} of sequence "
                    f"{sequence}. Check the checkpoint's weights for NaN or infinity and build it again."
                )
            self._memory.staged = step
            return Verified(ids, step.tap, scored)

    def commit(self, rows: Ids) -> None:
        """Keep the first rows[b] staged rows of each sequence and drop the others."""
        with self._exclusive():
            step = self._memory.staged
            if step is None or step is not self._steps.get(step.rows):
                raise ContractError("commit was called with nothing staged; call verify first.")
            kept = np.asarray(rows)
            if kept.dtype.kind not in "iu" or kept.shape != (self._batch,) or kept.min() < 0 or kept.max() > step.rows:
                raise ContractError(
                    f"commit got rows {kept.tolist()}, expected {self._batch} counts of 0..{step.rows}."
                )
            self._memory.staged = None
            if kept.max() > 0:
                # The other half holds the state after all rows; where some are dropped, it is made again.
                if kept.min() < step.rows and self._sessions.commit is not None:
                    step.replay(kept, self._state.committed())
                self._state.swap()
                self.lengths += kept

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Let the head consume committed rows and propose tokens."""
        if self._mtp is None:
            raise ContractError("This bundle has no MTP head to draft with; build it without --no-mtp.")
        with self._exclusive():
            check_draft(tokens, hidden, rows, draft_tokens, self._batch, self._spec, self._limits)
            if choose is not None:
                check_choose(self._spec)
            return self._mtp.draft(tokens, hidden, rows, draft_tokens, choose=choose)

    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for hidden rows."""
        return self._head.logits(hidden)

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the committed state of one sequence."""
        return copies(self._view(sequence, 0))

    def reset(self) -> None:
        """Forget everything."""
        with self._exclusive():
            self._memory.staged = None
            self.lengths[:] = 0
            self._state.reset()
            if self._mtp is not None:
                self._mtp.reset()

    def window(self, start: int, count: int) -> CpuSequences:
        """Neighbouring sequences with the same memory."""
        if not 0 <= start < start + count <= self._batch:
            raise ContractError(f"window got {count} sequences from {start} on, there are {self._batch}.")
        if count == self._batch:
            return self
        # Kept here and not in the shared memory, which would then be freed late: as a cycle.
        if (start, count) not in self._windows:
            self._windows[start, count] = CpuSequences(
                self._spec, self._limits, self._sessions, count, self._memory, self._start + start
            )
        return self._windows[start, count]

    def save(self, sequence: int, since: int = 0) -> Saved:
        """A copy of the committed state of one sequence, without the rows before `since`."""
        with self._exclusive():
            length = int(self.lengths[sequence])
            if not 0 <= since <= length:
                raise ContractError(f"save got rows from {since} on, but {length} are committed.")
            return Saved(since, length, copies(self._view(sequence, since)))

    def restore(self, sequence: int, parts: Iterable[Saved]) -> None:
        """Put saved parts in the place of one sequence's state."""
        with self._exclusive():
            self._memory.staged = None
            length = 0
            for part in parts:
                if part.since != length:
                    raise ContractError(f"restore got a part from row {part.since} on, expected row {length}.")
                self._put(sequence, part.arrays, part.length)
                length = part.length
            self.lengths[sequence] = length
            if self._mtp is not None:
                self._mtp.window(sequence, sequence + 1).reset()

    def copy(self, source: int, target: int, since: int = 0) -> None:
        """Make one sequence the same as another, but for the heads."""
        with self._exclusive():
            self._memory.staged = None
            self._put(target, self._view(source, since), int(self.lengths[source]))

    def _view(self, sequence: int, since: int) -> Arrays:
        length = int(self.lengths[sequence])
        return self._state.rows(sequence, since, length) | self._state.recurrent_of(sequence)

    def _put(self, sequence: int, arrays: Arrays, length: int) -> None:
        recurrent = self._state.recurrent_of(sequence)
        for name, array in arrays.items():
            if name in recurrent:
                recurrent[name][...] = array
        for name, rows in self._state.rows(sequence, 0, length).items():
            rows[:, length - arrays[name].shape[1] :] = arrays[name]
        self.lengths[sequence] = length

    def _step(self, rows: int) -> _Step:
        if rows not in self._steps:
            self._steps[rows] = _Step(self._spec, self._limits, self._sessions, self._state, rows, self._memory.scratch)
        return self._steps[rows]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = self._memory.lock
        if not lock.acquire(blocking=False):
            raise EngineBusyError("These sequences are in use by another thread; open sequences for each thread.")
        try:
            yield
        finally:
            lock.release()


class _Step:
    """Buffers and bindings of a target run over a fixed number of rows."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        sessions: Sessions,
        state: TargetState,
        rows: int,
        scratch: Scratch,
    ) -> None:
        batch = state.batch
        self.rows = rows
        self.tokens = np.zeros((batch, rows), np.int64)
        self.positions = np.zeros((batch, rows), np.int64)
        self.past_length = np.zeros(batch, np.int64)
        self.hidden = np.zeros((batch, rows, spec.hidden_size), np.float32)
        self.tap = np.zeros((batch, rows, spec.tap_width), np.float32) if spec.mtp and spec.mtp.taps else self.hidden
        # A prefill chunk of one sequence is always kept whole; factors of so many rows would cost memory.
        self._replayable = rows <= limits.max_draft_tokens + 1 or batch > 1
        self._factors = scratch.factors(batch, rows) if self._replayable else {}
        self._factor_rows = np.array([rows if self._replayable else 0], np.int64)
        self._sessions, self._state = sessions, state
        self._bound: dict[int, Bound] = {}
        self._replays: dict[tuple[int, int], tuple[Bound, Ids]] = {}

    def run(self, half: int) -> None:
        """Run the backbone with `half` of the states committed."""
        if half not in self._bound:
            inputs = {
                names.INPUT_IDS: self.tokens,
                names.POSITION_IDS: self.positions,
                names.PAST_LENGTH: self.past_length,
                FACTOR_ROWS: self._factor_rows,
                **self._state.past(half),
            }
            outputs = {names.HIDDEN: self.hidden, **self._state.present(half), **self._factors}
            if self.tap is not self.hidden:
                outputs[names.TAP] = self.tap
            known = {value.name for value in self._sessions.backbone.get_inputs()}
            inputs = {name: array for name, array in inputs.items() if name in known}
            self._bound[half] = Bound(self._sessions.backbone, inputs, outputs)
        self._bound[half].run()

    def replay(self, kept: Ids, half: int) -> None:
        """Repeat the kept rows on the states in `half` and write the result to the other half."""
        if not self._replayable:
            raise ContractError(
                f"Only {kept.tolist()} of {self.rows} rows were to be kept, but one sequence's run of more rows than "
                "the bundle's largest draft and one is kept whole."
            )
        is_alone = len(kept) == 1 and self._sessions.commit_all is not None
        width = int(kept[0]) if is_alone else self.rows
        if (width, half) not in self._replays:
            session = self._sessions.commit_all if is_alone else self._sessions.commit
            assert session is not None
            accepted = np.zeros_like(kept)
            inputs: dict[str, AnyArray] = {} if is_alone else {names.ACCEPTED_ROWS: accepted}
            inputs |= {name: array[:, :width] for name, array in self._factors.items()}
            outputs: dict[str, AnyArray] = {}
            for layer in self._state.recurrent:
                inputs |= self._state.past_of(layer, half)
                outputs |= self._state.present_of(layer, 1 - half)
            self._replays[width, half] = (Bound(session, inputs, outputs), accepted)
        bound, accepted = self._replays[width, half]
        accepted[:] = kept
        bound.run()
