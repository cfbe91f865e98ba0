"""The count that the choice of drawn drafts rests on."""

from __future__ import annotations

import numpy as np

from mtp_runtime import Model
from mtp_runtime.request import Request
from mtp_tools.draft_rule import kept
from tests.runtime.conftest import world  # noqa: F401
from tests.runtime.decoding import TARGET


def test_drawn_drafts_are_kept_as_the_laws_overlap_and_best_ones_as_they_are_probable(world: Model) -> None:  # noqa: F811
    """The head says what follows the next token. One draft a cycle, so the states are those of the target's law."""
    asked = {"temperature": 1.0, "acceptor": "rejection", "max_new_tokens": 60, "ignore_eos": True}
    requests = [Request(prompt_ids=[1, 2, 2], **asked) for _ in range(60)]
    drawn, best = (kept(world, requests, 1, drawn=rule) for rule in (True, False))
    values, vectors = np.linalg.eig(TARGET.T)
    weights = np.abs(np.real(vectors[:, np.argmax(np.real(values))]))
    weights /= weights.sum()
    other = TARGET[(np.arange(len(TARGET)) + 1) % len(TARGET)]
    overlap = weights @ np.minimum(TARGET, other).sum(axis=1)
    probable = weights @ TARGET[np.arange(len(TARGET)), other.argmax(axis=1)]
    for stats, wanted in ((drawn, overlap), (best, probable)):
        assert abs(stats.accepted / stats.drafted - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / stats.drafted) + 0.02
    assert overlap - probable > 0.1, "control: the two rules differ here"
