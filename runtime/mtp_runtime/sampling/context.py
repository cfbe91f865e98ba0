"""The tokens before a row, counted as the penalties need them, and taken back when a draft is rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mtp_runtime.constraints.matcher import TokenConstraint
from mtp_runtime.sampling.law import Ids


class Context:
    """Prompt and output before the next row; a token is added or taken back in constant time."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, constraint: TokenConstraint | None = None) -> None:
        """Begin with an empty output, as `constraint` does, which then goes along; two int32[vocab_size] are kept."""
        self.constraint = constraint
        """What the output must look like."""
        self.seen = Tally(vocab_size)
        """Tokens of prompt and output."""
        self.output = Tally(vocab_size)
        """Tokens of the output alone."""
        self._tokens = list(prompt)
        self._prompt_length = len(self._tokens)
        for token in self._tokens:
            self.seen.add(token)

    @property
    def output_length(self) -> int:
        """How many tokens the output has, which is the position of the next one."""
        return len(self._tokens) - self._prompt_length

    def advance(self, tokens: Iterable[int]) -> None:
        """Append tokens to the output."""
        for token in tokens:
            self._tokens.append(token)
            self.seen.add(token)
            self.output.add(token)
            if self.constraint is not None:
                self.constraint.advance([token])

    def roll_back(self, count: int) -> None:
        """Take the newest `count` tokens of the output back; all is as it was before they came."""
        assert 0 <= count <= self.output_length, "only output can be taken back"
        for _ in range(count):
            token = self._tokens.pop()
            self.seen.take_back(token)
            self.output.take_back(token)
        if self.constraint is not None:
            self.constraint.roll_back(count)

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether prompt and output together end with these tokens; with none of them they always do."""
        count = len(tokens)
        return count == 0 or tuple(self._tokens[-count:]) == tuple(tokens)


class Tally:
    """How often each token came, and the distinct ones without a search through the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._counts: NDArray[np.int32] = np.zeros(vocab_size, np.int32)
        self._ids: Ids = np.zeros(64, np.int64)
        self._distinct = 0

    @property
    def ids(self) -> Ids:
        """int64[distinct]: the tokens in the order of their first coming; valid until the next change."""
        return self._ids[: self._distinct]

    @property
    def counts(self) -> NDArray[np.int32]:
        """int32[distinct]: how often each of `ids` came."""
        return self._counts[self.ids]

    def add(self, token: int) -> None:
        """Count one token."""
        if self._counts[token] == 0:
            if self._distinct == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._ids[self._distinct] = token
            self._distinct += 1
        self._counts[token] += 1

    def take_back(self, token: int) -> None:
        """Undo the newest `add`, which was of this token."""
        self._counts[token] -= 1
        # Tokens go in the reverse of the order they came in, so the one that is gone was the last new one.
        if self._counts[token] == 0:
            self._distinct -= 1
