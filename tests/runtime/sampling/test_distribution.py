"""The law of the output is the target's, whatever drafts; each fault that would change it is seen.

Seeds are fixed, so a run is deterministic. The joint law of the first tokens is compared by chi-square; a right
implementation with fresh seeds would fail one test in 10**9, under one run of all in 10**7.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mtp_runtime.sampling import Law, Purpose, SamplingOptions, Stream
from tests.runtime.sampling.oracle import p_value
from tests.runtime.sampling.play import WAYS, Way, World, counted, play

FALSE_ALARM, CAUGHT = 1e-9, 1e-12
# Every transform alone, at sizes that cut into laws of six tokens, and all together.
TRANSFORMS = {
    "temperature": SamplingOptions(temperature=0.7),
    "hot": SamplingOptions(temperature=1.6),
    "top-k": SamplingOptions(temperature=1, top_k=3),
    "top-p": SamplingOptions(temperature=1, top_p=0.8),
    "min-p": SamplingOptions(temperature=1, min_p=0.2),
    "repetition": SamplingOptions(temperature=1, repetition_penalty=8),
    "frequency": SamplingOptions(temperature=1, frequency_penalty=2),
    "presence": SamplingOptions(temperature=1, presence_penalty=3),
    "bias": SamplingOptions(temperature=1, logit_bias={0: 1.5, 4: -2, 5: -np.inf}),
    "bad words": SamplingOptions(temperature=1, bad_words=[[3], [0, 1], [4, 4], [2, 2, 5]]),
    "min new tokens": SamplingOptions(temperature=1, min_new_tokens=2),
    "all": SamplingOptions(0.8, 4, 0.95, 0.02, 1.3, 0.4, 0.5, {1: 0.5}, 1, [[2, 3]]),
}
REJECTION = WAYS["rejection, drawn drafts"]
MAIN_WAYS = ["coupled, coupled drafts", "rejection, drawn drafts", "rejection, best drafts"]


@pytest.mark.parametrize(
    ("name", "draft_tokens"),
    [*itertools.product(MAIN_WAYS, range(5)), *itertools.product(sorted(WAYS.keys() - set(MAIN_WAYS)), [2])],
)
def test_three_tokens_have_the_targets_law_for_every_k(name: str, draft_tokens: int) -> None:
    world = World(SamplingOptions(temperature=0.9, presence_penalty=0.7), vocab_size=5)
    assert p_value(counted(world, WAYS[name], [draft_tokens], 3), world.expected(3)) > FALSE_ALARM


@pytest.mark.parametrize("name", MAIN_WAYS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_three_tokens_have_the_targets_law_under_every_transform(transform: str, name: str) -> None:
    world = World(TRANSFORMS[transform])
    assert p_value(counted(world, WAYS[name], [2, 3], 3), world.expected(3)) > FALSE_ALARM


@pytest.mark.parametrize("name", MAIN_WAYS)
def test_two_of_fifty_tokens_have_the_targets_law(name: str) -> None:
    world = World(SamplingOptions(temperature=1.0, top_p=0.97), vocab_size=50)
    assert p_value(counted(world, WAYS[name], [3, 1], 2), world.expected(2)) > FALSE_ALARM


def test_control_every_number_of_kept_drafts_occurs() -> None:
    world = World(SamplingOptions(temperature=0.9), unlike=0.5)
    for way in WAYS.values():
        kept = [play(world, way, Stream(seed), [4], 1)[1][0] for seed in range(400)]
        assert set(kept) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", ["rejection, drawn drafts", "rejection, best drafts"])
def test_control_replacing_from_p_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(SamplingOptions(temperature=1.0))
    monkeypatch.setattr(Law, "beyond", lambda law, other: law)
    assert p_value(counted(world, WAYS[name], [2], 2), world.expected(2)) < CAUGHT


@pytest.mark.parametrize("transform", ["temperature", "top-k", "top-p", "min-p", "bias", "bad words", "min new tokens"])
def test_control_transforms_of_the_draft_law_alone_are_seen(transform: str) -> None:
    options = TRANSFORMS[transform]
    world = World(options, drafter_options=options, target_options=SamplingOptions(temperature=1.0))
    assert p_value(counted(world, REJECTION, [2], 2), world.expected(2)) < CAUGHT


def test_transforms_of_the_target_alone_are_right() -> None:
    world = World(TRANSFORMS["all"], drafter_options=SamplingOptions(temperature=1.0))
    for way in WAYS.values():
        assert p_value(counted(world, way, [2], 2), world.expected(2)) > FALSE_ALARM


@pytest.mark.parametrize("told", [SamplingOptions(temperature=1.0), SamplingOptions(temperature=2.5)])
def test_control_a_draft_law_that_was_not_drawn_from_is_seen(told: SamplingOptions) -> None:
    drawn_from = SamplingOptions(temperature=0.4)
    world, other = World(SamplingOptions(temperature=1.0), drafter_options=drawn_from), World(told)
    way = Way("rejection", "drawn", told=lambda _, output, draft: other.q(output, draft))
    assert p_value(counted(world, way, [2], 2), world.expected(2)) < CAUGHT


@pytest.mark.parametrize("name", [*WAYS, "drawn drafts as point masses"])
def test_a_draft_that_ends_before_an_improbable_token_needs_the_coupling_or_point_masses(name: str) -> None:
    world = World(SamplingOptions(temperature=1.0))
    way = WAYS.get(name) or Way("rejection", "drawn", told=None)
    right = way.accept == "coupled" or way.told is None
    found = p_value(counted(world, replace(way, least=0.2), [2], 2), world.expected(2))
    assert found > FALSE_ALARM if right else found < CAUGHT


@pytest.mark.parametrize("name", ["coupled, coupled drafts", "rejection, drawn drafts"])
@pytest.mark.parametrize("transform", ["repetition", "frequency", "presence", "bad words", "min new tokens"])
def test_control_rows_that_ignore_the_draft_before_them_are_seen(transform: str, name: str) -> None:
    world = World(TRANSFORMS[transform], ignores_draft=True)
    assert p_value(counted(world, WAYS[name], [3], 3), world.expected(3)) < CAUGHT


@dataclass(frozen=True)
class OnePlace(Stream):
    """A fault: every position draws the same numbers."""

    def _words(self, position: int, purpose: Purpose, count: int) -> NDArray[np.uint64]:
        return super()._words(0, purpose, count)


@dataclass(frozen=True)
class OnePurpose(Stream):
    """A fault: a draft token is drawn with the number that decides on it."""

    def _words(self, position: int, purpose: Purpose, count: int) -> NDArray[np.uint64]:
        return super()._words(position, Purpose.DRAFT, count)


@pytest.mark.parametrize("name", WAYS)
def test_control_one_stream_for_two_positions_is_seen(name: str) -> None:
    world = World(SamplingOptions(temperature=1.0))
    assert p_value(counted(world, WAYS[name], [2], 2, stream=OnePlace), world.expected(2)) < CAUGHT


def test_control_one_stream_for_two_purposes_is_seen() -> None:
    world = World(SamplingOptions(temperature=1.0))
    assert p_value(counted(world, REJECTION, [2], 2, stream=OnePurpose), world.expected(2)) < CAUGHT
