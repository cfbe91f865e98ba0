"""What ends a generation: an end token, a stop text, a limit. Decided token by token, inside a block too."""

from __future__ import annotations

from collections.abc import Collection

from mtp_runtime.events import FinishReason
from mtp_runtime.text import TextStream


class Ending:
    """Cuts blocks where the generation ends and remembers why."""

    def __init__(self, limit: int, end_tokens: Collection[int], text: TextStream) -> None:
        """`limit` is the greatest number of tokens to emit."""
        self._limit, self._end_tokens = limit, end_tokens
        self.text = text
        self.reason: FinishReason | None = None

    def remaining(self, emitted: int) -> int:
        """Tokens that may still be emitted after `emitted` ones."""
        return self._limit - emitted

    def cut(self, block: list[int]) -> list[int]:
        """The block up to and including the token that ends the generation."""
        for index, token in enumerate(block):
            if self.text.push(token):
                self.reason = "stop"
            elif token in self._end_tokens:
                self.reason = "eos"
            if self.reason:
                return block[: index + 1]
        return block

    @property
    def full_text(self) -> str:
        """All text so far."""
        return self.text.decoded
