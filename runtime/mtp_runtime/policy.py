"""How many tokens to draft in each cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class DraftPolicy(Protocol):
    """Chooses K for every cycle. Greedy tokens never depend on it."""

    def choose(self, number: int) -> int:
        """K of the cycle with this number, counted from 0."""


@dataclass(frozen=True)
class FixedPolicy:
    """The same K in every cycle; 0 is plain decoding."""

    draft_tokens: int

    def choose(self, number: int) -> int:
        """Always the same."""
        return self.draft_tokens


@dataclass(frozen=True)
class SchedulePolicy:
    """K from a list, repeated from its start when it runs out."""

    schedule: Sequence[int]

    def choose(self, number: int) -> int:
        """The entry of this cycle."""
        return self.schedule[number % len(self.schedule)]
