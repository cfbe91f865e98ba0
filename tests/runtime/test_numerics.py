"""Values that are no numbers, in bundles that were changed after the build, which refuses such weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.bundle import BACKBONE, WEIGHTS, mtp_graph
from mtp_engines.engine import Floats, Ids
from mtp_engines.errors import NumericsError
from mtp_runtime import Model
from tests.fixtures.checkpoints import markov_checkpoint
from tests.runtime.changed import changed, forty_after_eight
from tests.runtime.conftest import Models
from tests.runtime.parts import Delegate, play, take_into
from tests.support import build_bundle, command_refused, copy_of, load_model, refused, run_command

CHAIN = list(range(6, 26))
K_VALUES = (0, 2, 3)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the chain t + 1 with a perfect head."""
    place = tmp_path_factory.mktemp("sound")
    return build_bundle(markov_checkpoint(place / "checkpoint"), place / "bundle")


def _broken_off(model: Model, draft_tokens: int, prompt: list[int]) -> tuple[list[int], str]:
    """The ids that came out before a NumericsError, and its text."""
    ids: list[int] = []
    events = model.generate(prompt_ids=prompt, max_new_tokens=20, draft_tokens=draft_tokens)
    with pytest.raises(NumericsError) as caught:
        take_into(ids, events)
    return ids, str(caught.value)


def test_changing_a_bundle_this_way_changes_nothing_else(sound: Path, tmp_path: Path) -> None:
    """RT-48: the control of this file: a changed value that is a number, in a head that only drafts."""
    copied = load_model(changed(sound, tmp_path / "b", mtp_graph(0), "mtp.output_norm", (0,), 0.9))
    for draft_tokens in K_VALUES:
        done = copied.complete(prompt_ids=[5], max_new_tokens=20, draft_tokens=draft_tokens)
        assert list(done.token_ids) == CHAIN
        assert (done.stats.drafted > 0) == (draft_tokens > 0)


@pytest.mark.parametrize("draft_tokens", K_VALUES)
@pytest.mark.parametrize(
    ("tensor", "at", "value"),
    [("layers.0.input_norm", (3,), np.nan), ("layers.3.post_norm", (0,), np.nan), ("head", (3, 7), np.inf)],
)
def test_a_target_that_is_not_finite_emits_nothing(
    sound: Path, tmp_path: Path, tensor: str, at: tuple[int, ...], value: float, draft_tokens: int
) -> None:
    """RT-48: NaN in a norm of the target, infinity in a row of the vocabulary head that is never the best."""
    model = load_model(changed(sound, tmp_path / "b", BACKBONE, tensor, at, value))
    ids, message = _broken_off(model, draft_tokens, [5, 6, 7])
    assert ids == []
    assert "not a number at position 2" in message
    assert message.endswith("build it again.")


def test_the_command_line_says_so_in_one_line(sound: Path, tmp_path: Path) -> None:
    """RT-48 and SV-07: exit code 1, one sentence, no id on stdout."""
    bundle = changed(sound, tmp_path / "b", BACKBONE, "layers.0.input_norm", (3,), np.nan)
    result = run_command("mtp-run", "generate", bundle, "--prompt-ids", "5", "--max-new-tokens", "4")
    command_refused(result, "position 0", "not a number")
    assert result.stdout.strip() == ""


