"""What breaks in one answer stays in that answer; what breaks in a drafter costs its drafts."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.engine import Ids, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime import Finished, Model
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.batching.tasks import Task
from mtp_runtime.batching.tickets import Failed, Told
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.request import Request
from mtp_runtime.sampling.sampler import Sampler
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import LENGTH, Heard, alone, drive, request, said, scheduler, told_in

BAD = 63
"""A token of the prompts that are to fail; no answer says it."""


def asked(first: int, draft_tokens: int = 3, **options: Any) -> Request:
    return request(
        prompt_ids=[first, 6, 20],
        max_new_tokens=20,
        draft_tokens=draft_tokens,
        ignore_eos=True,
        logit_bias={BAD: -99.0},
        **options,
    )


OTHERS = [asked(7), asked(8, 0), asked(9, 2, drafter="ngram")]


def beside_others(model: Model, wanted: Request, prefix_bytes: int = 0) -> Heard:
    """Run a request between others, which must say what they say alone."""
    one, heard = scheduler(model, prefix_bytes=prefix_bytes), Heard()
    before = one.submit(OTHERS[0])
    one.submit(wanted, listener=heard)
    tickets = [before, *(one.submit(other) for other in OTHERS[1:])]
    drive(one)
    # Nothing that is left behind in the slot reaches whoever comes next.
    tickets += [one.submit(other) for other in OTHERS]
    drive(one)
    assert [told_in(ticket) for ticket in tickets] == [alone(model, other) for other in [*OTHERS, *OTHERS]]
    return heard


def degrades(model: Model, wanted: Request, caplog: pytest.LogCaptureFixture, plain: Request) -> Finished:
    with caplog.at_level(logging.WARNING):
        heard = beside_others(model, wanted)
    assert heard.finished.token_ids == model.complete(plain).token_ids
    assert heard.finished.finish_reason == "length"
    (record,) = [record for record in caplog.records if record.name.startswith("mtp_runtime.batching")]
    assert "goes on without drafts" in record.getMessage()
    assert "broken" in record.getMessage()
    return heard.finished


@pytest.mark.parametrize("method", ["propose", "observe"])
@pytest.mark.parametrize("when", [0, 3])
def test_a_drafter_that_raises_costs_its_own_drafts(
    hybrid: Model, method: str, when: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one of the request whose n-grams are of another length."""
    right, calls = getattr(NgramDrafter, method), 0

    def wrong(self: NgramDrafter, *parts: Any) -> Any:
        nonlocal calls
        if len(self._lengths) == 1:
            calls += 1
            if calls > when:
                raise ValueError("broken")
        return right(self, *parts)

    monkeypatch.setattr(NgramDrafter, method, wrong)
    wanted = asked(5, drafter="mtp+ngram", ngram_min=2, ngram_max=2)
    finished = degrades(hybrid, wanted, caplog, asked(5, 0))
    if not when:
        assert finished.stats.drafted == 0


