"""Several drafters in turn: the first that has a proposal makes it."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter


class FirstDrafter:
    """Asks its drafters in order; all of them learn of every committed row."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._newest = self._drafters[0]

    @property
    def source(self) -> str:
        """That of the drafter whose proposal was taken."""
        return self._newest.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Tell every drafter."""
        for drafter in self._drafters:
            drafter.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """The first proposal that is not empty."""
        for drafter in self._drafters:
            if draft := drafter.propose(draft_tokens):
                self._newest = drafter
                return draft
        return []
