"""Drafts whose acceptance is known in advance, made from the plain continuation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtp_engines.engine import Floats, Ids

Pattern = Callable[[int, int], int]
"""Cycle number and number of draft tokens -> how many of them shall be right."""


class ForcedDrafter:
    """Proposes the plain continuation up to a chosen place and something else from there on."""

    source = "forced"

    def __init__(self, prompt_tokens: int, continuation: Sequence[int], vocab_size: int, pattern: Pattern) -> None:
        self._continuation, self._vocab_size, self._pattern = continuation, vocab_size, pattern
        # A row is observed with the token that follows it, so the first emitted token comes with row n - 1.
        self._emitted = 1 - prompt_tokens
        self._cycle = 0

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Count the rows to know which token comes next."""
        self._emitted += len(tokens)

    def propose(self, draft_tokens: int) -> list[int]:
        """The true tokens, then wrong ones."""
        right = self._pattern(self._cycle, draft_tokens)
        self._cycle += 1
        truth = self._continuation[self._emitted : self._emitted + draft_tokens]
        return [token if i < right else (token + 1) % self._vocab_size for i, token in enumerate(truth)]
