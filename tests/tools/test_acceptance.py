"""The figures of `mtp-run acceptance`, against closed forms and drafts that are made one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.costs import CycleCosts
from mtp_engines.engine import Floats
from mtp_runtime import Model, load
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.stats import Stats
from mtp_tools.acceptance import figures, teacher
from mtp_tools.acceptance.figures import (
    Share,
    best,
    conditional,
    conditional_of,
    coverage_of,
    drafting_share,
    expectations,
    of_proposed,
)
from mtp_tools.acceptance.lines import Task, tasks_from
from mtp_tools.acceptance.study import OWN, REFERENCE, Domain, costs_of, missing_coverage, study, total
from mtp_tools.acceptance.teacher import Counts, rank_of
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint
from tests.fixtures.dense_markov import eagle_markov_checkpoint, partial_mimo_checkpoint, plain_markov_checkpoint
from tests.support import build_bundle, load_model

K = 3
COSTS = CycleCosts(verify=(1.0, 1.1, 1.2, 1.4, 1.5), draft=(0.1, 0.2, 0.3, 0.4), catch_up=0.01, commit=0.2)
PUBLISHED = [Share(9, 10), Share(8, 10), Share(7, 10), Share(6, 10)]
"""Conditional: 0.9, 0.8, 0.7, 0.6."""


def tasks_for(
    model: Model, folder: Path, *lines: dict[str, Any], drafter: str | None = None, new: int = 38
) -> list[Task]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    defaults = {"draft_tokens": K, "drafter": drafter, "max_new_tokens": new, "ignore_eos": True}
    return tasks_from(file, defaults, model.prompts, model.manifest, has_draft_model=model.draft is not None)


def studied(model: Model, folder: Path, *lines: dict[str, Any], **options: Any) -> list[Domain]:
    return study(model, tasks_for(model, folder, *lines, **options), K)


def rates(shares: Sequence[Share]) -> list[float | None]:
    return [share.rate for share in shares]


Chains = Callable[..., Model]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chains:
    """A chain whose head is right as the name says."""
    found: dict[str, Model] = {}

    def get(draft: str, **options: Any) -> Model:
        if draft not in found:
            place = tmp_path_factory.mktemp("acceptance")
            checkpoint = markov_checkpoint(place / "checkpoint", **({"draft": draft} | options))
            found[draft] = load_model(build_bundle(checkpoint, place / "bundle", draft_tokens=K))
        return found[draft]

    return get


# Shares and intervals


@pytest.mark.parametrize(
    ("kept", "trials", "low", "high"),
    # By hand from ((k + z²/2) ± z √(k (n - k) / n + z²/4)) / (n + z²) with z = 1.959964.
    [(8, 10, 0.490162, 0.943318), (0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (50, 100, 0.403832, 0.596168)],
)
def test_intervals_are_wilsons(kept: int, trials: int, low: float, high: float) -> None:
    share = Share(kept, trials)
    assert share.interval == pytest.approx((low, high), abs=1e-6)
    plain = 1.959964 * (kept * (trials - kept) / trials**3) ** 0.5
    normal = kept / trials - plain, kept / trials + plain
    assert share.interval != pytest.approx(normal, abs=1e-3), "control: not the normal approximation"


def test_without_a_trial_there_is_neither_rate_nor_interval() -> None:
    assert (Share(0, 0).rate, Share(0, 0).interval) == (None, None)


def test_shares_of_statistics_have_their_own_trials() -> None:
    stats = Stats()
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (2, 2), (1, 1)):
        stats.add_cycle(drafted, accepted, accepted + 1)
    assert conditional(stats) == [Share(4, 5), Share(2, 3), Share(1, 1)]
    assert of_proposed(stats) == [Share(4, 5), Share(2, 4), Share(1, 3)]


# What to expect


def check_published() -> None:
    expected = expectations(PUBLISHED, COSTS, [4])[-1]
    assert expected.tokens == pytest.approx(1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7 + 0.9 * 0.8 * 0.7 * 0.6)
    assert expected.tokens == pytest.approx(3.43, abs=5e-3)


def test_conditional_rates_are_multiplied_before_they_are_added() -> None:
    check_published()


def test_control_rates_that_are_added_up_as_if_joint_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(acceptance: Sequence[float], costs: CycleCosts) -> list[tuple[float, float]]:
        return [(1 + sum(acceptance[:width]), costs.verify[width]) for width in range(len(acceptance) + 1)]

    monkeypatch.setattr(figures, "expected_cycles", added)
    assert expectations(PUBLISHED, COSTS, [4])[-1].tokens == pytest.approx(4.0)
    with pytest.raises(AssertionError):
        check_published()


def test_the_speed_up_is_tokens_over_what_a_cycle_costs() -> None:
    plain, two, four = expectations(PUBLISHED, COSTS, [2, 4])
    assert (plain.draft_tokens, plain.tokens, plain.seconds, plain.speedup) == (0, 1.0, 1.0, 1.0)
    # K = 2: a draft of 0.2 s, a verify of three rows, and a commit where not both were kept.
    assert two.seconds == pytest.approx(0.2 + 1.2 + (1 - 0.72) * 0.2)
    assert two.speedup == pytest.approx((1 + 0.9 + 0.72) / two.seconds)
    assert four.seconds == pytest.approx(0.4 + 1.5 + (1 - 0.3024) * 0.2)
    for one in (two, four):
        assert one.between is not None
        assert one.speedup is not None
        assert one.between[0] < one.speedup < one.between[1]
    many = expectations([Share(90 * one.kept, 900) for one in PUBLISHED], COSTS, [4])[-1]
    assert many.between is not None
    assert four.between is not None
    assert many.between[1] - many.between[0] < four.between[1] - four.between[0], "more trials say more"


def test_the_best_k_is_the_one_with_the_greatest_speed_up() -> None:
    everything = expectations(PUBLISHED, COSTS, [1, 2, 3, 4])
    assert best(everything).draft_tokens == max(range(5), key=lambda k: everything[k].speedup or 0)
    assert best(expectations([Share(0, 50)], COSTS, [1])).draft_tokens == 0, "control: nothing kept, nothing gained"


def test_what_was_never_tried_is_not_told_unless_it_does_not_matter() -> None:
    unseen = expectations([Share(5, 10), Share(0, 0)], COSTS, [1, 2])
    assert [one.speedup is None for one in unseen] == [False, False, True]
    hopeless = expectations([Share(0, 10), Share(0, 0)], COSTS, [1, 2])
    assert [one.tokens for one in hopeless] == [1.0, 1.0, 1.0]


def test_cycles_without_a_draft_count_as_plain_ones() -> None:
    """A lookup that finds something in a quarter of the cycles."""
    always = expectations([Share(10, 10)], COSTS, [1])[1]
    seldom = expectations([Share(10, 10)], COSTS, [1], drafting=0.25)[1]
    assert always.seconds is not None
    assert (seldom.tokens, seldom.seconds) == (1.25, pytest.approx(0.75 + 0.25 * always.seconds))
    stats = Stats()
    for drafted in (2, 0, 0, 0):
        stats.add_cycle(drafted, drafted, drafted + 1, "ngram", 2)
    stats.add_cycle(0, 0, 1, "ngram", 0)  # Its K was cut to nothing: it says nothing of the lookup.
    assert drafting_share(stats) == 0.25


# Ranks


def test_the_rank_of_a_token_is_its_place_among_all() -> None:
    logits = np.array([0.0, 3.0, 2.0, 3.0, -1.0], np.float32)
    assert [rank_of(token, logits) for token in range(5)] == [3, 0, 2, 1, 4]
    assert rank_of(0, logits) == 3
    assert rank_of(5, logits) is None, "a head over fewer tokens never drafts it"


# Chains whose figures are known


def check_third(model: Model, folder: Path) -> None:
    """The head is wrong behind every third token.

    Behind a token c the draft at position j is right where 3 does not divide c + j - 1: two thirds of all places. Given
    that those before were right: two thirds, a half, never.
    """
    (domain,) = studied(model, folder, {"prompt_ids": [5]}, new=38)
    counts = domain.teachers[OWN]
    # 6 .. 43: behind 6 .. 42 one token follows, behind 6 .. 41 two, behind 6 .. 40 three.
    places = [list(range(6, 43 - j)) for j in range(3)]
    assert counts.placed == [len(cs) for cs in places] == [37, 36, 35]
    assert counts.within[0] == [sum((c + j) % 3 > 0 for c in cs) for j, cs in enumerate(places)]
    reached, kept = [0, 0, 0], [0, 0, 0]
    for j, cs in enumerate(places):
        before = [c for c in cs if all((c + i) % 3 for i in range(j))]
        reached[j], kept[j] = len(before), sum((c + j) % 3 > 0 for c in before)
    assert (counts.reached, counts.kept) == (reached, kept)
    assert rates(conditional_of(counts)) == pytest.approx([2 / 3, 0.5, 0.0], abs=0.03)
    # Free-running all but the first cycle begin behind a bonus token, which 3 divides but for one.
    assert rates(conditional(domain.stats)) == pytest.approx([12 / 13, 1.0, 0.0])


def test_a_head_that_is_wrong_at_every_third_token_has_the_known_rates(chain: Chains, tmp_path: Path) -> None:
    check_third(chain("third"), tmp_path)


def test_control_counting_past_the_first_wrong_token_is_noticed(
    chain: Chains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of every place, two thirds each, in the place of conditional ones."""
    honest = Counts.add

    def marginal(self: Counts, drafted: Any, truth: Any, ranks: list[int | None]) -> None:
        honest(self, drafted, truth, ranks)
        self.reached, self.kept = list(self.placed), list(self.within[0])

    monkeypatch.setattr(Counts, "add", marginal)
    with pytest.raises(AssertionError):
        check_third(chain("third"), tmp_path)


