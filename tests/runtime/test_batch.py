"""Several sequences in one call of the engine: each is its solo run, ids and states, bit for bit.

The loop decodes one sequence; this file drives the engine's protocol the way a batch would, with
prompts that end at different rows and cycles that accept different numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mtp_engines.engine import Sequences
from mtp_engines.errors import ContractError, RequestError
from mtp_runtime import Model
from mtp_tools.verify.digests import Digests, state_digests
from tests.fixtures.checkpoints import markov_checkpoint, random_checkpoint
from tests.runtime.conftest import Models
from tests.runtime.parts import Run, plain, play, recorded
from tests.support import build_bundle, load_model, refused

BUILD = {"max_batch_size": 5, "draft_tokens": 4, "max_model_len": 96}
K = 4
PAD = 0


@dataclass
class Slot:
    """One sequence of a batch.

    right: how many drafts of each cycle are right, repeated; None drafts with the head.
    """

    prompt: list[int]
    limit: int
    truth: list[int]
    right: Sequence[int] | None = None
    end: int | None = None
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    states: dict[int, Digests] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.ids) >= self.limit or (bool(self.ids) and self.ids[-1] == self.end)

    def forced(self, size: int) -> list[int]:
        assert self.right is not None
        right = self.right[len(self.accepted) % len(self.right)]
        truth = self.truth[len(self.ids) : len(self.ids) + K]
        return [token if place < right else (token + 1) % size for place, token in enumerate(truth)]


def _decode(sequences: Sequences, slots: Sequence[Slot], size: int, fault: str | None = None) -> None:
    """Run all slots to their ends; every call has K + 1 rows of every slot, the rest is padding."""
    batch, width = len(slots), K + 1
    for slot in slots:
        slot.waiting = list(slot.prompt)
    drafts = np.zeros((batch, 0), np.int64)
    while not all(slot.done for slot in slots):
        tokens = np.full((batch, width), PAD, np.int64)
        real = np.zeros(batch, np.int64)
        proposed: dict[int, list[int]] = {}
        for index, slot in enumerate(slots):
            if slot.done:
                continue
            if slot.waiting:
                row, slot.waiting = slot.waiting[:width], slot.waiting[width:]
            else:
                draft = slot.forced(size) if slot.right is not None else drafts[index].tolist()
                draft = draft[: slot.limit - len(slot.ids) - 1]
                proposed[index] = draft
                row = [slot.ids[-1], *draft]
            tokens[index, : len(row)] = row
            real[index] = len(row)
        verified = sequences.verify(tokens, width)
        keep = real.copy()
        following = np.zeros((batch, width), np.int64)
        for index, slot in enumerate(slots):
            chosen = verified.ids[index].tolist()
            if index in proposed:
                keep[index] = _accept(slot, proposed[index], chosen)
                following[index, : keep[index]] = slot.ids[-keep[index] :]
            elif real[index]:
                rows = int(real[index])
                following[index, : rows - 1] = tokens[index, 1:rows]
                if slot.waiting:
                    following[index, rows - 1] = slot.waiting[0]
                else:
                    slot.ids.append(chosen[rows - 1])
                    following[index, rows - 1] = slot.ids[-1]
        hidden = verified.hidden.copy()
        committed = np.full_like(keep, keep.max()) if fault == "commits the most of all" else keep
        sequences.commit(committed)
        if fault == "commits the most of all":
            sequences.lengths -= committed - keep
        if any(slot.right is None for slot in slots):
            if fault == "hidden rows of the neighbour":
                hidden = np.roll(hidden, 1, axis=0)
            drafts = sequences.draft(following, hidden, keep, K)
        for index, slot in enumerate(slots):
            if keep[index] and not slot.waiting:
                slot.states[int(sequences.lengths[index])] = state_digests(sequences, index)


def _accept(slot: Slot, draft: list[int], chosen: list[int]) -> int:
    """Emit what is accepted and the bonus token; returns how many rows are kept."""
    count = 0
    while count < len(draft) and draft[count] == chosen[count]:
        count += 1
    block = [*draft[:count], chosen[count]]
    if slot.end in block:
        block = block[: block.index(slot.end) + 1]
    slot.ids += block
    slot.drafts.append(draft)
    slot.accepted.append(count)
    return len(block)


PROMPTS = ([5], [6, 20], [9, 8, 7, 30, 31, 33, 35], [1, 2, 3, 4], [60, 3, 17, 22, 40, 41, 2, 11, 50, 13, 5, 6])
LIMITS = (30, 12, 25, 18, 30)
RIGHT = ([K], [0], [2, 0, 4], [1, 3], [0, 1, 2, 3, 4])


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random hybrid for up to five sequences."""
    place = tmp_path_factory.mktemp("batch")
    return load_model(build_bundle(random_checkpoint(place / "c", seed=36), place / "b", **BUILD))


