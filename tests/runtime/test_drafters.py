"""The head and the lookup: how they draft, what the engine refuses to draft from, and which drafter a request gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.engine import Floats, Ids
from mtp_engines.errors import ContractError, NumericsError, RequestError
from mtp_runtime import Model
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.drafters.registry import DRAFTERS
from tests.fixtures.checkpoints import markov_checkpoint, random_checkpoint
from tests.runtime.parts import play
from tests.runtime.proposals import looked_up as searched
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
        drafter = MtpDrafter(model.engine.sequences(), size)
        for start in range(0, 59, 20):
            end = min(start + 20, 59)
            drafter.observe(ids[start + 1 : end + 1], hidden[start:end])
            assert drafter._count <= size, "no more waits than a block"
        drafts.append(drafter.propose(4))
    assert len(drafts[0]) == 4
    assert drafts[0] == drafts[1]
    other = MtpDrafter(model.engine.sequences(), 1000)
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


# ------------------------------------------------------------------------- lookups against a search


def _looks_up(text: list[int], lengths: tuple[int, int], blocks: list[int], drafter: type[NgramDrafter]) -> bool:
    """Whether a lookup that learns the text in blocks proposes what a search finds, after every block."""
    lookup = drafter(text[:1], *lengths)
    known, same = text[:1], True
    for size in blocks:
        part = text[len(known) : len(known) + size]
        lookup.observe(np.array(part, np.int64), np.zeros((len(part), 1), np.float32))
        known = known + part
        same &= all(lookup.propose(count) == searched(known, count, *lengths) for count in range(5))
    return same


class KeepsTheOldest(NgramDrafter):
    """A fault: an index that is not brought up to date when a run of tokens comes again."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        before = dict(self._after)
        super().observe(tokens, hidden)
        self._after |= before


