"""A request says the same alone and among any others: tokens, text, reasons, scores, accepted drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.engine import Floats, Ids
from mtp_engines.errors import MtpError
from mtp_runtime import Model, load
from mtp_runtime.batching.calls import SlotProxy
from mtp_runtime.batching.watch import Busy, Watch
from mtp_runtime.request import Request
from tests.fixtures.checkpoints import partial_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import (
    EOS,
    FAMILIES,
    LENGTH,
    PIECES,
    alone,
    drive,
    is_exact,
    mixed,
    request,
    scheduler,
    staggered,
    told_in,
)
from tests.support import build_bundle, refused


def asked_of(name: str, model: Model, count: int, seed: int) -> list[Request]:
    """Mixed requests that a family can serve."""
    most, size = model.manifest.limits.max_draft_tokens, model.manifest.model.vocab_size
    text = name in ("hybrid", "full", "torch")
    return mixed(count, seed=seed, size=size, most=most, text=text, exact=is_exact(model))


class Widths(Watch):
    """How many answers shared each verify."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def round(self, widths: Sequence[int], scheduler: Busy) -> None:
        self.counts[len(widths)] += 1


@pytest.mark.parametrize(
    ("name", "prefix_bytes"), [*((name, size) for name in FAMILIES for size in (0, 1 << 24)), ("torch", 1 << 24)]
)
def test_mixed_requests_say_together_what_they_say_alone(name: str, prefix_bytes: int, families: Families) -> None:
    model, widths = families(name), Widths()
    requests = asked_of(name, model, 9 if name == "torch" else 24, seed=1)
    tickets = staggered(scheduler(model, widths, prefix_bytes=prefix_bytes), requests)
    reasons: set[str] = set()
    accepted = 0
    for one, ticket in zip(requests, tickets, strict=True):
        finished = ticket.results()
        reasons |= {end.finish_reason for end in finished}
        accepted += sum(end.stats.accepted for end in finished)
        assert told_in(ticket) == alone(model, one), one
        if name == "torch":
            whole = [end.token_ids for end in model.complete_all(one)]
            assert [end.token_ids for end in finished] == whole, "a backend's own cycles say the same"
    assert set(widths.counts) >= {1, 2, 3, 4}, "every width of a batch occurs"
    assert accepted > 10
    if name == "hybrid":
        assert reasons == {"length", "eos", "stop"}


def test_the_order_of_arrival_changes_nothing(hybrid: Model) -> None:
    requests = asked_of("hybrid", hybrid, 10, seed=2)
    expected = [alone(hybrid, one) for one in requests]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(requests))
        gaps = rng.integers(0, 4, len(requests)).tolist()
        tickets = staggered(scheduler(hybrid), [requests[index] for index in order], gaps.__getitem__)
        assert [told_in(ticket) for ticket in tickets] == [expected[index] for index in order]


def test_the_context_to_its_last_row_beside_others(hybrid: Model) -> None:
    """Rows that pad a neighbour's verify lie behind the context, and leave it alone."""
    full = [
        request(prompt_ids=[7, 9] * half, max_new_tokens=99, draft_tokens=k, ignore_eos=True)
        for half, k in ((62, 4), (60, 0), (63, 1))
    ]
    requests = [*full, request(prompt_ids=[5, 6, 20], max_new_tokens=40, draft_tokens=4, ignore_eos=True), *full]
    tickets = staggered(scheduler(hybrid), requests, lambda index: 0)
    for one, ticket in zip(requests, tickets, strict=True):
        (answer,) = told_in(ticket)
        assert [answer] == alone(hybrid, one)
        if one in full:
            assert len(answer[0]) + answer[3] == LENGTH


def test_a_burst_then_a_single_request(hybrid: Model) -> None:
    """With ids of its own for each, so that an answer to an earlier prompt would show."""
    one = scheduler(hybrid)
    for repeat in range(5):
        same = request(prompt_ids=[3 * repeat + 1, 3], max_new_tokens=9, draft_tokens=3, ignore_eos=True)
        tickets = [one.submit(same) for _ in range(8)]
        for index in (1, 6):
            one.step()
            tickets[index].cancel()
        drive(one)
        single = request(prompt_ids=[60 - repeat], max_new_tokens=9, draft_tokens=2, ignore_eos=True)
        last = one.submit(single)
        drive(one)
        assert told_in(last) == alone(hybrid, single)
        for index, ticket in enumerate(tickets):
            if index not in (1, 6):
                assert told_in(ticket) == alone(hybrid, same)


def test_a_draft_model_beside_other_drafters(hybrid: Model, tmp_path: Path) -> None:
    checkpoint = partial_checkpoint(tmp_path / "checkpoint", seed=0, noise=0.05, eos=EOS)
    write_tokenizer(checkpoint, tinytext_tokenizer(PIECES))
    draft = build_bundle(checkpoint, tmp_path / "draft", max_model_len=LENGTH)
    model = load(hybrid.bundle.directory, threads=1, draft_model=draft)
    requests = [
        request(prompt_ids=[5 + index, 6, 20], max_new_tokens=20, draft_tokens=k, drafter=drafter, **options)
        for index, (k, drafter, options) in enumerate(
            [
                (3, "draft-model", {}),
                (3, "mtp", {}),
                (4, "draft-model+ngram", {"temperature": 0.8, "seed": 1}),
                (2, "draft-model", {"draft_confidence": 0.3}),
                (2, "ngram", {}),
                (3, "draft-model", {"temperature": 1.0, "seed": 5, "acceptor": "rejection"}),
            ]
        )
    ]
    tickets = staggered(scheduler(model, prefix_bytes=1 << 24), requests)
    assert [told_in(ticket) for ticket in tickets] == [alone(model, one) for one in requests]


def test_a_tree_is_refused_since_it_takes_several_slots(hybrid: Model) -> None:
    with refused("draft_branches is 1", "a tree takes several slots", "mtp-run generate"):
        scheduler(hybrid).submit(request(prompt_ids=[1], draft_tokens=3, draft_branches=1))


# Controls: a fault that the same comparison has to catch.


def differs(model: Model, count: int = 16) -> bool:
    """Whether anything is said otherwise together, or breaks."""
    requests = asked_of("hybrid", model, count, seed=1)
    expected = [alone(model, one) for one in requests]
    for one, truth in zip(staggered(scheduler(model), requests), expected, strict=True):
        try:
            if told_in(one) != truth:
                return True
        except (MtpError, RuntimeError):
            return True
    return False


def _no_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotProxy, "reset", lambda self: None)


def _shifted_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuSequences.commit
    monkeypatch.setattr(CpuSequences, "commit", lambda self, rows: right(self, np.roll(rows, 1)))


def _committed_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuSequences.commit
    monkeypatch.setattr(CpuSequences, "commit", lambda self, rows: right(self, np.maximum(rows, 1)))


def _rows_of_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuSequences.draft

    def wrong(self: CpuSequences, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, **options: Any) -> Ids:
        return right(self, tokens, np.roll(hidden, 1, axis=0), rows, draft_tokens, **options)

    monkeypatch.setattr(CpuSequences, "draft", wrong)


@pytest.mark.parametrize("fault", [_no_reset, _shifted_commits, _committed_gaps, _rows_of_the_neighbour])
def test_control_a_leak_between_slots_is_seen(hybrid: Model, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differs(hybrid)
    fault(monkeypatch)
    assert differs(hybrid)
