"""The head's drafter: how it catches up, and what the engine refuses to draft from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import ContractError, NumericsError
from mtp_runtime import Model
from mtp_runtime.drafters.mtp import MtpDrafter
from tests.fixtures.checkpoints import random_checkpoint
from tests.support import build_bundle, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    place = tmp_path_factory.mktemp("drafters")
    return load_model(build_bundle(random_checkpoint(place / "model", seed=6), place / "bundle", max_model_len=256))


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_long_backlog_is_consumed_in_blocks_with_the_same_drafts(model: Model, block: int) -> None:
    ids = np.random.default_rng(0).integers(0, 112, 60)
    hidden = model.engine.sequences().verify(ids[None], 0).hidden[0].copy()
    drafts = []
    for size in (block, 1000):
        drafter = MtpDrafter(model.engine.sequences(), model.engine.spec.hidden_size, size)
        for start in range(0, 59, 20):
            end = min(start + 20, 59)
            drafter.observe(ids[start + 1 : end + 1], hidden[start:end])
            assert len(drafter._tokens) <= size, "no more waits than a block"
        drafts.append(drafter.propose(4))
    assert len(drafts[0]) == 4
    assert drafts[0] == drafts[1]
    other = MtpDrafter(model.engine.sequences(), model.engine.spec.hidden_size, 1000)
    other.observe(ids[1:], hidden[:-1] * np.float32(-1))
    assert other.propose(4) != drafts[0], "control: the hidden rows matter"


def test_a_verify_that_fails_leaves_nothing_to_commit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences: Any = model.engine.sequences()
    sequences.verify(np.array([[1, 2]]), 1)
    with monkeypatch.context() as patch:
        no_number = (np.zeros((1, 1), np.int64), np.zeros((1, 1), bool))
        patch.setattr(type(sequences._head), "choose", lambda self, rows: no_number)
        with pytest.raises(NumericsError):
            sequences.verify(np.array([[3]]), 1)
    with pytest.raises(ContractError, match="nothing staged"):
        sequences.commit(np.array([1]))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda s, h: s.verify(np.array([[-1]]), 1), "Token id -1"),
        (lambda s, h: s.verify(np.array([[1]]), 2), "logit_rows = 2"),
        (lambda s, h: s.verify(np.array([[1.0]]), 1), "float64"),
        (lambda s, h: s.draft(np.array([[500]]), h, np.array([1]), 1), "Token id 500"),
        (lambda s, h: s.draft(np.array([[5]]), h, np.array([1]), 99), "draft_tokens = 99"),
        (lambda s, h: s.draft(np.array([[5]]), h[..., :3], np.array([1]), 1), "hidden[1, 1, 3]"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(model: Model, call: Callable[..., Any], expected: str) -> None:
    hidden = np.zeros((1, 1, model.engine.spec.hidden_size), np.float32)
    with pytest.raises(ContractError, match=re.escape(expected)):
        call(model.engine.sequences(), hidden)


def test_fractions_are_no_counts_of_rows(model: Model) -> None:
    sequences = model.engine.sequences()
    sequences.verify(np.array([[1]]), 1)
    with pytest.raises(ContractError, match="commit got rows"):
        sequences.commit(np.array([0.7]))
