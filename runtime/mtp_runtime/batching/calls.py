"""What a generation asks of its slot, as values that can wait and be answered together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from greenlet import getcurrent

from mtp_engines.engine import Choose, Floats, Ids, SlotSequences, Verified


@dataclass(frozen=True)
class Verify:
    """`Sequences.verify` of one sequence; `tokens` is int64[1, rows]."""

    tokens: Ids
    logit_rows: int
    logits: bool

    @property
    def rows(self) -> int:
        """Rows of the run."""
        return int(self.tokens.shape[1])


@dataclass(frozen=True)
class Commit:
    """`Sequences.commit` of one sequence."""

    rows: int


@dataclass(frozen=True)
class Draft:
    """`Sequences.draft` of one sequence; every row counts."""

    tokens: Ids
    hidden: Floats
    draft_tokens: int
    choose: Choose | None

    @property
    def rows(self) -> int:
        """Rows that the head consumes."""
        return int(self.tokens.shape[1])


@dataclass(frozen=True)
class Turn:
    """Nothing: others may go first."""


Call = Verify | Commit | Draft | Turn


def ask(call: Call) -> Any:
    """Wait in a task for the answer to a call: `Verified`, int64[1, n] drafts, or None."""
    parent = getcurrent().parent
    assert parent is not None, "only a task asks"
    return parent.switch(call)


class SlotProxy:
    """The sequences of one slot, as its generation sees them; see `mtp_engines.engine.Sequences`.

    Verify, commit and draft are handed on; the rest is answered by the slot itself.
    """

    def __init__(self, slots: SlotSequences, slot: int) -> None:
        self._slots = slots
        self.move(slot)

    def move(self, slot: int) -> None:
        """Stand for another slot, whose state is not that of the one before."""
        self._slot = self._slots.window(slot, 1)
        self.lengths = self._slot.lengths

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Handed on."""
        verified: Verified = ask(Verify(tokens, logit_rows, logits))
        return verified

    def commit(self, rows: Ids) -> None:
        """Handed on."""
        ask(Commit(int(rows[0])))

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Handed on."""
        count = int(rows[0])
        drafted: Ids = ask(Draft(tokens[:, :count], hidden[:, :count], draft_tokens, choose))
        return drafted

    def logits(self, hidden: Floats) -> Floats:
        """Of the slot."""
        return self._slot.logits(hidden)

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Of the slot."""
        return self._slot.snapshot(sequence)

    def reset(self) -> None:
        """Of the slot."""
        self._slot.reset()
