"""Who goes first, who has to leave, and that whoever left says the same in the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.feeding import LateDrafter
from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.batching.watch import Watch
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import (
    FAMILIES,
    Heard,
    alone,
    drive,
    is_exact,
    mixed,
    request,
    said,
    scheduler,
    told_in,
)

LONG = request(prompt_ids=[5, 6, 20] * 7, max_new_tokens=30, draft_tokens=3, ignore_eos=True)
SHORT = request(id="short", prompt_ids=[9], max_new_tokens=2, draft_tokens=0, ignore_eos=True)


class Log(Watch):
    """Who entered and left, by the ids of the requests."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.left: list[Any] = []

    def entered(self, ticket: Ticket) -> None:
        self.entries.append(ticket.request.id)

    def preempted(self, ticket: Ticket) -> None:
        self.left.append(ticket.request.id)


def named(name: str, **values: Any) -> Any:
    return request(id=name, prompt_ids=[7, 8], max_new_tokens=4, draft_tokens=0, ignore_eos=True, **values)


@pytest.mark.parametrize(
    ("name", "prefix_bytes"), [*((name, size) for name in FAMILIES for size in (0, 1 << 24)), ("torch", 1 << 24)]
)
def test_whoever_had_to_leave_says_the_same(name: str, prefix_bytes: int, families: Families) -> None:
    """One slot, taken from each request again and again, in its prompt, in its cycles, and at its end."""
    model = families(name)
    size, most = model.manifest.model.vocab_size, model.manifest.limits.max_draft_tokens
    count = {"hybrid": 16, "torch": 5}.get(name, 8)
    text = name in ("hybrid", "full")
    requests = mixed(count, seed=5, size=size, most=most, text=text, exact=is_exact(model))
    expected, left = [alone(model, one) for one in requests], 0
    for gap in (1, 3, 4) if name == "hybrid" else (3,):
        log = Log()
        one = scheduler(model, log, slots=1, prefix_bytes=prefix_bytes)
        for asked, truth in zip(requests, expected, strict=True):
            heard, inside, gone = Heard(), 0, len(log.left)
            one.submit(asked, listener=heard)
            while one.step():
                inside += log.entries[-1] != SHORT.id
                if inside >= gap and len(log.left) < gone + 10:
                    one.submit(SHORT, priority=1, listener=lambda told: None)
                    inside = 0
            assert [said(end) for end in sorted(heard.ends, key=lambda end: end.completion.index)] == truth, asked
            if asked.n == 1:
                assert tuple(heard.ids) == heard.finished.token_ids, "nothing is told twice or left out"
                assert heard.text == heard.finished.text
        left += len(log.left)
    assert left > 10, "control: they did have to leave"


def order_of(model: Model, priorities: list[int]) -> list[Any]:
    """In which order requests of these priorities get the one slot."""
    log = Log()
    one = scheduler(model, log, slots=1)
    for index, priority in enumerate(priorities):
        one.submit(named(str(index)), priority=priority)
    drive(one)
    return log.entries


def test_the_most_urgent_goes_first_and_equal_ones_in_their_order_of_arrival(hybrid: Model) -> None:
    assert order_of(hybrid, [0, 0, 0, 0]) == ["0", "1", "2", "3"]
    assert order_of(hybrid, [0, 2, 1, 2, 0]) == ["1", "3", "2", "0", "4"]
    assert order_of(hybrid, [-1, 0, -1]) == ["1", "0", "2"]


def test_only_a_higher_priority_takes_a_slot_and_it_takes_the_least_urgent_one(hybrid: Model) -> None:
    log = Log()
    one = scheduler(hybrid, log, slots=2)
    for name, priority in (("first", 1), ("low", 0), ("second", 1), ("late", 0)):
        one.submit(named(name), priority=priority)
    one.step()
    assert log.entries == ["first", "second"]
    one.submit(named("third"), priority=1)
    one.step()
    assert (log.entries, log.left) == (["first", "second"], []), "an equal one waits"
    one.submit(named("high"), priority=2)
    one.step()
    assert (log.entries[2:], log.left) == (["high"], ["second"])
    drive(one)
    # Whoever had to leave comes before those of its priority that came later.
    assert log.entries[3:] == ["second", "third", "low", "late"]


def test_a_low_priority_gets_its_turn_when_higher_ones_pause(hybrid: Model) -> None:
    """It is driven out again and again, and goes on from what it had said."""
    one = scheduler(hybrid, slots=1, prefix_bytes=1 << 24)
    heard = Heard()
    one.submit(LONG, listener=heard)
    said_so_far = []
    for _ in range(12):
        for _ in range(5):
            one.step()
        said_so_far.append(len(heard.ids))
        one.submit(SHORT, priority=1, listener=lambda told: None)
    assert said_so_far == sorted(said_so_far)
    assert said_so_far[-1] > said_so_far[0]
    drive(one)
    assert [said(heard.finished)] == alone(hybrid, LONG)


def test_an_answer_that_scores_its_prompt_stays_until_that_is_done(hybrid: Model) -> None:
    log = Log()
    one = scheduler(hybrid, log, slots=1)
    scored = request(id="scored", prompt_ids=[5, 6, 20] * 20, max_new_tokens=5, draft_tokens=0, prompt_logprobs=0)
    ticket = one.submit(scored)
    for _ in range(2):
        one.step()
        one.submit(named("high"), priority=1)
    one.step()
    assert log.left == []
    drive(one)
    assert log.left == ["scored"]
    assert told_in(ticket) == alone(hybrid, scored)


def test_what_it_read_itself_is_not_counted_as_cached(hybrid: Model) -> None:
    one = scheduler(hybrid, slots=1, prefix_bytes=1 << 24)
    heard = Heard()
    one.submit(request(prompt_ids=[5, 6, 20] * 20, max_new_tokens=5, draft_tokens=0), listener=heard)
    for _ in range(3):
        one.step()
    assert not heard.ids
    one.submit(SHORT, priority=1)
    drive(one)
    assert heard.finished.cached_tokens == 0
    assert one.prefixes.hits >= 16, "control: it did go on from its own chunk"


def test_control_a_head_that_is_fed_inside_a_cycle_says_tokens_twice(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeding waits; if that happens when an end knows tokens that were not emitted, leaving there doubles its text."""
    text = request(
        prompt_ids=[5, 6, 20], max_new_tokens=40, draft_tokens=4, ignore_eos=True, drafter="mtp+ngram", stop="never"
    )
    truth = alone(hybrid, text)

    def doubled() -> bool:
        wrong = False
        for rounds in range(4, 20):
            one = scheduler(hybrid, slots=1)
            ticket = one.submit(text)
            for _ in range(rounds):
                one.step()
            one.submit(SHORT, priority=1)
            drive(one)
            wrong |= told_in(ticket) != truth
        return wrong

    assert not doubled()
    monkeypatch.setattr(LateDrafter, "observe", lambda self, *rows: self._inner.observe(*rows))
    monkeypatch.setattr(hybrid.engine, "limits", replace(hybrid.engine.limits, prefill_chunk=4))
    assert doubled()
