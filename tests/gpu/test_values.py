"""Values that are no numbers, in whole cycles."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_engines.backends import open_engine
from mtp_engines.backends.gpu.cycle import Cycler
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import BACKBONE, mtp_graph, open_bundle
from mtp_engines.errors import NumericsError
from mtp_runtime import Model, load
from tests.fixtures.checkpoints import markov_checkpoint
from tests.gpu.parts import Opened, by_cycles, by_host
from tests.runtime.changed import changed, forty_after_eight
from tests.support import build_bundle, refused

CHAIN = list(range(6, 18))
LAYERS = ["linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the chain t + 1 with a perfect head."""
    place = tmp_path_factory.mktemp("sound")
    return build_bundle(markov_checkpoint(place / "checkpoint", layer_types=LAYERS), place / "bundle", draft_tokens=3)


@pytest.fixture(scope="module")
def tempted(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A head that drafts 40 after 8, which is NaN to consume and which plain decoding never meets."""
    place = tmp_path_factory.mktemp("tempted")
    checkpoint = markov_checkpoint(place / "checkpoint", draft=forty_after_eight, layer_types=LAYERS)
    bundle = build_bundle(checkpoint, place / "bundle", draft_tokens=3, max_batch_size=2)
    return _opened(changed(bundle, place / "changed", BACKBONE, "embedding", (40, 0), np.nan))


def _opened(directory: Path) -> Opened:
    bundle = open_bundle(directory)
    return Opened(bundle, open_engine(bundle, EngineOptions(threads=1)))


def _model(directory: Path) -> Model:
    return load(directory, options=EngineOptions(backend="torch", device="cpu", threads=1))


@pytest.mark.parametrize("draft_tokens", [0, 2])
@pytest.mark.parametrize(("tensor", "at", "value"), [("layers.0.input_norm", (3,), np.nan), ("head", (3, 7), np.inf)])
def test_a_target_that_is_not_finite_emits_nothing(
    sound: Path, tmp_path: Path, tensor: str, at: tuple[int, ...], value: float, draft_tokens: int
) -> None:
    model = _model(changed(sound, tmp_path / "b", BACKBONE, tensor, at, value))
    with refused("not a number at position 2 of sequence 0", "Check the checkpoint's weights", error=NumericsError):
        model.complete(prompt_ids=[5, 6, 7], max_new_tokens=8, draft_tokens=draft_tokens)


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_a_value_that_turns_up_later_ends_there(sound: Path, tmp_path: Path, draft_tokens: int) -> None:
    """Consuming id 9 gives NaN; what came out before is right."""
    opened = _opened(changed(sound, tmp_path / "b", BACKBONE, "embedding", (9, 0), np.nan))
    sequences = opened.torch().sequences()
    ids = sequences.prefill(np.array([[5]]), drafting=draft_tokens > 0).tolist()
    with refused("not a number", "Check the checkpoint's weights", error=NumericsError):
        for _ in range(9):
            ids += sequences.cycle(draft_tokens).emitted[0]
    assert ids == [6, 7, 8, 9]


@pytest.mark.parametrize("skinny", [False, True])
def test_the_next_sequences_find_no_trace_of_it(sound: Path, tmp_path: Path, skinny: bool) -> None:
    """Sequences take over the memory of those before them, with whatever was written there."""
    engine = _opened(changed(sound, tmp_path / "b", BACKBONE, "embedding", (9, 0), np.nan)).torch(skinny=skinny)
    sequences = engine.sequences()
    memory = id(sequences._device)
    sequences.verify(np.array([[5, 9, 9, 9]]), 0)
    sequences.commit(np.array([4]))
    del sequences
    gc.collect()
    fresh = engine.sequences()
    assert id(fresh._device) == memory, "control: this is other memory"
    assert by_cycles(engine, [20], 12, 2, sequences=fresh).cut(12) == list(range(21, 33))


@pytest.mark.parametrize("skinny", [False, True])
@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
def test_a_draft_that_is_not_finite_changes_no_token(tempted: Opened, draft_tokens: int, skinny: bool) -> None:
    engine = tempted.torch(skinny=skinny)
    said = by_cycles(engine, [7], 12, draft_tokens)
    assert said.cut(12) == list(range(8, 20))
    assert 40 in [token for draft in said.drafts for token in draft], "control: the head was not tempted"


def test_the_states_are_numbers_after_such_a_draft(tempted: Opened) -> None:
    engine = tempted.torch()
    sequences = engine.sequences()
    said = by_cycles(engine, [7], 12, 2, sequences=sequences)
    assert said.drafts[0][0] == 40, "control: the head was not tempted"
    assert all(np.isfinite(value).all() for value in sequences.snapshot(0).values())


def test_another_sequence_is_not_led_astray(tempted: Opened) -> None:
    """One of two meets the bad draft; the other goes on as if it were alone."""
    sequences = tempted.torch().sequences(2)
    ids = [[int(token)] for token in sequences.prefill(np.array([[7], [20]]), drafting=True)]
    for _ in range(5):
        for said, emitted in zip(ids, sequences.cycle(3).emitted, strict=True):
            said += emitted
    for said, first in zip(ids, (8, 21), strict=True):
        assert said == list(range(first, first + len(said)))


def test_control_without_the_check_such_a_draft_changes_tokens(
    tempted: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Cycler._keep

    def believes(
        self: Cycler, count: int, draft: torch.Tensor, chosen: torch.Tensor, finite: torch.Tensor, tap: torch.Tensor
    ) -> None:
        right(self, count, draft, chosen, torch.ones_like(finite), tap)

    monkeypatch.setattr(Cycler, "_keep", believes)
    assert by_cycles(tempted.torch(), [7], 12, 2).cut(12) != list(range(8, 20))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_that_is_not_finite_costs_time_only(sound: Path, tmp_path: Path, value: float) -> None:
    opened = _opened(changed(sound, tmp_path / "b", mtp_graph(0), "mtp.output_norm", (0,), value))
    engine = opened.torch()
    for way in (by_cycles, by_host):
        said = way(engine, [5], 12, 2)
        assert said.cut(12) == CHAIN
        assert all(0 <= token < 64 for draft in said.drafts for token in draft)
