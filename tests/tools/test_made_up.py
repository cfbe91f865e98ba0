"""Checkpoints with a chosen acceptance: what they emit and accept is known from two permutations, token by token."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import BuildError, ContractError
from mtp_runtime import Model
from mtp_tools.made_up import shapes
from mtp_tools.made_up.chosen import ChosenWeights, clash_bound
from mtp_tools.made_up.successors import Shuffle, Successors
from mtp_tools.made_up.write import chosen_weights, write_checkpoint
from tests.support import build_bundle, generate, load_model, run_command

SIZES = {"VOCAB": 640, "HEAD_DIM": 32, "DELTA_DIM": 16, "KEY_HEADS": 2}
TIED = shapes.PublishedShape(4, 192, 96, 2, 1, 4, True)
UNTIED = shapes.PublishedShape(4, 192, 96, 2, 1, 4, False)
SEED, NEW_TOKENS = 7, 300
ACCEPTANCES = (0.0, 0.3, 0.7, 1.0)
PROMPT = [3, 14, 15, 92, 65]


@contextlib.contextmanager
def small() -> Iterator[None]:
    """The dimensions that all published shapes share, made small."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setattr(shapes, name, value)
        yield


def written(directory: Path, shape: shapes.PublishedShape, acceptance: float | None) -> Path:
    """A small checkpoint at `directory`."""
    with small():
        write_checkpoint(directory, shape, SEED, acceptance)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Acceptance, and shape -> the loaded bundle, built once."""
    made: dict[object, Model] = {}

    def make(acceptance: float, shape: shapes.PublishedShape = TIED) -> Model:
        if (acceptance, shape) not in made:
            place = tmp_path_factory.mktemp("made_up")
            checkpoint = written(place / "checkpoint", shape, acceptance)
            bundle = build_bundle(checkpoint, place / "bundle", max_model_len=384, draft_tokens=3)
            made[acceptance, shape] = load_model(bundle)
        return made[acceptance, shape]

    return make


@dataclass
class Expected:
    """What a generation does, said by the permutations alone."""

    tokens: list[int]
    accepted_by_position: list[int]
    drafted: int
    cycles: int

    @classmethod
    def of(cls, successors: Successors, last: int, draft_tokens: int, new_tokens: int = NEW_TOKENS) -> Expected:
        """The tokens after a prompt that ends with `last`."""

        def one(function: Callable[[Any], Any], token: int) -> int:
            return int(function(np.array([token]))[0])

        found = cls([one(successors.target, last)], [0] * draft_tokens, 0, 0)
        while len(found.tokens) < new_tokens:
            token, kept, right = found.tokens[-1], 0, True
            count = min(draft_tokens, new_tokens - len(found.tokens) - 1)
            block: list[int] = []
            for position in range(count):
                following = one(successors.draft, token)
                right = right and following == one(successors.target, token)
                if right:
                    block.append(following)
                    found.accepted_by_position[position] += 1
                    kept += 1
                token = following
            block.append(one(successors.target, block[-1] if block else found.tokens[-1]))
            found.tokens += block
            found.drafted += count
            found.cycles += 1
        return found


def done(
    model: Model, draft_tokens: int, prompt: list[int] = PROMPT, new_tokens: int = NEW_TOKENS, **options: Any
) -> Expected:
    """What the generation did."""
    finished = generate(model, prompt, new_tokens, draft_tokens, ignore_eos=True, **options)
    stats = finished.stats
    return Expected(list(finished.token_ids), stats.accepted_by_position, stats.drafted, stats.cycles)


@pytest.mark.parametrize("vocab", [3, 97, 512, 5000])
def test_both_permutations_are_undone_and_differ_on_the_chosen_share(vocab: int) -> None:
    tokens = np.arange(vocab)
    for acceptance in ACCEPTANCES:
        successors = Successors(vocab, acceptance, SEED)
        target, draft = successors.target(tokens), successors.draft(tokens)
        np.testing.assert_array_equal(successors.before_target(target), tokens)
        np.testing.assert_array_equal(successors.before_draft(draft), tokens)
        assert sorted(draft) == sorted(target) == tokens.tolist()
        assert abs((draft == target).sum() - acceptance * vocab) <= 1
        seen, token = [], 0
        while not seen or token:
            token = int(target[token])
            seen.append(token)
        assert len(seen) == vocab, "the target has a shorter cycle than the vocabulary"


def test_wrong_drafts_are_spread_evenly_over_a_text() -> None:
    """Runs of right drafts in the order of the text are as long as independent drafts have them."""
    successors = Successors(shapes.VOCAB, 0.7, SEED)
    tokens = np.arange(shapes.VOCAB)
    right = successors.draft(tokens) == successors.target(tokens)
    in_order = right[Shuffle(shapes.VOCAB, SEED, 1).tokens(tokens)]
    for run in (2, 3, 4):
        share = np.lib.stride_tricks.sliding_window_view(in_order, run).all(axis=1).mean()
        # Five standard deviations of a mean over so many windows are below 0.005.
        assert share == pytest.approx(0.7**run, abs=0.01)
    # Control: the same drafts sorted have no such runs.
    assert np.lib.stride_tricks.sliding_window_view(np.sort(right), 2).all(axis=1).mean() > 0.69


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("draft_tokens", [1, 2, 3])
def test_tokens_and_accepted_drafts_are_those_of_the_permutations(
    model: Callable[..., Model], acceptance: float, draft_tokens: int
) -> None:
    loaded = model(acceptance)
    successors = Successors(SIZES["VOCAB"], acceptance, SEED)
    expected = Expected.of(successors, PROMPT[-1], draft_tokens)
    assert done(loaded, draft_tokens) == expected
    if 0 < acceptance < 1:
        assert all(expected.accepted_by_position), "no draft was accepted at some position: this test is too short"
        assert expected.cycles > expected.accepted_by_position[0], "no draft was refused: this test is too short"
        # Control: the drafts of another seed, which leave the same tokens.
        successors._rest = Shuffle(SIZES["VOCAB"], SEED + 1, 2)
        other = Expected.of(successors, PROMPT[-1], draft_tokens)
        assert other.tokens == expected.tokens
        assert other.accepted_by_position != expected.accepted_by_position


def test_a_head_of_its_own_gives_the_same(model: Callable[..., Model]) -> None:
    untied = done(model(0.7, UNTIED), 3)
    assert untied == Expected.of(Successors(SIZES["VOCAB"], 0.7, SEED), PROMPT[-1], 3)
    assert untied.tokens != Expected.of(Successors(SIZES["VOCAB"], 0.7, SEED + 1), PROMPT[-1], 3).tokens


def test_lookup_finds_nothing_in_a_text(model: Callable[..., Model]) -> None:
    loaded = model(0.7)
    assert sum(done(loaded, 3, drafter="ngram", ngram_min=1).accepted_by_position) == 0
    # Control: a prompt that has the answer.
    plain = done(loaded, 3).tokens
    repeated = [*plain[:40], *plain[:2]]
    assert sum(done(loaded, 3, repeated, drafter="ngram", ngram_min=1).accepted_by_position) >= 20


def test_verify_passes(tmp_path: Path) -> None:
    bundle = build_bundle(written(tmp_path / "checkpoint", TIED, 0.7), tmp_path / "bundle")
    verified = run_command("mtp-run", "verify", "--new-tokens", "16", "--long-tokens", "40", "--threads", "1", bundle)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def margins(chosen: ChosenWeights, tokens: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The best row for each token by target and draft, and how far it is ahead, as a share of its logit."""
    code = chosen.code
    rows = chosen.rows(tokens).astype(np.float32)
    first, second = rows[:, :code], rows[:, code : 2 * code]
    hidden = np.stack([16 * first + second, first])
    best = np.full((2, len(tokens), 2), -np.inf, np.float32)
    place = np.zeros((2, len(tokens)), np.int64)
    for start in range(0, vocab, 4096):
        block = chosen.rows(np.arange(start, min(start + 4096, vocab))).astype(np.float32)
        for index in range(2):
            logits = hidden[index] @ block[:, (index + 1) * code : (index + 2) * code].T
            higher = logits.max(axis=1) > best[index, :, 1]
            place[index][higher] = start + logits[higher].argmax(axis=1)
            both = np.concatenate([best[index], np.partition(logits, -2, axis=1)[:, -2:]], axis=1)
            best[index] = np.sort(both, axis=1)[:, -2:]
    return place, 1 - best[..., 0] / best[..., 1]


