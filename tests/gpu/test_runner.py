"""The shared runner on a CPU, kernels by their bodies, in float32: both ways to generate say what ONNX Runtime says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_engines.backends import open_engine
from mtp_engines.backends.gpu import state
from mtp_engines.backends.gpu.device import Device
from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.errors import ContractError, RequestError
from tests.gpu.bundles import DRAFTING
from tests.gpu.parts import Opened, Said, by_cycles, by_host, plain, small_pages, state_error
from tests.support import refused

PROMPT = [5, 6, 20]
TOKENS = 24
# Shares of the greatest value of a state. Both engines round float32; worst found: 6e-6.
STATES = 5e-5


@pytest.fixture(scope="module")
def reference(partial: Opened) -> Said:
    """Plain decoding by ONNX Runtime, with every state on the way."""
    return plain(partial.engine, PROMPT, TOKENS + 6, states=True)


@pytest.mark.parametrize("draft_tokens", range(6))
def test_both_ways_say_what_onnx_runtime_says(partial: Opened, reference: Said, draft_tokens: int) -> None:
    """Tokens, drafts, accepted counts, and every committed state."""
    engine = partial.torch()
    theirs = by_host(partial.engine, PROMPT, TOKENS, draft_tokens)
    cycles = by_cycles(engine, PROMPT, TOKENS, draft_tokens, drafting=draft_tokens > 0, states=True)
    host = by_host(engine, PROMPT, TOKENS, draft_tokens, states=True)
    for ours in (cycles, host):
        assert ours.ids == theirs.ids
        assert ours.cut(TOKENS) == reference.cut(TOKENS)
        assert ours.drafts == theirs.drafts
        assert ours.accepted == theirs.accepted
        assert state_error(ours.states, reference.states) < STATES
    if draft_tokens == 3:
        assert set(cycles.accepted) == {0, 1, 2, 3}, "not every accepted count was reached"


@pytest.mark.parametrize("length", [1, 8, 9, 20])
def test_a_prompt_of_any_length_against_the_chunk(partial: Opened, length: int) -> None:
    """Chunks of 8: a prompt of one token, exactly one chunk, just over, and several."""
    prompt = np.random.default_rng(length).integers(0, 64, length).tolist()
    engine = partial.torch(prefill_chunk=8)
    theirs = by_host(partial.engine, prompt, 12, 3)
    for ours in (by_cycles(engine, prompt, 12, 3, states=True), by_host(engine, prompt, 12, 3, states=True)):
        assert (ours.ids, ours.drafts) == (theirs.ids, theirs.drafts)
        known = plain(partial.engine, prompt, 20, states=True)
        assert state_error(ours.states, known.states) < STATES


def test_a_chunk_below_the_widest_verify(partial: Opened) -> None:
    """Chunks of 4 run at the width of a verify, 6, and are kept all the same."""
    engine = partial.torch(prefill_chunk=4)
    prompt = list(range(3, 25, 2))
    theirs = by_host(partial.engine, prompt, 12, 2)
    for ours in (by_cycles(engine, prompt, 12, 2), by_host(engine, prompt, 12, 2)):
        assert (ours.ids, ours.drafts) == (theirs.ids, theirs.drafts)


def test_a_changing_number_of_draft_tokens(partial: Opened, reference: Said) -> None:
    """0, 3, 1, 5: the head catches up whatever the last K was."""
    schedule = [0, 3, 1, 5] * 6
    theirs = by_host(partial.engine, PROMPT, TOKENS, schedule)
    for way in (by_cycles, by_host):
        ours = way(partial.torch(), PROMPT, TOKENS, schedule, states=True)
        assert (ours.ids, ours.drafts) == (theirs.ids, theirs.drafts)
        assert state_error(ours.states, reference.states) < STATES
    assert sum(theirs.accepted) > 3


def test_the_context_to_its_last_row(partial: Opened) -> None:
    """64 tokens, the last cycle with more drafts than there is room to deliver; then the context is full."""
    prompt = np.random.default_rng(5).integers(0, 64, 50).tolist()
    theirs = plain(partial.engine, prompt, 14)
    engine = partial.torch()
    sequences = engine.sequences()
    ours = by_cycles(engine, prompt, 14, 5, sequences=sequences)
    assert ours.cut(14) == theirs.ids
    with refused("leave the context of 64 tokens", "--max-model-len", error=ContractError):
        for _ in range(3):
            sequences.cycle(5)


def test_pages_are_handed_out_as_sequences_grow(
    partial: Opened, reference: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 4 rows, so that a verify crosses from one into the next all the time."""
    small_pages(monkeypatch)
    engine = partial.torch()
    for way in (by_cycles, by_host):
        ours = way(engine, PROMPT, TOKENS, 3, states=True)
        assert ours.cut(TOKENS) == reference.cut(TOKENS)
        assert state_error(ours.states, reference.states) < STATES


