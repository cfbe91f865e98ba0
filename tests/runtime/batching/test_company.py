"""`auto` of answers that run together: one K for all of a round, learnt from all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mtp_engines.costs import CycleCosts
from mtp_runtime import Model, auto
from mtp_runtime.batching.company import CompanyPolicy, SharedPolicy
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.policy import AutoPolicy, FixedPolicy
from tests.runtime.batching.parts import drive, request, scheduler


class Inner(AutoPolicy):
    """Counts what it is asked and told."""

    def __init__(self) -> None:
        self.choices = self.aged = 0
        self.seen: list[int] = []
        self.ends: list[bool] = []

    def choose(self, number: int) -> int:
        self.choices += 1
        return self.choices

    def learn(self, drafted: int, accepted: int) -> None:
        self.seen.append(drafted)

    def forget(self) -> None:
        self.aged += 1

    def conclude(self, succeeded: bool) -> None:
        self.ends.append(succeeded)


def test_a_choice_holds_until_all_have_shown_what_it_brought() -> None:
    inner = Inner()
    shared = SharedPolicy(inner, lambda: 3)
    for cycle in (1, 2, 3):
        assert [shared.choose(0) for _ in range(3)] == [cycle] * 3
        for _ in range(3):
            shared.observe(cycle, 0)
    assert (inner.choices, inner.seen) == (3, [1, 1, 1, 2, 2, 2, 3, 3, 3])
    assert (inner.aged, inner.ends) == (3, [False] * 3), "a round is a cycle"


def test_evidence_in_company_lasts_as_many_rounds_as_alone() -> None:
    """Where plain decoding is best though most drafts are kept, few rounds are spent on looking again."""
    costs = CycleCosts((0.53, 0.66, 0.74), (0.29, 0.38), 0.0, 0.46)
    generator = random.Random(1)
    spent = {}
    for fault in (False, True):
        inner = AutoPolicy(costs)
        shared = SharedPolicy(inner, lambda: 4)
        drafting = 0
        for _ in range(400):
            width = shared.choose(0)
            drafting += width > 0
            for _ in range(4):
                kept = next((place for place in range(width) if generator.random() > 0.72), width)
                shared.observe(width, kept)
                if fault:
                    inner.forget()
        spent[fault] = drafting
    assert spent[False] < 60
    assert spent[True] > 1.5 * spent[False], "control: evidence that ages with every answer"


def test_alone_an_answer_goes_by_its_own_policy() -> None:
    inner, size = Inner(), [1]
    policy = CompanyPolicy(FixedPolicy(7), SharedPolicy(inner, lambda: size[0]), lambda: size[0])
    assert policy.choose(0) == 7
    policy.observe(7, 7)
    size[0] = 2
    assert policy.choose(1) == 1
    policy.observe(1, 0)
    assert inner.seen == [1]


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
