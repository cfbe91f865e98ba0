"""Prompts are read beside running answers, a chunk a round; no answer waits longer than that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.rounds import Rounds
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.watch import Watch
from mtp_runtime.request import Request
from tests.runtime.batching.parts import CHUNK, Heard, alone, drive, request, said, scheduler, told_in

ROWS = 96


def long(first: int, draft_tokens: int = 0) -> Request:
    """A prompt of six chunks."""
    prompt = [(first + 7 * index) % 60 for index in range(ROWS)]
    return request(prompt_ids=prompt, max_new_tokens=4, draft_tokens=draft_tokens, ignore_eos=True)


class Rows(Watch):
    """Rows of prompts, and head rows of texts that were read before, in each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.now = [], 0
        right = Rounds._alone

        def alone(rounds: Rounds, task: object) -> None:
            call = task.call  # type: ignore[attr-defined]
            self.now += call.rows if rounds._is_prompt(task) else 0  # type: ignore[arg-type]
            right(rounds, task)  # type: ignore[arg-type]

        monkeypatch.setattr(Rounds, "_alone", alone)

    read: list[int]

    def round(self, widths: Sequence[int], scheduler: Scheduler) -> None:
        self.read.append(self.now)
        self.now = 0


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_round_reads_no_more_of_prompts_than_its_budget(
    hybrid: Model, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows(monkeypatch)
    one = scheduler(hybrid, rows, prefill_budget=chunks * CHUNK + 3)
    tickets = [one.submit(long(first)) for first in (1, 2, 3)]
    drive(one)
    assert max(rows.read) == chunks * CHUNK
    assert sum(rows.read) == 3 * ROWS
    assert [told_in(ticket) for ticket in tickets] == [alone(hybrid, long(first)) for first in (1, 2, 3)]


def test_a_budget_below_a_chunk_still_reads_one(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch)
    one = scheduler(hybrid, rows, prefill_budget=1)
    one.submit(long(1))
    one.submit(long(2))
    drive(one)
    assert max(rows.read) == CHUNK
    assert rows.read.count(CHUNK) == 2 * ROWS // CHUNK


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 24])
def test_a_running_answer_has_a_cycle_in_every_round(hybrid: Model, draft_tokens: int, prefix_bytes: int) -> None:
    """While long prompts come, are read, and are read again from what is kept."""
    one, heard = scheduler(hybrid, prefix_bytes=prefix_bytes), Heard()
    running = request(prompt_ids=[5, 6, 20], max_new_tokens=100, draft_tokens=draft_tokens, ignore_eos=True)
    one.submit(running, listener=heard)
    one.step()
    rounds = 0
    while one.running:
        if rounds % 9 == 0:
            one.submit(long(1 + rounds // 9 % 2, draft_tokens), listener=lambda told: None)
        before = len(heard.ids)
        one.step()
        rounds += 1
        if heard.ends:
            break
        assert len(heard.ids) > before
    assert rounds > 20
    drive(one)
    assert [said(heard.finished)] == alone(hybrid, running)


def test_the_head_of_a_text_that_was_read_before_is_fed_a_chunk_a_round(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scheduler(hybrid, prefix_bytes=1 << 24)
    first = one.submit(long(1, 3))
    drive(one)
    fed: list[int] = []
    right = Rounds._consume

    def consume(rounds: Rounds, task: object, call: object, rows: int) -> None:
        fed[-1] += rows
        right(rounds, task, call, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Rounds, "_consume", consume)
    again = one.submit(long(1, 3))
    while one.running or one.queued:
        fed.append(0)
        one.step()
    assert max(fed) <= CHUNK
    assert fed.count(CHUNK) == ROWS // CHUNK - 1
    (finished,) = again.results()
    assert finished.cached_tokens == ROWS - CHUNK
    assert [said(finished)] == told_in(first) == alone(hybrid, long(1, 3))
