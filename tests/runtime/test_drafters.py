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
from mtp_runtime.drafters.ngram import NgramDrafter
from tests.fixtures.checkpoints import markov_checkpoint, random_checkpoint
from tests.support import build_bundle, load_model, refused


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


# ---------------------------------------------------------------------------------- prompt lookup


def looked_up(prompt: list[int], emitted: list[int], count: int, **options: int) -> list[int]:
    """A lookup's proposal after a prompt and some emitted tokens, which come in blocks as in a generation."""
    drafter = NgramDrafter(prompt, **options)
    rows = [*prompt[1:], *emitted]
    for start in range(0, len(rows), 3):
        part = np.array(rows[start : start + 3])
        drafter.observe(part, np.zeros((len(part), 1), np.float32))
    return drafter.propose(count)


@pytest.mark.parametrize(
    ("prompt", "emitted", "expected"),
    [
        ([1, 2, 3, 4, 5], [1, 2], [3, 4, 5, 1]),
        ([7, 8, 1, 7, 8, 2], [7, 8], [2, 7, 8]),
        ([9, 1, 2, 3, 6, 2, 3, 7], [1, 2, 3], [6, 2, 3, 7]),
        ([1, 2, 3], [4], []),
        ([5, 5, 5], [5], [5]),
        ([1], [2], []),
    ],
    ids=["continues", "the newest match", "the longest match", "no match", "overlapping", "too short"],
)
def test_a_lookup_proposes_what_followed_the_longest_newest_match(
    prompt: list[int], emitted: list[int], expected: list[int]
) -> None:
    assert looked_up(prompt, emitted, 4) == expected
    assert looked_up(prompt, emitted, 2) == expected[:2]
    assert looked_up(prompt, emitted, 0) == []


def test_a_lookup_keeps_to_its_lengths() -> None:
    assert looked_up([3, 9, 3], [8, 3], 1, min_match=1) == [8]
    assert looked_up([3, 9, 3], [8, 3], 1) == [], "control: one token is no match of two"


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A chain around eight tokens without a head: a lookup is right after the first round."""
    place = tmp_path_factory.mktemp("cyclic")
    checkpoint = markov_checkpoint(place / "model", target=lambda t: (t + 1) % 8)
    return load_model(build_bundle(checkpoint, place / "bundle", mtp=False, draft_tokens=4))


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4])
def test_a_lookup_drafts_for_a_bundle_without_a_head(cyclic: Model, draft_tokens: int) -> None:
    plain = cyclic.complete(prompt_ids=[0], max_new_tokens=40, draft_tokens=0)
    finished = cyclic.complete(prompt_ids=[0], max_new_tokens=40, draft_tokens=draft_tokens, drafter="ngram")
    assert finished.token_ids == plain.token_ids
    assert finished.stats.accepted == finished.stats.drafted > 0
    assert finished.stats.cycles < plain.stats.cycles


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A chain t -> t + 1 whose own head always drafts t + 2 instead."""
    place = tmp_path_factory.mktemp("successor")
    return load_model(build_bundle(markov_checkpoint(place / "model", draft="wrong"), place / "bundle", draft_tokens=4))


@pytest.mark.parametrize("drafter", ["ngram", "mtp+ngram"])
@pytest.mark.parametrize("right", range(5))
def test_a_lookup_is_accepted_exactly_as_far_as_the_prompt_was_right(
    successor: Model, drafter: str, right: int
) -> None:
    """The prompt says 10 11 12 and `right` true tokens, then 50: every accepted count from 0 to K."""
    prompt = [10, 11, 12, *range(13, 13 + right), 50, 51, 52, 53, 10, 11]
    events = list(successor.generate(prompt_ids=prompt, max_new_tokens=12, draft_tokens=4, drafter=drafter))
    assert events[0].token_ids == (12,)
    assert events[1].token_ids == tuple(range(13, 13 + right + 1))
    assert events[-1].token_ids == tuple(range(12, 24)), "the tokens are those of plain decoding"


def test_the_head_drafts_where_the_lookup_finds_nothing(successor: Model) -> None:
    prompt = [20, 30, 40]
    alone = successor.complete(prompt_ids=prompt, max_new_tokens=6, draft_tokens=2, drafter="ngram")
    both = successor.complete(prompt_ids=prompt, max_new_tokens=6, draft_tokens=2, drafter="mtp+ngram")
    assert alone.stats.drafted == 0
    assert both.stats.drafted > 0
    assert alone.token_ids == both.token_ids


@pytest.mark.parametrize("drafter", ["ngram", "mtp+ngram"])
def test_lookups_change_no_token_of_a_hybrid(model: Model, drafter: str) -> None:
    """Random weights and prompts that quote what the model will say, with a wrong token at a chosen place."""
    generator = np.random.default_rng(3)
    drafted = 0
    for seed in range(4):
        start = generator.integers(0, 112, 6).tolist()
        said = list(model.complete(prompt_ids=start, max_new_tokens=24, draft_tokens=0, ignore_eos=True).token_ids)
        for cut in range(2, 7):
            quoted = [*start, *said[:cut], 111 - said[cut], *start]
            plain = model.complete(prompt_ids=quoted, max_new_tokens=24, draft_tokens=0, ignore_eos=True)
            other = model.complete(prompt_ids=quoted, max_new_tokens=24, drafter=drafter, ignore_eos=True)
            assert other.token_ids == plain.token_ids, (seed, cut)
            drafted += other.stats.drafted
    assert drafted > 20, "control: the lookup drafts at all"


def test_drafters_that_a_bundle_cannot_use_are_refused(cyclic: Model, model: Model) -> None:
    for drafter in ("mtp", "mtp+ngram"):
        with refused(f"drafter is '{drafter}'", "without an MTP head", "ngram"):
            cyclic.complete(prompt_ids=[0], drafter=drafter)
    with refused("drafter is 'none'", "draft_tokens is 2"):
        model.complete(prompt_ids=[0], drafter="none", draft_tokens=2)
    with refused("drafter = 'guess'"):
        model.complete(prompt_ids=[0], drafter="guess")
    assert model.complete(prompt_ids=[0], drafter="none", max_new_tokens=2).stats.drafted == 0