def test_control_a_teacher_that_is_one_token_late_is_noticed(
    chain: Chains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = teacher._Forced.begin
    monkeypatch.setattr(teacher._Forced, "begin", lambda self, truth: begin(self, [*truth[1:], truth[-1]]))
    with pytest.raises(AssertionError):
        check_third(chain("third"), tmp_path)


def test_a_perfect_head_is_right_everywhere(chain: Chains, tmp_path: Path) -> None:
    (domain,) = studied(chain("perfect"), tmp_path, {"prompt_ids": [5]}, {"prompt_ids": [11, 12, 13]}, new=20)
    counts = domain.teachers[OWN]
    assert domain.prompts == 2
    assert rates(conditional(domain.stats)) == rates(conditional_of(counts)) == [1.0] * K
    assert all(rates(shares) == [1.0] * K for shares in coverage_of(counts).values())


@pytest.mark.parametrize(("second", "covered"), [(0, [0.0, 1.0, 1.0]), (9, [0.0, 0.0, 1.0])])
def test_a_head_whose_second_or_third_choice_is_right_shows_in_its_coverage(
    tmp_path: Path, second: int, covered: list[float]
) -> None:
    """After t the target says t + 1. The head says what follows t + 1: t + 2 first, t + 1 as its second or third."""
    size = 64
    table = np.full((size, size), 1e-3)
    for token in range(size):
        table[token, (token + 1) % size] = 0.6
        table[token, token] = 0.1
        if second:
            table[token, (token + second) % size] = 0.2
    table /= table.sum(1, keepdims=True)
    checkpoint = markov_checkpoint(tmp_path / "checkpoint", table=table, draft=lambda token: (token + 1) % size)
    model = load_model(build_bundle(checkpoint, tmp_path / "bundle", draft_tokens=K))
    (domain,) = studied(model, tmp_path, {"prompt_ids": [5]}, new=20)
    counts = domain.teachers[OWN]
    assert [rates(shares) for shares in coverage_of(counts).values()] == [[rate] * K for rate in covered]
    # Behind a draft that was wrong the later ones are not reached, though they are scored behind the true tokens.
    assert rates(conditional_of(counts)) == [0.0]
    assert rates(conditional(domain.stats)) == [0.0, None, None]


def test_a_reference_is_a_teacher_of_its_own(chain: Chains, tmp_path: Path) -> None:
    """It says 6, 7, 40, 41 behind 5: the perfect head is wrong behind 7 alone."""
    lines = [{"prompt_ids": [5], "continuation_ids": [6, 7, 40, 41], "domain": "a"}, {"prompt_ids": [5], "domain": "a"}]
    (domain,) = studied(chain("perfect"), tmp_path, *lines, new=10)
    counts = domain.teachers[REFERENCE]
    # Behind 6: 7 right, 40 wrong. Behind 7: 40 wrong. Behind 40: 41 right. Forced: 41 behind 40 is scored each time.
    assert (counts.reached, counts.kept) == ([3, 1], [2, 0])
    assert (counts.placed, counts.within[0]) == ([3, 2, 1], [2, 1, 1])
    assert rates(conditional_of(domain.teachers[OWN])) == [1.0] * K, "control: its own answer is another teacher"


def test_domains_are_counted_apart_and_together(chain: Chains, tmp_path: Path) -> None:
    lines = [
        {"prompt_ids": [5], "domain": "code", "max_new_tokens": 9},
        {"prompt_ids": [6]},
        {"prompt_ids": [7], "domain": "code", "max_new_tokens": 12},
    ]
    domains = studied(chain("third"), tmp_path, *lines, new=20)
    assert [(domain.name, domain.prompts) for domain in domains] == [("code", 2), ("untagged", 1)]
    everything = total(domains)
    assert everything.prompts == 3
    assert everything.stats.drafted == sum(domain.stats.drafted for domain in domains)
    placed = [domain.teachers[OWN].placed[0] for domain in domains]
    assert placed == [8 + 11, 19]
    assert everything.teachers[OWN].placed[0] == sum(placed)
    assert domains[0].teachers[OWN].placed[0] == placed[0], "control: adding up changes no part"


# Heads that depend on everything they have seen


def one_by_one(model: Model, prompt: list[int], answer: list[int]) -> Counts:
    """Drafts behind every token of the answer, each from sequences of its own and left to its own tokens."""
    counts, text = Counts(), prompt + answer
    for newest in range(len(prompt), len(text) - 1):
        sequences = model.engine.sequences()
        verified = sequences.verify(np.array([text[:newest]], np.int64), 0)
        hidden = verified.hidden[0].copy()
        drafter = model.drafter(sequences)
        drafter.observe(np.array(text[1 : newest + 1], np.int64), hidden)
        truth = text[newest + 1 : newest + 1 + K]
        counts.add(drafter.propose(len(truth)), truth, [])
    return counts


def _eagle3(place: Path) -> Path:
    """A head that looks its ids up in a table, and is right sometimes."""
    target = plain_markov_checkpoint(place / "target")
    draft = eagle_markov_checkpoint(
        place / "draft", target=target, version=3, draft="third", through="tokens", draft_ids=range(1, 64, 2)
    )
    return build_bundle(target, place / "bundle", draft_tokens=K, draft_model=str(draft))


KINDS: dict[str, Callable[[Path], Path]] = {
    "one depth": lambda place: build_bundle(partial_checkpoint(place / "c"), place / "bundle", draft_tokens=K),
    "three depths": lambda place: build_bundle(
        partial_mimo_checkpoint(place / "c", depths=3), place / "bundle", draft_tokens=K
    ),
    "table": _eagle3,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    return request.param, load_model(KINDS[request.param](tmp_path_factory.mktemp("kinds")))


def check_against_one_by_one(model: Model, folder: Path) -> Counts:
    prompt = [5, 6, 20]
    (domain,) = studied(model, folder, {"prompt_ids": prompt}, new=40)
    answer = list(model.complete(prompt_ids=prompt, max_new_tokens=40, draft_tokens=0, ignore_eos=True).token_ids)
    counts, expected = domain.teachers[OWN], one_by_one(model, prompt, answer)
    assert (counts.reached, counts.kept) == (expected.reached, expected.kept)
    assert expected.reached[0] == 39
    return counts


def test_drafts_behind_the_teacher_are_those_of_fresh_sequences(kind: tuple[str, Model], tmp_path: Path) -> None:
    """So no trial leaves a trace in the head, and forcing its tokens changes none of its own choices."""
    name, model = kind
    counts = check_against_one_by_one(model, tmp_path)
    assert 0 < counts.kept[0] < counts.reached[0], "a head that is right sometimes"
    missing = missing_coverage(model.manifest.model.mtp.kind, model.engine.spec)  # type: ignore[union-attr]
    if name == "table":
        assert missing is not None
        assert "table" in missing
        assert counts.placed == []
    else:
        assert missing is None
        assert counts.placed == [39, 38, 37]


@pytest.mark.parametrize("kind", ["one depth", "three depths"], indirect=True)
def test_control_a_trial_that_leaves_a_trace_is_noticed(
    kind: tuple[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last drafts of the first trials stay behind as if they had been committed."""
    _, model = kind
    propose, traces = MtpDrafter.propose, list(range(16))

    def tracing(self: MtpDrafter, draft_tokens: int) -> list[int]:
        drafted = propose(self, draft_tokens)
        if self._drafting is not None and traces:
            rows: Floats = np.full((1, 64), traces.pop(), np.float32)
            self.observe(np.array(drafted[-1:], np.int64), rows)
        return drafted

    monkeypatch.setattr(MtpDrafter, "propose", tracing)
    with pytest.raises(AssertionError):
        check_against_one_by_one(model, tmp_path)
    assert not traces


def test_a_draft_model_is_taught_too(tmp_path: Path) -> None:
    bundles = [
        build_bundle(plain_markov_checkpoint(tmp_path / f"{name}-c"), tmp_path / name, draft_tokens=K)
        for name in ("target", "draft")
    ]
    model = load(bundles[0], 1, draft_model=bundles[1])
    tasks = tasks_for(model, tmp_path, {"prompt_ids": [5]}, new=20)
    (domain,) = study(model, tasks, K)
    assert domain.stats.drafter == "draft-model"
    assert rates(conditional_of(domain.teachers[OWN])) == [1.0] * K
    assert all(rates(shares) == [1.0] * K for shares in coverage_of(domain.teachers[OWN]).values())
    assert all(value > 0 for value in costs_of(model, tasks).draft), "a second model costs something"


def test_a_lookup_has_free_running_figures_only(chain: Chains, tmp_path: Path) -> None:
    model = chain("perfect")
    (domain,) = studied(model, tmp_path, {"prompt_ids": [5, 6, 7, 8, 5, 6]}, drafter="ngram", new=20)
    assert domain.teachers == {}
    assert "lookup" in (missing_coverage("ngram", model.engine.spec) or "")
    assert missing_coverage("mtp", model.engine.spec) is None, "control: the head has coverage"


def test_a_teacher_longer_than_a_block_is_followed_to_its_end(chain: Chains, tmp_path: Path) -> None:
    model = chain("third")
    whole = studied(model, tmp_path, {"prompt_ids": [4, 5, 6, 7]}, new=20)[0].teachers[OWN]
    limits, engine = model.engine.limits, model.engine
    for chunk in (1, 3, 4, 7):
        engine.limits = type(limits)(**{**vars(limits), "prefill_chunk": chunk})
        try:
            assert studied(model, tmp_path, {"prompt_ids": [4, 5, 6, 7]}, new=20)[0].teachers[OWN] == whole
        finally:
            engine.limits = limits
