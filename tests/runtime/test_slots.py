"""Sequences that run in windows, are saved, restored and copied: each is its solo run.

Bit for bit on ONNX Runtime; up to the rounding of products, which depends on their size, on the runner of the GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.gpu.state import DeltaStates
from mtp_engines.backends.gpu.window import DeviceWindow
from mtp_engines.backends.onnxruntime_cpu.state import TargetState
from mtp_engines.engine import Sequences, SlotSequences
from mtp_engines.errors import ContractError
from mtp_runtime import Model
from mtp_tools.verify.digests import state_digests
from tests.fixtures.dense_families import mimo_checkpoint
from tests.runtime.batching.parts import on_torch
from tests.runtime.conftest import Models
from tests.support import build_bundle, load_model, refused

BUILD = {"max_batch_size": 4, "draft_tokens": 4, "max_model_len": 96}
PROMPTS = ([7, 3, 9, 11, 2], [1, 2], [40, 41, 42, 43, 44, 45, 46])


TOLERANCE = 1e-5
"""A share of the greatest value of a state; worst found: 2e-7. With the rows of an older set: more than 1."""


@pytest.fixture(scope="module", params=["onnxruntime", "torch"])
def chained(hybrid: Models, request: pytest.FixtureRequest) -> Model:
    """A hybrid with one trained depth, on a CPU."""
    model = hybrid(seed=30, build=BUILD)
    return model if request.param == "onnxruntime" else on_torch(model.bundle.directory)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A head of two trained depths."""
    place = tmp_path_factory.mktemp("deep")
    mimo_checkpoint(place / "checkpoint", seed=1, depths=2)
    return load_model(build_bundle(place / "checkpoint", place / "bundle", **{**BUILD, "draft_tokens": 2}))


def feed(sequences: SlotSequences, tokens: list[int], following: int | None = None) -> Any:
    """Consume tokens at once in a window of one sequence; the head follows, up to the row before the last."""
    verified = sequences.verify(np.array([tokens]), 1)
    sequences.commit(np.array([len(tokens)]))
    after = tokens[1:] if following is None else [*tokens[1:], following]
    if after:
        sequences.draft(np.array([after]), verified.hidden[:, : len(after)].copy(), np.array([len(after)]), 0)
    return verified


def alone(model: Model, tokens: list[int]) -> Any:
    sequences = model.engine.sequences()
    feed(sequences, tokens)
    return sequences


def same(ours: Sequences, sequence: int, theirs: Sequences, other: int = 0) -> bool:
    """Whether two sequences have the same state."""
    if not isinstance(ours, DeviceWindow):
        return state_digests(ours, sequence) == state_digests(theirs, other)
    first, second = ours.snapshot(sequence), theirs.snapshot(other)
    assert first.keys() == second.keys()
    return all(
        value.shape == second[name].shape
        and np.abs(value - second[name]).max(initial=0) <= TOLERANCE * np.abs(second[name]).max(initial=0)
        for name, value in first.items()
    )


def test_windows_of_any_width_are_solo_runs(chained: Model) -> None:
    """Slots that begin at different times, run together in wider and narrower windows, and are used again."""
    size = chained.manifest.model.vocab_size
    slots = chained.engine.sequences(4)
    texts: list[list[int]] = [[], [], [], []]
    rng = np.random.default_rng(3)
    for step in range(24):
        if step % 5 == 0:
            slot = int(rng.integers(0, 4))
            slots.window(slot, 1).reset()
            texts[slot] = rng.integers(0, size, 6).tolist()
            feed(slots.window(slot, 1), texts[slot])
        start = int(rng.integers(0, 4))
        count = int(rng.integers(1, 5 - start))
        rows = rng.integers(0, size, (count, 3))
        kept = rng.integers(0, 4, count)
        window = slots.window(start, count)
        window.verify(rows, 0)
        window.commit(kept)
        for index in range(count):
            texts[start + index] += rows[index, : kept[index]].tolist()
    for slot, text in enumerate(texts):
        assert slots.lengths[slot] == len(text)
        if text:
            assert same(slots, slot, alone(chained, text))


def test_control_a_window_that_forgets_which_half_is_committed_is_seen(
    chained: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetState, "committed", lambda self: int(self._halves[0]))
    monkeypatch.setattr(DeltaStates, "agreed", lambda self: int(self._newest[0]))
    with pytest.raises(AssertionError):
        test_windows_of_any_width_are_solo_runs(chained)


def test_a_restored_sequence_goes_on_as_the_one_that_was_saved(chained: Model) -> None:
    goes_on(chained)


def test_a_restored_sequence_goes_on_with_several_depths(deep: Model) -> None:
    goes_on(deep)


def goes_on(model: Model) -> None:
    """Saved in parts of a few rows, restored elsewhere: the same states, and with its rows the same drafts."""
    text, parts, rows = [5, 9, 2, 33, 8, 21, 60, 4, 17, 3], [], []
    slots = model.engine.sequences(3)
    source = slots.window(0, 1)
    for start, end in ((0, 4), (4, 7), (7, 10)):
        rows.append(feed(source, text[start:end], text[end] if end < len(text) else None).hidden[0].copy())
        parts.append(slots.save(0, start))
    feed(slots.window(2, 1), [1, 2, 3])
    slots.restore(2, parts)
    assert slots.lengths.tolist() == [10, 0, 10]
    assert same(slots, 2, slots, 0)
    assert sum(part.nbytes for part in parts) > parts[-1].nbytes > 0
    seen = np.concatenate(rows)[None, :-1]
    slots.window(2, 1).draft(np.array([text[1:]]), seen, np.array([9]), 0)
    hidden = source.verify(np.array([[11]]), 1).hidden[:, :1].copy()
    drafts = [slots.window(slot, 1).draft(np.array([[12]]), hidden, np.array([1]), 2).tolist() for slot in (0, 2)]
    assert drafts[0] == drafts[1]


def test_a_copy_takes_the_rows_since_the_two_were_the_same(chained: Model) -> None:
    slots = chained.engine.sequences(2)
    for slot in (0, 1):
        feed(slots.window(slot, 1), [5, 6, 7])
    slots.verify(np.array([[1, 2, 3], [4, 5, 6]]), 0)
    slots.commit(np.array([2, 0]))
    slots.copy(0, 1, since=3)
    assert slots.lengths.tolist() == [5, 5]
    assert same(slots, 1, slots, 0)
    assert same(slots, 1, alone(chained, [5, 6, 7, 1, 2]))


def test_what_windows_refuse(chained: Model) -> None:
    slots = chained.engine.sequences(3)
    with refused("2 sequences from 2", "there are 3", error=ContractError):
        slots.window(2, 2)
    feed(slots.window(0, 1), [1, 2, 3])
    with refused("from 4", "3 are committed", error=ContractError):
        slots.save(0, 4)
    with refused("from row 1", "expected row 0", error=ContractError):
        slots.restore(1, [slots.save(0, 1)])
    slots.window(0, 2).verify(np.array([[1], [2]]), 0)
    slots.window(2, 1).verify(np.array([[3]]), 0)
    with refused("nothing staged", error=ContractError):
        slots.window(0, 2).commit(np.array([1, 1]))