def test_control_without_the_check_a_row_of_nan_becomes_an_id(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RT-48: the fault of the case, NaN laundered into a token, is what the checks above would see."""
    model = load_model(changed(sound, tmp_path / "b", BACKBONE, "layers.0.input_norm", (3,), np.nan))
    choose = VocabularyHead.choose

    def believes(self: VocabularyHead, hidden: Floats) -> object:
        ids, finite = choose(self, hidden)
        return ids, np.ones_like(finite)

    monkeypatch.setattr(VocabularyHead, "choose", believes)
    done = model.complete(prompt_ids=[5], max_new_tokens=20, draft_tokens=2)
    assert len(done.token_ids) == 20
    assert list(done.token_ids) != CHAIN


@pytest.mark.parametrize("draft_tokens", K_VALUES)
def test_a_value_that_turns_up_later_ends_there(sound: Path, tmp_path: Path, draft_tokens: int) -> None:
    """RT-48: consuming id 9, at position 4, gives NaN; what came out before is right, and others are served."""
    model = load_model(changed(sound, tmp_path / "b", BACKBONE, "embedding", (9, 0), np.nan))
    ids, message = _broken_off(model, draft_tokens, [5])
    assert "not a number at position 4" in message
    assert ids == CHAIN[: len(ids)]
    assert 1 <= len(ids) <= 4
    if draft_tokens == 0:
        assert ids == [6, 7, 8, 9]
    other = model.complete(prompt_ids=[20], max_new_tokens=20, draft_tokens=draft_tokens)
    assert list(other.token_ids) == list(range(21, 41))


@pytest.mark.parametrize("tensor", ["mtp.embedding_norm", "mtp.projection", "mtp.layer.mlp.down", "mtp.output_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_head_that_is_not_finite_drafts_nothing(sound: Path, tmp_path: Path, tensor: str, value: float) -> None:
    """RT-48: the ids are those of plain decoding, and nothing counts as drafted."""
    shape = next(
        tuple(initializer.dims)
        for initializer in onnx.load(sound / mtp_graph(0), load_external_data=False).graph.initializer
        if initializer.name == tensor
    )
    model = load_model(changed(sound, tmp_path / "b", mtp_graph(0), tensor, (0,) * len(shape), value))
    for draft_tokens in K_VALUES:
        done = model.complete(prompt_ids=[5], max_new_tokens=20, draft_tokens=draft_tokens)
        assert list(done.token_ids) == CHAIN
        assert done.stats.as_dict()["acceptance_rate"] is None
        assert done.stats.drafted == 0


def test_drafts_that_break_off_early_are_used_as_far_as_they_go(markov: Models) -> None:
    """RT-48: a head that stops making sense after one draft; the loop takes what there is."""

    class BreaksOff(Delegate):
        calls = 0

        def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
            self.calls += 1
            return super().draft(tokens, hidden, rows, draft_tokens)[:, : self.calls % 3]

    run = play(markov(), [5], 20, 3, wrap=BreaksOff)
    assert run.ids == CHAIN
    assert run.accepted[:6] == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("draft_tokens", K_VALUES)
def test_a_rejected_draft_that_is_not_finite_changes_no_id(tmp_path: Path, draft_tokens: int) -> None:
    """RT-48 and P2: id 40 is drafted after 8 and gives NaN, plain decoding never meets it.

    The ids are those of plain decoding, or the run ends with the position: never with other ids.
    """
    checkpoint = markov_checkpoint(tmp_path / "checkpoint", draft=forty_after_eight)
    bundle = build_bundle(checkpoint, tmp_path / "bundle")
    model = load_model(changed(bundle, tmp_path / "changed", BACKBONE, "embedding", (40, 0), np.nan))
    if draft_tokens == 0:
        done = model.complete(prompt_ids=[7], max_new_tokens=20, draft_tokens=0)
        assert list(done.token_ids) == list(range(8, 28))
        return
    ids: list[int] = []
    with contextlib.suppress(NumericsError):
        take_into(ids, model.generate(prompt_ids=[7], max_new_tokens=20, draft_tokens=draft_tokens))
        assert len(ids) == 20
    assert ids == list(range(8, 8 + len(ids)))


def test_a_changed_weight_file_is_noticed_without_new_digests(sound: Path, tmp_path: Path) -> None:
    """RT-48: the way these tests change a bundle needs the manifest too, which a user does not touch."""
    bundle = copy_of(sound, tmp_path / "b")
    weights = np.memmap(bundle / WEIGHTS, np.float32, "r+")
    weights[5] = np.nan
    weights.flush()
    with refused("weights.data", "was changed"):
        load_model(bundle)
