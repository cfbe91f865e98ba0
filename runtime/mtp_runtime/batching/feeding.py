"""When a drafter learns of committed rows: between two cycles, where its answer may be stopped and begin again."""

from __future__ import annotations

import numpy as np

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter

_PATIENCE = 64
"""Rows that are kept back where no draft is wanted."""


class LateDrafter:
    """Keeps committed rows back until `feed`, and a record of their hidden states where somebody takes it.

    Feeding a head waits for the engine. In the middle of a cycle, an end and a constraint already know tokens that are
    not emitted yet; an answer that had to leave there would say them twice. An answer that drafts nothing for a while
    is fed by many rows at once, so that its cycles cost what those of plain decoding do.
    """

    def __init__(self, inner: Drafter, *, records: bool) -> None:
        """With `records`, hidden rows are kept for `take`."""
        self._inner, self._records = inner, records
        self._late: list[tuple[Ids, Floats]] = []
        self._count = 0
        self._hidden: list[Floats] = []

    @property
    def source(self) -> str:
        """Passed on."""
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Keep copies."""
        rows = hidden.copy()
        self._late.append((tokens.copy(), rows))
        self._count += len(rows)
        if self._records:
            self._hidden.append(rows)

    def propose(self, draft_tokens: int) -> list[int]:
        """Passed on, after all rows; without a draft only if many rows wait."""
        if not draft_tokens and self._count < _PATIENCE:
            return []
        self.feed()
        return self._inner.propose(draft_tokens)

    def feed(self) -> None:
        """Tell the drafter of the rows that were kept back."""
        late, self._late, self._count = self._late, [], 0
        if late:
            tokens, hidden = (np.concatenate(parts) for parts in zip(*late, strict=True))
            self._inner.observe(tokens, hidden)

    def take(self) -> Floats:
        """float32[rows, tap_width] since the last call; [0, 0] if there were none."""
        rows, self._hidden = self._hidden, []
        return np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)

    def forget(self) -> None:
        """Record nothing from now on."""
        self._records, self._hidden = False, []
