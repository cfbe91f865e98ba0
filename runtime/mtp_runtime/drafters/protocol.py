"""What the loop asks of a drafter."""

from __future__ import annotations

from typing import Protocol

from mtp_engines.engine import Floats, Ids


class Drafter(Protocol):
    """Proposes tokens for one sequence. Wrong proposals cost time, never correctness."""

    @property
    def source(self) -> str:
        """The name, for the statistics, of what made the newest proposal."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Learn of committed rows.

        Args:
            tokens: int64[rows]; the token that follows each committed position.
            hidden: float32[rows, width], the target's hidden state of that position, as its head takes
                it. Valid during the call only.
        """

    def propose(self, draft_tokens: int) -> list[int]:
        """At most `draft_tokens` ids to follow the newest token, oldest first."""
