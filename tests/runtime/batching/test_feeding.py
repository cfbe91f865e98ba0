"""Rows that are kept back from a drafter until somebody wants a draft."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_engines.engine import Floats, Ids
from mtp_runtime.batching import feeding
from mtp_runtime.batching.feeding import LateDrafter


class Inner:
    """Notes what it is told and asked."""

    source = "inner"

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[float]]] = []
        self.asked: list[int] = []

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        self.told.append((tokens.tolist(), hidden[:, 0].tolist()))

    def propose(self, draft_tokens: int) -> list[int]:
        self.asked.append(draft_tokens)
        return [7] * draft_tokens


def cycles(late: LateDrafter, first: int, count: int) -> None:
    """Plain cycles of one row each, in memory that is written over."""
    token, hidden = np.zeros(1, np.int64), np.zeros((1, 2), np.float32)
    for number in range(first, first + count):
        assert late.propose(0) == []
        token[:], hidden[:] = number, number / 2
        late.observe(token, hidden)


def test_plain_cycles_leave_the_drafter_alone_and_a_draft_gets_all_rows_at_once() -> None:
    inner = Inner()
    late = LateDrafter(inner, records=False)
    cycles(late, 0, 5)
    assert (inner.told, inner.asked) == ([], [])
    assert late.propose(2) == [7, 7]
    assert inner.told == [([0, 1, 2, 3, 4], [0.0, 0.5, 1.0, 1.5, 2.0])]
    cycles(late, 5, 1)
    late.feed()
    assert inner.told[1:] == [([5], [2.5])]


@pytest.mark.parametrize("bounded", [True, False])
def test_no_more_rows_wait_than_patience_lasts(monkeypatch: pytest.MonkeyPatch, bounded: bool) -> None:
    if not bounded:
        monkeypatch.setattr(feeding, "_PATIENCE", 10**9)
    inner = Inner()
    late = LateDrafter(inner, records=False)
    cycles(late, 0, 200)
    waiting = 200 - sum(len(tokens) for tokens, _ in inner.told)
    assert waiting <= 64 if bounded else waiting == 200, "control: without a bound all of them wait"
    late.propose(1)
    assert [token for tokens, _ in inner.told for token in tokens] == [*range(200)]