def test_sequences_can_be_reset_and_used_again(partial: Opened) -> None:
    engine = partial.torch()
    sequences = engine.sequences()
    first = by_cycles(engine, PROMPT, 12, 3, sequences=sequences)
    sequences.reset()
    assert sequences.lengths.tolist() == [0]
    with refused("prefill first", error=ContractError):
        sequences.cycle(1)
    other = by_cycles(engine, [40, 2], 12, 2, sequences=sequences)
    assert other.ids == by_cycles(engine, [40, 2], 12, 2).ids
    sequences.reset()
    again = by_cycles(engine, PROMPT, 12, 3, sequences=sequences)
    assert (again.ids, again.drafts) == (first.ids, first.drafts)
    assert other.ids[:12] != first.ids[:12], "control: prompts that say the same cannot show what a reset forgets"


def test_control_a_reset_that_forgets_nothing_is_seen(partial: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.DeltaStates, "reset", lambda self: None)
    engine = partial.torch()
    sequences = engine.sequences()
    first = by_cycles(engine, PROMPT, 8, 3, sequences=sequences)
    sequences.reset()
    assert by_cycles(engine, PROMPT, 8, 3, sequences=sequences).ids != first.ids


def test_two_sequences_in_whole_cycles(partial: Opened) -> None:
    """Prompts of one length that accept different counts; each says what it says alone."""
    prompts = [PROMPT, [40, 2, 33]]
    alone = [by_host(partial.engine, prompt, 16, 3) for prompt in prompts]
    sequences = partial.torch().sequences(2)
    ids = [[int(token)] for token in sequences.prefill(np.array(prompts), drafting=True)]
    drafts: list[list[list[int]]] = [[], []]
    while min(map(len, ids)) < 16:
        cycle = sequences.cycle(3)
        for place in range(2):
            ids[place] += cycle.emitted[place]
            drafts[place].append(cycle.draft[place])
    for place in range(2):
        assert ids[place][:16] == alone[place].ids[:16]
        assert drafts[place][: len(alone[place].drafts)] == alone[place].drafts
    assert sequences.lengths[0] != sequences.lengths[1], "control: both accepted the same, which shows little"
    for place, prompt in enumerate(prompts):
        known = plain(partial.engine, prompt, len(ids[place]), states=True).states
        length = int(sequences.lengths[place])
        assert state_error({length: sequences.snapshot(place)}, known) < STATES


def test_two_sequences_of_different_lengths_with_the_host_in_between(partial: Opened) -> None:
    """Prompts of 3 and 6 rows in one verify; then every pair of kept counts, each followed by what it says alone."""
    prompts = [PROMPT, [40, 2, 33, 7, 9, 1]]
    known = [plain(partial.engine, prompt, 40, states=True) for prompt in prompts]
    sequences = partial.torch().sequences(2)
    tokens = np.array([[*PROMPT, 0, 0, 0], prompts[1]])
    chosen = sequences.verify(tokens, 6).ids
    sequences.commit(np.array([3, 6]))
    ids = [[int(chosen[0, 2])], [int(chosen[1, 5])]]
    for kept in [(1, 4), (4, 1), (2, 3), (0, 2), (3, 3)]:
        rows = np.array([said.ids[len(own) - 1 :][:4] for said, own in zip(known, ids, strict=True)])
        chosen = sequences.verify(rows, 4).ids
        sequences.commit(np.array(kept))
        for place, count in enumerate(kept):
            ids[place] += chosen[place, :count].tolist()
            assert ids[place] == known[place].ids[: len(ids[place])]
            length = int(sequences.lengths[place])
            assert state_error({length: sequences.snapshot(place)}, known[place].states) < STATES
    assert sequences.lengths.tolist() == [3 + 10, 6 + 13]


