"""What acceptors promise beyond the law: the same tokens whatever drafts, the limit of greedy, what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mtp_engines.errors import ContractError
from mtp_runtime.acceptance import accept_greedy
from mtp_runtime.sampling import (
    Law,
    Purpose,
    SamplingOptions,
    Stream,
    coupled,
    coupled_draft,
    drawn_draft,
    lossy_relaxed,
    lossy_typical,
    rejection,
)
from tests.runtime.sampling.play import WAYS, Prefix, Way, World, play

LENGTH = 40
OPTIONS = SamplingOptions(0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5, bad_words=[[1, 2]])


def texts(ways: list[Way], options: SamplingOptions, seed: int) -> set[Prefix]:
    """What a seed makes under several ways, every K, other drafters, and K that changes from cycle to cycle."""
    found = set()
    for unlike in (0.3, 3.0):
        world = World(options, unlike=unlike)
        for way in ways:
            found |= {play(world, way, Stream(seed), ks, LENGTH)[0] for ks in ([0], [1], [2], [3], [4], [4, 0, 2])}
    return found


@pytest.mark.parametrize("seed", range(5))
def test_coupled_tokens_are_the_same_for_every_k_drafter_and_way_of_drafting(seed: int) -> None:
    ways = [way for way in WAYS.values() if way.accept == "coupled"]
    assert len(ways) == 3
    assert len(texts(ways, OPTIONS, seed)) == 1
    assert texts(ways, OPTIONS, seed) != texts(ways, OPTIONS, seed + 1), "control: another seed, another text"


def test_control_tokens_of_rejection_depend_on_k_and_drafter() -> None:
    assert len(texts([WAYS["rejection, drawn drafts"]], OPTIONS, 0)) > 6


@pytest.mark.parametrize("name", WAYS)
def test_the_same_seed_k_and_drafts_give_the_same_tokens(name: str) -> None:
    first = play(World(OPTIONS), WAYS[name], Stream(7), [3, 1], LENGTH)
    assert first == play(World(OPTIONS), WAYS[name], Stream(7), [3, 1], LENGTH)
    assert first != play(World(OPTIONS), WAYS[name], Stream(8), [3, 1], LENGTH)


@pytest.mark.parametrize("name", WAYS)
def test_greedy_is_the_limit(name: str) -> None:
    """Temperature 0 and a tiny one: the tokens and kept drafts of greedy acceptance, whatever the seed."""
    found = set()
    for seed, temperature in ((0, 0.0), (1, 0.0), (2, 1e-4)):
        world = World(replace(OPTIONS, temperature=temperature))
        text, kept = play(world, WAYS[name], Stream(seed), [3], LENGTH)
        found.add((text, tuple(kept)))
    assert len(found) == 1
    assert 0 < sum(found.pop()[1]) < LENGTH


def test_at_temperature_zero_every_rule_is_greedy_acceptance() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        chosen = rng.integers(0, 3, 5).tolist()
        draft = rng.integers(0, 3, 4).tolist()
        laws, wanted = [Law.point(token) for token in chosen], accept_greedy(draft, chosen)
        for rule in (coupled, rejection):
            assert rule(laws, draft, 9, Stream(1)) == (wanted, len(wanted) - 1)
        assert lossy_relaxed(laws, draft, 9, Stream(1), top_k=3, delta=1.0) == (wanted, len(wanted) - 1)
        assert lossy_typical(laws, draft, 9, Stream(1), epsilon=0.1, delta=0.3) == (wanted, len(wanted) - 1)


@pytest.mark.parametrize(("p", "q"), [((0.5, 0.3, 0.2), (0.2, 0.5, 0.3)), ((0.9, 0.1, 0.0), (0.6, 0.2, 0.2))])
def test_drafts_are_kept_as_often_as_the_formulae_say(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    target, drafter = (Law.of_weights(np.arange(3), np.array(law)) for law in (p, q))
    laws, runs = [target, target], 1500

    def rate(rule: str, draw: str) -> float:
        kept = 0
        for seed in range(runs):
            stream = Stream(seed)
            token = (coupled_draft if draw == "race" else drawn_draft)(drafter, stream, 0)
            verdict = (
                coupled(laws, [token], 0, stream)
                if rule == "coupled"
                else rejection(laws, [token], 0, stream, [drafter])
            )
            kept += verdict.accepted
        return kept / runs

    ratios = [[max(p[y] / p[x], q[y] / q[x]) for y in range(3)] for x in range(3) if p[x] > 0]
    wanted = {
        ("coupled", "race"): sum(1 / sum(row) for row in ratios),
        ("coupled", "apart"): sum(a * b for a, b in zip(p, q, strict=True)),
        ("rejection", "apart"): sum(map(min, p, q)),
        ("rejection", "race"): sum(map(min, p, q)),
    }
    # Five standard deviations of a share of so many runs.
    tolerance = 5 * 0.5 / math.sqrt(runs)
    found = {key: rate(*key) for key in wanted}
    assert found == pytest.approx(wanted, abs=tolerance)
    assert wanted["rejection", "apart"] - wanted["coupled", "apart"] > 2 * tolerance, "control: the rates differ"


def test_later_rows_are_not_made_after_a_rejection() -> None:
    asked: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int, /) -> Law:
            asked.append(row)
            return Law.point(row)

    for rule in (coupled, rejection):
        asked.clear()
        assert rule(Lazy(), [0, 5, 2], 0, Stream(1)) == ([0, 1], 1)
        assert set(asked) == {0, 1}


def test_rounding_that_leaves_nothing_to_draw_from_takes_the_target() -> None:
    law = Law.of_weights(np.arange(3), np.ones(3))
    assert law.beyond(law) is law


def test_rows_and_laws_that_do_not_fit_are_refused() -> None:
    law, stream = Law.of_weights(np.arange(3), np.ones(3)), Stream(1)
    for rule in (coupled, rejection):
        with pytest.raises(ContractError, match="there are 2 laws for 2 draft tokens, expected one law more"):
            rule([law, law], [0, 1], 0, stream)
    with pytest.raises(ContractError, match="there are 2 laws for 2"):
        lossy_relaxed([law, law], [0, 1], 0, stream, top_k=1, delta=0)
    with pytest.raises(ContractError, match="there are 0 draft laws for 1 draft tokens"):
        rejection([law, law], [0], 0, stream, [])
    with pytest.raises(ContractError, match="draft token 2 has probability 0 in its draft law"):
        rejection([law, law], [2], 0, stream, [Law.point(1)])


LOSSY_LAW = Law.of_weights(np.array([0, 1, 2, 3]), np.array([0.4, 0.3, 0.25, 0.05]))


@pytest.mark.parametrize(
    ("token", "top_k", "delta", "kept"),
    [(0, 1, 0, 1), (1, 1, 1, 0), (1, 2, 0.11, 1), (1, 2, 0.09, 0), (2, 2, 1, 0), (2, 3, 0.16, 1), (4, 9, 1, 0)],
)
def test_relaxed_keeps_what_is_good_enough(token: int, top_k: int, delta: float, kept: int) -> None:
    verdict = lossy_relaxed([LOSSY_LAW, Law.point(8)], [token], 0, Stream(1), top_k=top_k, delta=delta)
    assert verdict.accepted == kept
    race = Stream(1).race(LOSSY_LAW, 0)
    assert verdict.emitted == ([token, 8] if kept else [race])


def test_typical_keeps_what_exceeds_the_lower_threshold() -> None:
    entropy = -sum(p * math.log(p) for p in (0.4, 0.3, 0.25, 0.05))
    assert 0.05 < 0.3 * math.exp(-entropy) < 0.25

    def kept(token: int, epsilon: float, delta: float) -> int:
        laws = [LOSSY_LAW, LOSSY_LAW]
        return lossy_typical(laws, [token], 0, Stream(1), epsilon=epsilon, delta=delta).accepted

    assert [kept(token, 1.0, 0.3) for token in range(5)] == [1, 1, 1, 0, 0]
    assert [kept(token, 0.04, 0.3) for token in range(5)] == [1, 1, 1, 1, 0]
    assert [kept(token, 0.3, 9.0) for token in range(5)] == [1, 0, 0, 0, 0]


def test_lossy_rules_may_judge_by_other_laws_than_they_draw_from() -> None:
    greedy, stream = [Law.point(0), Law.point(3)], Stream(1)
    judges = [LOSSY_LAW]
    assert lossy_relaxed(greedy, [1], 0, stream, top_k=2, delta=0.2, judges=judges) == ([1, 3], 1)
    assert lossy_relaxed(greedy, [1], 0, stream, top_k=2, delta=0.2) == ([0], 0)
    assert lossy_typical(greedy, [1], 0, stream, epsilon=0.2, delta=1, judges=judges) == ([1, 3], 1)


@pytest.mark.parametrize("rule", ["relaxed", "typical"])
def test_lossy_rules_change_the_law(rule: str) -> None:
    """So they are lossy, and the tests of the law would see it."""
    counts = np.zeros(4)
    for seed in range(1000):
        stream = Stream(seed)
        laws, draft = [LOSSY_LAW, LOSSY_LAW], [1]
        if rule == "relaxed":
            verdict = lossy_relaxed(laws, draft, 0, stream, top_k=2, delta=0.2)
        else:
            verdict = lossy_typical(laws, draft, 0, stream, epsilon=0.2, delta=1)
        counts[verdict.emitted[0]] += 1
    assert counts.tolist() == [0, 1000, 0, 0]


def test_purposes_are_not_shared_by_drafting_and_accepting() -> None:
    law = Law.of_weights(np.arange(1000), np.ones(1000))
    stream = Stream(2)
    assert stream.draw(law, 0, Purpose.DRAFT) != stream.draw(law, 0, Purpose.TOKEN)
