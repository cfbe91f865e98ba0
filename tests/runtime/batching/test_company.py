"""`auto` of answers that run together: one K for all of a round, learnt from all of them."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from mtp_engines.costs import TYPICAL_ROWS, CycleCosts
from mtp_runtime import Model, auto
from mtp_runtime.batching import company, lanes
from mtp_runtime.batching.calls import Turn
from mtp_runtime.batching.company import Experience, SharedPolicy
from mtp_runtime.batching.rounds import Round
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.policy import AutoPolicy
from tests.runtime.batching.parts import drive, request, scheduler

COSTS = CycleCosts((0.53, 0.66, 0.74), (0.29, 0.38), 0.0, 0.46)
WIDE = CycleCosts(tuple(1.0 + 0.1 * k for k in range(9)), tuple(0.1 * k for k in range(1, 9)), 0.0, 0.5)


class Inner(AutoPolicy):
    """Counts what it is asked and told; wants one token more with every choice."""

    def __init__(self, first: int = 1) -> None:
        self.choices, self.first = 0, first
        self.aged = self.paused = 0
        self.owed: list[float] = []
        self.seen: list[int] = []
        self.ends: list[bool] = []

    def choose(self, number: int) -> int:
        self.choices += 1
        return self.first + self.choices - 1

    def learn(self, drafted: int, accepted: int) -> None:
        self.seen.append(drafted)

    def forget(self) -> None:
        self.aged += 1

    def pause(self) -> None:
        self.paused += 1

    def owe(self, waiting_rows: float) -> None:
        self.owed.append(waiting_rows)

    def conclude(self, succeeded: bool) -> None:
        self.ends.append(succeeded)


def shared_over(inner: AutoPolicy, costs: CycleCosts = WIDE) -> SharedPolicy:
    return SharedPolicy(lambda together: inner, lambda answers: costs)


def play(shared: SharedPolicy, answers: int, kept: Callable[[int], int], seconds: Callable[[int], float]) -> int:
    """A round of so many answers; `kept` says what becomes of a draft, `seconds` how long a round of that K takes."""
    shared.gather(answers)
    width = shared.choose(0)
    for _ in range(answers):
        assert shared.choose(0) == width
        shared.observe(width, kept(width))
    shared.conclude(Round(answers, seconds(width), answers * TYPICAL_ROWS))
    return width


def test_a_choice_holds_for_a_round() -> None:
    inner = Inner()
    shared = shared_over(inner)
    assert [play(shared, 3, lambda width: 0, lambda width: 1.0) for _ in range(3)] == [1, 2, 3]
    assert (inner.choices, inner.seen) == (3, [1, 1, 1, 2, 2, 2, 3, 3, 3])
    assert (inner.aged, inner.ends) == (3, [False] * 3), "a round is a cycle"


def test_a_choice_of_no_draft_holds_for_some_rounds_unless_others_come() -> None:
    inner = Inner(first=0)
    shared = shared_over(inner)
    assert [play(shared, 3, lambda width: 0, lambda width: 1.0) for _ in range(5)] == [0] * 5
    assert (inner.choices, inner.paused, inner.aged) == (1, 4, 5)
    assert play(shared, 2, lambda width: 0, lambda width: 1.0) == 1


def test_prompts_that_no_head_has_read_count_until_a_draft() -> None:
    inner = Inner()
    shared = shared_over(inner)
    for rows in (100, 40, 60):
        shared.join(rows)
    play(shared, 2, lambda width: 0, lambda width: 1.0)
    play(shared, 2, lambda width: 0, lambda width: 1.0)
    shared.join(10)
    play(shared, 2, lambda width: 0, lambda width: 1.0)
    assert inner.owed == [50, 0, 5], "of the two that came last; nothing behind a draft; one of two is new"


def test_evidence_in_company_lasts_as_many_rounds_as_alone() -> None:
    """Where plain decoding is best though most drafts are kept, few rounds are spent on looking again."""
    generator = random.Random(1)
    spent = {}
    for fault in (False, True):
        inner = AutoPolicy(COSTS, prior=0.6)
        shared = shared_over(inner, COSTS)
        drafting = 0
        for _ in range(400):

            def kept(width: int, fault: bool = fault, inner: AutoPolicy = inner) -> int:
                if fault:
                    inner.forget()
                return next((place for place in range(width) if generator.random() > 0.72), width)

            drafting += play(shared, 4, kept, lambda width: 4 * COSTS.verify[0] if not width else 5.0) > 0
        spent[fault] = drafting
    assert spent[False] < 60
    assert spent[True] > 1.5 * spent[False], "control: evidence that ages with every answer"


@pytest.mark.parametrize("heeds", [True, False])
def test_what_rounds_take_corrects_what_was_measured(monkeypatch: pytest.MonkeyPatch, heeds: bool) -> None:
    """Measured alone, three rows seemed cheap; in company a round with a draft takes four times that."""
    cheap = CycleCosts((1.0, 1.05, 1.1), (0.05, 0.1), 0.0, 0.0)
    if not heeds:
        monkeypatch.setattr(Experience, "add", lambda *parts, now: None)
    shared = SharedPolicy(lambda together: AutoPolicy(cheap, together=together), lambda answers: cheap)
    widths = [play(shared, 4, lambda width: width, lambda width: 16.0 if width else 4.0) for _ in range(300)]
    drafting = sum(width > 0 for width in widths[20:])
    assert drafting < 10 if heeds else drafting > 250, "control: one that does not learn it goes on drafting"


def test_what_was_dear_once_is_tried_again() -> None:
    cheap = CycleCosts((1.0, 1.05, 1.1), (0.05, 0.1), 0.0, 0.0)
    shared = SharedPolicy(lambda together: AutoPolicy(cheap, together=together), lambda answers: cheap)
    dear = [play(shared, 4, lambda width: width, lambda width: 16.0 if width else 4.0) for _ in range(100)]
    assert dear[-20:] == [0] * 20
    after = [play(shared, 4, lambda width: width, lambda width: 4.8 if width else 4.0) for _ in range(1500)]
    assert after[-20:] == [2] * 20


def test_rounds_that_others_share_say_nothing_of_costs() -> None:
    shared = shared_over(Inner())
    shared.gather(3)
    shared.observe(shared.choose(0), 0)
    shared.conclude(Round(3, 99.0, 0))
    assert not shared._experience
    play(shared, 3, lambda width: 0, lambda width: 1.0)
    assert shared._experience, "control: a round of its own does"


class Widths(Watch):
    """Rows of every round with several answers."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def round(self, widths: Sequence[int], scheduler: Busy) -> None:
        if len(widths) > 1:
            self.rounds.append(list(widths))