def test_at_the_real_width_the_right_row_is_far_ahead_of_all_others() -> None:
    shape = shapes.PUBLISHED["0.8B"]
    chosen, successors = chosen_weights(shape, 0.7, SEED), Successors(shapes.VOCAB, 0.7, SEED)
    tokens = np.random.default_rng(1).integers(0, shapes.VOCAB, 64)
    place, ahead = margins(chosen, tokens, shapes.VOCAB)
    np.testing.assert_array_equal(place, [successors.target(tokens), successors.draft(tokens)])
    # Codes that agree in less than a half leave three eighths of the logit; bfloat16 rounds by 1/256.
    assert ahead.min() > 3 / 8
    assert clash_bound(shapes.VOCAB, chosen.code, 0.5) < 1e-7
    assert clash_bound(shapes.VOCAB, 64) > 1e-2, "the bound tells no narrow code from a wide one"


def test_a_narrow_shape_and_a_wrong_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot tell 640 tokens apart"):
        written(tmp_path / "narrow", dataclasses.replace(TIED, hidden=96), 0.5)
    with pytest.raises(BuildError, match="must have 63 neurons"):
        written(tmp_path / "few neurons", dataclasses.replace(TIED, intermediate=32), 0.5)
    with pytest.raises(ContractError, match="give a number from 0 to 1"):
        written(tmp_path / "more than all", TIED, 1.5)
    assert not list(tmp_path.iterdir())


def test_a_chosen_acceptance_changes_values_and_no_layout(tmp_path: Path) -> None:
    files = [(written(tmp_path / str(a), TIED, a) / "model.safetensors").read_bytes() for a in (None, 0.7)]
    length = int.from_bytes(files[0][:8], "little")
    assert files[0][: 8 + length] == files[1][: 8 + length]
    assert len(files[0]) == len(files[1])
    assert files[0] != files[1]


@pytest.mark.slow
def test_a_published_size_accepts_the_chosen_share(tmp_path: Path) -> None:
    """Five gigabytes and some minutes: the shape of 0.8B parameters, written by the command, built and run."""
    command = [sys.executable, "-m", "mtp_tools.made_up", "--shape", "0.8B", "--acceptance", "0.7", "--seed", str(SEED)]
    subprocess.run([*command, "--out", str(tmp_path / "checkpoint")], check=True)
    loaded = load_model(build_bundle(tmp_path / "checkpoint", tmp_path / "bundle", max_model_len=384))
    for draft_tokens in (1, 3):
        got = done(loaded, draft_tokens, new_tokens=64)
        assert got == Expected.of(Successors(shapes.VOCAB, 0.7, SEED), PROMPT[-1], draft_tokens, 64)
        assert got != Expected.of(Successors(shapes.VOCAB, 0.3, SEED), PROMPT[-1], draft_tokens, 64)
