"""From token ids to text that can be shown at once: whole characters, no half stop texts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes ids one by one and watches for stop texts.

    The text ends before the stop text; the ids end with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stops = tokenizer, sorted(set(stops))
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._first_characters = frozenset(stop[:1] for stop in self._stops)
        self._skips = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self.decoded = ""
        """Everything decoded so far, cut before a stop text."""
        self._shown = 0
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True if it completed a stop text."""
        if self._tokenizer is None:
            return False
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece:
            searched = len(self.decoded)
            self.decoded += piece
            self._cut_at_stop(searched)
        return self.stopped

    def take(self) -> str:
        """Text that is safe to show and was not taken yet."""
        end = len(self.decoded) - (0 if self.stopped else self._held())
        text = self.decoded[self._shown : end]
        self._shown = max(end, self._shown)
        return text

    def flush(self) -> str:
        """What was held back as a possible stop text; bytes that are no character yet stay out."""
        text = self.decoded[self._shown :]
        self._shown = max(len(self.decoded), self._shown)
        return text

    def finish(self) -> str:
        """The rest, with bytes that never became a character shown as U+FFFD."""
        if self._tokenizer is not None and not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips)
            if whole.startswith(self.decoded):
                self.decoded = whole
        text = self.decoded[self._shown :]
        self._shown = len(self.decoded)
        return text

    def _cut_at_stop(self, searched: int) -> None:
        start = max(searched - self._longest + 1, 0)
        found = [at for stop in self._stops if (at := self.decoded.find(stop, start)) >= 0]
        if found:
            self.decoded = self.decoded[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        """Length of the longest end of the text that could be the beginning of a stop text."""
        tail = self.decoded[max(len(self.decoded) - self._longest + 1, 0) :] if self._longest > 1 else ""
        for start, character in enumerate(tail):
            if character not in self._first_characters:
                continue
            # Among sorted texts, those that begin with this one are the first ones that are not below it.
            end = tail[start:]
            place = bisect_left(self._stops, end)
            if place < len(self._stops) and self._stops[place].startswith(end):
                return len(end)
        return 0