class IndexesOneBlockLate(NgramDrafter):
    """A fault: proposals come from the index before the newest block."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        before = dict(self._after)
        super().observe(tokens, hidden)
        self._after, self._newer = {**before, **getattr(self, "_newer", {})}, self._after


class FindsItself(NgramDrafter):
    """A fault: the ending of the text is in the index, so that it finds itself."""

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        super().observe(tokens, hidden)
        self._after |= {tuple(self._tokens[-length:]): len(self._tokens) for length in self._lengths}


def _texts() -> list[tuple[list[int], tuple[int, int], list[int]]]:
    """Texts of few different tokens, lengths of matches from 1 to 16, and blocks of 1 to 5 tokens."""
    generator = np.random.default_rng(0)
    cases = []
    for size in (2, 3, 5):
        for lengths in ((1, 1), (1, 4), (2, 4), (3, 3), (2, 16), (16, 16)):
            text = generator.integers(0, size, 60).tolist()
            cases.append((text, lengths, generator.integers(1, 6, 30).tolist()))
    return cases


def test_a_lookup_is_a_search_from_the_back() -> None:
    assert all(_looks_up(*case, NgramDrafter) for case in _texts())


@pytest.mark.parametrize("fault", [KeepsTheOldest, IndexesOneBlockLate, FindsItself])
def test_control_a_stale_index_is_noticed(fault: type[NgramDrafter]) -> None:
    assert sum(not _looks_up(*case, fault) for case in _texts()) >= 10


def test_control_a_stale_index_changes_no_token(cyclic: Model) -> None:
    """Exactness does not rest on the lookup: here the prompt misleads it, and the index does too."""
    prompt = [0, 1, 5, 0, 1, 6, 0]
    expected = cyclic.complete(prompt_ids=prompt, max_new_tokens=40, draft_tokens=0).token_ids
    runs = [play(cyclic, prompt, 40, 3, fault(prompt)) for fault in (KeepsTheOldest, IndexesOneBlockLate, FindsItself)]
    assert [tuple(run.ids) for run in runs] == [expected] * 3
    assert runs[0].finished.stats.drafted > runs[0].finished.stats.accepted > 0


def test_the_lengths_of_a_match_are_options(cyclic: Model) -> None:
    """The chain repeats after eight tokens: a lookup of one token drafts from the ninth on, one of eight later."""
    drafted = []
    for lengths in ({}, {"ngram_min": 1}, {"ngram_min": 2, "ngram_max": 4}, {"ngram_min": 8, "ngram_max": 16}):
        done = cyclic.complete(prompt_ids=[0], max_new_tokens=30, drafter="ngram", draft_tokens=4, **lengths)
        assert done.token_ids == tuple((1 + index) % 8 for index in range(30))
        drafted.append(done.stats.drafted)
    assert drafted[1] > drafted[0] == drafted[2] > drafted[3] > 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"ngram_min": 0}, ["ngram_min is 0", "1 <= ngram_min"]),
        ({"ngram_min": -1}, ["ngram_min is -1"]),
        ({"ngram_max": 17}, ["ngram_max is 17", "ngram_max <= 16"]),
        ({"ngram_min": 5}, ["ngram_min is 5 and ngram_max is 4"]),
        ({"ngram_max": 1}, ["ngram_min is 2 and ngram_max is 1"]),
        ({"ngram_min": 3, "ngram_max": 2}, ["ngram_min is 3 and ngram_max is 2"]),
        ({"ngram_min": 2.0}, ["ngram_min = 2.0"]),
        ({"ngram_max": "4"}, ["ngram_max = '4'"]),
        ({"ngram_min": True}, ["ngram_min = True"]),
    ],
    ids=str,
)
def test_lengths_out_of_range_are_refused(successor: Model, options: dict[str, Any], parts: list[str]) -> None:
    for drafter in ("ngram", "mtp+ngram"):
        with refused(*parts, error=RequestError):
            successor.complete(prompt_ids=[5], drafter=drafter, **options)
    assert successor.complete(prompt_ids=[5], max_new_tokens=2, drafter="ngram", ngram_min=1, ngram_max=16)


def test_lengths_are_refused_by_name_where_nothing_is_looked_up(successor: Model, cyclic: Model) -> None:
    for name in ("ngram_min", "ngram_max"):
        for options in ({"drafter": "mtp"}, {}, {"draft_tokens": 0}):
            with refused(f"{name} is 3", "the drafter is 'mtp'", "leave it out", "'mtp+ngram'", error=RequestError):
                successor.complete(prompt_ids=[5], **{name: 3}, **options)
        with refused(f"{name} is 3", "the drafter is 'none'", "'ngram'", error=RequestError):
            cyclic.complete(prompt_ids=[0], **{name: 3})
    done = successor.complete(prompt_ids=[5], max_new_tokens=2, drafter="ngram", draft_tokens=0, ngram_min=3)
    assert done.stats.drafter == "none", "with K = 0 the lengths are checked and not used"


# ----------------------------------------------------------------------------------- names and kinds

NAMES = {"none", "ngram", "mtp", "eagle", "eagle3", "draft-model"}
NAMES |= {f"{name}+ngram" for name in ("mtp", "eagle", "eagle3", "draft-model")}


def test_the_names_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `--drafter` |")]
    assert set(DRAFTERS) == NAMES
    assert set(re.findall(r"`([a-z0-9+-]+)`", row.split("|")[2])) == NAMES


def of_kind(model: Model, kind: str | None) -> Model:
    """The model as if its head were of another kind, or absent; what it computes stays."""
    head = replace(model.manifest.model.mtp) if kind else None
    if head is not None:
        # Frozen, and in this release without the field.
        object.__setattr__(head, "kind", kind)
    spec = replace(model.manifest.model, mtp=head)
    engine = copy(model.engine)
    engine.spec = spec
    bundle = replace(model.bundle, manifest=replace(model.manifest, model=spec))
    return Model(bundle, engine, model.prompts)


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_a_head_goes_by_its_kind(successor: Model, kind: str) -> None:
    """The head is the default under its own name, drafts under it, and no other kind is taken for it."""
    model = of_kind(successor, kind)
    options = {"prompt_ids": [5], "max_new_tokens": 8, "draft_tokens": 2}
    for name in (None, kind, f"{kind}+ngram"):
        done = model.complete(**options, drafter=name)
        assert done.token_ids == tuple(range(6, 14))
        assert (done.stats.drafter, set(done.stats.drafted_by_source)) == (name or kind, {kind})
    for other in {"mtp", "eagle", "eagle3"} - {kind}:
        with refused(f"drafter is '{other}'", f"a head of the kind '{kind}'", f"use '{kind}'", error=RequestError):
            model.complete(**options, drafter=other)
        with refused(f"drafter is '{other}+ngram'", f"'{kind}+ngram', 'ngram' or 'none'", error=RequestError):
            model.complete(**options, drafter=f"{other}+ngram")


def test_drafters_that_a_bundle_cannot_use_are_refused(cyclic: Model, model: Model) -> None:
    for drafter in ("mtp", "mtp+ngram", "eagle", "eagle3+ngram"):
        with refused(f"drafter is '{drafter}'", "without an MTP head", "use 'ngram' or 'none'"):
            cyclic.complete(prompt_ids=[0], drafter=drafter)
    for drafter in ("draft-model", "draft-model+ngram"):
        with refused(f"drafter is '{drafter}'", "no draft model was loaded", "--draft-model", "'ngram' or 'none'"):
            cyclic.complete(prompt_ids=[0], drafter=drafter)
    with refused("--draft-model, or use 'mtp', 'ngram' or 'none'"):
        model.complete(prompt_ids=[0], drafter="draft-model")
    with refused("drafter is 'none'", "draft_tokens is 2"):
        model.complete(prompt_ids=[0], drafter="none", draft_tokens=2)
    for unknown in ("guess", "ngram+mtp", "none+ngram", "ngram+ngram", "+ngram", "", "MTP"):
        with refused(f"drafter = '{unknown}'", "expected one of none, ngram, mtp", "draft-model+ngram"):
            model.complete(prompt_ids=[0], drafter=unknown)
    assert model.complete(prompt_ids=[0], drafter="none", max_new_tokens=2).stats.drafted == 0


def test_the_drafter_that_is_taken_when_none_is_named(cyclic: Model, successor: Model) -> None:
    """A draft model, else the head, else nothing; K = 0 is none of them."""
    both = Model(successor.bundle, successor.engine, successor.prompts, draft=cyclic.engine)
    only = Model(cyclic.bundle, cyclic.engine, cyclic.prompts, draft=cyclic.engine)
    for model, expected in ((both, "draft-model"), (only, "draft-model"), (successor, "mtp"), (cyclic, "none")):
        assert model.complete(prompt_ids=[0], max_new_tokens=4).stats.drafter == expected
        assert model.complete(prompt_ids=[0], max_new_tokens=4, draft_tokens=0).stats.drafter == "none"
    with refused("drafter is 'eagle'", "use 'mtp', 'draft-model', 'ngram' or 'none'"):
        both.complete(prompt_ids=[0], drafter="eagle")
    with refused("draft_tokens is 2", "without an MTP head", "a draft model"):
        cyclic.complete(prompt_ids=[0], draft_tokens=2)
