"""Answers that are drawn together have the target's law, as those drawn alone have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mtp_runtime import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling.decoding import Decoding
from tests.fixtures.checkpoints import markov_checkpoint
from tests.runtime.batching.parts import drive, scheduler
from tests.runtime.decoding import CAUGHT, FALSE_ALARM, PROMPT, TARGET, TRANSFORMS, expected_law
from tests.runtime.sampling.oracle import p_value
from tests.support import build_bundle, load_model

SLOTS, LENGTH = 4, 3


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The small world of `tests.runtime.decoding` with room for four."""
    options = {"table": TARGET, "size": len(TARGET), "draft": lambda token: (token + 1) % len(TARGET), "eos": 0}
    place = tmp_path_factory.mktemp("together")
    checkpoint = markov_checkpoint(place / "checkpoint", layer_types=["full_attention"], **options)
    return load_model(build_bundle(checkpoint, place / "bundle", draft_tokens=4, max_batch_size=SLOTS))


def fit(model: Model, asked: dict[str, Any], draft_tokens: int, acceptor: str, runs: int = 240) -> float:
    """Chance of counts as far from the target's law as those of answers that run four at a time."""
    one = scheduler(model, slots=SLOTS, max_queue=runs, prefix_bytes=0)
    options = {"ignore_eos": not asked.get("min_new_tokens"), "acceptor": acceptor, "draft_tokens": draft_tokens}
    length = LENGTH + draft_tokens
    tickets = [
        one.submit(Request(prompt_ids=PROMPT, max_new_tokens=length, seed=seed, **options, **asked))
        for seed in range(runs)
    ]
    drive(one)
    counts = Counter(ticket.results()[0].token_ids[:LENGTH] for ticket in tickets)
    return p_value(counts, expected_law(asked, LENGTH)) if {*map(len, counts)} == {LENGTH} else 0.0


@pytest.mark.parametrize("acceptor", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("transform", "draft_tokens"),
    [
        pytest.param(name, k, marks=() if k == 1 + place % 4 and place % 3 == 0 else pytest.mark.slow)
        for place, name in enumerate(TRANSFORMS)
        for k in range(5)
    ],
)
def test_four_at_a_time_have_the_targets_law(together: Model, transform: str, draft_tokens: int, acceptor: str) -> None:
    """RT-28, RT-36: every transform, every K."""
    assert fit(together, TRANSFORMS[transform], draft_tokens, acceptor) > FALSE_ALARM


def test_control_answers_that_share_their_random_numbers_are_seen(
    together: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoding, "seed_of", lambda self, index: 7)
    assert fit(together, {"temperature": 1.0}, 2, "coupled") < CAUGHT
