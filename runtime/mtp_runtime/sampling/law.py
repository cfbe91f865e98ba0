"""A probability law over token ids, kept as the tokens that can occur at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Law:
    """Tokens with their probabilities; every other token has none.

    Attributes:
        ids: int64[tokens], ascending.
        probabilities: float64[tokens], each above 0, their sum 1 up to rounding.
    """

    ids: Ids
    probabilities: Doubles

    @classmethod
    def of_weights(cls, ids: Ids, weights: Doubles) -> Law:
        """The law proportional to weights of 0 or more, of which one at least is above 0; `ids` ascend."""
        positive = weights > 0
        if not positive.all():
            ids, weights = ids[positive], weights[positive]
        total = weights.sum()
        assert total > 0, "a law needs a token that can occur"
        return cls(ids, weights / total)

    @classmethod
    def point(cls, token: int) -> Law:
        """The law of a token that is certain: greedy decoding, or a draft that was not drawn."""
        return cls(np.array([token], np.int64), np.ones(1))

    def of(self, token: int) -> float:
        """The probability of one token."""
        place = int(np.searchsorted(self.ids, token))
        found = place < len(self.ids) and self.ids[place] == token
        return float(self.probabilities[place]) if found else 0.0

    def at(self, ids: Ids) -> Doubles:
        """The probabilities of several tokens, whose ids ascend, as float64[len(ids)]."""
        if np.array_equal(ids, self.ids):
            return self.probabilities
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)

    def beyond(self, other: Law) -> Law:
        """The normalised positive part of this law minus another: what a rejected draft leaves to draw from.

        Without any positive part, which only rounding can bring about where a token of `other` was rejected, it is
        this law.
        """
        rest = self.probabilities - other.at(self.ids)
        np.maximum(rest, 0.0, out=rest)
        return Law.of_weights(self.ids, rest) if rest.any() else self


class Laws(Protocol):
    """Laws of consecutive positions: a list, or what makes each when it is asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, row: int, /) -> Law:
        """One of them, counted from 0."""
