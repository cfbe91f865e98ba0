"""Committed states: after rejections, changing K, stops, faults, cancels, and from several threads.

Every comparison of states is bit for bit with plain decoding at the same committed length.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import psutil
import pytest

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_engines.errors import EngineBusyError
from mtp_runtime import Event, Model
from mtp_runtime.policy import SchedulePolicy
from mtp_tools.verify.digests import state_digests
from tests.fixtures.checkpoints import partial_checkpoint, random_checkpoint
from tests.oracles.float64 import Oracle, load_checkpoint
from tests.runtime.conftest import Models
from tests.runtime.parts import (
    CommitsRejected,
    Delegate,
    Run,
    Scripted,
    collect,
    emitted_ids,
    forced,
    limit_only,
    plain,
    play,
    recorded,
    take_into,
)
from tests.support import build_bundle, load_model, top_two_margin

PROMPT = [5, 6, 20]
SEEDS = range(30, 40)
TOKENS = 48
BUILD = {"max_model_len": 256}


def _seeded(hybrid: Models, seed: int) -> Model:
    return hybrid(seed=seed, build=BUILD)


def _same(ours: Run, theirs: Run) -> bool:
    """Ids, and every state that both know."""
    shared = ours.states.keys() & theirs.states.keys()
    assert len(shared) == len(ours.states) > 0, "plain decoding passes every length"
    return ours.ids == theirs.ids and all(ours.states[length] == theirs.states[length] for length in shared)


# RT-09, RT-14, RT-15: rejections


@pytest.mark.parametrize("seed", SEEDS)
def test_rejected_rows_leave_no_trace_in_a_hybrid(hybrid: Models, seed: int) -> None:
    """RT-09 and RT-14: drafts of 0 %, about half and all right, K = 1 to 4: ids and every state are plain's."""
    model = _seeded(hybrid, seed)
    size = model.manifest.model.vocab_size
    reference = plain(model, PROMPT, TOKENS, states=True)
    generator = np.random.default_rng(seed)
    patterns: list[Callable[[int, int], int]] = [
        lambda cycle, k: 0,
        lambda cycle, k: k,
        lambda cycle, k: int(generator.integers(0, k + 1)),
    ]
    reached: set[int] = set()
    for draft_tokens in range(1, 5):
        for pattern in patterns:
            drafter = forced(reference, PROMPT, size, pattern)
            run = play(model, PROMPT, TOKENS, draft_tokens, drafter, states=True)
            assert _same(run, reference)
            reached |= set(run.accepted)
    assert reached == set(range(5)), "not every accepted count was reached"


def test_control_rejected_rows_in_the_state_change_the_ids(hybrid: Models) -> None:
    """RT-09: with the recurrence run over rejected rows, at least 8 of the 10 seeds go wrong."""
    changed = 0
    for seed in SEEDS:
        model = _seeded(hybrid, seed)
        reference = plain(model, PROMPT, TOKENS)
        drafter = forced(reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: 0)
        changed += play(model, PROMPT, TOKENS, 2, drafter, wrap=CommitsRejected).ids != reference.ids
    assert changed >= 8, "this file cannot see a state that was not rolled back"


def test_a_long_generation_stays_exact(hybrid: Models) -> None:
    """RT-09: 240 tokens with random acceptance, to the last place of the context."""
    model = _seeded(hybrid, 30)
    reference = plain(model, PROMPT, 253, states=True)
    generator = np.random.default_rng(0)
    drafter = forced(
        reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: int(generator.integers(0, k + 1))
    )
    run = play(model, PROMPT, 253, 4, drafter, states=True)
    assert len(run.ids) == 253
    assert _same(run, reference)