def _solo(model: Model) -> list[Run]:
    return [plain(model, prompt, limit, states=True) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


def _slots(solo: Sequence[Run], own_head: bool = False) -> list[Slot]:
    """Five slots; the second ends at an end token, where plain decoding meets it first."""
    end = solo[1].ids[7]
    assert end not in solo[1].ids[:7]
    ends = [None, end, None, None, None]
    return [
        Slot(list(prompt), limit, run.ids, None if own_head else right, stop)
        for prompt, limit, run, right, stop in zip(PROMPTS, LIMITS, solo, RIGHT, ends, strict=True)
    ]


def _expected(solo: Sequence[Run]) -> list[list[int]]:
    return [run.ids[:8] if index == 1 else run.ids for index, run in enumerate(solo)]


def test_every_sequence_of_a_batch_is_its_solo_run(batched: Model) -> None:
    """RT-36 and RT-09: five prompts, limits and acceptance patterns in one call, every committed state too."""
    solo = _solo(batched)
    slots = _slots(solo)
    _decode(batched.engine.sequences(5), slots, batched.manifest.model.vocab_size)
    assert [slot.ids for slot in slots] == _expected(solo)
    for slot, run in zip(slots, solo, strict=True):
        assert slot.states, "no state was looked at"
        assert all(digests == run.states[length] for length, digests in slot.states.items())
    assert set(slots[0].accepted[:-1]) == {K}
    assert set(slots[1].accepted) == {0}
    assert set().union(*(slot.accepted for slot in slots)) == set(range(K + 1)), "not every accepted count was reached"


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_the_order_of_a_batch_does_not_matter(batched: Model, order: list[int]) -> None:
    """RT-36: the same sequences in other places."""
    solo = _solo(batched)
    slots = _slots(solo)
    _decode(batched.engine.sequences(5), [slots[index] for index in order], batched.manifest.model.vocab_size)
    assert [slot.ids for slot in slots] == _expected(solo)
    assert all(
        digests == run.states[at] for slot, run in zip(slots, solo, strict=True) for at, digests in slot.states.items()
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_smaller_batches_of_the_same_bundle(batched: Model, count: int) -> None:
    """RT-36: one, two and three sequences; hybrids elsewhere failed from three on."""
    solo = _solo(batched)
    slots = _slots(solo)[:count]
    _decode(batched.engine.sequences(count), slots, batched.manifest.model.vocab_size)
    assert [slot.ids for slot in slots] == _expected(solo)[:count]


def test_control_one_count_for_the_whole_batch_changes_the_ids(batched: Model) -> None:
    """RT-36: committing the same rows for all, the fault of a commit that is not ragged, is visible."""
    solo = _solo(batched)
    slots = _slots(solo)
    _decode(batched.engine.sequences(5), slots, batched.manifest.model.vocab_size, "commits the most of all")
    assert [slot.ids for slot in slots] != _expected(solo)


def test_drafts_of_a_batch_are_those_of_the_solo_runs(partial: Model) -> None:
    """RT-36: the own head in a batch, with prompts that end at different calls: ids and every draft."""
    solo = _solo(partial)
    slots = _slots(solo, own_head=True)
    slots[1].end = None
    _decode(partial.engine.sequences(5), slots, 64)
    reached: set[int] = set()
    for slot, run in zip(slots, solo, strict=True):
        alone, recorder = recorded(partial, slot.prompt, slot.limit, draft_tokens=K)
        assert slot.ids == run.ids == alone.ids
        assert slot.accepted == alone.accepted
        assert [draft for draft in slot.drafts if draft] == recorder.drafts
        reached |= set(slot.accepted)
    assert {0, 1, 2, 3} <= reached, "too few accepted counts were reached"


def test_control_hidden_rows_of_the_neighbour_change_the_drafts(partial: Model) -> None:
    """RT-36: a mix-up of two sequences leaves the ids alone and is visible in the drafts."""
    solo = _solo(partial)
    drafts = []
    for fault in (None, "hidden rows of the neighbour"):
        slots = _slots(solo, own_head=True)
        slots[1].end = None
        _decode(partial.engine.sequences(5), slots, 64, fault)
        assert [slot.ids for slot in slots] == [run.ids for run in solo]
        drafts.append([slot.drafts for slot in slots])
    assert drafts[0] != drafts[1]


def test_ties_go_to_the_lowest_id_everywhere(tmp_path: Path) -> None:
    """RT-34: two equal best columns in every state, plain, verified, drafted and in a batch."""
    head = np.zeros((64, 64))
    head[[40, 20]] = 4.0
    model = load_model(build_bundle(markov_checkpoint(tmp_path / "c", head=head), tmp_path / "b", **BUILD))
    for draft_tokens in range(5):
        run = play(model, [5], 20, draft_tokens)
        assert run.ids == [20] * 20
        # All drafts accepted: the head broke its ties in the same way.
        assert run.finished.stats.accepted == run.finished.stats.drafted
    slots = [Slot([token], 15, [20] * 15, right) for token, right in ((5, None), (40, None), (20, None))]
    _decode(model.engine.sequences(3), slots, 64)
    assert [slot.ids for slot in slots] == [[20] * 15] * 3
    assert all(set(slot.accepted[:-1]) == {K} for slot in slots)
    # The control: with the higher column ahead by one unit in the last place, it is no tie.
    head[40] = np.nextafter(np.float32(4.0), np.float32(5.0))
    other = load_model(build_bundle(markov_checkpoint(tmp_path / "d", head=head), tmp_path / "e", **BUILD))
    assert play(other, [5], 5, 3).ids == [40] * 5


def test_more_sequences_than_built_for_are_refused(markov: Models, batched: Model) -> None:
    """EN-06 and RT-36: one more than the limit, and none."""
    for model, limit in ((markov(), 1), (batched, 5)):
        for count in (limit + 1, 0):
            with refused(f"{count} sequences", f"1 to {limit}", "--max-batch-size", error=RequestError):
                model.engine.sequences(count)
        assert model.engine.sequences(limit).lengths.tolist() == [0] * limit


def test_counts_that_do_not_fit_are_refused_and_change_nothing(batched: Model) -> None:
    """EN-06: commits of rows that were not staged, or for another number of sequences; the right one still works."""
    sequences = batched.engine.sequences(2)
    tokens = np.array([[5, 6, 7], [8, 9, 10]])
    with refused("nothing staged", error=ContractError):
        sequences.commit(np.array([1, 1]))
    sequences.verify(tokens, 1)
    for rows in ([4, 1], [-1, 2], [1], [1, 1, 1]):
        with refused(str(rows), "0..3", error=ContractError):
            sequences.commit(np.array(rows))
    sequences.commit(np.array([2, 0]))
    assert sequences.lengths.tolist() == [2, 0]
    with refused("nothing staged", error=ContractError):
        sequences.commit(np.array([1, 1]))
    for wrong in (tokens[:1], tokens.astype(np.int32), tokens[:, :0], tokens[0]):
        with refused("verify got", "int64[2, rows]", error=ContractError):
            sequences.verify(wrong, 1)
    for token in (-1, batched.manifest.model.vocab_size):
        with refused(str(token), "vocabulary", error=ContractError):
            sequences.verify(np.array([[token], [1]]), 1)


def test_a_verify_that_was_not_committed_is_forgotten(batched: Model) -> None:
    """RT-36 and RT-56: rows that are staged and replaced by another verify leave no trace in any sequence."""
    sequences, clean = batched.engine.sequences(2), batched.engine.sequences(2)
    tokens = np.array([[5, 6, 7], [8, 9, 10]])
    sequences.verify(np.array([[50, 51, 52, 53], [54, 55, 56, 57]]), 4)
    for each in (sequences, clean):
        each.verify(tokens, 1)
        each.commit(np.array([3, 1]))
    assert [state_digests(sequences, index) for index in (0, 1)] == [state_digests(clean, index) for index in (0, 1)]
    # The control: committing one row of them is noticed.
    sequences.verify(tokens, 1)
    sequences.commit(np.array([1, 0]))
    assert state_digests(sequences, 0) != state_digests(clean, 0)
    assert state_digests(sequences, 1) == state_digests(clean, 1)
