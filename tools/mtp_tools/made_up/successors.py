"""Which token follows which, for target and draft: permutations of a vocabulary that are computed and never stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_engines.errors import ContractError

Tokens = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_ROUNDS = 8
_FOLLOWS, _DIFFERS = 1, 2


def keys(seed: int, purpose: int, count: int) -> Words:
    """Independent 64-bit keys for each purpose of a seed."""
    return np.random.SeedSequence([seed, purpose]).generate_state(count, np.uint64).astype(np.uint64)


def mix(values: Words) -> Words:
    """64 bits that look random for each 64-bit counter: the output function of SplitMix64 (Steele et al., 2014)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Shuffle:
    """A pseudo-random order of the tokens, computable in both directions.

    A Feistel network permutes the next power of four; what leaves the vocabulary is permuted again until it is back,
    which keeps it a permutation.
    """

    def __init__(self, vocab: int, seed: int, purpose: int) -> None:
        self._vocab = vocab
        self._half = np.uint64(((vocab - 1).bit_length() + 1) // 2)
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys = keys(seed, purpose, _ROUNDS)

    def places(self, tokens: Tokens) -> Tokens:
        """Where each token stands in the order."""
        return self._walk(tokens, self._keys, swapped=False)

    def tokens(self, places: Tokens) -> Tokens:
        """The tokens at these places."""
        return self._walk(places, self._keys[::-1], swapped=True)

    def _walk(self, values: Tokens, round_keys: Words, *, swapped: bool) -> Tokens:
        found = self._permute(values.astype(np.uint64), round_keys, swapped=swapped)
        while (outside := found >= np.uint64(self._vocab)).any():
            found[outside] = self._permute(found[outside], round_keys, swapped=swapped)
        return found.astype(np.int64)

    def _permute(self, values: Words, round_keys: Words, *, swapped: bool) -> Words:
        left, right = values >> self._half, values & self._mask
        if swapped:
            left, right = right, left
        for key in round_keys:
            left, right = right, left ^ (mix(right + key) & self._mask)
        if swapped:
            left, right = right, left
        return (left << self._half) | right


class Successors:
    """The target's next token and the draft's, each as a function of the token before it.

    The target's permutation is one cycle through the whole vocabulary, so a text repeats nothing before it has had
    every token. The draft's is the same but on a pseudo-random set of tokens, where it proposes what follows another
    token of that set: such a draft is always wrong.
    """

    def __init__(self, vocab: int, acceptance: float, seed: int) -> None:
        """acceptance: share of the vocabulary after which the draft is right, met to within one token.

        Raises:
            ContractError: acceptance is not in 0..1.
        """
        if not 0.0 <= acceptance <= 1.0:
            raise ContractError(
                f"The acceptance is {acceptance}; it is a share of the drafts: give a number from 0 to 1."
            )
        self.vocab = vocab
        self.wrong = round((1.0 - acceptance) * vocab)
        """Tokens after which the draft is wrong."""
        # A single token cannot change places with another one.
        self.wrong = 0 if self.wrong == 1 else self.wrong
        self._order, self._rest = Shuffle(vocab, seed, _FOLLOWS), Shuffle(vocab, seed, _DIFFERS)

    def target(self, tokens: Tokens) -> Tokens:
        """What the target emits after each token."""
        return self._order.tokens((self._order.places(tokens) + 1) % self.vocab)

    def draft(self, tokens: Tokens) -> Tokens:
        """What the draft head proposes after each token."""
        return self.target(self._exchanged(tokens, 1))

    def before_target(self, tokens: Tokens) -> Tokens:
        """The token after which the target emits each of these."""
        return self._order.tokens((self._order.places(tokens) - 1) % self.vocab)

    def before_draft(self, tokens: Tokens) -> Tokens:
        """The token after which the draft head proposes each of these."""
        return self._exchanged(self.before_target(tokens), -1)

    def _exchanged(self, tokens: Tokens, step: int) -> Tokens:
        """The first `wrong` places of a second order change round in a ring; every other token stays."""
        places = self._rest.places(tokens)
        return np.where(places < self.wrong, self._rest.tokens((places + step) % max(self.wrong, 1)), tokens)
