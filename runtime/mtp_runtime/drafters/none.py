"""No drafting: plain decoding through the same loop."""

from __future__ import annotations

from mtp_engines.engine import Floats, Ids


class NoDrafter:
    """Proposes nothing and remembers nothing."""

    source = "none"

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Nothing to learn."""

    def propose(self, draft_tokens: int) -> list[int]:
        """No tokens."""
        return []
