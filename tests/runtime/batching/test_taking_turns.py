"""A backend without slots: the same scheduler lets requests take turns, cycle by cycle."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mtp_engines.backends.options import EngineOptions
from mtp_runtime import Model, load
from mtp_runtime.drafters.ngram import NgramDrafter
from tests.fixtures.checkpoints import partial_checkpoint
from tests.runtime.batching.parts import Heard, alone, drive, request, said, scheduler, staggered, told_in
from tests.support import build_bundle

REQUESTS = [
    request(prompt_ids=[5, 6, 20], max_new_tokens=12, draft_tokens=3),
    request(prompt_ids=[9], max_new_tokens=9, draft_tokens=0),
    request(prompt_ids=[7, 8] * 9, max_new_tokens=12, draft_tokens=2, drafter="ngram"),
    request(prompt_ids=[4, 4, 1], max_new_tokens=12, draft_tokens=2, temperature=0.9, seed=3, n=2),
    request(prompt_ids=[5, 6, 20], max_new_tokens=0, draft_tokens=2),
    request(prompt_ids=[11, 3], max_new_tokens=12, draft_tokens=3, drafter="mtp+ngram", repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def turning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The torch backend on a CPU; `threads` of the options sets PyTorch's for the whole process."""
    before, place = torch.get_num_threads(), tmp_path_factory.mktemp("turning")
    layers = ["linear_attention", "full_attention"]
    partial_checkpoint(place / "checkpoint", layer_types=layers, noise=0.2, head_noise=1.0)
    bundle = build_bundle(place / "checkpoint", place / "bundle", draft_tokens=3, max_batch_size=3)
    yield load(bundle, options=EngineOptions(backend="torch", device="cpu", threads=1))
    torch.set_num_threads(before)


def test_requests_in_turn_say_what_they_say_alone(turning: Model) -> None:
    one = scheduler(turning, prefix_bytes=1 << 20)
    assert not one.batched
    assert [told_in(ticket) for ticket in staggered(one, REQUESTS)] == [alone(turning, each) for each in REQUESTS]
    assert one.prefixes.nbytes == 0


def test_nobody_waits_for_more_than_one_cycle_of_each_other(turning: Model) -> None:
    one, heard = scheduler(turning), [Heard() for _ in range(3)]
    for listener in heard:
        one.submit(REQUESTS[0], listener=listener)
    while one.step():
        counts = [len(listener.all) for listener in heard]
        assert max(counts) - min(counts) <= 1


def test_giving_up_and_failing_drafters(
    turning: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: NgramDrafter, draft_tokens: int) -> Any:
        raise ValueError("broken")

    truth, plain = (
        alone(turning, REQUESTS[0]),
        turning.complete(prompt_ids=[7, 8] * 9, max_new_tokens=12, draft_tokens=0),
    )
    monkeypatch.setattr(NgramDrafter, "propose", wrong)
    one, gone, broken = scheduler(turning, slots=2), Heard(), Heard()
    victim = one.submit(REQUESTS[1], listener=gone)
    one.submit(REQUESTS[2], listener=broken)
    last = one.submit(REQUESTS[0], priority=5)
    one.step()
    one.step()
    assert one.queued == 1, "without slots nobody has to leave for a higher priority"
    victim.cancel()
    with caplog.at_level(logging.WARNING):
        drive(one)
    assert gone.finished.finish_reason == "cancelled"
    assert broken.finished.token_ids == plain.token_ids
    assert len(caplog.records) == 1
    assert told_in(last) == truth
    assert said(broken.finished)[2] == "length"
