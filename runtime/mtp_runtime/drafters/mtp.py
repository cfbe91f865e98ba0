"""Drafting with the checkpoint's own multi-token-prediction head."""

from __future__ import annotations

import numpy as np

from mtp_engines.engine import Floats, Ids, Sequences


class MtpDrafter:
    """Feeds the head every committed row with the target's hidden state, then chains drafts behind them.

    Rows wait here until a draft is asked for, so cycles without one cost the head nothing; more than
    `block` waiting rows (a prompt) are consumed at once.
    """

    def __init__(self, sequences: Sequences, hidden_size: int, block: int) -> None:
        self._sequences, self._block = sequences, block
        self._tokens: Ids = np.zeros(0, np.int64)
        self._hidden: Floats = np.zeros((0, hidden_size), np.float32)

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Keep rows that the head has not seen yet."""
        self._tokens = np.concatenate([self._tokens, tokens])
        self._hidden = np.concatenate([self._hidden, hidden])
        while len(self._tokens) > self._block:
            self._consume(self._block, 0)

    def propose(self, draft_tokens: int) -> list[int]:
        """Let the head catch up and draft."""
        return self._consume(len(self._tokens), draft_tokens) if draft_tokens else []

    def _consume(self, rows: int, draft_tokens: int) -> list[int]:
        tokens, hidden = self._tokens[None, :rows], self._hidden[None, :rows]
        ids = self._sequences.draft(tokens, hidden, np.array([rows]), draft_tokens)
        self._tokens, self._hidden = self._tokens[rows:], self._hidden[rows:]
        drafted: list[int] = ids[0].tolist()
        return drafted
