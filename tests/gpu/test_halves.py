"""Half precision: the same tokens with every K where rows do not depend on their number, and pages in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtp_engines.backends.gpu import caches, pages
from mtp_engines.backends.gpu.runs import TargetRun
from mtp_engines.backends.torch.engine import TorchEngine
from mtp_engines.lowering.precision import Precision
from mtp_engines.promise import measure_promise
from tests.gpu.parts import Opened, by_cycles, by_host, plain, small_pages

PROMPT = [5, 6, 20]
TOKENS = 14
HALVES: list[Precision] = ["bf16", "fp16"]


@pytest.fixture(scope="module", params=HALVES)
def half(request: pytest.FixtureRequest, partial: Opened) -> TorchEngine:
    """An engine in half precision, with products of one width."""
    return partial.torch(request.param)


def test_no_row_of_halves_depends_on_others_on_this_cpu(half: TorchEngine) -> None:
    """PyTorch's half products treat every row alike on a CPU, which the tests below build on.

    A recurrent state may differ in its last bit: PyTorch's vector code rounds exp otherwise than the scalar code that
    does the rest of a tensor, and where that begins depends on the number of rows.
    """
    difference = measure_promise(half, np.arange(16)).first_difference
    assert difference is None or difference.startswith("past.")


def test_control_the_measurement_sees_a_row_that_depends_on_others(
    half: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TargetRun.enqueue

    def wrong(self: TargetRun, newest: int) -> None:
        right(self, newest)
        # The first row of a verify whose second is not padding differs in its last bit.
        self.hidden[:, 0] = torch.where(self.tokens[:, 1:2] > 0, self.hidden[:, 0] * (1 + 2**-20), self.hidden[:, 0])

    monkeypatch.setattr(TargetRun, "enqueue", wrong)
    measured = measure_promise(half, np.arange(1, 17))
    assert measured.promise == "near-tie"
    assert measured.first_difference is not None
    assert measured.first_difference.startswith("row 5 of 15 in verifies of 2 rows")


@pytest.mark.parametrize("draft_tokens", range(1, 5))
def test_tokens_do_not_depend_on_the_number_of_drafts(half: TorchEngine, draft_tokens: int) -> None:
    own = plain(half, PROMPT, TOKENS).ids
    cycles, host = (way(half, PROMPT, TOKENS, draft_tokens) for way in (by_cycles, by_host))
    assert cycles.cut(TOKENS) == host.cut(TOKENS) == own
    assert sum(cycles.accepted) > 0


def test_hidden_rows_of_halves_are_near_those_of_float32(half: TorchEngine, partial: Opened) -> None:
    """Shares of the greatest value: bfloat16 rounds at 4e-3 and float16 at 5e-4, which a few layers add up."""
    ids = np.array([np.random.default_rng(1).integers(1, 64, 12)])
    rows, wanted = (engine.sequences().verify(ids, 0).hidden[0].copy() for engine in (half, partial.engine))
    error = np.abs(rows - wanted).max() / np.abs(wanted).max()
    assert 1e-5 < error < 0.03


def _shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 4 rows in a random order, those of two sequences mixed."""
    small_pages(monkeypatch)
    generator = np.random.default_rng(3)

    class Shuffled(pages.PagePool):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            generator.shuffle(self._free)

    monkeypatch.setattr(caches, "PagePool", Shuffled)


def test_pages_in_any_order_give_the_same_bits(half: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pages(monkeypatch)
    in_order = _two(half)
    _shuffled(monkeypatch)
    sequences, again = half.sequences(2), _two(half)
    assert (free := sequences._device.pages.table.pool._free) != sorted(free, reverse=True)
    assert again.keys() == in_order.keys()
    assert all(np.array_equal(again[name], value) for name, value in in_order.items())


def test_control_pages_that_two_sequences_share_change_the_bits(
    half: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pages(monkeypatch)
    right = _two(half)
    reserve = pages.PagePool.reserve

    def shared(self: pages.PagePool, sequence: int, rows: int) -> bool:
        changed = reserve(self, sequence, rows)
        self.table[1, 0] = self.table[0, 0]
        return changed

    monkeypatch.setattr(pages.PagePool, "reserve", shared)
    wrong = _two(half)
    assert not all(np.array_equal(wrong[name], value) for name, value in right.items())


def _two(engine: TorchEngine) -> dict[str, np.ndarray]:
    """Hidden rows, drafts and states of two sequences after a prompt of 9 rows and verifies of 3."""
    sequences = engine.sequences(2)
    tokens = np.random.default_rng(0).integers(1, 64, (2, 18))
    found: dict[str, np.ndarray] = {}
    for start, end in ((0, 9), (9, 12), (12, 15), (15, 18)):
        verified = sequences.verify(tokens[:, start:end], 1)
        found[f"hidden {start}"] = verified.hidden.copy()
        sequences.commit(np.full(2, end - start))
        shifted = np.roll(tokens, -1, 1)[:, start:end]
        found[f"drafts {start}"] = sequences.draft(shifted, verified.hidden, np.full(2, end - start), 2)
    return found | {f"{name} {place}": value for place in (0, 1) for name, value in sequences.snapshot(place).items()}
