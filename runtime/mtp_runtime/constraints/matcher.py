"""Which tokens may come next in one answer; follows what is emitted or only drafted, and takes it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from mtp_engines.errors import RequestError
from mtp_runtime.constraints.grammars import Grammar


class _Kind(Enum):
    """What became of a token."""

    FREE = "before the constraint"
    TAKEN = "by the grammar"
    BEHIND = "the end, or behind it"
    FORBIDDEN = "by the grammar, or behind such a token"
    FAILED = "what the engine gave up on, or behind it"


_DEAD = (_Kind.FORBIDDEN, _Kind.FAILED)


class TokenConstraint:
    """A grammar along the tokens of one answer.

    Attributes:
        name: the field of the request that asked for it.
    """

    def __init__(self, grammar: Grammar, end_tokens: Collection[int], vocab_size: int) -> None:
        """Begin with an empty answer.

        Args:
            grammar: what the answer must look like.
            end_tokens: ids that end it; without any it ends by itself where nothing more can follow.
            vocab_size: columns of the logits; those without a token are never allowed.
        """
        self.name = grammar.name
        self._grammar, self._vocabulary = grammar, grammar.vocabulary
        self._end_tokens, self._vocab_size = frozenset(end_tokens), vocab_size
        self._matcher = grammar.matcher()
        self._steps: list[tuple[_Kind, int]] = []
        self._free = bytearray()
        self._waits = bool(grammar.after)
        self._failure = ""

    @property
    def is_complete(self) -> bool:
        """Whether the answer so far is one that the grammar asks for."""
        newest = self._newest
        if self._waits or newest in _DEAD:
            return False
        return newest is _Kind.BEHIND or self._matcher.is_accepting()

    @property
    def is_ended(self) -> bool:
        """Whether it is complete and can go no further.

        Raises:
            RequestError: the grammar engine gave up.
        """
        if not self.is_complete:
            return False
        return self._newest is _Kind.BEHIND or not self._grammar.followers(self._matcher).any()

    def allowed(self) -> NDArray[np.bool_] | None:
        """The tokens that may come next, bool[vocab_size]; None if all may.

        All may before the constraint begins, and behind the end, where nothing is emitted.

        Raises:
            RequestError: the grammar engine gave up.
        """
        newest = self._newest
        if self._waits or newest is _Kind.BEHIND:
            return None
        if newest is _Kind.FAILED:
            raise RequestError(self._failure)
        mask = np.zeros(self._vocab_size, np.bool_)
        if newest is _Kind.FORBIDDEN:
            return mask
        followers = self._grammar.followers(self._matcher)[: self._vocab_size]
        mask[: len(followers)] = followers
        if self._matcher.is_accepting():
            if not self._end_tokens and not followers.any():
                return None
            mask[list(self._end_tokens)] = True
        return mask

    def admissible(self, draft: Sequence[int]) -> list[int]:
        """The draft up to its first token that is not allowed, or that the engine gives up on."""
        kept = 0
        for token in draft:
            self.advance([token])
            kept += 1
            if self._newest in _DEAD:
                self.roll_back(kept)
                return list(draft[: kept - 1])
        self.roll_back(kept)
        return list(draft)

    def advance(self, tokens: Iterable[int]) -> None:
        """Append tokens; behind one that is not allowed nothing is."""
        for token in tokens:
            self._steps.append((self._take(token), token))

    def roll_back(self, count: int) -> None:
        """Take the newest `count` tokens back; all is as it was before they came."""
        assert 0 <= count <= len(self._steps), "only what came can be taken back"
        taken = 0
        for _ in range(count):
            kind, token = self._steps.pop()
            taken += kind is _Kind.TAKEN
            if kind is _Kind.FREE:
                self._waits = True
                del self._free[len(self._free) - len(self._vocabulary.bytes_of(token)) :]
        if taken:
            self._matcher.rollback(taken)
        if self._matcher.is_error():
            # An engine that gave up never recovers, and what it gave up on may have been no more than a draft.
            self._matcher = self._grammar.matcher()
            self._matcher.consume_tokens([token for kind, token in self._steps if kind is _Kind.TAKEN])

    @property
    def _newest(self) -> _Kind | None:
        return self._steps[-1][0] if self._steps else None

    def _take(self, token: int) -> _Kind:
        newest = self._newest
        if self._waits:
            self._read(token)
            return _Kind.FREE
        if newest is _Kind.BEHIND or newest in _DEAD:
            return newest
        if token in self._end_tokens and self._matcher.is_accepting():
            return _Kind.BEHIND
        if token < self._vocabulary.size and self._matcher.try_consume_tokens([token]) == 1:
            return _Kind.TAKEN
        if (failure := self._grammar.failure(self._matcher)) is not None:
            self._failure = failure
            return _Kind.FAILED
        ended = not self._end_tokens and not self._matcher.is_error() and self.is_ended
        return _Kind.BEHIND if ended else _Kind.FORBIDDEN

    def _read(self, token: int) -> None:
        """Before the constraint: look for the text behind which it begins, which may end inside a token."""
        searched = max(0, len(self._free) - len(self._grammar.after) + 1)
        self._free += self._vocabulary.bytes_of(token)
        self._waits = self._free.find(self._grammar.after, searched) < 0