def test_a_look_at_the_states_changes_nothing(partial: Opened, reference: Said) -> None:
    """Before a commit the staged rows are not in them; afterwards they are, and can still be looked at twice."""
    sequences = partial.torch().sequences()
    sequences.verify(np.array([PROMPT]), 1)
    sequences.commit(np.array([3]))
    for kept in (2, 0, 4, 1):
        length = int(sequences.lengths[0])
        sequences.verify(np.array([[*PROMPT, *reference.ids][length : length + 4]]), 4)
        assert state_error({length: sequences.snapshot(0)}, reference.states) < STATES
        sequences.commit(np.array([kept]))
        looks = [sequences.snapshot(0) for _ in range(2)]
        assert state_error({length + kept: looks[0]}, reference.states) < STATES
        assert all(np.array_equal(looks[0][name], looks[1][name]) for name in looks[0])


@pytest.mark.parametrize("family", DRAFTING)
def test_heads_of_every_kind_draft_what_they_draft_on_onnx_runtime(family: str, tmp_path: Path) -> None:
    bundle = open_bundle(DRAFTING[family](tmp_path))
    opened = Opened(bundle, open_engine(bundle, EngineOptions(threads=1)))
    theirs = by_host(opened.engine, PROMPT, 12, 3)
    engine = opened.torch(max_draft_tokens=3)
    for way in (by_cycles, by_host):
        ours = way(engine, PROMPT, 12, 3)
        assert (ours.ids, ours.drafts) == (theirs.ids, theirs.drafts)
    assert 0 < sum(theirs.accepted) < 3 * len(theirs.accepted), "this head is always right or always wrong"


REFUSALS: dict[str, tuple[Callable[[Opened], object], tuple[str, ...]]] = {
    "commit of part of a prompt": (
        lambda opened: _verified(opened, 9).commit(np.array([4])),
        ("4", "of 9 rows", "kept whole on this backend"),
    ),
    "commit twice": (lambda opened: _committed(opened).commit(np.array([1])), ("nothing staged",)),
    "commit of more than was staged": (lambda opened: _verified(opened, 2).commit(np.array([3])), ("0..2",)),
    "cycle before prefill": (lambda opened: opened.torch().sequences().cycle(1), ("prefill first",)),
    "drafts without drafting": (lambda opened: _prefilled(opened).cycle(1), ("prefill was called without drafting",)),
    "too many drafts": (lambda opened: _prefilled(opened).cycle(6), ("draft_tokens = 6", "0..5")),
    "a token outside the vocabulary": (lambda opened: _verified(opened, 1, 64), ("Token id 64", "0..63")),
    "a prompt beyond the context": (lambda opened: _verified(opened, 70), ("leave the context of 64 tokens",)),
    "more rows than a chunk": (lambda opened: _chunked(opened), ("9 rows", "8")),
}


@pytest.mark.parametrize("call", REFUSALS)
def test_a_call_that_cannot_be_served_is_refused_in_one_sentence(partial: Opened, call: str) -> None:
    run, parts = REFUSALS[call]
    with refused(*parts, error=ContractError):
        run(partial)


def test_more_sequences_than_the_bundle_was_built_for(partial: Opened) -> None:
    with refused("3 sequences", "--max-batch-size 3", error=RequestError):
        partial.torch().sequences(3)


def _verified(opened: Opened, rows: int, token: int = 1) -> DeviceSequences:
    sequences = opened.torch().sequences()
    sequences.verify(np.full((1, rows), token), 1)
    return sequences


