"""Decision 0025: a commit of some rows waits for the next run, and no bit depends on when it is made."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu import steps
from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.kernels.library import why_missing

from .conftest import Case

Rows = list[tuple[int, int]]
"""Rows of a verify, and how many of them are kept."""


@pytest.fixture(autouse=True)
def own_kernels() -> None:
    if why_missing() is not None:
        pytest.skip(f"there are no kernels: {why_missing()}")


def schedule(seed: int, most: int, cycles: int = 14) -> Rows:
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, most + 1, cycles)
    return [(int(width), int(rng.integers(0, width + 1))) for width in widths]


def fresh(case: Case, batch: int = 1) -> CpuSequences:
    sequences = case.model.engine.sequences(batch)
    assert isinstance(sequences, CpuSequences)
    return sequences


def tokens(case: Case) -> np.ndarray:
    return np.random.default_rng(1).integers(0, case.model.engine.spec.vocab_size, (1, 200))


def play(sequences: CpuSequences, ids: np.ndarray, rows: Rows) -> list[np.ndarray]:
    """Hidden states of the kept rows; rows that are dropped are other tokens."""
    found = []
    for width, kept in rows:
        start = int(sequences.lengths[0])
        given = ids[:, start : start + width].copy()
        given[:, kept:] += 1
        given %= ids.max() + 1
        found.append(sequences.verify(given, width).hidden[:, :kept].copy())
        sequences.commit(np.array([kept]))
    return found


def alone(case: Case, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same rows one at a time, where no commit ever waits."""
    sequences = fresh(case)
    hidden = play(sequences, tokens(case), [(1, 1)] * count)
    return np.concatenate(hidden, axis=1), sequences.snapshot(0)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commits were computed by themselves."""
    seen: list[int] = []
    right = steps.Step.replay

    def counted(self: steps.Step, *given: Any) -> None:
        seen.append(1)
        right(self, *given)

    monkeypatch.setattr(steps.Step, "replay", counted)
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_rows_and_states_are_those_of_rows_one_at_a_time(case: Case, seed: int, replays: list[int]) -> None:
    rows = schedule(seed, case.model.engine.limits.max_draft_tokens + 1)
    sequences = fresh(case)
    hidden = np.concatenate(play(sequences, tokens(case), rows), axis=1)
    assert len(replays) <= 2, "all but a few commits were made by the run that followed"
    expected, states = alone(case, hidden.shape[1])
    np.testing.assert_array_equal(hidden, expected)
    assert same(sequences.snapshot(0), states)


def test_control_a_row_too_few_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps.Step.run

    def one_less(self: steps.Step, waiting: steps.Pending | None, *, keeps: bool) -> steps.Staged:
        if waiting is not None:
            waiting = steps.Pending(waiting.step, waiting.side, waiting.kept - 1)
        return right(self, waiting, keeps=keeps)

    monkeypatch.setattr(steps.Step, "run", one_less)
    sequences = fresh(case)
    hidden = np.concatenate(play(sequences, tokens(case), [(3, 2), (3, 1)]), axis=1)
    monkeypatch.undo()
    assert not np.array_equal(hidden[:, 2:], alone(case, 3)[0][:, 2:])


def test_looking_at_states_changes_nothing(case: Case, replays: list[int]) -> None:
    ids, sequences = tokens(case), fresh(case)
    for width, kept in ((4, 2), (4, 1), (3, 3), (2, 1)):
        play(sequences, ids, [(width, kept)])
        for _ in range(2):
            assert same(sequences.snapshot(0), alone(case, int(sequences.lengths[0]))[1])
    assert sequences._memory.pending is not None, "rows that wait go on doing so"


@pytest.mark.parametrize(
    "other", ["prompt", "again", "nothing kept", "save", "copy", "company", "other window", "reset"]
)
def test_whatever_comes_next(case: Case, other: str) -> None:
    """Two rows wait when something else than a further cycle happens."""
    ids, both = tokens(case), fresh(case, batch=2)
    first = both.window(0, 1)
    assert isinstance(first, CpuSequences)
    play(first, ids, [(4, 2)])
    assert both._memory.pending is not None, "two rows wait"
    if other == "prompt":
        play(first, ids, [(30, 30)])
    elif other == "again":
        first.verify(ids[:, 7:10], 3)
        play(first, ids, [(3, 2)])
    elif other == "nothing kept":
        play(first, ids, [(3, 0), (1, 0), (2, 1)])
    elif other == "save":
        saved = first.save(0)
        play(first, ids, [(3, 1)])
        first.restore(0, [saved])
    elif other == "copy":
        both.copy(0, 1)
        second = both.window(1, 1)
        assert same(second.snapshot(0), alone(case, 2)[1])
    elif other == "company":
        both.verify(np.repeat(ids[:, 2:5], 2, axis=0), 3)
        both.commit(np.array([2, 3]))
    elif other == "other window":
        second = both.window(1, 1)
        assert isinstance(second, CpuSequences)
        play(second, ids, [(4, 1), (2, 1)])
        assert same(second.snapshot(0), alone(case, 2)[1])
    else:
        first.reset()
    assert same(
        first.snapshot(0), alone(case, int(first.lengths[0]))[1] if other != "reset" else fresh(case).snapshot(0)
    )
    play(first, ids, [(3, 1), (2, 2)])
    assert same(first.snapshot(0), alone(case, int(first.lengths[0]))[1])


@pytest.mark.parametrize("when", ["next run", "settling"])
def test_a_fault_leaves_rows_that_wait(case: Case, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, sequences = tokens(case), fresh(case)
    play(sequences, ids, [(4, 2)])
    run = steps.Bound.run

    def fails(self: Any) -> None:
        run(self)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(steps.Bound, "run", fails)
        act = partial(sequences.verify, ids[:, 2:5], 3) if when == "next run" else partial(sequences.save, 0)
        with pytest.raises(MemoryError):
            act()
    assert sequences.lengths.tolist() == [2]
    play(sequences, ids, [(3, 2)])
    assert same(sequences.snapshot(0), alone(case, 4)[1])


def test_behind_rows_that_were_kept_whole_states_are_written_at_once(case: Case) -> None:
    """So that a draft that is always right costs no repetition."""
    ids, sequences = tokens(case), fresh(case)
    waited = []
    for width, kept in [(3, 3)] * 4 + [(3, 1), (3, 3), (3, 3), (3, 3)]:
        play(sequences, ids, [(width, kept)])
        waited.append(sequences._memory.pending is not None)
    assert waited == [True, True, False, False, True, True, True, False]
    assert same(sequences.snapshot(0), alone(case, 22)[1])