@pytest.mark.parametrize("crowded", [True, False])
def test_together_all_draft_alike_and_by_the_costs_of_company(
    partial: Model, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    """Where a row costs as much as the first one, nothing is drafted in company. Control: where it costs nothing."""

    def pretend(*parts: object, answers: int = 1, whole: bool = False) -> CycleCosts:
        row = 1.0 if crowded and answers > 1 else 0.01
        return CycleCosts(tuple(1.0 + row * k for k in range(9)), tuple(0.01 * k for k in range(1, 9)), 0.0, 0.0)

    monkeypatch.setattr(auto, "costs_of", pretend)
    monkeypatch.setattr(
        partial, "auto", auto.Auto(auto.Opened(partial.bundle, partial.engine, partial.auto._target.options))
    )
    partial.auto.measure(4)
    watch = Widths()
    one = scheduler(partial, watch, slots=4, prefix_bytes=0)
    asked = [
        request(prompt_ids=[5, 6, 20 + i], max_new_tokens=40, draft_tokens="auto", ignore_eos=True) for i in range(4)
    ]
    tickets = [one.submit(each) for each in asked]
    drive(one)
    for ticket, each in zip(tickets, asked, strict=True):
        wanted = request(prompt_ids=each.prompt_ids, max_new_tokens=40, draft_tokens=0, ignore_eos=True)
        assert ticket.results()[0].token_ids == partial.complete(wanted).token_ids
    late = [row for widths in watch.rounds[8:-8] for row in widths]
    assert late
    if crowded:
        assert sum(row == 1 for row in late) > 0.8 * len(late)
    else:
        assert sum(row > 2 for row in late) > 0.8 * len(late)


@pytest.mark.parametrize("waits", [True, False])
def test_a_round_is_judged_by_its_own_choice(partial: Model, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Whoever is first to end a round may not choose the next K before the others have ended it too."""

    class Noted(SharedPolicy):
        def observe(self, drafted: int, accepted: int) -> None:
            noted.append((self._chosen, drafted))
            super().observe(drafted, accepted)

    noted: list[tuple[int | None, int]] = []
    monkeypatch.setattr(company, "SharedPolicy", Noted)
    monkeypatch.setattr(auto, "costs_of", lambda *parts, **named: WIDE)
    opened = auto.Opened(partial.bundle, partial.engine, partial.auto._target.options)
    monkeypatch.setattr(partial, "auto", auto.Auto(opened))
    if not waits:
        real = lanes.ask
        monkeypatch.setattr(lanes, "ask", lambda call: None if isinstance(call, Turn) else real(call))
    one = scheduler(partial, slots=4, prefix_bytes=0)
    for index in range(4):
        asked = request(prompt_ids=[5, 6, 20 + index], max_new_tokens=100, draft_tokens="auto", ignore_eos=True)
        one.submit(asked)
    drive(one)
    others = sum(chosen != drafted for chosen, drafted in noted[:-40])
    assert len(noted) > 80
    assert others == 0 if waits else others > 0, "control: without the wait they differ"


@pytest.mark.parametrize("least", [True, False])
def test_other_work_on_the_machine_is_not_taken_for_what_a_round_costs(
    monkeypatch: pytest.MonkeyPatch, least: bool
) -> None:
    """Three of five rounds are disturbed, and drafts never pay. Control: by medians they seem to."""
    if not least:
        monkeypatch.setattr(company, "sorted", lambda found: [statistics.median(found)] * 7, raising=False)
    cheap = CycleCosts((1.0, 1.05, 1.1), (0.05, 0.1), 0.0, 0.0)
    shared = SharedPolicy(lambda together: AutoPolicy(cheap, together=together), lambda answers: cheap)
    disturbed = itertools.cycle([1.0, 3.0, 3.0, 1.0, 3.0])
    widths = [
        play(shared, 4, lambda width: width, lambda width: 16.0 if width else 4.0 * next(disturbed)) for _ in range(600)
    ]
    drafting = sum(width > 0 for width in widths[100:])
    assert drafting < 15 if least else drafting > 100
