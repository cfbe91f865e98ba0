"""The policy `auto` of answers that run together: one K for all, since a run is as wide as its widest answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtp_runtime.auto import Auto
from mtp_runtime.loop import Generation
from mtp_runtime.policy import AutoPolicy, DraftPolicy
from mtp_runtime.prepare import Prepared
from mtp_runtime.request import AUTO


class SharedPolicy:
    """One policy for all answers: each choice holds until every one of them has shown what it brought.

    What one answer shows is learnt for all, so that nothing is tried by each of them again; evidence ages by rounds.
    """

    def __init__(self, inner: AutoPolicy, company: Callable[[], int]) -> None:
        """`company` says how many answers run together."""
        self._inner, self._company = inner, company
        self._chosen, self._left = 0, 0
        self._kept: list[bool] = []

    def choose(self, number: int) -> int:
        """The K of all, chosen anew when all have observed."""
        if self._left <= 0:
            self._chosen, self._left = self._inner.choose(number), self._company()
        return self._chosen

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn what became of one answer's cycle."""
        self._left -= 1
        self._inner.learn(drafted, accepted)
        if drafted:
            self._kept.append(accepted >= self._chosen)
        if self._left == 0:
            # A chosen draft that nobody made says nothing for it.
            self._inner.conclude(2 * sum(self._kept) > len(self._kept))
            self._inner.forget()
            self._kept.clear()


class CompanyPolicy:
    """The policy of one answer: its own while it is alone, that of all in company."""

    def __init__(self, own: DraftPolicy, shared: DraftPolicy, company: Callable[[], int]) -> None:
        self._own, self._shared, self._company = own, shared, company
        self._newest = own

    def choose(self, number: int) -> int:
        """By whichever holds now."""
        self._newest = self._own if self._company() == 1 else self._shared
        return self._newest.choose(number)

    def observe(self, drafted: int, accepted: int) -> None:
        """Told to the one that chose."""
        self._newest.observe(drafted, accepted)


class Company:
    """The answers of one scheduler, as far as `auto` is concerned; of each drafter's those that ask for it."""

    def __init__(self, auto: Auto, size: Callable[[], int]) -> None:
        """`size` says how many answers run together."""
        self._auto, self._size = auto, size
        self._shared: dict[str, SharedPolicy] = {}

    def join(self, generation: Generation, prepared: Prepared) -> None:
        """Let an answer that asks for `auto` go with the others."""
        if prepared.draft_tokens != AUTO:
            return
        drafter = prepared.drafter
        if drafter not in self._shared:
            # The prompt is of no account: others are always there that have read theirs.
            self._shared[drafter] = SharedPolicy(self._auto.policy(drafter, 0, company=self._size), self._size)
        policy = CompanyPolicy(generation.parts.policy, self._shared[drafter], self._size)
        generation.parts = replace(generation.parts, policy=policy)
