"""Answers of a built bundle have the target's law under every option, K and acceptor; each fault is seen.

Seeds are fixed, so a run is deterministic; a right implementation with fresh seeds would fail one test in 10**9. The
default suite tries every transform at one K, the slow one at all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.engine import Floats, Ids, Verified
from mtp_runtime import Model
from mtp_runtime.sampling import Law, SamplingOptions, sampler
from mtp_runtime.sampling.sampler import Sampler
from mtp_runtime.sampling.transforms import Rows, law_from_logits
from tests.runtime.decoding import CAUGHT, FALSE_ALARM, PROMPT, TARGET, TRANSFORMS, expected_law, fit, said

NAMES = list(TRANSFORMS)
HOT = {"temperature": 1.0}


@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("transform", "draft_tokens"), list(zip(NAMES, itertools.cycle([2, 4, 1, 3, 0]), strict=False))
)
def test_three_tokens_have_the_targets_law_under_every_transform(
    world: Model, transform: str, draft_tokens: int, acceptor: str
) -> None:
    """RT-21, RT-31, RT-32."""
    asked = TRANSFORMS[transform]
    assert fit(world, asked, draft_tokens=draft_tokens, acceptor=acceptor) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "mtp+ngram"])
@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
@pytest.mark.parametrize("draft_tokens", range(5))
@pytest.mark.parametrize("transform", NAMES)
def test_the_law_at_every_k(world: Model, transform: str, draft_tokens: int, acceptor: str, drafter: str) -> None:
    options = {"draft_tokens": draft_tokens, "acceptor": acceptor} | ({"drafter": drafter} if draft_tokens else {})
    assert fit(world, TRANSFORMS[transform], runs=500, **options) > FALSE_ALARM


@pytest.mark.parametrize(
    ("acceptor", "drafter"), list(itertools.product(["coupled", "rejection"], ["ngram", "mtp+ngram"]))
)
def test_looked_up_drafts_keep_the_law(world: Model, acceptor: str, drafter: str) -> None:
    """A lookup draws nothing, so its tokens are judged as they stand, also between drawn ones."""
    assert fit(world, HOT, 3, 300, draft_tokens=3, acceptor=acceptor, drafter=drafter) > FALSE_ALARM


def test_a_long_answer_picks_with_the_targets_probabilities(world: Model) -> None:
    """RT-30: every state of long answers, within five standard deviations, for both acceptors."""
    for acceptor, draft_tokens in itertools.product(["coupled", "rejection"], [1, 4]):
        counts = np.zeros_like(TARGET)
        for seed in range(12):
            ids = said(world, PROMPT, 58, draft_tokens, temperature=1.0, seed=seed, acceptor=acceptor).token_ids
            np.add.at(counts, ((PROMPT[-1], *ids[:-1]), ids), 1)
        visits = counts.sum(axis=1, keepdims=True)
        assert visits.min() > 30, "control: every state was visited"
        deviations = np.abs(counts - visits * TARGET) / np.sqrt(visits * TARGET * (1 - TARGET))
        assert deviations.max() < 5


def test_drawn_drafts_are_kept_as_often_as_the_laws_overlap(world: Model) -> None:
    """RT-30: rejection keeps a drawn draft with the sum of min(p, q), here at a head that is a token ahead."""
    wanted = np.array([np.minimum(TARGET[token], TARGET[(token + 1) % len(TARGET)]).sum() for token in range(6)])
    asked = {"temperature": 1.0, "acceptor": "rejection", "draft_tokens": 1, "max_new_tokens": 3, "ignore_eos": True}
    answers = world.complete_all(prompt_ids=PROMPT, n=600, seed=1, **asked)
    chances = wanted[[answer.token_ids[0] for answer in answers]]
    kept = sum(answer.stats.accepted_by_position[0] for answer in answers)
    assert abs(kept - chances.sum()) < 5 * np.sqrt((chances * (1 - chances)).sum())
    agreeing = sum((TARGET[token] * TARGET[(token + 1) % 6]).sum() for token in range(6)) / 6
    assert kept > 1.3 * 600 * agreeing, "control: more than two draws apart would agree"


# Controls: faults between the loop, the laws and the engine


@pytest.mark.parametrize(
    ("transform", "acceptor", "runs"),
    [
        ("repetition", "coupled", 500),
        ("frequency", "rejection", 800),
        pytest.param("presence", "coupled", 800, marks=pytest.mark.slow),
        ("bad words", "rejection", 500),
        pytest.param("min new tokens", "coupled", 1200, marks=pytest.mark.slow),
    ],
)
def test_control_rows_that_ignore_the_accepted_draft_are_seen(
    world: Model, transform: str, acceptor: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RT-21: penalties that count what was emitted before the cycle, and not the drafts of the row."""

    class Blind(Rows):
        def __init__(self, logits: Floats, draft: Sequence[int], *others: Any) -> None:
            super().__init__(logits, [], *others)

    asked = TRANSFORMS[transform]
    monkeypatch.setattr(sampler, "Rows", Blind)
    assert fit(world, asked, runs=100, draft_tokens=0, acceptor=acceptor) > FALSE_ALARM, "without a draft it is right"
    assert fit(world, asked, runs=runs, draft_tokens=3, acceptor=acceptor) < CAUGHT


