"""The randomness of a request: every draw belongs to a seed, a position in the output and a purpose.

Nothing is drawn in sequence, so the same request draws the same numbers alone, in a batch and after other requests, and
a position that is drafted again draws the same numbers again. The generator is Philox 4x64 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011), a function of a key and a counter: the key is seed and purpose, the highest
word of the counter the position. Only its raw words are taken: NumPy keeps their stream between
releases, which it does not promise of distributions.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mtp_runtime.sampling.law import Doubles, Law

# A JSON number keeps 53 bits in every reader, so a seed that was reported can be sent back.
_FRESH_BITS = 53


class Purpose(IntEnum):
    """What a number is drawn for; the numbers of one purpose say nothing about those of another."""

    RACE = 0
    """One exponential for each token, shared by target and draft."""
    DRAFT = 1
    """The draft token, where it is drawn apart from the target."""
    ACCEPT = 2
    """Whether a draft token is kept."""
    TOKEN = 3
    """The token in the place of a rejected draft token, or after all."""


@dataclass(frozen=True)
class Stream:
    """The random numbers of one request.

    Attributes:
        seed: 0 to 2**64 - 1; equal seeds draw equal numbers.
    """

    seed: int

    @classmethod
    def of(cls, seed: int | None) -> Stream:
        """The stream of a seed, or of a fresh one, which its `seed` then tells."""
        return cls(secrets.randbits(_FRESH_BITS) if seed is None else seed)

    def uniform(self, position: int, purpose: Purpose) -> float:
        """One number between 0 and 1, never either."""
        return float(_uniforms(self._words(position, purpose, 1))[0])

    def draw(self, law: Law, position: int, purpose: Purpose) -> int:
        """A token of the law, by one uniform number."""
        sums = np.cumsum(law.probabilities)
        place = np.searchsorted(sums, self.uniform(position, purpose) * sums[-1], side="right")
        return int(law.ids[min(int(place), len(sums) - 1)])

    def race(self, law: Law, position: int) -> int:
        """A token of the law as the winner of an exponential race: argmax of p / E, E ~ Exp(1) for each token.

        Equal to the Gumbel-max draw argmax(log p - log E). E of a token depends on seed, position and the token's id
        alone, not on the law or the size of the vocabulary: similar laws have the same winner often.
        """
        if len(law.ids) == 1:
            return int(law.ids[0])
        words = self._words(position, Purpose.RACE, int(law.ids[-1]) + 1)
        logs = _uniforms(words if len(words) == len(law.ids) else words[law.ids])
        np.log(logs, out=logs)
        # E is minus the logarithm of a uniform number; the sign makes of the largest ratio the smallest.
        return int(law.ids[np.argmin(np.divide(law.probabilities, logs, out=logs))])

    def _words(self, position: int, purpose: Purpose, count: int) -> NDArray[np.uint64]:
        """uint64[count]; the first ones do not depend on how many are asked for."""
        key = np.array([self.seed, purpose], np.uint64)
        generator = np.random.Philox(key=key, counter=np.array([0, 0, 0, position], np.uint64))
        return np.asarray(generator.random_raw(count))


def derived_seed(seed: int, index: int) -> int:
    """The seed of the completion `index` of a request: the request's own for 0, else 53 bits of a digest of both."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _FRESH_BITS)


def _uniforms(words: NDArray[np.uint64]) -> Doubles:
    """The middles of 2**52 equal steps from 0 to 1: exact in float64, and neither 0 nor 1."""
    numbers = (words >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers
