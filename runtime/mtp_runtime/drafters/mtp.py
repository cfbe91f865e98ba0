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
        # Put together when the head takes them: a cycle without a draft only adds its rows.
        self._waiting: list[tuple[Ids, Floats]] = []
        self._count = 0

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Keep rows that the head has not seen yet."""
        self._waiting.append((tokens.copy(), hidden.copy()))
        self._count += len(tokens)
        while self._count > self._block:
            self._consume(self._block, 0)

    def propose(self, draft_tokens: int) -> list[int]:
        """Let the head catch up and draft."""
        return self._consume(self._count, draft_tokens) if draft_tokens and self._count else []

    def _consume(self, rows: int, draft_tokens: int) -> list[int]:
        if len(self._waiting) > 1:
            tokens, hidden = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
            self._waiting = [(tokens, hidden)]
        tokens, hidden = self._waiting[0]
        draft = self._sequences.draft
        if draft_tokens and self._drafting is not None:
            draft = partial(draft, choose=self._drafting())
        ids = draft(tokens[None, :rows], hidden[None, :rows], np.array([rows]), draft_tokens)
        self._waiting, self._count = [(tokens[rows:], hidden[rows:])] if rows < len(tokens) else [], len(tokens) - rows
        drafted: list[int] = ids[0].tolist()
        return drafted