@pytest.mark.parametrize("told", [0.3, 6.0])
def test_control_drafts_drawn_from_another_law_than_the_one_told_are_seen(
    world: Model, told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RT-30 and RT-32."""
    right = Sampler._choose

    def wrong(self: Sampler, logits: Floats) -> Ids:
        token = right(self, logits)
        self._draft_laws[-1] = law_from_logits(logits[0], SamplingOptions(temperature=told))
        return token

    monkeypatch.setattr(Sampler, "_choose", wrong)
    assert fit(world, HOT, 2, 1000, draft_tokens=2, acceptor="rejection") < CAUGHT
    # What the coupling promises does not ask for the draft's law.
    assert fit(world, HOT, 2, 200, draft_tokens=2, acceptor="coupled") > FALSE_ALARM


def test_control_best_drafts_that_pass_for_drawn_ones_are_seen(world: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """RT-30: the draft is the best token, and the acceptor is told the law that it was not drawn from."""

    def best(law: Law, *others: Any) -> int:
        return int(law.ids[law.probabilities.argmax()])

    monkeypatch.setattr(sampler, "coupled_draft", best)
    assert fit(world, HOT, 2, 1000, draft_tokens=2, acceptor="rejection") < CAUGHT


def test_control_replacing_from_the_target_is_seen(world: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """RT-31."""
    monkeypatch.setattr(Law, "beyond", lambda law, other: law)
    assert fit(world, HOT, 2, 3000, draft_tokens=1, acceptor="rejection") < CAUGHT


@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
def test_control_logits_of_a_shifted_row_are_seen(world: Model, acceptor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuSequences.verify

    def shifted(self: CpuSequences, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        found = right(self, tokens, logit_rows, logits=logits)
        scores = None if found.logits is None else np.roll(found.logits, 1, axis=1)
        return Verified(found.ids, found.hidden, scores)

    monkeypatch.setattr(CpuSequences, "verify", shifted)
    assert fit(world, HOT, 2, 100, draft_tokens=0, acceptor=acceptor) > FALSE_ALARM, "one row cannot be shifted"
    assert fit(world, HOT, 2, 600, draft_tokens=2, acceptor=acceptor) < CAUGHT


@pytest.mark.parametrize(("acceptor", "numbers"), [("relaxed", {"relaxed_top_k": 3}), ("typical", {})])
def test_control_lossy_acceptors_have_another_law(world: Model, acceptor: str, numbers: dict[str, Any]) -> None:
    assert fit(world, HOT, 2, 600, draft_tokens=2, acceptor=acceptor, **numbers) < CAUGHT
    assert fit(world, HOT, 2, 100, draft_tokens=0, acceptor=acceptor, **numbers) > FALSE_ALARM


def test_control_the_oracle_tells_the_transforms_apart() -> None:
    laws = [tuple(expected_law(asked, 2).values()) for asked in TRANSFORMS.values()]
    assert len(set(laws)) == len(laws)
