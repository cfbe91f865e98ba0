"""How many tokens to draft in each cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtp_engines.costs import TYPICAL_ROWS, CycleCosts


class DraftPolicy(Protocol):
    """Chooses K for every cycle. Greedy tokens never depend on it."""

    def choose(self, number: int) -> int:
        """K of the cycle with this number, counted from 0."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn what became of the cycle that was chosen last: tokens proposed, and those of them that were kept."""


@dataclass(frozen=True)
class FixedPolicy:
    """The same K in every cycle; 0 is plain decoding."""

    draft_tokens: int

    def choose(self, number: int) -> int:
        """Always the same."""
        return self.draft_tokens

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class SchedulePolicy:
    """K from a list, repeated from its start when it runs out."""

    schedule: Sequence[int]

    def choose(self, number: int) -> int:
        """The entry of this cycle."""
        return self.schedule[number % len(self.schedule)]

    def observe(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class Tuning:
    """How `AutoPolicy` learns.

    Attributes:
        prior: acceptance of every position before anything is known.
        weight: cycles that an expectation weighs as much as, against what was seen.
        memory: what of the evidence is left after a cycle.
        surprise: a run of equal outcomes that the estimate makes less probable than this is taken for a change.
        hope: accepted drafts that are added to the evidence to see what might be gained at best.
        allowances: share of the tokens that may be lost on looking whether a larger K would pay: after no failure in a
            row, after one, and so on; the last for all that follow.
    """

    prior: float = 0.5
    weight: float = 2.0
    memory: float = 0.97
    surprise: float = 0.002
    hope: float = 2.0
    allowances: tuple[float, ...] = (0.005, 0.005, 0.004)


class Acceptance:
    """Share of kept drafts of one position among those that were reached; old cycles count less."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._kept, self._trials, self._run, self._newest = 0.0, 0.0, 0, False

    def estimate(self, expected: float, hope: float = 0.0) -> float:
        """What was seen, and `expected` where that is little; with `hope`, what it may be at best."""
        weight = self._tuning.weight
        return (self._kept + weight * expected + hope) / (self._trials + weight + hope)

    def age(self) -> None:
        """Forget a little."""
        self._kept *= self._tuning.memory
        self._trials *= self._tuning.memory

    def add(self, kept: bool, expected: float) -> float:
        """Count one outcome; a run that is hardly by chance puts what was before it aside.

        Returns:
            What is to be expected from now on.
        """
        estimate = self.estimate(expected)
        self._run = self._run + 1 if kept is self._newest else 1
        self._newest = kept
        if self._run > 1 and (estimate if kept else 1 - estimate) ** self._run < self._tuning.surprise:
            self._kept, self._trials = float(self._run * kept), float(self._run)
            return (self._kept + 0.5) / (self._trials + 1)
        self._kept, self._trials = self._kept + kept, self._trials + 1
        return expected


class AutoPolicy:
    """The K that lets expect the most tokens a second, from what parts of a cycle cost and what was accepted.

    A position of which little is known is expected to do as well as the one before it. At K = 0 even the first one
    shows nothing; so now and then more is drafted than seems best, if that might pay. How often follows from what it
    loses, which may be a small share of the whole, and a smaller one the more often it was in vain; a draft that was
    kept then is followed by the next attempt at once.

    Nothing is drawn: the same acceptance gives the same choices.
    """

    def __init__(
        self,
        costs: CycleCosts,
        waiting_rows: int = 0,
        prior: float | None = None,
        tuning: Tuning | None = None,
        together: Callable[[], CycleCosts] | None = None,
    ) -> None:
        """Begin knowing nothing.

        Args:
            costs: of the engine and the drafter.
            waiting_rows: rows of the prompt, which the drafter has not seen yet.
            prior: acceptance that is expected of every position; None takes a mild one.
            together: asked at every choice for the costs that hold in the company of other answers; None: it is alone.
        """
        self._together = together
        self._tuning = tuning = tuning or Tuning()
        self._expected = tuning.prior if prior is None else prior
        self._knows = prior is not None
        self._costs = costs
        self.owe(waiting_rows)
        self._positions = [Acceptance(tuning) for _ in costs.draft]
        self._chosen, self._attempt = 0, False
        self._saved, self._failures, self._eager = 0.0, 0, False

    def choose(self, number: int) -> int:
        """The best K, or a larger one to see whether that would pay."""
        if self._together is not None:
            self._costs = self._together()
        cycles = expected_cycles(self._estimates(), self._costs)
        rates = [tokens / seconds for tokens, seconds in cycles]
        best_rate = max(rates)
        self._chosen = best = rates.index(best_rate)
        self._saved += self._allowance() * cycles[best][0]
        self._attempt = False
        if best < len(self._positions):
            hopes = expected_cycles(self._estimates(self._tuning.hope), self._costs)
            larger = [
                # What the attempt costs. The prompt counts, which a head that is never asked need not read. Rows since
                # then do not: it has to read them whenever it is asked again, be that soon or late.
                ((cycles[width][1] + self._owed) * best_rate - cycles[width][0], width)
                for width in range(best + 1, len(cycles))
                if hopes[width][0] / hopes[width][1] > best_rate
            ]
            lost, wanted = min(larger, default=(0.0, best))
            self._attempt = wanted > best and (self._eager or lost <= self._saved)
            if self._attempt:
                self._chosen, self._saved = wanted, 0.0
        if not self._knows:
            # Where nobody has said what to expect, one draft shows as much of the first position as several do.
            self._chosen = min(self._chosen, 1)
        return self._chosen

    def pause(self) -> None:
        """A cycle goes by without a draft and without a choice; what may be lost on looking is saved up all the same.

        Such a cycle emits one token.
        """
        self._chosen, self._attempt = 0, False
        self._saved += self._allowance()

    def owe(self, waiting_rows: float) -> None:
        """Rows that the drafter has not seen yet, of prompts, whatever it was before."""
        self._owed = max(waiting_rows - TYPICAL_ROWS, 0) * self._costs.catch_up

    def observe(self, drafted: int, accepted: int) -> None:
        """Count the positions that the cycle has shown, and let the evidence of all of them age."""
        self.forget()
        self.learn(drafted, accepted)
        self.conclude(accepted >= self._chosen)

    def forget(self) -> None:
        """Let the evidence of all positions age by a cycle."""
        if self._positions:
            # What is forgotten of the first position is what to expect of it.
            first = self._positions[0].estimate(self._expected)
            self._expected = first + self._tuning.memory * (self._expected - first)
        for position in self._positions:
            position.age()

    def learn(self, drafted: int, accepted: int) -> None:
        """Count the positions that a draft has shown."""
        if not drafted:
            return
        self._owed, self._knows = 0.0, True
        # Where a drafter has no more to propose, the next position is as good as a rejected one.
        for index, expected in enumerate([self._expected, *self._estimates()][: min(accepted + 1, self._chosen)]):
            after = self._positions[index].add(index < accepted, expected)
            self._expected = self._expected if index else after

    def conclude(self, succeeded: bool) -> None:
        """Learn whether what was chosen last was all kept, if it was an attempt."""
        if self._attempt:
            self._eager = succeeded
            self._failures = 0 if self._eager else self._failures + 1

    def _estimates(self, hope: float = 0.0) -> list[float]:
        """Acceptance of every position, given that the drafts before it were kept."""
        found: list[float] = []
        for position in self._positions:
            found.append(position.estimate(found[-1] if found else self._expected, hope))
        return found

    def _allowance(self) -> float:
        allowances = self._tuning.allowances
        return allowances[min(self._failures, len(allowances) - 1)]


def expected_cycles(acceptance: Sequence[float], costs: CycleCosts) -> list[tuple[float, float]]:
    """Expected emitted tokens and seconds of a cycle with K = 0, 1, ... up to the number of positions.

    Args:
        acceptance: of each position, given that the drafts before it were kept; no more positions than were measured.
    """
    count = len(acceptance)
    kept = tokens = 1.0
    found = [(tokens, costs.verify[0])]
    for share, draft, verify in zip(acceptance, costs.draft[:count], costs.verify[1 : count + 1], strict=True):
        kept *= share
        tokens += kept
        found.append((tokens, draft + verify + (1 - kept) * costs.commit))
    return found
