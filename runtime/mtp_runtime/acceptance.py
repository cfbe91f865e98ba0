"""Which draft tokens are kept: what the loop asks of an acceptor, and the greedy one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mtp_engines.engine import Ids, Verified
from mtp_runtime.events import Completion
from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_runtime.verification import Scored


class Acceptor(Protocol):
    """Decides on the rows of a verify, for one completion."""

    needs_logits: bool
    """Whether the logits have to leave the graph."""
    scores_prompt: bool
    """Whether all rows of the prompt have to be scored, not just the last one."""
    scores_output: bool
    """Whether `emit` returns log-probabilities."""
    completion: Completion

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry for each token of the prompt, None for the first; None if nobody asked."""

    def observe_prompt(self, following: Ids, verified: Verified) -> None:
        """Learn of rows of the prompt and int64[rows or rows - 1], the token of the prompt after each of them."""

    def accept(self, draft: Sequence[int], scored: Scored) -> list[int]:
        """The accepted draft tokens and the bonus token; no row behind the first rejected token is asked for."""

    def emit(self, block: Sequence[int], verified: Verified) -> tuple[TokenLogprobs, ...] | None:
        """Learn of the tokens that are emitted, a beginning of what was accepted; their log-probabilities, if asked.

        The rows of `verified` begin with that of the first token.
        """


class GreedyAcceptor:
    """Keeps what equals the ids that the graph chose."""

    needs_logits = False
    scores_prompt = False
    scores_output = False
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def __init__(self) -> None:
        """One completion, nothing drawn."""
        self.completion = Completion()

    def observe_prompt(self, following: Ids, verified: Verified) -> None:
        """Nothing to learn."""

    def accept(self, draft: Sequence[int], scored: Scored) -> list[int]:
        """The longest prefix that the target chose itself, and its next token."""
        return accept_greedy(draft, scored.ids)

    def emit(self, block: Sequence[int], verified: Verified) -> tuple[TokenLogprobs, ...] | None:
        """Nothing to learn or to report."""
        return None


def accept_greedy(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Keep the longest prefix of the draft that the target chose itself, then the target's next token.

    Args:
        draft: K token ids, oldest first; K may be 0.
        chosen: K + 1 ids; chosen[i] is the target's choice in the place of draft[i], chosen[K] after all.

    Returns:
        The accepted draft tokens and the bonus token: 1 to K + 1 ids.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return [*draft[:accepted], chosen[accepted]]
