"""Rounds in which every engine answers with every K in turn, one at a time, in another order each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mtp_runtime.request import DraftTokens
from mtp_tools.neighbours.contenders import Contender
from mtp_tools.neighbours.process import DeadError
from mtp_tools.neighbours.protocol import NeighbourError, Question, Ready, Reply

PAUSE_S = 0.5
"""Between two answers: a pool of threads may spin for a while after its last product."""
Report = Callable[[str], None]


class Answers(Protocol):
    """A worker that has loaded its model."""

    def ask(self, question: Question) -> Reply:
        """One answer."""

    def close(self) -> None:
        """End it."""


@dataclass
class Entry:
    """A contender that came up.

    Attributes:
        died: why it ended before the measurement did.
    """

    contender: Contender
    worker: Answers
    ready: Ready
    died: str | None = None


@dataclass
class Case:
    """A contender with one K, and what it answered.

    Attributes:
        rounds: one for each round, None where no answer came.
        wrong_at: first token that differs from what is expected, in any answer; None while all were right.
        failure: why no further answers are asked for.
    """

    entry: Entry
    draft_tokens: DraftTokens
    rounds: list[Reply | None] = field(default_factory=list)
    wrong_at: int | None = None
    failure: str | None = None

    @property
    def contender(self) -> Contender:
        return self.entry.contender

    @property
    def replies(self) -> list[Reply]:
        """The answers that came."""
        return [reply for reply in self.rounds if reply is not None]


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
        draft_tokens: values of K above 0, or `auto`; an engine that cannot do one is not asked for it.
        expected: the right answer; None takes our own plain answer of the warm-up, or else the first answer.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    draft_tokens: tuple[DraftTokens, ...]
    rounds: int
    expected: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Measured:
    """All cases, and whose answer they were compared with."""

    cases: list[Case]
    expected_from: str


def measure(
    entries: Sequence[Entry],
    plan: Plan,
    report: Report = lambda line: None,
    pause: Callable[[float], None] = time.sleep,
) -> Measured:
    """Warm up with every case once, then run the rounds. An engine that fails is left out from then on."""
    cases = [Case(entry, width) for entry in entries for width in _widths(entry, plan)]
    firsts = [(case, _asked(case, plan, report, pause)) for case in cases]
    expected, source = _expected(firsts, plan)
    for case, reply in firsts:
        _judge(case, reply, expected)
    report("warm-up is done")
    for number in range(plan.rounds):
        start = number * len(cases) // plan.rounds
        order = [*cases[start:], *cases[:start]]
        for case in order if number % 2 == 0 else reversed(order):
            reply = _asked(case, plan, report, pause)
            case.rounds.append(reply)
            _judge(case, reply, expected)
        report(f"round {number + 1} of {plan.rounds} is done")
    return Measured(cases, source)


def _widths(entry: Entry, plan: Plan) -> list[DraftTokens]:
    return [width for width in (0, *plan.draft_tokens) if width in entry.ready.draft_tokens]


def _asked(case: Case, plan: Plan, report: Report, pause: Callable[[float], None]) -> Reply | None:
    """The answer; None, and the reason noted, if it does not come."""
    if case.failure is None and case.entry.died is not None:
        case.failure = case.entry.died
    if case.failure is not None:
        return None
    pause(PAUSE_S)
    try:
        return case.entry.worker.ask(Question(plan.prompt, plan.new_tokens, case.draft_tokens))
    except NeighbourError as error:
        case.failure = str(error)
        if isinstance(error, DeadError):
            case.entry.died = case.failure
        report(f"{case.contender.name}, K = {case.draft_tokens}: {error}")
        return None


def _expected(firsts: Sequence[tuple[Case, Reply | None]], plan: Plan) -> tuple[tuple[int, ...], str]:
    if plan.expected is not None:
        return plan.expected, "what the weights were made to say"
    answered = [(case, reply) for case, reply in firsts if reply is not None]
    ours = [(case, reply) for case, reply in answered if case.contender.is_ours]
    for case, reply in (*ours, *answered):
        return reply.ids, f"{case.contender.name}, K = {case.draft_tokens}"
    return (), "nothing"


def _judge(case: Case, reply: Reply | None, expected: tuple[int, ...]) -> None:
    if reply is None or reply.ids == expected:
        return
    pairs = enumerate(zip(reply.ids, expected, strict=False))
    shorter = min(len(reply.ids), len(expected))
    found = next((index for index, (theirs, right) in pairs if theirs != right), shorter)
    case.wrong_at = found if case.wrong_at is None else min(found, case.wrong_at)