@pytest.mark.parametrize("when", [0, 4])
def test_a_rule_that_raises_costs_its_own_drafts(
    hybrid: Model, when: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one chain of the head with the rules of others."""
    right, calls = Sampler._choose, 0

    def wrong(self: Sampler, logits: Any) -> Any:
        nonlocal calls
        if self._decoding.options.seed == 77:
            calls += 1
            if calls > when:
                raise ValueError("broken")
        return right(self, logits)

    monkeypatch.setattr(Sampler, "_choose", wrong)
    options: dict[str, Any] = {"temperature": 0.7, "seed": 77}
    degrades(hybrid, asked(5, **options), caplog, asked(5, 0, **options))


def test_a_drafter_that_fails_again_behind_a_preemption_is_not_reported_again(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: MtpDrafter, draft_tokens: int) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(MtpDrafter, "propose", wrong)
    one = scheduler(hybrid, slots=1)
    ticket = one.submit(asked(5))
    for _ in range(3):
        one.step()
        one.submit(asked(6, 0), priority=1)
        for _ in range(4):
            one.step()
    drive(one)
    assert told_in(ticket)[0][0] == hybrid.complete(asked(5, 0)).token_ids
    assert len(caplog.records) == 1


# The target


def poison(one: Scheduler, slot: int, rows: bool) -> None:
    """Make the committed state of a slot no numbers, or the rows of its caches, those behind its length too."""
    assert isinstance(one._slots, CpuSequences)
    state, lengths = one._slots._state, one._slots.lengths
    arrays = state.rows(slot, int(lengths[slot]) // 2, LENGTH) if rows else state.recurrent_of(slot)
    for array in arrays.values():
        array[...] = np.nan


def failures_of(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What verifies raise from now on."""
    right, failures = CpuSequences.verify, []

    def verify(self: CpuSequences, tokens: Ids, logit_rows: int, **options: Any) -> Verified:
        try:
            return right(self, tokens, logit_rows, **options)
        except Exception as error:
            failures.append(error)
            raise

    monkeypatch.setattr(CpuSequences, "verify", verify)
    return failures


@pytest.mark.parametrize(("name", "rows"), [("hybrid", False), ("hybrid", True), ("full", True), ("latent", True)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_no_numbers_in_one_slot_fail_that_request_alone(
    name: str,
    rows: bool,
    rounds: int,
    families: Families,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever comes into its slot finds nothing of it."""
    model, heard = families(name), Heard()
    one = scheduler(model)
    tickets = [one.submit(OTHERS[0])]
    one.submit(asked(5), listener=heard)
    tickets += [one.submit(other) for other in OTHERS[1:]]
    for _ in range(rounds):
        one.step()
    poison(one, 1, rows)
    drive(one)
    assert isinstance(heard.ends[0], Failed)
    assert isinstance(heard.ends[0].error, NumericsError)
    assert heard.ids == list(model.complete(asked(5, 0)).token_ids[: len(heard.ids)])
    failures = failures_of(monkeypatch)
    for order in ([0, 1, 2], [2, 0, 1]):
        tickets += [one.submit(OTHERS[index]) for index in order]
        drive(one)
    expected = [alone(model, other) for other in OTHERS]
    assert [told_in(ticket) for ticket in tickets] == expected + expected + [expected[index] for index in (2, 0, 1)]
    assert not failures, "nor does it fill a gap between others there"
    assert not caplog.records, "numbers that are none are no bug of ours"


@pytest.mark.parametrize("error", [NumericsError("no numbers."), MemoryError("no room"), RuntimeError("engine")])
def test_a_verify_that_fails_for_one_fails_that_one_alone(
    hybrid: Model, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CpuSequences.verify

    def wrong(self: CpuSequences, tokens: Ids, logit_rows: int, **options: Any) -> Verified:
        if (tokens == BAD).any():
            raise error
        return right(self, tokens, logit_rows, **options)

    monkeypatch.setattr(CpuSequences, "verify", wrong)
    assert [end.error for end in beside_others(hybrid, asked(BAD)).ends if isinstance(end, Failed)] == [error]
    # Of several answers to one request none goes on once one has failed.
    heard = beside_others(hybrid, asked(BAD, n=2, temperature=1.0, seed=3))
    assert [type(end) for end in heard.ends] == [Failed, Failed]


def test_runs_of_several_that_always_fail_leave_each_to_itself(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right, failed = CpuSequences.verify, 0

    def wrong(self: CpuSequences, tokens: Ids, logit_rows: int, **options: Any) -> Verified:
        nonlocal failed
        if len(tokens) > 1:
            failed += 1
            raise RuntimeError("too wide")
        return right(self, tokens, logit_rows, **options)

    monkeypatch.setattr(CpuSequences, "verify", wrong)
    assert [said(beside_others(hybrid, asked(5)).finished)] == alone(hybrid, asked(5))
    assert failed > 10


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken"), MemoryError()])
@pytest.mark.parametrize("when", [2, 5])
def test_a_fault_between_verify_and_commit_ends_whoever_waited_for_it(
    hybrid: Model, error: BaseException, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on with a state that may hold too much; the next requests find clean slots."""
    right, commits = CpuSequences.commit, 0

    def wrong(self: CpuSequences, rows: Ids) -> None:
        nonlocal commits
        commits += 1
        if commits == when:
            right(self, rows)
            raise error
        right(self, rows)

    one, heard = scheduler(hybrid), [Heard() for _ in OTHERS]
    for other, listener in zip(OTHERS, heard, strict=True):
        one.submit(other, listener=listener)
    monkeypatch.setattr(CpuSequences, "commit", wrong)
    interrupted(one, isinstance(error, KeyboardInterrupt))
    ends = [listener.ends[0] for listener in heard]
    assert any(isinstance(end, Failed) for end in ends)
    for end, other in zip(ends, OTHERS, strict=True):
        if isinstance(end, Finished):
            assert [said(end)] == alone(hybrid, other)
    tickets = [one.submit(other) for other in OTHERS]
    drive(one)
    assert [told_in(ticket) for ticket in tickets] == [alone(hybrid, other) for other in OTHERS]


def interrupted(one: Scheduler, expected: bool) -> None:
    """Steps to the end, which an interrupt comes in between of if it is expected."""
    if expected:
        with pytest.raises(KeyboardInterrupt):
            drive(one)
    drive(one)


@pytest.mark.parametrize("kind", ["listener", "engine"])
def test_an_interrupt_harms_no_request_but_that_in_which_it_came(
    hybrid: Model, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, heard = scheduler(hybrid), Heard()
    tickets = [one.submit(OTHERS[0])]
    one.submit(asked(5), listener=heard)
    tickets += [one.submit(other) for other in OTHERS[1:]]
    if kind == "listener":

        def interrupt(told: Told) -> None:
            if len(heard.all) == 3:
                raise KeyboardInterrupt

        heard.then = interrupt
    else:
        right, runs = CpuSequences.verify, 0

        def wrong(self: CpuSequences, tokens: Ids, logit_rows: int, **options: Any) -> Verified:
            nonlocal runs
            runs += 1
            if runs == 4:
                raise KeyboardInterrupt
            return right(self, tokens, logit_rows, **options)

        monkeypatch.setattr(CpuSequences, "verify", wrong)
    interrupted(one, True)
    assert [told_in(ticket) for ticket in tickets] == [alone(hybrid, other) for other in OTHERS]
    if kind == "listener":
        assert isinstance(heard.ends[0], Failed)
        assert "KeyboardInterrupt" in str(heard.ends[0].error)
    else:
        assert [said(heard.finished)] == alone(hybrid, asked(5))


def test_control_a_slot_left_as_it_failed_would_send_others_on_runs_alone(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots 0 and 2 are in use, and slot 1 between them is what a failure left."""

    def wide_failures() -> int:
        one = scheduler(hybrid)
        tickets = [one.submit(other) for other in (OTHERS[0], asked(5), OTHERS[1])]
        one.step()
        poison(one, 1, rows=False)
        failures = failures_of(monkeypatch)
        drive(one)
        assert [told_in(tickets[index]) for index in (0, 2)] == [alone(hybrid, other) for other in OTHERS[:2]]
        return len(failures)

    # The run of all three, then those of the guilty one: with its draft and without.
    assert wide_failures() == 3
    right = Scheduler._ended

    def unclean(self: Scheduler, task: Task) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(CpuSequences, "reset", lambda self: None)
            right(self, task)

    monkeypatch.setattr(Scheduler, "_ended", unclean)
    assert wide_failures() > 5
