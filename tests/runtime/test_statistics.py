"""What a generation reports, against closed forms and the float64 speculation."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mtp_engines.engine import Floats, Ids, Verified
from mtp_runtime import Finished, Model
from mtp_runtime.loop import Generation, Parts
from mtp_runtime.policy import FixedPolicy
from mtp_runtime.records import footer_of
from mtp_runtime.stats import Stats, merge
from mtp_runtime.timing import TimedDrafter, TimedSequences
from mtp_runtime.verification import RowsTogether
from tests.runtime.conftest import Models
from tests.runtime.parts import Scripted, limit_only, plain, play, streamed


def test_drafts_that_an_end_cut_off_are_not_counted(markov: Models) -> None:
    """BM-01: 6 | 7 8 9 10 | 11 12: of six drafts five were delivered, 3.0 tokens a cycle."""
    run = streamed(markov(eos=12), prompt_ids=[5], max_new_tokens=20, draft_tokens=3)
    assert [list(block) for block in run.blocks] == [[6], [7, 8, 9, 10], [11, 12]]
    stats = run.finished.stats.as_dict()
    assert (stats["cycles"], stats["drafted"], stats["accepted"]) == (2, 6, 5)
    assert stats["emitted_per_cycle"] == 3.0
    assert stats["acceptance_rate"] == pytest.approx(5 / 6)
    assert stats["emitted_histogram"] == {"2": 1, "4": 1}
    assert stats["accepted_by_position"] == [2, 2, 1]


def test_control_counting_before_the_cut_gives_the_raw_figures(markov: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """BM-01: the fault of the case, six accepted, is visible to the check above."""
    monkeypatch.setattr("mtp_runtime.loop._delivered", lambda draft, block: len(draft))
    stats = markov(eos=12).complete(prompt_ids=[5], max_new_tokens=20, draft_tokens=3).stats
    assert stats.accepted == 6


def test_rates_leave_out_the_token_of_the_prefill(markov: Models) -> None:
    """BM-02: the chain whose head is wrong after every third token, K = 3, 38 tokens."""
    run = streamed(markov(draft="third"), prompt_ids=[5], max_new_tokens=38, draft_tokens=3)
    assert run.ids == list(range(6, 44))
    assert run.accepted == [0] + [2] * 12
    stats = run.finished.stats.as_dict()
    # The last cycle has three tokens left and drafts two.
    assert (stats["cycles"], stats["drafted"], stats["accepted"]) == (13, 38, 24)
    assert stats["acceptance_rate"] == pytest.approx(24 / 38)
    assert stats["emitted_per_cycle"] == pytest.approx(37 / 13)
    assert stats["accepted"] / stats["cycles"] == pytest.approx(1.846, abs=1e-3)
    # The control: with the prefill token, or with the bonus token as accepted, the figures are others.
    assert stats["emitted_per_cycle"] not in (pytest.approx(38 / 13), pytest.approx(24 / 13))
    for name in ("acceptance_rate", "acceptance_by_position", "emitted_per_cycle"):
        assert name in (Stats.as_dict.__doc__ or ""), "a figure without its definition"


def test_a_perfect_head_is_right_at_every_place(markov: Models) -> None:
    """BM-06: K cut near the limit does not make a head that is never wrong look wrong."""
    stats = markov().complete(prompt_ids=[5], max_new_tokens=8, draft_tokens=3).stats.as_dict()
    # 6 | 7 8 9 10 | 11 12 13: the second cycle had three tokens left and drafted two.
    assert stats["proposed_by_position"] == stats["accepted_by_position"] == [2, 2, 1]
    assert stats["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert stats["conditional_by_position"] == [1.0, 1.0, 1.0]


def test_joint_and_conditional_rates_are_apart(markov: Models) -> None:
    """BM-06: 1000 cycles drawn from conditional rates .9 .8 .7 .6; joint rates add up, conditional ones do not."""
    generator = np.random.default_rng(11)
    kept = [int((generator.random(4) < [0.9, 0.8, 0.7, 0.6]).cumprod().sum()) for _ in range(1000)]
    stats = Stats()
    for accepted in kept:
        stats.add_cycle(4, accepted, accepted + 1)
    report = stats.as_dict()
    joint = [sum(accepted > place for accepted in kept) / 1000 for place in range(4)]
    assert report["acceptance_by_position"] == joint
    np.testing.assert_allclose(joint, [0.9, 0.72, 0.504, 0.302], atol=0.05)
    conditional = [rate / before for rate, before in zip(joint, [1.0, *joint], strict=False)]
    np.testing.assert_allclose(report["conditional_by_position"], conditional, rtol=1e-12)
    assert report["emitted_per_cycle"] == pytest.approx(1 + sum(joint), rel=1e-12)
    # 0.15 is four standard errors of the mean of 1000 lengths.
    assert report["emitted_per_cycle"] == pytest.approx(3.43, abs=0.15)
    # The control: adding up the conditional rates gives the misleading figure of the case.
    assert 1 + sum(conditional) == pytest.approx(4.0, abs=0.15)
    assert report["accepted"] == sum(kept)
    assert report["drafted"] == 4000


def test_the_sum_of_statistics_is_that_of_their_cycles() -> None:
    """BM-06: reports of several generations are added cycle by cycle, whatever their K."""
    cycles = [(4, 2, 3), (1, 1, 2), (0, 0, 1), (3, 0, 1), (4, 4, 5)]
    parts, whole = [], Stats()
    for cycle in cycles:
        parts.append(Stats())
        parts[-1].add_cycle(*cycle)
        whole.add_cycle(*cycle)
    assert merge(parts).as_dict() == whole.as_dict()
    assert merge(parts[1:]).as_dict() != whole.as_dict()
    assert merge([]).as_dict()["acceptance_rate"] is None


def test_drafts_are_counted_by_what_made_them() -> None:
    """Cycles without a draft belong to nobody; sums of several generations add up source by source."""
    first, second, other = Stats(drafter="mtp+ngram"), Stats(drafter="mtp+ngram"), Stats(drafter="mtp")
    for stats, cycle in (
        (first, (3, 2, 3, "ngram")),
        (first, (2, 0, 1, "mtp")),
        (first, (0, 0, 1, "ngram")),
        (second, (1, 1, 2, "ngram")),
        (other, (4, 4, 5, "mtp")),
    ):
        stats.add_cycle(*cycle)
    assert (first.drafted_by_source, first.accepted_by_source) == ({"ngram": 3, "mtp": 2}, {"ngram": 2, "mtp": 0})
    both, all_three = merge([first, second]).as_dict(), merge([first, second, other]).as_dict()
    assert (both["drafter"], all_three["drafter"]) == ("mtp+ngram", None)
    assert both["drafted_by_source"] == {"ngram": 4, "mtp": 2}
    assert all_three["accepted_by_source"] == {"ngram": 3, "mtp": 4}
    for sums in (both, all_three):
        assert sum(sums["drafted_by_source"].values()) == sums["drafted"]
        assert sum(sums["accepted_by_source"].values()) == sums["accepted"]


def test_the_line_after_an_answer_says_what_drafted(markov: Models) -> None:
    """One source for a drafter alone, each of two with a lookup; nothing where nothing was drafted."""
    model = markov(draft="third")
    alone = model.complete(prompt_ids=[5, 6, 7, 5], max_new_tokens=12, draft_tokens=2)
    both = model.complete(prompt_ids=[5, 6, 7, 5], max_new_tokens=12, draft_tokens=2, drafter="mtp+ngram")
    assert f"acceptance {alone.stats.accepted / alone.stats.drafted:.0%} (mtp " in footer_of(alone)
    assert re.search(r"\(ngram \d+ of \d+, mtp \d+ of \d+\)", footer_of(both))
    assert "(" not in footer_of(model.complete(prompt_ids=[5], max_new_tokens=4, draft_tokens=0))


def test_every_accepted_count_is_counted_where_it_belongs(markov: Models) -> None:
    """BM-02 and BM-06: forced counts 0 to K come back in the histogram and by position."""
    reference = plain(markov(), [5], 60)
    for draft_tokens in range(1, 6):
        drafter = Scripted([5], reference.ids, 64, lambda cycle, index, k: index >= cycle % (k + 1))
        run = play(markov(), [5], 40, draft_tokens, drafter)
        stats = run.finished.stats
        whole = run.accepted
        assert set(range(draft_tokens + 1)) <= set(whole), "not every accepted count was reached"
        assert stats.emitted_histogram == {count + 1: whole.count(count) for count in set(whole)}
        places = range(draft_tokens)
        assert stats.accepted_by_position == [sum(count > place for count in whole) for place in places]
        assert stats.accepted == sum(whole) == len(run.ids) - 1 - stats.cycles


def test_counts_are_those_of_the_float64_speculation(partial: Model) -> None:
    """BM-02: a histogram that is no closed form is the one of the events, and all of it is JSON."""
    for draft_tokens in range(9):
        run = streamed(partial, prompt_ids=[5, 6, 20], max_new_tokens=48, draft_tokens=draft_tokens)
        report = json.loads(json.dumps(run.finished.stats.as_dict()))
        assert report["cycles"] == len(run.accepted)
        assert report["accepted"] == sum(run.accepted)
        assert sum(int(length) * count for length, count in report["emitted_histogram"].items()) == 47
        if draft_tokens == 3:
            assert set(run.accepted) == {0, 1, 2, 3}, "not every accepted count was reached"


class FakeEngine:
    """A chain t + 1 that takes 100 ms for a prefill and 10 ms each to draft, verify and commit."""

    def __init__(self) -> None:
        self.now, self.lengths = 0.0, np.zeros(1, np.int64)

    def clock(self) -> float:
        return self.now

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        self.now += 0.01 if self.lengths[0] else 0.1
        return Verified(tokens[:, -logit_rows:] + 1, np.zeros((1, tokens.shape[1], 2), np.float32))

    def commit(self, rows: Ids) -> None:
        self.now += 0.01 if self.lengths[0] else 0.0
        self.lengths += rows

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
        self.now += 0.01
        return tokens[:, -1:] + 1 + np.arange(draft_tokens)


class AsksTheEngine:
    """A drafter that asks the fake engine."""

    source = "fake"

    def __init__(self, sequences: TimedSequences) -> None:
        self._sequences = sequences

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        self._newest = tokens[None, -1:]

    def propose(self, draft_tokens: int) -> list[int]:
        return self._sequences.draft(self._newest, np.zeros(1), np.array([1]), draft_tokens)[0].tolist()


def _fake_run(tokens: int) -> Finished:
    engine, stats = FakeEngine(), Stats()
    prefill = TimedSequences(engine, stats.seconds, ("prefill", "prefill"), engine.clock)
    timed = TimedSequences(engine, stats.seconds, clock=engine.clock)
    drafter = TimedDrafter(AsksTheEngine(timed), stats.seconds, engine.clock)
    parts = Parts(prefill, RowsTogether(timed, logits=False), drafter, FixedPolicy(3), limit_only(tokens), stats, 256)
    *_, finished = Generation([5], parts)
    assert isinstance(finished, Finished)
    return finished


def test_speed_is_counted_in_tokens_not_in_blocks() -> None:
    """BM-04: a prefill of 100 ms, ten cycles of 30 ms and 4 tokens: 7.5 ms a token, 133.3 tokens a second."""
    finished = _fake_run(41)
    assert list(finished.token_ids) == list(range(6, 47))
    seconds = finished.stats.seconds
    assert finished.stats.emitted_histogram == {4: 10}
    assert (seconds.prefill, seconds.draft, seconds.verify, seconds.commit) == pytest.approx((0.1, 0.1, 0.1, 0.1))
    cycles = seconds.draft + seconds.verify + seconds.commit
    assert cycles / 40 == pytest.approx(0.0075)
    footer = footer_of(finished)
    assert "133.3 tok/s after the first" in footer
    assert "41 tokens" in footer
    assert "10 cycles" in footer
    # The control: blocks as tokens would give 33.3, the prefill's token 136.7, the prefill's time 100.0.
    assert not any(f" {wrong} tok/s" in footer for wrong in ("33.3", "136.7", "100.0"))


def test_a_generation_without_cycles_reports_no_speed_and_no_rate(markov: Models) -> None:
    """BM-04: one token has no time after the first, K = 0 has no rate; nothing is divided by zero."""
    assert "tok/s" not in footer_of(_fake_run(1))
    assert "acceptance n/a" in footer_of(markov().complete(prompt_ids=[5], max_new_tokens=4, draft_tokens=0))
    assert "acceptance 0%" in footer_of(
        markov(draft="wrong").complete(prompt_ids=[5], max_new_tokens=4, draft_tokens=1)
    )
    assert (
        footer_of(markov().complete(prompt_ids=[5], max_new_tokens=0)) == "[0 tokens, length; 0 cycles, acceptance n/a]"
    )