@pytest.mark.parametrize("seed", [30, 31, 32, 33])
def test_plain_ids_are_those_of_the_float64_loop(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """P2: the reference of this file is right, on seeds without near ties."""
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("seed") / "checkpoint", seed=seed)
    model = load_model(build_bundle(checkpoint, checkpoint.parent / "bundle"))
    oracle = Oracle(load_checkpoint(checkpoint))
    expected = oracle.greedy(PROMPT, 40)
    logits = oracle.forward([*PROMPT, *expected[:-1]]).logits[len(PROMPT) - 1 :]
    # float32 rows of this size are right to about 1e-4.
    assert top_two_margin(logits) > 1e-3, "a near tie: take another seed"
    for draft_tokens in range(8):
        assert (
            list(model.complete(prompt_ids=PROMPT, max_new_tokens=40, draft_tokens=draft_tokens).token_ids) == expected
        )
    # The control: the same loop with one convention broken says something else.
    assert Oracle(load_checkpoint(checkpoint), "no_decay").greedy(PROMPT, 40) != expected


@pytest.mark.parametrize("draft_tokens", range(1, 5))
def test_cycles_without_any_accepted_draft(markov: Models, hybrid: Models, draft_tokens: int) -> None:
    """RT-14: as many cycles as tokens after the first, nothing accepted, right ids."""
    wrong = markov(draft="wrong").complete(prompt_ids=[5], max_new_tokens=32, draft_tokens=draft_tokens)
    assert wrong.token_ids == tuple(range(6, 38))
    assert (wrong.stats.cycles, wrong.stats.accepted) == (31, 0)
    model = _seeded(hybrid, 31)
    reference = plain(model, PROMPT, 32)
    drafter = forced(reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: 0)
    run = play(model, PROMPT, 32, draft_tokens, drafter)
    assert run.ids == reference.ids
    assert run.accepted == [0] * 31


@pytest.mark.parametrize("draft_tokens", range(1, 6))
def test_every_draft_is_checked_against_its_own_row(markov: Models, draft_tokens: int) -> None:
    """RT-15: wrong at the first, a middle or the last place only; the ids are right and the counts say where."""
    reference = plain(markov(), [5], 33)
    assert reference.ids == list(range(6, 39))
    reached = set()
    for place in range(draft_tokens):
        drafter = Scripted([5], reference.ids, 64, lambda cycle, index, k, place=place: index == place)
        run = play(markov(), [5], 33, draft_tokens, drafter)
        assert run.ids == reference.ids
        # The last two cycles may have had a smaller K.
        assert set(run.accepted[:-2]) == {place}
        reached |= set(run.accepted)
    right = play(markov(), [5], 33, draft_tokens, Scripted([5], reference.ids, 64, lambda *_: False))
    assert set(right.accepted[:-1]) == {draft_tokens}
    assert reached | set(right.accepted) == set(range(draft_tokens + 1))


