"""Runs of the target over a fixed number of rows, and the commits that wait for the next one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, Bound
from mtp_engines.backends.onnxruntime_cpu.sessions import Sessions
from mtp_engines.backends.onnxruntime_cpu.state import Scratch, TargetState
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Ids
from mtp_engines.errors import ContractError
from mtp_engines.lowering.factors import FACTOR_ROWS, packed
from mtp_engines.lowering.pending import KEEPS_ROWS, PENDING_ROWS, pending


@dataclass(frozen=True)
class Staged:
    """A run whose rows wait for a commit.

    Attributes:
        step: what ran.
        side: which of the two memories has its factors.
        keeps: the other half of the states is what it is after all rows; else it is what it was before them, and only
            if rows were pending.
    """

    step: Step
    side: int
    keeps: bool


@dataclass(frozen=True)
class Pending:
    """Committed rows that the states of a lone sequence lack: the first `kept`, int64[1], of a step's factors."""

    step: Step
    side: int
    kept: Ids


class Step:
    """Buffers and bindings of a target run over a fixed number of rows."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        sessions: Sessions,
        state: TargetState,
        rows: int,
        sides: tuple[Scratch, Scratch],
    ) -> None:
        """`sides`: memory for factors, of which one may be pending while a run of a lone sequence writes the other."""
        batch = state.batch
        self.rows, self.state = rows, state
        self.tokens = np.zeros((batch, rows), np.int64)
        self.positions = np.zeros((batch, rows), np.int64)
        self.past_length = np.zeros(batch, np.int64)
        self.hidden = np.zeros((batch, rows, spec.hidden_size), np.float32)
        self.tap = np.zeros((batch, rows, spec.tap_width), np.float32) if spec.mtp and spec.mtp.taps else self.hidden
        # A prefill chunk of one sequence is always kept whole; factors of so many rows would cost memory.
        self._replayable = rows <= limits.max_draft_tokens + 1 or batch > 1
        used = sides[: 2 if batch == 1 else 1] if self._replayable else ()
        self.factors = [side.factors(batch, rows) for side in used]
        # Rows that wait begin where the memory does, whatever run they come from.
        most = limits.max_draft_tokens + 1 if batch == 1 else 0
        self._before = [side.factors(batch, most) for side in sides]
        self._factor_rows = np.array([rows if self._replayable else 0], np.int64)
        self._pending_rows, self._keeps_rows = np.zeros(batch, np.int64), np.ones(1, np.int64)
        self._sessions = sessions
        self._bound: dict[tuple[int, int], Bound] = {}
        self._replays: dict[tuple[int, int, int], tuple[Bound, Ids]] = {}

    @cached_property
    def defers(self) -> bool:
        """Whether a commit of some of its rows may wait for the next run."""
        inputs = (value.name for value in self._sessions.backbone.get_inputs())
        return self.state.batch == 1 and self._replayable and KEEPS_ROWS in inputs

    def run(self, waiting: Pending | None, *, keeps: bool) -> Staged:
        """Run the backbone behind the committed state and the rows that wait.

        Args:
            keeps: write the states after all rows into the other half, and not those before them.
        """
        half, side = self.state.committed(), 0 if waiting is None else 1 - waiting.side
        if (half, side) not in self._bound:
            self._bound[half, side] = self._bind(half, side)
        self._pending_rows[:] = 0 if waiting is None else waiting.kept
        self._keeps_rows[:] = keeps
        self._bound[half, side].run()
        return Staged(self, side, keeps)

    def replay(self, kept: Ids, side: int) -> None:
        """Repeat the kept rows on the committed states and write the result to the other half."""
        if not self._replayable:
            raise ContractError(
                f"Only {kept.tolist()} of {self.rows} rows were to be kept, but one sequence's run of more rows than "
                "the bundle's largest draft and one is kept whole."
            )
        half = self.state.committed()
        is_alone = len(kept) == 1 and self._sessions.commit_all is not None
        width = int(kept[0]) if is_alone else self.rows
        if (width, half, side) not in self._replays:
            session = self._sessions.commit_all if is_alone else self._sessions.commit
            assert session is not None
            accepted = np.zeros_like(kept)
            inputs: dict[str, AnyArray] = {} if is_alone else {names.ACCEPTED_ROWS: accepted}
            inputs |= {packed(layer): array[:, :width] for layer, array in self.factors[side].items()}
            outputs: dict[str, AnyArray] = {}
            for layer in self.state.recurrent:
                inputs |= self.state.past_of(layer, half)
                outputs |= self.state.present_of(layer, 1 - half)
            self._replays[width, half, side] = (Bound(session, inputs, outputs), accepted)
        bound, accepted = self._replays[width, half, side]
        accepted[:] = kept
        bound.run()

    def _bind(self, half: int, side: int) -> Bound:
        inputs = {
            names.INPUT_IDS: self.tokens,
            names.POSITION_IDS: self.positions,
            names.PAST_LENGTH: self.past_length,
            FACTOR_ROWS: self._factor_rows,
            PENDING_ROWS: self._pending_rows,
            KEEPS_ROWS: self._keeps_rows,
            **{pending(layer): array for layer, array in self._before[1 - side].items()},
            **self.state.past(half),
        }
        outputs = {names.HIDDEN: self.hidden, **self.state.present(half)}
        if self._replayable:
            outputs |= {packed(layer): array for layer, array in self.factors[side].items()}
        if self.tap is not self.hidden:
            outputs[names.TAP] = self.tap
        known = {value.name for value in self._sessions.backbone.get_inputs()}
        return Bound(self._sessions.backbone, {name: array for name, array in inputs.items() if name in known}, outputs)
