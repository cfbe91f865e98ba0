"""--mtp-from: the head, and only the head, of another checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.checkpoints import drop_tensors, edit_tensor, markov_checkpoint, random_checkpoint
from tests.support import build_bundle, build_refused, generate


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return markov_checkpoint(tmp_path / "base")


def is_head(name: str) -> bool:
    return name.startswith("mtp.")


def test_a_fine_tune_that_lost_its_head_gets_the_base_models(tmp_path: Path, base: Path) -> None:
    tuned = markov_checkpoint(tmp_path / "tuned")
    drop_tensors(tuned, is_head)
    build_refused(tuned, tmp_path / "out", "0 of 15", "--mtp-from")
    finished = generate(build_bundle(tuned, tmp_path / "out", mtp_from=str(base)), [5], 13, 3)
    assert list(finished.token_ids) == list(range(6, 19))
    assert finished.stats.accepted == finished.stats.drafted > 0


def test_a_head_of_its_own_is_replaced_whole(tmp_path: Path, base: Path) -> None:
    tuned = markov_checkpoint(tmp_path / "tuned", draft="wrong")
    own = generate(build_bundle(tuned, tmp_path / "own"), [5], 13, 3)
    assert own.stats.accepted == 0, "control: the fine-tune's own head is never right"
    drop_tensors(tuned, lambda name: name == "mtp.norm.weight")
    taken = generate(build_bundle(tuned, tmp_path / "out", mtp_from=str(base)), [5], 13, 3)
    assert taken.token_ids == own.token_ids
    assert taken.stats.accepted == taken.stats.drafted > 0


def test_only_the_head_is_taken(tmp_path: Path) -> None:
    other = markov_checkpoint(tmp_path / "base", target=lambda t: (t + 5) % 64)
    tuned = markov_checkpoint(tmp_path / "tuned", target=lambda t: (t + 1) % 64)
    drop_tensors(tuned, is_head)
    finished = generate(build_bundle(tuned, tmp_path / "out", mtp_from=str(other)), [5], 6, 2)
    assert list(finished.token_ids) == [6, 7, 8, 9, 10, 11], "the target is the fine-tune's"


def test_a_head_that_does_not_fit_is_refused_with_what_differs(tmp_path: Path) -> None:
    tuned = random_checkpoint(tmp_path / "tuned", seed=1, mtp=False)
    wider = random_checkpoint(tmp_path / "wider", seed=1, vocab_size=130)
    build_refused(tuned, tmp_path / "out", "does not fit", "vocab_size is 112 and 130", mtp_from=str(wider))
    deeper = random_checkpoint(tmp_path / "deeper", seed=1, head_dim=16)
    build_refused(tuned, tmp_path / "out", "does not fit", "their layers differ", mtp_from=str(deeper))


def test_a_base_without_a_head_is_refused(tmp_path: Path, base: Path) -> None:
    tuned = markov_checkpoint(tmp_path / "tuned")
    drop_tensors(tuned, is_head)
    build_refused(tuned, tmp_path / "out", "0 of 15", mtp_from=str(tuned))
    build_refused(base, tmp_path / "out", "--mtp-from", "--no-mtp", mtp_from=str(base), mtp=False)


def test_another_base_is_another_bundle(tmp_path: Path, base: Path) -> None:
    tuned = markov_checkpoint(tmp_path / "tuned")
    drop_tensors(tuned, is_head)
    out = build_bundle(tuned, tmp_path / "out", mtp_from=str(base))
    assert generate(out, [5], 9, 2).stats.accepted > 0
    edit_tensor(base, "mtp.fc.weight", lambda values: np.roll(values, 1, axis=0))
    assert generate(build_bundle(tuned, tmp_path / "out", mtp_from=str(base)), [5], 9, 2).stats.accepted == 0