def test_control_a_first_draft_that_is_not_checked_changes_the_ids(
    markov: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RT-15: the fault of the case is visible to the check above."""
    model = markov(draft="wrong")
    expected = list(range(6, 26))

    def first_unchecked(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
        accepted = min(1, len(draft))
        while accepted < len(draft) and draft[accepted] == chosen[accepted]:
            accepted += 1
        return [*draft[:accepted], chosen[accepted]]

    assert play(model, [5], 20, 1).ids == expected
    monkeypatch.setattr("mtp_runtime.acceptance.accept_greedy", first_unchecked)
    assert play(model, [5], 20, 1).ids != expected


# RT-13, RT-41: changing K


SCHEDULES = {
    "alternating": [3, 0],
    "late": [0] * 10 + [4] * 60,
    "early": [4] * 4 + [0] * 60,
    "every K": [0, 1, 2, 3, 4, 5, 6, 7, 8],
    "falling": [8, 5, 3, 2, 1, 0],
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_changing_number_of_draft_tokens_changes_no_token(
    hybrid: Models, partial: Model, schedule: list[int]
) -> None:
    """RT-13: plain and speculative cycles mixed, with the own head and with drafts that are all right."""
    reference = plain(partial, PROMPT, TOKENS, states=True)
    run = play(partial, PROMPT, TOKENS, SchedulePolicy(schedule), states=True)
    assert _same(run, reference)
    assert run.finished.stats.accepted > 0
    model = _seeded(hybrid, 32)
    reference = plain(model, PROMPT, TOKENS, states=True)
    drafter = forced(reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: k - cycle % 2)
    assert _same(play(model, PROMPT, TOKENS, SchedulePolicy(schedule), drafter, states=True), reference)


def test_control_a_plain_cycle_that_keeps_the_older_state_is_noticed(hybrid: Models) -> None:
    """RT-13: the fault of the case, one path reading the slot of the other, changes the ids."""

    class LosesPlainRows(Delegate):
        def verify(self, tokens: Ids, logit_rows: int) -> Verified:
            self._rows = tokens.shape[1]
            return super().verify(tokens, logit_rows)

        def commit(self, rows: Ids) -> None:
            plain_row = self._rows == 1
            self.inner.commit(np.zeros_like(rows) if plain_row else rows)
            self.inner.lengths += rows if plain_row else 0

    model = _seeded(hybrid, 32)
    reference = plain(model, PROMPT, TOKENS)
    drafter = forced(reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: k)
    run = play(model, PROMPT, TOKENS, SchedulePolicy([3, 0]), drafter, wrap=LosesPlainRows)
    assert run.ids != reference.ids, "this file cannot see a plain cycle that lost its row"


def test_k_of_zero_is_plain_decoding(partial: Model, tmp_path_factory: pytest.TempPathFactory) -> None:
    """RT-41: no call of the head, nothing drafted, no rate; a bundle without a head says the same."""
    run, recorder = recorded(partial, PROMPT, TOKENS, draft_tokens=0)
    stats = run.finished.stats
    assert (recorder.draft_calls, stats.drafted, stats.cycles) == (0, 0, TOKENS - 1)
    assert stats.as_dict()["acceptance_rate"] is None
    assert set(recorder.verified_rows[1:]) == {1}
    place = tmp_path_factory.mktemp("plain")
    without = load_model(build_bundle(partial_checkpoint(place / "c"), place / "b", mtp=False))
    for draft_tokens in (0, None):
        assert (
            list(without.complete(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens=draft_tokens).token_ids)
            == run.ids
        )
    for draft_tokens in range(1, 9):
        speculative, recorder = recorded(partial, PROMPT, TOKENS, draft_tokens=draft_tokens)
        assert speculative.ids == run.ids
        # The control of the zeros above: the same recorder sees the head at work.
        assert recorder.draft_calls > 0
        assert speculative.finished.stats.drafted > 0


# RT-17: what the head has seen


@pytest.fixture(scope="module")
def oracle_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Model]:
    """One partial checkpoint as float64 and as a bundle."""
    place = tmp_path_factory.mktemp("partial")
    checkpoint = partial_checkpoint(place / "checkpoint")
    return Oracle(load_checkpoint(checkpoint)), load_model(
        build_bundle(checkpoint, place / "bundle", max_model_len=128)
    )


def _draft_logits(
    model: Model, prompt: list[int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, list[list[Floats]]]:
    """A run with K = 3, and for every draft call the logits of its drafts."""
    logits: list[list[Floats]] = []
    drafting = [False]
    choose = VocabularyHead.choose

    def remember(self: VocabularyHead, hidden: Floats) -> object:
        if drafting[0]:
            logits[-1].append(self.logits(hidden[0])[0])
        return choose(self, hidden)

    class Marks(Delegate):
        def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
            if draft_tokens:
                logits.append([])
            drafting[0] = bool(draft_tokens)
            try:
                return super().draft(tokens, hidden, rows, draft_tokens)
            finally:
                drafting[0] = False

    monkeypatch.setattr(VocabularyHead, "choose", remember)
    return play(model, prompt, limit, 3, wrap=Marks), logits


@pytest.mark.parametrize("length", [1, 2, 40])
def test_the_head_has_seen_the_whole_text_at_every_draft(
    oracle_and_model: tuple[Oracle, Model], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """RT-17: the first draft's logits of every cycle are those of the head over all rows (token i + 1, hidden i)."""
    oracle, model = oracle_and_model
    prompt = np.random.default_rng(length).integers(0, 64, length).tolist()
    run, logits = _draft_logits(model, prompt, 24, monkeypatch)
    known, checked = list(prompt), 0
    for block, rows in zip(run.blocks, logits, strict=False):
        known += block
        whole = oracle.head_over(known).logits
        # Logits are about 10; float32 and float64 differ by less than 1e-4, the faults below by more than 1e-2.
        np.testing.assert_allclose(rows[0], whole[-1], rtol=0, atol=1e-4)
        checked += 1
        blind = oracle.head(known[-1:], oracle.forward(known[:-1]).hidden[-1:]).logits[0]
        if len(known) > 2:
            assert np.abs(blind - whole[-1]).max() > 1e-2, "a head that saw one row only would not be noticed"
    assert checked > 3
    if length == 40:
        assert any(0 < count < 3 for count in run.accepted), "no cycle accepted only some of its drafts"


def test_drafts_are_those_of_the_float64_speculation(oracle_and_model: tuple[Oracle, Model]) -> None:
    """RT-17 and P4: ids, drafts and accepted counts of every cycle, with prompts of 1 to 40 tokens."""
    oracle, model = oracle_and_model
    reached: set[int] = set()
    for prompt in ([5], PROMPT, np.random.default_rng(7).integers(0, 64, 40).tolist()):
        for draft_tokens in range(1, 5):
            expected = oracle.speculate(prompt, 32, draft_tokens)
            run, recorder = recorded(model, prompt, 32, draft_tokens=draft_tokens)
            assert run.ids == expected.ids
            assert run.accepted == expected.accepted
            assert recorder.drafts == [draft for draft in expected.drafts if draft]
            if draft_tokens == 3:
                reached |= set(run.accepted)
    assert reached == {0, 1, 2, 3}, "not every accepted count was reached"


@pytest.mark.parametrize(
    "fault",
    ["mtp_rejected_rows_kept", "chained_rows_kept", "hidden_row_off_by_one", "unshifted_ids", "pre_norm_hidden"],
)
def test_control_a_wrong_cache_of_the_head_changes_the_drafts(
    oracle_and_model: tuple[Oracle, Model], fault: str
) -> None:
    """RT-17: each fault in what the head is fed leaves the ids alone and is visible to the check above."""
    oracle, model = oracle_and_model
    broken = Oracle(oracle.checkpoint, fault).speculate(PROMPT, 32, 3)
    run, recorder = recorded(model, PROMPT, 32, draft_tokens=3)
    assert broken.ids == run.ids
    assert broken.drafts != recorder.drafts


def test_a_prompt_of_several_chunks_reaches_target_and_head(
    oracle_and_model: tuple[Oracle, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RT-17: a prompt that is consumed in pieces of 7 rows gives the same ids and the same drafts."""
    oracle, model = oracle_and_model
    prompt = np.random.default_rng(8).integers(0, 64, 40).tolist()
    expected = oracle.speculate(prompt, 24, 3)
    monkeypatch.setattr(model.engine, "limits", replace(model.engine.limits, prefill_chunk=7))
    run, recorder = recorded(model, prompt, 24, draft_tokens=3)
    assert recorder.verified_rows[:6] == [7, 7, 7, 7, 7, 5]
    assert (run.ids, recorder.drafts) == (expected.ids, [draft for draft in expected.drafts if draft])


# RT-19, RT-20: after the end


@pytest.mark.parametrize("draft_tokens", range(5))
def test_the_states_after_a_stop_continue_like_a_fresh_run(hybrid: Models, draft_tokens: int) -> None:
    """RT-19 and RT-20: an end at every place of a block, then five more ids on the same sequences.

    No request reuses states in this release; the parts of the loop can, and show what was committed.
    """
    model = _seeded(hybrid, 30)
    size = model.manifest.model.vocab_size
    reference = plain(model, PROMPT, 20, states=True)
    assert len(set(reference.ids[:9])) == 9, "end tokens below must be met for the first time"
    more = [9, 8, 7, 30, 31]
    for count in range(1, 10):
        delivered = reference.ids[:count]
        sequences = model.engine.sequences()
        drafter = forced(reference, PROMPT, size, lambda cycle, k: k)
        ending = limit_only(20, {delivered[-1]})
        first = play(model, PROMPT, 20, draft_tokens, drafter, sequences=sequences, ending=ending)
        assert first.ids == delivered
        assert sequences.lengths.tolist() == [len(PROMPT) + count - 1]
        assert state_digests(sequences) == reference.states[len(PROMPT) + count - 1]
        transcript = [*PROMPT, *delivered, *more]
        turn = play(model, [delivered[-1], *more], 12, draft_tokens, sequences=sequences)
        assert turn.ids == plain(model, transcript, 12).ids
        # The control: a turn without the newest token, which was never consumed, says something else.
        sequences = model.engine.sequences()
        play(model, PROMPT, 20, draft_tokens, sequences=sequences, ending=limit_only(20, {delivered[-1]}))
        assert play(model, more, 12, draft_tokens, sequences=sequences).ids != turn.ids


def test_every_request_starts_empty(hybrid: Models, tmp_path_factory: pytest.TempPathFactory) -> None:
    """RT-19: after turns that ended in all ways, a request says what a freshly loaded bundle says."""
    used = _seeded(hybrid, 33)
    fresh = load_model(used.bundle.directory)
    expected = fresh.complete(prompt_ids=[7, 8, 9], max_new_tokens=30, draft_tokens=3).token_ids
    for options in ({"max_new_tokens": 5}, {"max_new_tokens": 500}, {"max_new_tokens": 1}, {"max_new_tokens": 0}):
        for draft_tokens in range(5):
            used.complete(prompt_ids=PROMPT, draft_tokens=draft_tokens, **options)
            again = used.complete(prompt_ids=[7, 8, 9], max_new_tokens=30, draft_tokens=draft_tokens)
            assert again.token_ids == expected
    # The control: on sequences that were not empty the ids are others.
    sequences = used.engine.sequences()
    play(used, PROMPT, 5, 3, sequences=sequences)
    assert tuple(play(used, [7, 8, 9], 30, 3, sequences=sequences).ids) != expected


def test_sequences_that_were_reset_are_as_new(partial: Model) -> None:
    """RT-19: reset forgets target and head; without it the ids differ."""
    sequences = partial.engine.sequences()
    first, _ = recorded(partial, [7, 8, 9], 24, draft_tokens=3, sequences=sequences)
    used = play(partial, [7, 8, 9], 24, 3, sequences=sequences)
    sequences.reset()
    assert sequences.lengths.tolist() == [0]
    again, recorder = recorded(partial, [7, 8, 9], 24, draft_tokens=3, sequences=sequences)
    _, expected = recorded(partial, [7, 8, 9], 24, draft_tokens=3)
    assert again.ids == first.ids != used.ids
    assert recorder.drafts == expected.drafts


# RT-54: cancelling


@pytest.mark.parametrize("count", range(1, 13))
def test_a_cancelled_generation_leaves_nothing_behind(partial: Model, count: int) -> None:
    """RT-54 and RT-20: closed after 1 to 12 tokens, or left by an exception; the next request is right."""
    reference = plain(partial, PROMPT, TOKENS, states=True)
    sequences = partial.engine.sequences()
    drafter = forced(reference, PROMPT, 64, lambda cycle, k: k)
    events = partial.run(PROMPT, sequences, drafter, SchedulePolicy([4]), limit_only(TOKENS))
    ids = emitted_ids(events, count)
    events.close()
    assert ids == reference.ids[: len(ids)]
    # No row of a token that was not delivered is committed.
    assert sequences.lengths.tolist() == [len(PROMPT) + len(ids) - 1]
    assert state_digests(sequences) == reference.states[len(PROMPT) + len(ids) - 1]
    with pytest.raises(ZeroDivisionError):
        _read_and_fail(partial.generate(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens=4), count)
    assert list(partial.complete(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens=4).token_ids) == reference.ids


def _read_and_fail(events: Iterator[Event], count: int) -> None:
    """A reader that raises after `count` tokens."""
    emitted_ids(events, count)
    raise ZeroDivisionError


def test_cancelled_generations_do_not_pile_up(partial: Model) -> None:
    """RT-54: 200 cancelled generations keep less than 5 MB."""

    def cancel(kept: list[object]) -> None:
        events = partial.generate(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens=4)
        next(events)
        next(events)
        kept.append(events)

    def growth(kept: list[object], keep: bool) -> int:
        gc.collect()
        # Memory that malloc kept would take in what is kept alive.
        ctypes.CDLL(None).malloc_trim(0)
        before = process.memory_info().rss
        for _ in range(200):
            cancel(kept)
            if not keep:
                kept.clear()
        gc.collect()
        return process.memory_info().rss - before

    process = psutil.Process()
    for _ in range(20):
        cancel([])
    assert growth([], False) < 5e6
    # The control: generations that are kept alive are seen.
    assert growth([], True) > 5e6


# RT-56: faults in a cycle


class FailsOnce(Delegate):
    """Raises in a chosen cycle, after the verify or instead of the commit."""

    fault: type[BaseException] = RuntimeError
    at = 3
    commits_before = False

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        self._calls = getattr(self, "_calls", -1) + 1
        verified = super().verify(tokens, logit_rows)
        if self._calls == self.at:
            if self.commits_before:
                self.inner.commit(np.array([tokens.shape[1]]))
            raise self.fault("injected")
        return verified


@pytest.mark.parametrize("fault", [MemoryError, KeyboardInterrupt, RuntimeError])
def test_a_fault_between_verify_and_commit_keeps_the_committed_state(
    partial: Model, fault: type[BaseException]
) -> None:
    """RT-56: the generation is over, the states are those before the cycle, and continuing them is exact."""
    reference = plain(partial, PROMPT, TOKENS, states=True)
    sequences = partial.engine.sequences()
    wrapped = FailsOnce(sequences)
    wrapped.fault = fault
    drafter = forced(reference, PROMPT, 64, lambda cycle, k: cycle % (k + 1))
    events = iter(partial.run(PROMPT, wrapped, drafter, SchedulePolicy([4]), limit_only(TOKENS)))
    ids: list[int] = []
    with pytest.raises(fault, match="injected"):
        take_into(ids, events)
    assert next(events, None) is None, "a generation that failed goes on"
    assert ids == reference.ids[: len(ids)]
    assert len(ids) == 4
    assert sequences.lengths.tolist() == [len(PROMPT) + len(ids) - 1]
    assert state_digests(sequences) == reference.states[len(PROMPT) + len(ids) - 1]
    rest = play(partial, ids[-1:], TOKENS - len(ids), 4, sequences=sequences)
    assert ids + rest.ids == reference.ids
    fresh = partial.complete(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens=4)
    assert list(fresh.token_ids) == reference.ids


def test_a_fault_in_the_commit_keeps_the_committed_state(partial: Model) -> None:
    """RT-56: the same when the commit is never reached."""

    class NeverCommits(Delegate):
        calls = 0

        def commit(self, rows: Ids) -> None:
            self.calls += 1
            if self.calls == 4:
                raise MemoryError("injected")
            super().commit(rows)

    reference = plain(partial, PROMPT, TOKENS, states=True)
    sequences = partial.engine.sequences()
    events = partial.run(
        PROMPT, NeverCommits(sequences), partial.drafter(sequences), SchedulePolicy([4]), limit_only(TOKENS)
    )
    ids: list[int] = []
    with pytest.raises(MemoryError, match="injected"):
        take_into(ids, events)
    assert state_digests(sequences) == reference.states[len(PROMPT) + len(ids) - 1]
    rest = play(partial, ids[-1:], TOKENS - len(ids), 4, sequences=sequences)
    assert ids + rest.ids == reference.ids


def test_control_draft_rows_that_a_fault_left_committed_are_noticed(partial: Model) -> None:
    """RT-56: the fault of the case, all rows kept when the host fails, is visible to the checks above."""
    reference = plain(partial, PROMPT, TOKENS, states=True)
    sequences = partial.engine.sequences()
    wrapped = FailsOnce(sequences)
    wrapped.commits_before = True
    drafter = forced(reference, PROMPT, 64, lambda cycle, k: 0)
    with pytest.raises(RuntimeError, match="injected"):
        collect(partial.run(PROMPT, wrapped, drafter, SchedulePolicy([4]), limit_only(TOKENS)))
    length = len(PROMPT) + 2
    assert sequences.lengths.tolist() != [length]
    assert state_digests(sequences) != reference.states[length]
    assert play(partial, reference.ids[2:3], 20, 4, sequences=sequences).ids != reference.ids[3:23]


# EN-10: threads


@pytest.mark.parametrize(("count", "tokens"), [(2, 200), (8, 50)])
def test_threads_that_generate_at_once_do_not_mix(hybrid: Models, count: int, tokens: int) -> None:
    """EN-10: one loaded bundle, a generation in every thread, three times: each is its serial run."""
    model = _seeded(hybrid, 34)
    prompts = [[index, index + 40, 3 * index] for index in range(count)]
    expected = [
        model.complete(prompt_ids=prompt, max_new_tokens=tokens, draft_tokens=3).token_ids for prompt in prompts
    ]
    assert len(set(expected)) == count, "prompts that say the same cannot show a mix-up"
    for _ in range(3):
        results: dict[int, tuple[int, ...]] = {}
        start = threading.Barrier(count)

        def work(index: int, start: threading.Barrier = start, results: dict = results) -> None:
            start.wait()
            done = model.complete(prompt_ids=prompts[index], max_new_tokens=tokens, draft_tokens=3)
            results[index] = done.token_ids

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results.get(index) for index in range(count)] == expected


@pytest.mark.parametrize("call", ["verify", "commit", "draft", "reset"])
def test_a_second_thread_on_the_same_sequences_is_refused(
    partial: Model, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """EN-10: while one thread is inside verify, every call of another raises at once, and the first is right."""
    tokens, expected = np.array([PROMPT]), partial.engine.sequences().verify(np.array([PROMPT]), 1).ids
    sequences: Sequences = partial.engine.sequences()
    inside, leave = threading.Event(), threading.Event()
    choose = VocabularyHead.choose

    def wait(self: VocabularyHead, hidden: Floats) -> object:
        inside.set()
        assert leave.wait(20)
        return choose(self, hidden)

    monkeypatch.setattr(VocabularyHead, "choose", wait)
    got: list[Ids] = []
    thread = threading.Thread(target=lambda: got.append(sequences.verify(tokens, 1).ids))
    thread.start()
    assert inside.wait(20)
    calls: dict[str, Callable[[], object]] = {
        "verify": lambda: sequences.verify(tokens, 1),
        "commit": lambda: sequences.commit(np.array([3])),
        "draft": lambda: sequences.draft(
            np.zeros((1, 1), np.int64), np.zeros((1, 1, 64), np.float32), np.array([1]), 1
        ),
        "reset": sequences.reset,
    }
    try:
        with pytest.raises(EngineBusyError, match="open sequences for each thread"):
            calls[call]()
    finally:
        leave.set()
        thread.join()
    assert np.array_equal(got[0], expected)
    sequences.commit(np.array([3]))
    # The control: with nobody inside, the same call is served.
    calls[call]() if call != "commit" else sequences.verify(tokens, 1)
