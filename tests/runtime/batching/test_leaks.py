"""Nothing is left of requests that are over: objects are counted, and memory is looked at."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from typing import Any

import numpy as np
import psutil
import pytest
from greenlet import greenlet

from mtp_runtime import Model
from mtp_runtime.batching.calls import SlotProxy
from mtp_runtime.batching.lanes import Lane, SlotRun
from mtp_runtime.batching.prefixes import Place
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.tasks import Task
from mtp_runtime.batching.tickets import Failed, Ticket
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.loop import Generation
from tests.runtime.batching.parts import Heard, alone, drive, request, said, scheduler

KINDS = (Task, Lane, SlotRun, SlotProxy, Generation, Ticket, Place, Heard, greenlet)
BUDGET = 1 << 18


def living() -> Counter[str]:
    """How many objects there are of each kind."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)


def tiny(rng: np.random.Generator) -> Any:
    """A request of a few tokens; some fail, which a lookup's drafts of length 3 say."""
    depth = int(rng.integers(0, 4))
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1} if rng.integers(0, 4) == 0 else {}
    if depth:
        options["drafter"] = ["mtp", "ngram", "mtp+ngram"][int(rng.integers(0, 3))]
    prompt = rng.integers(0, 60, int(rng.integers(1, 20))).tolist()
    if rng.integers(0, 20) == 0:
        prompt[0] = 63
    return request(prompt_ids=prompt, max_new_tokens=int(rng.integers(0, 4)), draft_tokens=depth, **options)


def many(model: Model, one: Scheduler, count: int, seed: int) -> Counter[str]:
    """Submit and run so many requests, some of which are given up or preempted; how they ended."""
    rng, ends = np.random.default_rng(seed), Counter[str]()
    for _ in range(count):
        heard = Heard()
        heard.then = lambda told: ends.update(
            [type(told).__name__ if isinstance(told, Failed) else getattr(told, "finish_reason", "")]
        )
        ticket = one.submit(tiny(rng), listener=heard, priority=int(rng.integers(0, 2)))
        for _ in range(int(rng.integers(0, 3))):
            one.step()
        if rng.integers(0, 8) == 0:
            ticket.cancel()
        assert one.prefixes.nbytes <= BUDGET
    drive(one)
    return ends


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin with the token 63 fail in their first run, and lookups now and then."""
    right, wrong_rows = Generation.prefill, NgramDrafter.propose

    def prefill(self: Generation) -> Any:
        if self.prompt[0] == 63:
            raise MemoryError("no room")
        return right(self)

    def propose(self: NgramDrafter, draft_tokens: int) -> list[int]:
        if self._tokens[-1] % 16 == 0:
            raise ValueError("broken")
        return wrong_rows(self, draft_tokens)

    # Whoever collects records of failures keeps their frames, and all that is in them.
    monkeypatch.setattr(logging.getLogger("mtp_runtime.batching.telling"), "disabled", True)
    monkeypatch.setattr(Generation, "prefill", prefill)
    monkeypatch.setattr(NgramDrafter, "propose", propose)


def leaks(model: Model, count: int) -> None:
    one = scheduler(model, prefix_bytes=BUDGET, max_queue=count)
    many(model, one, count // 2, seed=0)
    before, memory = living(), psutil.Process().memory_info().rss
    ends = many(model, one, count, seed=1)
    after, grown = living(), psutil.Process().memory_info().rss - memory
    assert min(ends[kind] for kind in ("length", "cancelled", "Failed")) > count // 100
    # Texts that are kept come and go, within their budget.
    for kept in (before, after):
        assert kept.pop("Place", 0) < 500
    assert after == before
    assert grown < 5 << 20
    assert (one.running, one.queued, one._rounds.tasks) == (0, 0, [])
    wanted = request(prompt_ids=[5, 6, 20], max_new_tokens=9, draft_tokens=3)
    last = Heard()
    one.submit(wanted, listener=last)
    drive(one)
    assert [said(last.finished)] == alone(model, wanted)


@pytest.mark.usefixtures("failing")
def test_five_hundred_requests_leave_nothing(hybrid: Model) -> None:
    leaks(hybrid, 500)


@pytest.mark.slow
@pytest.mark.usefixtures("failing")
def test_ten_thousand_requests_leave_nothing(hybrid: Model) -> None:
    leaks(hybrid, 10_000)


@pytest.mark.usefixtures("failing")
def test_control_a_task_that_is_kept_is_counted(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Task] = []
    right = Scheduler._ended

    def wrong(self: Scheduler, task: Task) -> None:
        kept.append(task)
        right(self, task)

    monkeypatch.setattr(Scheduler, "_ended", wrong)
    with pytest.raises(AssertionError):
        leaks(hybrid, 100)
    assert kept
