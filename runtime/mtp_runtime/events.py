"""What a generation yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_runtime.stats import Stats

FinishReason = Literal["eos", "stop", "length", "cancelled", "timeout"]
"""The last two only from a scheduler: its sender gave it up, or its time was over."""
ConstraintState = Literal["complete", "incomplete"]


@dataclass(frozen=True)
class Completion:
    """Which answer to a request this is, and how its tokens were chosen.

    Attributes:
        index: from 0; above 0 only where several were asked for.
        seed: what its tokens were drawn with; None if nothing was drawn. The same request with this seed gives it
            alone.
        acceptor: the rule that kept draft tokens; `greedy` at temperature 0.
        lossy: the rule keeps draft tokens that the target would not have said: the tokens are not the target's.
    """

    index: int = 0
    seed: int | None = None
    acceptor: str = "greedy"
    lossy: bool = False


@dataclass(frozen=True)
class Emitted:
    """Tokens of one cycle, committed and final.

    `text` may lag behind the ids: it never ends inside a character, and never shows the beginning of a
    stop text that may still complete. `logprobs` has one entry for each id, if they were asked for. `index` is that
    of the completion. `drafted` says of each id whether it was a draft token, kept by the acceptor.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    drafted: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end of a generation, with everything that was emitted.

    `logprobs` has one entry for each id, `prompt_logprobs` one for each token of the prompt, None for the first, if
    they were asked for. `constraint` says whether the answer is one that the request's constraint asks for, if it has
    one; it is not where a limit, a stop text, or an end token before the constraint cut it.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    completion: Completion = Completion()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    constraint: ConstraintState | None = None
    cached_tokens: int = 0
    """Tokens of the prompt whose state was taken from an earlier request."""


Event = Emitted | Finished
