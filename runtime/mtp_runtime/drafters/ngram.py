"""Drafting by prompt lookup: what followed the last few tokens when they stood in the text before."""

from __future__ import annotations

from mtp_engines.engine import Floats, Ids

MIN_MATCH, MAX_MATCH = 2, 4
LONGEST_MATCH = 16
"""Longer ones find hardly more, and every token of the text is remembered once for each length."""


class NgramDrafter:
    """Proposes the continuation of the newest earlier occurrence of the longest repeated ending.

    Needs no head and no model; it pays where the answer repeats its prompt (summaries, edits of code).
    """

    source = "ngram"

    def __init__(self, prompt: list[int], min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        """A match is `min_match` to `max_match` tokens long; longer ones are tried first."""
        self._tokens = prompt[:1]
        self._lengths = range(max_match, min_match - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """Run of tokens -> index of the token after its newest occurrence, the ending of the text excluded."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Append the tokens and remember what each run before them was followed by; hidden rows are not needed."""
        for token in tokens.tolist():
            for length in self._lengths:
                if length <= len(self._tokens):
                    self._after[tuple(self._tokens[-length:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, draft_tokens: int) -> list[int]:
        """What followed the longest match, at most `draft_tokens`; nothing without a match."""
        for length in self._lengths:
            start = self._after.get(tuple(self._tokens[-length:]))
            if start is not None:
                return self._tokens[start : start + draft_tokens]
        return []