def _committed(opened: Opened) -> DeviceSequences:
    sequences = _verified(opened, 2)
    sequences.commit(np.array([2]))
    return sequences


def _prefilled(opened: Opened) -> DeviceSequences:
    sequences = opened.torch().sequences()
    sequences.prefill(np.array([PROMPT]), drafting=False)
    return sequences


def _chunked(opened: Opened) -> object:
    return opened.torch(prefill_chunk=8).sequences().verify(np.ones((1, 9), np.int64), 1)


def test_rows_of_a_prompt_that_were_not_committed_are_not_forgotten_in_silence(partial: Opened) -> None:
    """They are in the states already, so the next verify would stand on rows that nobody kept."""
    sequences = partial.torch().sequences()
    chunk = sequences._device.widths.prefill[0]
    sequences.verify(np.zeros((1, chunk), np.int64), 1)
    for again in (
        lambda: sequences.verify(np.zeros((1, 1), np.int64), 1),
        lambda: sequences.prefill(np.zeros((1, 1), np.int64), drafting=False),
    ):
        with pytest.raises(ContractError, match=r"kept whole .* commit all of it, or reset"):
            again()
    sequences.commit(np.array([chunk]))
    sequences.verify(np.zeros((1, 1), np.int64), 1)
    sequences.reset()
    sequences.verify(np.zeros((1, chunk), np.int64), 1)
    sequences.reset()
    assert sequences.verify(np.zeros((1, 1), np.int64), 1).ids.shape == (1, 1), "control: a reset forgets them"


def test_sequences_that_are_let_go_leave_their_memory_to_the_next(partial: Opened) -> None:
    engine = partial.torch()
    prompt = np.array([[3, 1, 4, 1, 5]])
    first = engine.sequences()
    want = [int(first.prefill(prompt, drafting=True)[0]), *first.cycle(2).emitted[0]]
    device = first._device
    second = engine.sequences()
    assert second._device is not device, "control: the first still has it"
    del first
    third = engine.sequences()
    assert third._device is device
    third.verify(np.array([[7, 7, 7]]), 1)
    del third
    fourth = engine.sequences()
    assert [int(fourth.prefill(prompt, drafting=True)[0]), *fourth.cycle(2).emitted[0]] == want


def test_a_cycle_that_failed_half_way_is_not_repeated_in_silence(
    partial: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may be in the states already; a second try would commit them twice."""
    sequences = partial.torch().sequences()
    prompt = np.array([PROMPT])
    want = [int(sequences.prefill(prompt, drafting=True)[0]), *sequences.cycle(2).emitted[0]]
    choose = Device.choose

    def interrupted(self: Device, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Device, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sequences.cycle(2)
    monkeypatch.setattr(Device, "choose", choose)
    for again in (lambda: sequences.cycle(2), lambda: sequences.verify(np.zeros((1, 1), np.int64), 1)):
        with pytest.raises(ContractError, match="failed half-way; reset them"):
            again()
    sequences.reset()
    assert [int(sequences.prefill(prompt, drafting=True)[0]), *sequences.cycle(2).emitted[0]] == want


def test_a_head_does_not_follow_a_second_prompt(partial: Opened) -> None:
    sequences = partial.torch().sequences()
    sequences.prefill(np.array([PROMPT]), drafting=True)
    with pytest.raises(ContractError, match="reset the sequences first"):
        sequences.prefill(np.array([PROMPT]), drafting=True)


def test_a_retry_that_failed_leaves_nobody_inactive(partial: Opened) -> None:
    """Memory is reused, and sequences that a retry had left out would emit nothing."""
    sequences = partial.torch().sequences()
    prompt = np.array([PROMPT])
    want = [int(sequences.prefill(prompt, drafting=True)[0]), *sequences.cycle(2).emitted[0]]
    sequences._cycler._active.fill_(False)
    sequences.reset()
    assert [int(sequences.prefill(prompt, drafting=True)[0]), *sequences.cycle(2).emitted[0]] == want
