"""The policy `auto` of answers that run together: one K for all, since a run is as wide as its widest answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from mtp_engines.costs import TYPICAL_ROWS, CycleCosts
from mtp_runtime.auto import Auto
from mtp_runtime.batching.rounds import Round
from mtp_runtime.loop import Generation
from mtp_runtime.policy import AutoPolicy, Tuning
from mtp_runtime.prepare import Prepared
from mtp_runtime.request import AUTO


class Experience:
    """How much longer the rounds of a company take than was measured once: the host's share, other work.

    The lower quartile of the newest rounds of each K, since what disturbs a machine only makes a round longer; after a
    while what is not confirmed counts no more, so that what was dear once is tried again.
    """

    _SAMPLES, _LIFE = 7, 500

    def __init__(self) -> None:
        """Nothing is known, and everything takes what was measured."""
        self._found: dict[int, deque[tuple[int, float]]] = {}
        self._now = 0

    def add(self, draft_tokens: int, factor: float, *, now: int) -> None:
        """Count a round, the `now`-th of all, that took so many times what was expected."""
        self._now = now
        self._found.setdefault(draft_tokens, deque(maxlen=self._SAMPLES)).append((now, factor))

    def factor(self, draft_tokens: int) -> float:
        """What to expect; of a K that was not tried lately, what holds without a draft."""
        newest = [factor for when, factor in self._found.get(draft_tokens, ()) if when + self._LIFE > self._now]
        if newest:
            return sorted(newest)[len(newest) // 4]
        return self.factor(0) if draft_tokens else 1.0

    def corrected(self, costs: CycleCosts) -> CycleCosts:
        """Costs with what was learnt."""
        factors = [self.factor(width) for width in range(len(costs.verify))]
        verify = tuple(value * factor for value, factor in zip(costs.verify, factors, strict=True))
        draft = tuple(value * factor for value, factor in zip(costs.draft, factors[1:], strict=True))
        return replace(costs, verify=verify, draft=draft, commit=costs.commit * factors[0])


_TUNING = Tuning(allowances=(0.005, 0.0025, 0.00125))
"""Less than an answer by itself spends on looking, in the long run a quarter: a server lives longer."""
_NEWEST = 1024
"""Answers whose prompts are remembered, more than run together anywhere."""
_REST = 8
"""Rounds for which a choice of no draft holds: looking again at once would cost more than it could find."""


class SharedPolicy:
    """One policy for all answers that ask for `auto` with the same drafter: a choice holds for a round at least.

    What one answer shows is learnt for all, also for those that come later, so that nothing is tried by each of them
    again; evidence ages by rounds.
    """

    def __init__(
        self, make: Callable[[Callable[[], CycleCosts]], AutoPolicy], costs: Callable[[int], CycleCosts]
    ) -> None:
        """Nothing is known.

        Args:
            make: a policy that asks the function it is given for the costs of a cycle.
            costs: of each of so many answers that run together, as they were measured.
        """
        self._costs, self._measured, self._company = costs, costs(1), 1
        self._experience: dict[int, Experience] = {}
        self._corrected = self._measured
        self._inner = make(lambda: self._corrected)
        self._chosen: int | None = None
        self._rounds = self._rest = 0
        self._seen: list[tuple[int, int]] = []
        self._unread: deque[int] = deque(maxlen=_NEWEST)

    def join(self, prompt_rows: int) -> None:
        """An answer comes whose draft head has not read its prompt."""
        self._unread.append(prompt_rows)

    def gather(self, company: int) -> None:
        """So many answers run in the round that begins; costs depend on it."""
        if company != self._company:
            self._company, self._measured, self._rest = company, self._costs(company), 0
            self._correct()

    def choose(self, number: int) -> int:
        """The K of all in this round."""
        if self._chosen is None:
            if self._rest:
                self._rest -= 1
                self._inner.pause()
                self._chosen = 0
            else:
                # The draft heads of those that came last have their prompts to read, as far as they are still here.
                newest = islice(reversed(self._unread), self._company)
                self._inner.owe(sum(newest) / self._company)
                self._chosen = self._inner.choose(number)
                self._rest = 0 if self._chosen else _REST
        return self._chosen

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn what became of one answer's cycle."""
        self._inner.learn(drafted, accepted)
        self._seen.append((drafted, accepted))

    def conclude(self, happened: Round) -> None:
        """A round is over: its choice was all kept by most or was not, and it took so long."""
        if not self._seen or self._chosen is None:
            return  # Only prompts ran; who has chosen already has not verified yet.
        seen, chosen, self._seen, self._chosen = self._seen, self._chosen, [], None
        self._rounds += 1
        kept = [accepted for drafted, accepted in seen if drafted]
        self._inner.conclude(2 * sum(accepted >= chosen for accepted in kept) > len(kept))
        self._inner.forget()
        if kept:
            self._unread.clear()
        # A round in which others did something else says nothing of it; of many without a draft, one is enough.
        if happened.answers == len(seen) == self._company and (len(kept) == len(seen) or self._rest == _REST):
            self._learn_cost(seen, happened)

    def _learn_cost(self, seen: list[tuple[int, int]], happened: Round) -> None:
        costs, width = self._measured, max(drafted for drafted, _ in seen)
        expected = costs.verify[width] + costs.commit * sum(kept < drafted for drafted, kept in seen) / len(seen)
        if width:
            further = max(happened.fed / len(seen) - TYPICAL_ROWS, 0.0)
            expected += costs.draft[width - 1] + further * costs.catch_up
        experience = self._experience.setdefault(self._company, Experience())
        experience.add(width, happened.seconds / len(seen) / expected, now=self._rounds)
        self._correct()

    def _correct(self) -> None:
        experience = self._experience.get(self._company)
        self._corrected = self._measured if experience is None else experience.corrected(self._measured)


class Company:
    """The answers of one scheduler, as far as `auto` is concerned; of each drafter's those that ask for it."""

    def __init__(self, auto: Auto) -> None:
        """Nobody is here."""
        self._auto = auto
        self._shared: dict[str, SharedPolicy] = {}

    def join(self, generation: Generation, prepared: Prepared) -> None:
        """Let an answer that asks for `auto` go with the others."""
        if prepared.draft_tokens != AUTO:
            return
        drafter = prepared.drafter
        if drafter not in self._shared:
            self._shared[drafter] = SharedPolicy(
                lambda together: self._auto.policy(drafter, 0, together=together, tuning=_TUNING),
                lambda answers: self._auto.known(drafter, answers),
            )
        shared = self._shared[drafter]
        shared.join(len(prepared.prompt))
        generation.parts = replace(generation.parts, policy=shared)

    def gather(self, answers: int) -> None:
        """So many answers run in the round that begins."""
        for shared in self._shared.values():
            shared.gather(answers)

    def conclude(self, happened: Round) -> None:
        """A round is over."""
        for shared in self._shared.values():
            shared.conclude(happened)
