"""Several sequences that hold the same text, as one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.engine import Choose, Floats, Ids, SlotSequences, Verified


class Paths:
    """See `mtp_engines.engine.Sequences`: what is verified here is run by the first sequence alone, drafts by all.

    So the prompt is read once, but for the heads, which all read it. The others get a copy of the target's state before
    the first draft, and follow wherever the first was ahead.
    """

    def __init__(self, every: SlotSequences) -> None:
        """`every` has one sequence for each path, all empty."""
        self.every, self.first = every, every.window(0, 1)
        self.lengths: Ids = self.first.lengths

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Rows of one sequence."""
        return self.first.verify(tokens, logit_rows, logits=logits)

    def commit(self, rows: Ids) -> None:
        """Of the first sequence."""
        self.first.commit(rows)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Consume rows of one sequence, all of which count, in every head, and draft in all.

        Args:
            choose: makes the tokens of all paths.

        Returns:
            int64[1, n], those of the first.
        """
        if draft_tokens:
            for path in np.flatnonzero(self.every.lengths < self.lengths[0]).tolist():
                self.every.copy(0, path, int(self.every.lengths[path]))
        count = len(self.every.lengths)
        tokens, hidden, rows = tokens.repeat(count, axis=0), hidden.repeat(count, axis=0), rows.repeat(count)
        return self.every.draft(tokens, hidden, rows, draft_tokens, choose=choose)[:1]

    def logits(self, hidden: Floats) -> Floats:
        """Of the model; no sequence matters."""
        return self.first.logits(hidden)

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Of one path."""
        return self.every.snapshot(sequence)

    def reset(self) -> None:
        """Forget the text everywhere."""
        self.every.reset()
