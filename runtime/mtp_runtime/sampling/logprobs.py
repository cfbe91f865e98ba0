"""Log-probabilities to report, from the model's raw logits: before bias, penalties, masks and temperature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtp_engines.errors import NumericsError
from mtp_runtime.sampling.transforms import Row, largest


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought of one position, whatever the token was drawn from.

    Attributes:
        token: the emitted token.
        logprob: its natural log-probability; minus infinity if the model itself excludes it.
        top: the most probable tokens with theirs, best first, equal ones by lowest id. The emitted token need not be
            among them; tokens that the model excludes never are.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Row, token: int, top: int = 0) -> TokenLogprobs:
    """Log-softmax in float64 of one row.

    Args:
        logits: float32[vocab_size] as the model made them.
        token: the emitted token.
        top: how many of the most probable ones to tell, 0 or more.

    Raises:
        NumericsError: the row is not a law: a logit is not a number or infinite, or all are minus infinity.
    """
    best = float(logits.max())
    if not np.isfinite(best):
        raise NumericsError(f"the largest logit is {best}, expected a finite number; check the model's numerics.")
    shifted = logits.astype(np.float64) - best
    total = float(np.log(np.sum(np.exp(shifted))))
    places = largest(logits, top)
    places = places[np.argsort(-shifted[places], kind="stable")]
    told = [(int(place), float(shifted[place]) - total) for place in places if shifted[place] > -np.inf]
    return TokenLogprobs(token, float(shifted[token]) - total, tuple(told))
