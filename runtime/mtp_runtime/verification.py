"""How the rows of a draft are verified: all in one run of the target, or row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, get_args

import numpy as np

from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_engines.errors import NumericsError

Item = TypeVar("Item")
VerifyMode = Literal["rows", "step"]
VERIFY_MODES: tuple[VerifyMode, ...] = get_args(VerifyMode)
"""`rows`: one run of K + 1 rows. `step`: a run of one row for each token that is kept, as plain decoding does."""


@dataclass(frozen=True)
class Scored:
    """What the target says of a draft; rows are asked for one by one, up to the first rejection.

    Attributes:
        ids: K + 1 ids; ids[i] is the target's own choice in the place of draft[i], ids[K] after all.
        logits: the K + 1 rows that they were chosen from, float32[vocab_size] each; None unless asked for.
    """

    ids: Sequence[int]
    logits: Sequence[Floats] | None

    @classmethod
    def last_of(cls, verified: Verified, rows: int) -> Scored:
        """The last rows of a run of one sequence."""
        logits = None if verified.logits is None else list(verified.logits[0, -rows:])
        return cls(verified.ids[0, -rows:].tolist(), logits)


class Verification(Protocol):
    """Verifies drafts of one sequence; `begin` and `commit` take turns."""

    def begin(self, pending: int, draft: list[int]) -> tuple[list[int], Scored]:
        """Consider the pending token and a draft.

        Returns:
            What is left of the draft, and what the target says of it.

        Raises:
            NumericsError: the target makes no numbers even without a draft; for `step` when a row is asked for.
        """

    def commit(self, count: int) -> Verified:
        """Keep the rows of the pending token and of the first `count` - 1 draft tokens; what these rows gave."""


class RowsTogether:
    """One run of the target over the pending token and the draft."""

    def __init__(self, sequences: Sequences, *, logits: bool) -> None:
        """With `logits` those of every row leave the graph."""
        self._sequences, self._verify = sequences, verify_of(sequences, logits=logits)
        self._verified: Verified | None = None

    def begin(self, pending: int, draft: list[int]) -> tuple[list[int], Scored]:
        """Run all rows; only the pending one if the draft makes no numbers.

        A draft token can drive the target to infinity where the right token would not, and attention spreads it to
        the rows before. Plain decoding never sees that token, so neither may this.
        """
        try:
            self._verified = self._verify(np.array([[pending, *draft]]), len(draft) + 1)
        except NumericsError:
            if not draft:
                raise
            draft = []
            self._verified = self._verify(np.array([[pending]]), 1)
        return draft, Scored.last_of(self._verified, len(draft) + 1)

    def commit(self, count: int) -> Verified:
        """Keep the first rows of the run."""
        assert self._verified is not None, "commit comes after begin"
        self._sequences.commit(np.array([count]))
        return self._verified


class RowByRow:
    """A run of one row for each token that is kept: what plain decoding does, so it is exact wherever that repeats.

    A row is committed when the next one is asked for, since that happens only if its token was kept. If an acceptor
    stops in between, by an exception, the sequences hold rows that were not emitted and cannot be used further.
    """

    def __init__(self, sequences: Sequences, *, logits: bool) -> None:
        """With `logits` those of every row leave the graph."""
        self._sequences, self._verify = sequences, verify_of(sequences, logits=logits)
        self._logits = logits
        self._tokens: list[int] = []
        self._rows: list[Verified] = []
        self._kept = 0

    def begin(self, pending: int, draft: list[int]) -> tuple[list[int], Scored]:
        """Run nothing yet."""
        self._tokens, self._rows, self._kept = [pending, *draft], [], 0
        count = len(self._tokens)
        ids = _OnDemand(count, lambda row: int(self._row(row).ids[0, 0]))
        logits = _OnDemand(count, lambda row: _logits_of(self._row(row))) if self._logits else None
        return draft, Scored(ids, logits)

    def commit(self, count: int) -> Verified:
        """Keep the last row; those before it are kept already.

        An end may have cut the block, so that rows behind it are committed too: nothing follows then.
        """
        self._row(count - 1)
        self._keep()
        ids, hidden = (np.concatenate([getattr(row, name) for row in self._rows], axis=1) for name in ("ids", "hidden"))
        logits = np.concatenate([_logits_of(row)[None, None] for row in self._rows], axis=1) if self._logits else None
        return Verified(ids, hidden, logits)

    def _row(self, index: int) -> Verified:
        while len(self._rows) <= index:
            self._keep()
            row = self._verify(np.array([[self._tokens[len(self._rows)]]]), 1)
            # The next run writes over the hidden state.
            self._rows.append(Verified(row.ids, row.hidden.copy(), row.logits))
        return self._rows[index]

    def _keep(self) -> None:
        """Commit the newest row, unless that was done before the row behind it failed."""
        if self._kept < len(self._rows):
            self._sequences.commit(np.array([1]))
            self._kept += 1


def verification_of(mode: VerifyMode, sequences: Sequences, *, logits: bool) -> Verification:
    """The verification of a name from `VERIFY_MODES`."""
    return RowByRow(sequences, logits=logits) if mode == "step" else RowsTogether(sequences, logits=logits)


def verify_of(sequences: Sequences, *, logits: bool) -> Callable[[Ids, int], Verified]:
    """The verify of these sequences, with logits if they are needed."""
    if logits:
        return lambda tokens, rows: sequences.verify(tokens, rows, logits=True)
    return sequences.verify


def _logits_of(verified: Verified) -> Floats:
    assert verified.logits is not None
    row: Floats = verified.logits[0, 0]
    return row


class _OnDemand(Sequence[Item], Generic[Item]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Item]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)
