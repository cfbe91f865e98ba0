"""Depth by confidence: a draft ends where its head no longer believes in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mtp_engines.engine import Choose, Floats, Ids


def gated(least: float, drafting: Callable[[], Choose] | None) -> Callable[[], Choose]:
    """Begins drafts that end before the product of the head's best probabilities falls below `least`.

    The best probability of each place counts, not that of the token drawn there: so whether a place is drafted depends
    on the tokens before it alone, which `rejection` asks of its drafts.

    Args:
        least: 0 to 1; 0 never ends a draft.
        drafting: begins a draft whose tokens are chosen from logits; None takes the best ones.
    """

    def begin() -> Choose:
        choose, product = (_best if drafting is None else drafting()), 1.0

        def gate(logits: Floats) -> Ids | None:
            nonlocal product
            product *= best_probability(logits[0])
            return None if product < least else choose(logits)

        return gate

    return begin


def best_probability(row: npt.NDArray[np.float32]) -> float:
    """The probability of the best token of float32[vocab_size] logits."""
    return 1.0 / float(np.exp(row - row.max()).sum(dtype=np.float64))


def _best(logits: Floats) -> Ids:
    ids: Ids = np.argmax(logits, axis=-1)
    return ids
