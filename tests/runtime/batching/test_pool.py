"""Slots that share the rows of their caches: pages come and go, whoever is least urgent makes room, no token changes.

On the runner of the GPUs, by PyTorch on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.gpu.caches import CachePages, PageTable
from mtp_engines.backends.gpu.pages import NO_PAGE, PagePool
from mtp_engines.backends.gpu.parts import Part
from mtp_engines.backends.gpu.state import DeltaStates
from mtp_engines.backends.gpu.window import DeviceWindow
from mtp_engines.engine import Ids, PooledSequences
from mtp_engines.errors import ContractError, MtpError, RequestError
from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.request import Request
from tests.gpu.parts import small_pages
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import Heard, alone, drive, request, scheduler, staggered, told_in
from tests.support import refused

ROWS = 84
"""Of 4 slots, whose texts have up to 45 rows each."""
LENGTHS = ((3, 22), (17, 20), (9, 24), (21, 24), (5, 16), (2, 30))


@pytest.fixture(scope="module")
def paged(families: Families) -> Model:
    return families("torch")


@pytest.fixture(autouse=True)
def pages_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that something is taken in nearly every round."""
    small_pages(monkeypatch)


def texts() -> list[Request]:
    """Requests of many lengths, each with a K of its own, the last ones drawn."""
    rng = np.random.default_rng(7)
    drawn: list[dict[str, Any]] = [{}] * 4 + [{"temperature": 0.9, "seed": 3}, {"drafter": "ngram"}]
    return [
        request(
            prompt_ids=rng.integers(0, 60, rows).tolist(),
            max_new_tokens=limit,
            draft_tokens=[3, 0, 2, 4, 1, 2][index],
            ignore_eos=True,
            **drawn[index],
        )
        for index, (rows, limit) in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def truth(paged: Model) -> list[Any]:
    """What each says alone."""
    return [alone(paged, one) for one in texts()]


class Pages(Watch):
    """Counts who had to leave, and looks at the pages after every round."""

    def __init__(self) -> None:
        self.left, self.least = 0, 10_000

    def preempted(self, ticket: Any) -> None:
        self.left += 1

    def round(self, widths: Any, scheduler: Busy) -> None:
        pool = pool_of(scheduler)
        held = pool.table[pool.table != NO_PAGE].tolist()
        assert len(held) == len(set(held)), "a page has two owners"
        assert sorted(held + pool._free) == list(range(pool.pages)), "a page is lost"
        taken = {int(row) for row in np.flatnonzero((pool.table != NO_PAGE).any(1))}
        assert taken <= set(scheduler._running), "somebody who left holds pages"  # type: ignore[attr-defined]
        self.least = min(self.least, pool.free)


def pool_of(one: Any) -> PagePool:
    pages = one._slots._device.pages
    assert isinstance(pages, CachePages)
    return pages.table.pool


def differs(model: Model, truth: list[Any]) -> bool:
    """Whether anything is said otherwise in a pool that is too small for all, or breaks."""
    tickets = staggered(scheduler(model, cache_rows=ROWS), texts())
    for ticket, wanted in zip(tickets, truth, strict=True):
        try:
            if told_in(ticket) != wanted:
                return True
        except (MtpError, RuntimeError):
            return True
    return False


def test_a_pool_that_is_too_small_for_all_changes_no_token(paged: Model, truth: list[Any]) -> None:
    """Without places of prefixes, so that whoever left reads all of its text again; below, with them."""
    pages = Pages()
    one = scheduler(paged, pages, cache_rows=ROWS)
    assert pool_of(one).pages == ROWS // 4
    tickets = staggered(one, texts())
    assert [told_in(ticket) for ticket in tickets] == truth
    assert pages.left > 0, "control: nobody had to leave"
    assert pages.least < 3, "control: the pool was never nearly full"
    assert pool_of(one).free == ROWS // 4


def test_a_pool_for_one_lets_all_go_one_after_the_other(paged: Model, truth: list[Any]) -> None:
    """The smallest that is taken: the longest text alone."""
    one = scheduler(paged, Pages(), cache_rows=48, prefix_bytes=1 << 24)
    tickets = staggered(one, texts()[:4], lambda index: 0)
    assert [told_in(ticket) for ticket in tickets] == truth[:4]
    assert pool_of(one).free == 12


def test_a_pool_with_room_for_all_drives_nobody_out(paged: Model, truth: list[Any]) -> None:
    pages = Pages()
    one = scheduler(paged, pages, cache_rows=1 << 20)
    # No more than every slot's whole context.
    assert pool_of(one).pages < 200
    assert [told_in(ticket) for ticket in staggered(one, texts()[:4])] == truth[:4]
    assert pages.left == 0


def test_the_least_urgent_one_leaves(paged: Model) -> None:
    """Though it came first; and a higher priority takes room, not only slots."""
    left: list[Any] = []
    watch = Watch()
    watch.preempted = lambda ticket: left.append(ticket.request.id)  # type: ignore[method-assign]
    one = scheduler(paged, watch, cache_rows=64)
    low, high = (
        request(id=name, prompt_ids=[5, 6, 20] * 7, max_new_tokens=14, draft_tokens=2, ignore_eos=True)
        for name in ("low", "high")
    )
    tickets = [one.submit(low, priority=-1), one.submit(high)]
    one.step()
    assert one.running == 2
    last = request(id="last", prompt_ids=[7] * 30, max_new_tokens=3, draft_tokens=0, ignore_eos=True)
    drive_to = one.submit(last, priority=2)
    one.step()
    assert left[:1] == ["low"]
    drive(one)
    assert [told_in(ticket) for ticket in tickets] == [alone(paged, low), alone(paged, high)]
    assert told_in(drive_to) == alone(paged, last)


def test_one_that_scores_its_prompt_stays_though_it_came_last(paged: Model) -> None:
    """It would score it twice. So the other one leaves, for itself, until the prompt is read."""
    left: list[Any] = []
    watch = Watch()
    watch.preempted = lambda ticket: left.append(ticket.request.id)  # type: ignore[method-assign]
    one = scheduler(paged, watch, cache_rows=92)
    grows = request(id="grows", prompt_ids=[7, 8], max_new_tokens=30, draft_tokens=4, ignore_eos=True)
    scored = request(id="scored", prompt_ids=[5, 6, 20, 7] * 20, max_new_tokens=4, draft_tokens=0, prompt_logprobs=0)
    tickets = [one.submit(grows), one.submit(scored)]
    drive(one)
    assert left[:1] == ["grows"]
    for ticket, asked in zip(tickets, (grows, scored), strict=True):
        (end,), (wanted,) = ticket.results(), paged.complete_all(asked)
        assert end.token_ids == wanted.token_ids
        scores = [[each.logprob for each in found.prompt_logprobs or () if each] for found in (end, wanted)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    # All but the first token of the prompt, once.
    assert len(scores[0]) == 79


def test_pages_are_all_free_after_many_requests(paged: Model) -> None:
    """Finished, cancelled at every point, failed, and never admitted."""
    rng, watch = np.random.default_rng(2), Pages()
    one = scheduler(paged, watch, cache_rows=40, max_queue=99, prefix_bytes=1 << 18)
    ends: list[str] = []
    for index in range(24):
        heard = Heard()
        heard.then = lambda told: ends.append(getattr(told, "finish_reason", ""))
        asked = request(
            prompt_ids=rng.integers(0, 60, int(rng.integers(1, 24))).tolist(),
            max_new_tokens=int(rng.integers(0, 7)),
            draft_tokens=int(rng.integers(0, 5)),
        )
        ticket = one.submit(asked, listener=heard, priority=int(rng.integers(0, 2)))
        for _ in range(int(rng.integers(0, 3))):
            one.step()
        if index % 5 == 0:
            ticket.cancel()
    drive(one)
    assert pool_of(one).free == 10
    assert ends.count("cancelled") > 2
    assert ends.count("length") > 10


def test_an_answer_that_fails_gives_its_pages_back(paged: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    one, right = scheduler(paged, cache_rows=64), DeviceWindow.verify

    def wrong(self: DeviceWindow, tokens: Ids, *rest: Any, **options: Any) -> Any:
        if tokens[0, 0] == 33:
            raise MemoryError("no room")
        return right(self, tokens, *rest, **options)

    monkeypatch.setattr(DeviceWindow, "verify", wrong)
    failing = one.submit(request(prompt_ids=[33] * 20, max_new_tokens=3, draft_tokens=0))
    one.step()
    drive(one)
    with pytest.raises(RuntimeError, match="no room"):
        failing.results()
    assert pool_of(one).free == 16


def test_what_can_never_fit_is_refused_at_once(paged: Model) -> None:
    one = scheduler(paged, cache_rows=40)
    with refused("30 tokens", "may have 11", "40 rows for all", "--cache-rows"):
        one.submit(request(prompt_ids=[1] * 30, max_new_tokens=11, draft_tokens=2))
    last = request(prompt_ids=[1] * 30, max_new_tokens=10, draft_tokens=2, ignore_eos=True)
    ticket = one.submit(last)
    drive(one)
    assert told_in(ticket) == alone(paged, last)


def test_where_slots_share_nothing_a_pool_is_refused(hybrid: Model) -> None:
    with refused("cache_rows is 64", "a cache of its own", "--backend torch"):
        Scheduler(hybrid, BatchOptions(cache_rows=64))
    with refused("cache_rows is 0", "1 or more", error=RequestError):
        BatchOptions(cache_rows=0)


def test_rows_without_room_are_not_kept(paged: Model) -> None:
    """An engine's own guard: what nobody held is refused, not lost."""
    slots: Any = paged.engine.sequences(2, cache_rows=24)
    assert isinstance(slots, PooledSequences)
    assert slots.pool_rows == 24
    first = slots.window(0, 1)
    first.verify(np.array([[1, 2, 3]]), 0)
    with refused("Sequence 0 is to keep 2 rows, and holds 0", error=ContractError):
        first.commit(np.array([2]))
    with refused("Sequence 1 is to keep 16 rows, and holds 0", error=ContractError):
        slots.window(1, 1).verify(np.ones((1, 16), np.int64), 0)
    assert slots.hold(0, 16)
    assert not slots.hold(1, 12)
    slots.verify(np.array([[1, 2, 3], [4, 5, 6]]), 0)
    slots.commit(np.array([2, 0]))
    with refused("Sequence 1 is to keep 2 rows", error=ContractError):
        slots.copy(0, 1)
    saved = slots.save(0)
    slots.release(0)
    assert slots.lengths.tolist() == [0, 0]
    assert slots.hold(1, 12)
    slots.restore(1, [saved])
    assert slots.lengths.tolist() == [0, 2]
    again = slots.save(1)
    assert all(np.array_equal(again.arrays[name], array) for name, array in saved.arrays.items())


# Controls: a fault that the same comparison has to catch.


def _one_page_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagePool.reserve

    def wrong(self: PagePool, sequence: int, rows: int) -> bool:
        changed = right(self, sequence, rows)
        if sequence == 1 and self.held(0):
            self.table[1, 0] = self.table[0, 0]
        return changed

    monkeypatch.setattr(PagePool, "reserve", wrong)


def _one_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DeviceWindow.commit

    def wrong(self: DeviceWindow, rows: Ids) -> None:
        right(self, rows)
        self._device.delta.accepted.add_(1)

    monkeypatch.setattr(DeviceWindow, "commit", wrong)


def _any_set_is_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeltaStates, "agreed", lambda self: int(self._newest[0]))


def _pages_leave_before_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset gives back what was held for the text that begins."""
    right = DeviceWindow.reset

    def wrong(self: DeviceWindow) -> None:
        right(self)
        for sequence in range(len(self.lengths)):
            self._device.pages.release(sequence)

    monkeypatch.setattr(DeviceWindow, "reset", wrong)


def _parts_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "load", lambda self: None)


def _parts_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "store", lambda self: None)


FAULTS = {
    "a page is handed to two slots": _one_page_for_two,
    "one row too many is accepted": _one_row_too_many,
    "a window ignores which set is newest": _any_set_is_newest,
    "what is bound as a copy is not brought up to date before a run": _parts_are_not_loaded,
    "nor after it": _parts_are_not_stored,
    "a reset gives pages back": _pages_leave_before_their_rows,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_of_the_slots_is_seen(
    paged: Model, truth: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    FAULTS[fault](monkeypatch)
    assert differs(paged, truth), f"these tests cannot see that {fault}"


def test_control_pages_that_are_not_given_back_are_counted(paged: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "release", lambda self, sequence: None)
    one = scheduler(paged, cache_rows=64)
    one.submit(request(prompt_ids=[5, 6], max_new_tokens=3, draft_tokens=1))
    drive(one)
    assert pool_of(one).free < 16
