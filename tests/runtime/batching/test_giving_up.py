"""Requests that are given up, too late, or refused; and the end of a scheduler."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mtp_runtime import Finished, Model
from mtp_runtime.batching.scheduler import BatchOptions, ClosedError, QueueFullError, Scheduler
from mtp_runtime.batching.tickets import Failed, Told
from mtp_runtime.request import Request
from tests.runtime.batching.parts import SLOTS, Heard, alone, drive, mixed, request, said, scheduler, told_in
from tests.support import refused

# Umlauts of two tokens each, the second of which makes the character.
HALVES = {"regex": "ä{40}", "draft_tokens": 3, "drafter": "mtp+ngram"}


def long(first: int = 5, draft_tokens: int = 3, **options: Any) -> Request:
    prompt = options.pop("prompt_ids", [first, 6, 20])
    return request(prompt_ids=prompt, max_new_tokens=60, draft_tokens=draft_tokens, ignore_eos=True, **options)


@pytest.mark.parametrize("verify", ["rows", "step"])
def test_a_slot_is_free_one_round_after_its_request_was_given_up(hybrid: Model, verify: str) -> None:
    """After every round of an answer, in its prompt, too; the request that waited takes its slot, the other goes on."""
    wanted, other = long(9), long(7, 2)
    expected = alone(hybrid, wanted) + alone(hybrid, other)
    given_up = long(prompt_ids=[*range(40)], verify=verify)
    for rounds in range(14):
        one = scheduler(hybrid, slots=2)
        beside, heard = one.submit(other), Heard()
        victim, waiting = one.submit(given_up, listener=heard), one.submit(wanted)
        for _ in range(rounds + 1):
            one.step()
        assert (one.running, one.queued) == (2, 1)
        victim.cancel()
        victim.cancel()
        one.step()
        assert (one.running, one.queued) == (2, 0)
        assert heard.finished.finish_reason == "cancelled"
        assert tuple(heard.ids) == heard.finished.token_ids
        drive(one)
        assert told_in(waiting) + told_in(beside) == expected
        assert len(heard.ends) == 1


def test_the_text_of_an_answer_that_was_given_up_has_whole_characters_only(hybrid: Model) -> None:
    whole = hybrid.complete(request(prompt_ids=[5], max_new_tokens=60, **HALVES)).text
    assert whole.startswith("ä" * 25)
    odd = 0
    for rounds in range(1, 30):
        one, heard = scheduler(hybrid), Heard()
        ticket = one.submit(
            request(prompt_ids=[5], max_new_tokens=60, **{**HALVES, "draft_tokens": rounds % 4 or 4}), listener=heard
        )
        for _ in range(rounds):
            one.step()
        ticket.cancel()
        drive(one)
        finished = heard.finished
        assert finished.text == heard.text == "ä" * (len(finished.token_ids) // 2)
        odd += len(finished.token_ids) % 2 and finished.finish_reason == "cancelled"
    assert odd > 3, "control: some were given up inside a character"


def test_requests_that_are_given_up_while_they_wait(hybrid: Model) -> None:
    one = scheduler(hybrid, slots=1)
    first, heard = one.submit(long()), Heard()
    waiting = one.submit(long(n=2, temperature=1.0, seed=4), listener=heard)
    last = one.submit(long(8))
    one.step()
    waiting.cancel()
    one.step()
    assert one.queued == 1
    assert [(end.finish_reason, end.token_ids) for end in heard.ends if isinstance(end, Finished)] == [
        ("cancelled", ())
    ] * 2
    assert [end.completion.index for end in heard.ends if isinstance(end, Finished)] == [0, 1]
    drive(one)
    assert told_in(first) + told_in(last) == alone(hybrid, long()) + alone(hybrid, long(8))


def test_a_request_that_is_too_late_is_ended_where_it_is(hybrid: Model) -> None:
    now = 0.0
    one = Scheduler(hybrid, BatchOptions(slots=1, prefix_bytes=0), clock=lambda: now)
    runs, waits, other = (one.submit(long(first), timeout=limit) for first, limit in ((5, 2.0), (6, 1.0), (7, None)))
    one.step()
    now = 1.0
    one.step()
    (late,) = waits.results()
    assert (late.finish_reason, late.token_ids) == ("timeout", ())
    assert one.running == 1
    now = 2.0
    one.step()
    (late,) = runs.results()
    truth = hybrid.complete(long(5)).token_ids
    assert late.finish_reason == "timeout"
    assert 0 < len(late.token_ids) < 60
    assert late.token_ids == truth[: len(late.token_ids)]
    drive(one)
    assert told_in(other) == alone(hybrid, long(7))
    for limit in (0.0, -1.0, float("nan")):
        with refused(f"the time limit is {limit} seconds", "more than 0"):
            one.submit(long(), timeout=limit)


def test_a_listener_may_give_up_submit_and_fail(hybrid: Model, caplog: pytest.LogCaptureFixture) -> None:
    """From inside an event; whoever else runs says what it says alone."""
    one = scheduler(hybrid)
    others = [one.submit(long(first, 2)) for first in (7, 8)]
    follower: list[Any] = []

    def follow(told: Told) -> None:
        if isinstance(told, Finished):
            follower.append(one.submit(long(11)))

    gives_up, fails = Heard(), Heard()
    ticket = one.submit(long(9), listener=gives_up)
    gives_up.then = lambda told: (ticket.cancel(), follow(told))[0]

    def fail(told: Told) -> None:
        raise ValueError("no more")

    fails.then = fail
    one.submit(long(10), listener=fails)
    drive(one)
    assert gives_up.finished.finish_reason == "cancelled"
    assert len(gives_up.ids) <= 5
    assert fails.finished.finish_reason == "cancelled"
    assert [record.getMessage() for record in caplog.records] == ["a listener failed; its request is given up"] * 2
    assert [told_in(other) for other in others] == [alone(hybrid, long(first, 2)) for first in (7, 8)]
    assert told_in(follower[0]) == alone(hybrid, long(11))


def test_a_full_queue_refuses_and_says_so(hybrid: Model) -> None:
    one = scheduler(hybrid, slots=1, max_queue=2)
    for _ in range(3):
        one.submit(long())
    with refused("3 answers wait already", "at most 2 may", "try again later", error=QueueFullError):
        one.submit(long())
    one.step()
    assert (one.running, one.queued) == (1, 2)
    with pytest.raises(QueueFullError):
        one.submit(long())
    with refused("asks for 4 answers", "at most 3 may run and wait"):
        one.submit(long(n=4, temperature=1.0))
    drive(one)
    one.submit(long(n=3, temperature=1.0))
    drive(one)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"slots": 0}, ("slots is 0", "1 or more")),
        ({"slots": SLOTS + 1}, (str(SLOTS + 1),)),
        ({"max_queue": -1}, ("max_queue is -1", "0 or more")),
        ({"prefill_budget": 0}, ("prefill_budget is 0", "1 or more")),
        ({"prefix_bytes": -5}, ("prefix_bytes is -5", "0 or more")),
    ],
)
def test_numbers_out_of_range_are_refused(hybrid: Model, options: dict[str, int], parts: tuple[str, ...]) -> None:
    with refused(*parts):
        scheduler(hybrid, **options)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("threaded", [True, False])
def test_closing_with_requests_that_run_and_wait(hybrid: Model, drain: bool, threaded: bool) -> None:
    one = scheduler(hybrid, slots=2)
    tickets = [one.submit(long(first, 1)) for first in range(4, 10)]
    if threaded:
        one.start()
        next(iter(tickets[0]))
    else:
        one.step()
    one.close(drain=drain)
    with refused("is shutting down", error=ClosedError):
        one.submit(long())
    if not threaded:
        drive(one)
    assert (one.running, one.queued) == (0, 0)
    # The first event of the first one is taken already, its end is not.
    ends = [ticket.results()[0] for ticket in tickets]
    if drain:
        assert [[said(end)] for end in ends] == [alone(hybrid, long(first, 1)) for first in range(4, 10)]
    else:
        assert {end.finish_reason for end in ends[-2:]} == {"cancelled"}
        assert {end.finish_reason for end in ends} <= {"cancelled", "length"}
    one.close()


def test_eight_threads_submit_at_once_while_others_run(hybrid: Model) -> None:
    requests = mixed(32, seed=9, size=64)
    expected = [alone(hybrid, one) for one in requests]
    one = scheduler(hybrid, prefix_bytes=1 << 22)
    one.start()
    got: dict[int, Any] = {}

    def send(start: int) -> None:
        for index in range(start, len(requests), 8):
            got[index] = told_in(one.submit(requests[index]))

    threads = [threading.Thread(target=send, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    assert [got[index] for index in range(len(requests))] == expected


def test_a_scheduler_whose_thread_fails_leaves_nobody_waiting(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, heard = scheduler(hybrid, slots=1), Heard()
    one.submit(long(), listener=heard)
    ticket = one.submit(long())
    rounds = 0

    def broken() -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise AssertionError("a bug")
        return right()

    right = one._rounds.run
    monkeypatch.setattr(one._rounds, "run", broken)
    one.start()
    with pytest.raises(RuntimeError, match="the scheduler failed: AssertionError"):
        ticket.results()
    assert isinstance(heard.ends[0], Failed)
    with pytest.raises(ClosedError):
        one.submit(long())
    one.close()
    assert "the scheduler failed" in caplog.text
