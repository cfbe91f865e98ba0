"""A drafter that may fail: its request then goes on without drafts, which changes its speed and not its tokens."""

from __future__ import annotations

from collections.abc import Callable

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter


class FailSafeDrafter:
    """Passes all on until the drafter raises; from then on it proposes nothing."""

    def __init__(self, inner: Drafter, report: Callable[[Exception], None]) -> None:
        """`report` is told of the failure, once."""
        self._inner, self._report, self._failed = inner, report, False

    @property
    def source(self) -> str:
        """Passed on."""
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Passed on, unless it has failed."""
        if not self._failed:
            try:
                self._inner.observe(tokens, hidden)
            except Exception as error:  # Whatever it was, the target can go on without it.
                self._fail(error)

    def propose(self, draft_tokens: int) -> list[int]:
        """Passed on; nothing once it has failed."""
        if not self._failed:
            try:
                return self._inner.propose(draft_tokens)
            except Exception as error:  # As above.
                self._fail(error)
        return []

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._report(error)
