"""Sequences of the ONNX Runtime CPU engine: stage rows, commit some of them, draft."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.depths import draft_head
from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.sessions import Sessions
from mtp_engines.backends.onnxruntime_cpu.state import Arrays, Scratch, TargetState, copies
from mtp_engines.backends.onnxruntime_cpu.steps import Pending, Staged, Step
from mtp_engines.checks import check_choose, check_draft, check_rows
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Choose, Floats, Ids, Saved, Verified
from mtp_engines.errors import ContractError, EngineBusyError, NumericsError

_SURE = 2
"""Runs in a row that were kept whole, behind which the next one is taken to be: it writes the states after all rows."""


class _Memory:
    """What all windows of some sequences share."""

    def __init__(self, spec: ModelSpec, limits: Limits, sessions: Sessions, batch: int) -> None:
        self.state = TargetState.empty(spec, limits, batch)
        self.lengths: Ids = np.zeros(batch, np.int64)
        self.head = VocabularyHead(sessions.head, spec.hidden_size)
        self.mtp = draft_head(sessions, spec, limits, batch, self.head) if sessions.mtp else None
        most = limits.max_draft_tokens + 1
        self.sides = (Scratch(spec, batch * most), Scratch(spec, most))
        self.lock = threading.Lock()
        self.staged: Staged | None = None
        self.pending: Pending | None = None


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
        self._steps: dict[int, Step] = {}
        self._kept_whole = 0
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
            keeps = not step.defers or rows == 1 or self._kept_whole >= _SURE
            staged = step.run(self._waiting(), keeps=keeps)
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
            self._memory.staged = staged
            return Verified(ids, step.tap, scored)

    def commit(self, rows: Ids) -> None:
        """Keep the first rows[b] staged rows of each sequence and drop the others."""
        with self._exclusive():
            staged = self._memory.staged
            if staged is None or staged.step is not self._steps.get(staged.step.rows):
                raise ContractError("commit was called with nothing staged; call verify first.")
            kept, step = np.asarray(rows), staged.step
            if kept.dtype.kind not in "iu" or kept.shape != (self._batch,) or kept.min() < 0 or kept.max() > step.rows:
                raise ContractError(
                    f"commit got rows {kept.tolist()}, expected {self._batch} counts of 0..{step.rows}."
                )
            self._memory.staged = None
            if kept.max() > 0:
                self._keep(staged, kept)
                self.lengths += kept

    def _keep(self, staged: Staged, kept: Ids) -> None:
        """Make states of the kept rows, or leave them to the next run."""
        step, memory = staged.step, self._memory
        whole = int(kept.min()) == step.rows
        self._kept_whole = self._kept_whole + 1 if whole else 0
        if staged.keeps and (whole or self._sessions.commit is None):
            memory.pending = None
            self._state.swap()
        elif step.defers:
            if staged.keeps:
                # What it wrote is of no use, and neither half has the rows that were pending.
                self._settle()
            elif memory.pending is not None:
                self._state.swap()
            memory.pending = Pending(step, staged.side, kept.astype(np.int64))
        else:
            step.replay(kept, staged.side)
            self._state.swap()

    def _waiting(self) -> Pending | None:
        """Rows that wait for a run of these sequences; those of other ones are settled."""
        found = self._memory.pending
        if found is not None and found.step is not self._steps.get(found.step.rows):
            self._settle()
        return self._memory.pending

    def _settle(self) -> None:
        """Bring the states up to date that lack committed rows; what was staged is gone then."""
        found = self._memory.pending
        if found is not None:
            self._memory.staged = None
            found.step.replay(found.kept, found.side)
            found.step.state.swap()
            self._memory.pending = None

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
        with self._exclusive():
            found = self._memory.pending
            if found is None or self._memory.staged is not None:
                self._settle()
                return copies(self._view(sequence, 0))
            # Looking changes nothing: rows that wait go on doing so.
            found.step.replay(found.kept, found.side)
            found.step.state.swap()
            states = copies(self._view(sequence, 0))
            found.step.state.swap()
            return states

    def reset(self) -> None:
        """Forget everything."""
        with self._exclusive():
            self._settle()
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
            self._settle()
            return Saved(since, length, copies(self._view(sequence, since)))

    def restore(self, sequence: int, parts: Iterable[Saved]) -> None:
        """Put saved parts in the place of one sequence's state."""
        with self._exclusive():
            self._settle()
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
            self._settle()
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

    def _step(self, rows: int) -> Step:
        if rows not in self._steps:
            self._steps[rows] = Step(self._spec, self._limits, self._sessions, self._state, rows, self._memory.sides)
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
