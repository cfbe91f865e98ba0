"""What ends a generation: end token, stop text, limit, complete constraint. Decided token by token, in a block too."""

from __future__ import annotations

from collections.abc import Collection

from mtp_runtime.constraints.matcher import TokenConstraint
from mtp_runtime.events import ConstraintState, FinishReason
from mtp_runtime.text import TextStream


class Ending:
    """Cuts blocks where the generation ends and remembers why."""

    def __init__(
        self,
        limit: int,
        end_tokens: Collection[int],
        text: TextStream,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """`limit` is the greatest number of tokens to emit; `constraint` goes along with what is emitted.

        Where there are end tokens a complete constraint allows nothing else, and one of them ends the answer.
        """
        self._limit, self._end_tokens = limit, end_tokens
        self.text = text
        self.reason: FinishReason | None = None
        self._constraint = constraint
        if self._completes():
            self.reason, self._limit = "stop", 0

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
            if self._constraint is not None:
                self._constraint.advance([token])
                if not self.reason and self._completes():
                    self.reason = "stop"
            if self.reason:
                return block[: index + 1]
        return block

    @property
    def constraint(self) -> ConstraintState | None:
        """Whether what was emitted is what the constraint asks for; None without one."""
        if self._constraint is None:
            return None
        return "complete" if self._constraint.is_complete else "incomplete"

    def _completes(self) -> bool:
        return self._constraint is not None and not self._end_tokens and self._constraint.is_ended

    @property
    def full_text(self) -> str:
        """All text so far."""
        return self.text.decoded
