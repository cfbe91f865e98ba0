"""Draws that belong to seed, position and purpose."""

from __future__ import annotations

import itertools

import numpy as np

from mtp_runtime.sampling import Law, Purpose, Stream, coupled_draft


def random_law(rng: np.random.Generator, size: int) -> Law:
    """A law of some tokens of a vocabulary of this size."""
    return Law.of_weights(np.arange(size), rng.exponential(size=size) * (rng.random(size) < 0.7))


def test_the_numbers_are_those_of_every_release() -> None:
    """Philox 4x64-10 of key (seed, purpose) and counter (1, 0, 0, position): the first word's upper 52 bits."""
    stream = Stream(42)
    found = [stream.uniform(0, Purpose.ACCEPT), stream.uniform(7, Purpose.ACCEPT), stream.uniform(7, Purpose.TOKEN)]
    assert found == [0.4269192325220025, 0.7743830646310014, 0.3635944608112195]
    assert stream.race(Law.of_weights(np.arange(1000), np.ones(1000)), 3) == 516


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    law = random_law(np.random.default_rng(1), 50)
    stream = Stream(9)
    first = [(stream.race(law, place), stream.draw(law, place, Purpose.TOKEN)) for place in range(30)]
    again = [(Stream(9).race(law, place), Stream(9).draw(law, place, Purpose.TOKEN)) for place in reversed(range(30))]
    assert first == again[::-1]


def test_seeds_positions_and_purposes_draw_different_numbers() -> None:
    seeds, places = (0, 1, 2**32, 2**63, 2**64 - 1), (0, 1, 2, 2**31, 2**40)
    found = {Stream(s).uniform(p, w) for s, p, w in itertools.product(seeds, places, Purpose)}
    assert len(found) == len(seeds) * len(places) * len(Purpose)
    assert all(0 < number < 1 for number in found)


def test_an_open_seed_is_fresh_and_told() -> None:
    seeds = {Stream.of(None).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert Stream.of(2**64 - 1).seed == 2**64 - 1


def test_a_race_depends_on_neither_vocabulary_nor_tokens_that_cannot_occur() -> None:
    rng = np.random.default_rng(2)
    for place in range(200):
        law = random_law(rng, 60)
        weights = np.zeros(90)
        weights[law.ids] = law.probabilities
        assert Stream(3).race(law, place) == Stream(3).race(Law.of_weights(np.arange(90), weights), place)


def test_equal_laws_have_the_same_draft_and_unlike_ones_often() -> None:
    rng = np.random.default_rng(3)
    stream, equal = Stream(4), 0
    for place in range(300):
        law, other = random_law(rng, 20), random_law(rng, 20)
        assert coupled_draft(law, stream, place) == stream.race(law, place)
        equal += coupled_draft(other, stream, place) == stream.race(law, place)
    assert 0 < equal < 300, "control: other laws have other winners"


def test_a_token_without_probability_is_never_drawn() -> None:
    law = Law.of_weights(np.arange(5), np.array([0, 1e-300, 0, 1, 0.0]))
    assert law.ids.tolist() == [1, 3]
    for place in range(500):
        assert Stream(5).race(law, place) == Stream(5).draw(law, place, Purpose.TOKEN) == 3
