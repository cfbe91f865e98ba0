"""Drafting with the bundle's own head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mtp_engines.engine import Choose, Floats, Ids, Sequences


class MtpDrafter:
    """Feeds the head every committed row with the target's hidden state, then chains drafts behind them.

    Rows wait here until a draft is asked for, so cycles without one cost the head nothing; more than
    `block` waiting rows (a prompt) are consumed at once.
    """

    def __init__(
        self, sequences: Sequences, block: int, kind: str = "mtp", drafting: Callable[[], Choose] | None = None
    ) -> None:
        """Begin with no rows.

        Args:
            sequences: the target's.
            block: most rows that wait.
            kind: names the head in the statistics; what it means to draft with it is the engine's business.
            drafting: begins a draft and gives what chooses its tokens; None takes the best ones.
        """
        self.source, self._drafting = kind, drafting
        self._sequences, self._block = sequences, block
        self._tokens: Ids = np.zeros(0, np.int64)
        self._hidden: Floats = np.zeros((0, 0), np.float32)

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Keep rows that the head has not seen yet."""
        self._tokens = np.concatenate([self._tokens, tokens])
        # How wide a row is depends on what the head was trained on, so the first rows say it.
        self._hidden = np.concatenate([self._hidden, hidden]) if len(self._hidden) else hidden.copy()
        while len(self._tokens) > self._block:
            self._consume(self._block, 0)

    def propose(self, draft_tokens: int) -> list[int]:
        """Let the head catch up and draft."""
        return self._consume(len(self._tokens), draft_tokens) if draft_tokens else []

    def _consume(self, rows: int, draft_tokens: int) -> list[int]:
        tokens, hidden = self._tokens[None, :rows], self._hidden[None, :rows]
        draft = self._sequences.draft
        if draft_tokens and self._drafting is not None:
            draft = partial(draft, choose=self._drafting())
        ids = draft(tokens, hidden, np.array([rows]), draft_tokens)
        self._tokens, self._hidden = self._tokens[rows:], self._hidden[rows:]
        drafted: list[int] = ids[0].tolist()
        return drafted
