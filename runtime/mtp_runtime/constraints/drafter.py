"""Drafts without what the grammar forbids: a lookup, or a head without logits to mask, knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter


class AdmissibleDrafter:
    """Another drafter's proposals up to the first token that cannot be accepted, so that no row is verified for it."""

    def __init__(self, inner: Drafter, admissible: Callable[[list[int]], list[int]]) -> None:
        """`admissible` gives the beginning of a draft that the constraint allows."""
        self._inner, self._admissible = inner, admissible

    @property
    def source(self) -> str:
        """That of the other drafter."""
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Tell the other drafter."""
        self._inner.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """What the other drafter proposes, cut."""
        return self._admissible(self._inner.propose(draft_tokens))
