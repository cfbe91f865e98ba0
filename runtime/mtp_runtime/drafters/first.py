"""Several drafters in turn: the first that has a proposal makes it."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter


class FirstDrafter:
    """Asks its drafters in order; all of them learn of every committed row."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Tell every drafter."""
        for drafter in self._drafters:
            drafter.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """The first proposal that is not empty."""
        for drafter in self._drafters:
            if draft := drafter.propose(draft_tokens):
                return draft
        return []
