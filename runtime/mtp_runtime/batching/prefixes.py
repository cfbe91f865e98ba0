"""States of texts that were read before, for requests that begin with the same text.

A recurrent state cannot be cut back, so a text is resumed only where its state was kept: at the end of a chunk of a
prompt, and at the end of an answer. What is kept there are the rows of the caches since the place before, the recurrent
states, and the hidden rows, from which any draft head can be fed again. Only committed rows are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from mtp_engines.engine import Floats, Saved

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Place:
    """The end of a text whose state is kept.

    Attributes:
        tokens: the text since the place before.
        saved: rows of these tokens, and the states after them.
        hidden: float32[tokens, tap_width] of the target.
        before: None for the beginning of all texts.
    """

    tokens: Tokens = ()
    saved: Saved | None = None
    hidden: Floats | None = None
    before: Place | None = None
    after: dict[Tokens, Place] = field(default_factory=dict)
    used: int = 0
    kept: bool = True

    @property
    def length(self) -> int:
        """Tokens from the beginning."""
        return 0 if self.saved is None else self.saved.length

    @property
    def nbytes(self) -> int:
        """Bytes that it holds by itself."""
        return (0 if self.saved is None else self.saved.nbytes) + (0 if self.hidden is None else self.hidden.nbytes)

    def path(self) -> list[Place]:
        """From the first place to this one."""
        places: list[Place] = []
        place: Place | None = self
        while place is not None and place.saved is not None:
            places.append(place)
            place = place.before
        return places[::-1]

    def parts(self) -> Iterator[Saved]:
        """For `SlotSequences.restore`."""
        for place in self.path():
            assert place.saved is not None
            yield place.saved

    def rows(self) -> Floats:
        """float32[length, tap_width], the hidden rows of the whole text."""
        return np.concatenate([place.hidden for place in self.path() if place.hidden is not None])


class PrefixCache:
    """Places under a budget of bytes; the least recently used ones without another behind them go first.

    Attributes:
        nbytes: what is held.
        queries, hits: tokens that were looked up, and those of them that were found.
    """

    def __init__(self, budget: int) -> None:
        """`budget` is in bytes; 0 keeps nothing."""
        self.budget, self.nbytes, self.queries, self.hits = budget, 0, 0, 0
        self._root, self._clock = Place(), 0
        self._read: set[Tokens] = set()

    @contextmanager
    def reading(self, tokens: Sequence[int]) -> Iterator[None]:
        """Meanwhile a text is read whose states will be kept, and others that need it do well to wait."""
        text = tuple(tokens)
        self._read.add(text)
        try:
            yield
        finally:
            self._read.discard(text)

    def is_read(self, tokens: Sequence[int]) -> bool:
        """Whether the very same text is being read."""
        return tuple(tokens) in self._read

    def find(self, tokens: Sequence[int]) -> Place:
        """The longest text that is kept and leaves at least one of these tokens to run; the beginning, if none is."""
        text, most = tuple(tokens), len(tokens) - 1
        found, waiting = self._root, [self._root]
        while waiting:
            place = waiting.pop()
            if place.length > found.length:
                found = place
            start = place.length
            waiting += [
                following
                for part, following in place.after.items()
                if start + len(part) <= most and text[start : start + len(part)] == part
            ]
        for place in found.path():
            self._touch(place)
        self.queries += len(text)
        self.hits += found.length
        return found

    def has(self, before: Place, tokens: Tokens) -> bool:
        """Whether the state behind `tokens`, which follow a place, is kept, or cannot be: then a copy is in vain."""
        return tokens in before.after or not before.kept or not tokens

    def keep(self, before: Place, tokens: Tokens, saved: Saved | None, hidden: Floats) -> Place:
        """Keep the state behind `tokens`, which follow a place.

        Args:
            before: a place that `find` or `keep` gave.
            tokens: what follows it.
            saved: rows and states; None where `has` says so.
            hidden: float32[tokens, tap_width].

        Returns:
            The new place, the one that was there already, or `before` if that is gone or nothing fits the budget.
        """
        if tokens in before.after:
            for one in before.after[tokens].path():
                self._touch(one)
            return before.after[tokens]
        place = Place(tokens, saved, hidden, before)
        if saved is None or not before.kept or not tokens or not self._make_room(place):
            return before
        before.after[tokens] = place
        self.nbytes += place.nbytes
        for one in place.path():
            self._touch(one)
        return place

    def _touch(self, place: Place) -> None:
        self._clock += 1
        place.used = self._clock

    def _make_room(self, place: Place) -> bool:
        """Drop what was not used for the longest time; nothing at all if a place and those before it do not fit."""
        path = place.path()
        if sum(one.nbytes for one in path) > self.budget:
            return False
        stays = set(map(id, path))
        while self.nbytes + place.nbytes > self.budget:
            ends = [one for one in self._places() if not one.after and id(one) not in stays]
            self._drop(min(ends, key=lambda one: one.used))
        return True

    def _drop(self, place: Place) -> None:
        """An answer may still stand there, so that the memory is given back here."""
        assert place.before is not None and place.saved is not None
        del place.before.after[place.tokens]
        self.nbytes -= place.nbytes
        place.kept, place.saved, place.hidden = False, replace(place.saved, arrays={}), None

    def _places(self) -> Iterator[Place]:
        waiting = list(self._root.after.values())
        while waiting:
            place = waiting.pop()
            waiting += place.after.values()
            yield place
