"""What is asked of a worker and what it answers; `workers/host.py` is the other end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_engines.errors import MtpError
from mtp_runtime.request import DraftTokens


class NeighbourError(MtpError):
    """An engine cannot be installed, fed or asked; the others go on without it."""


@dataclass(frozen=True)
class Question:
    """A greedy answer that no end token ends.

    Attributes:
        draft_tokens: K; 0 is plain decoding, `auto` is our own choice of K for every cycle.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    draft_tokens: DraftTokens

    def as_dict(self) -> dict[str, Any]:
        """The line that is sent."""
        return {"prompt": self.prompt, "new_tokens": self.new_tokens, "draft_tokens": self.draft_tokens}


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        first_s: seconds from the question to the first new token.
        total_s: seconds of the whole answer.
        peak_bytes: the most memory that the answering process has had so far.
        drafted: drafts that were checked, None where the engine does not count them.
        accepted: of those, how many were kept.
    """

    ids: tuple[int, ...]
    prompt_tokens: int
    first_s: float
    total_s: float
    peak_bytes: int
    drafted: int | None = None
    accepted: int | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of the prompt over the time of the first token."""
        return self.prompt_tokens / self.first_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens behind the first one over the rest of the time."""
        return (len(self.ids) - 1) / (self.total_s - self.first_s)


@dataclass(frozen=True)
class Ready:
    """What a worker says once its model is loaded: the K that it can be asked for, versions and remarks."""

    draft_tokens: tuple[DraftTokens, ...]
    about: dict[str, str]


def ready_from(line: Mapping[str, Any]) -> Ready:
    """The first line of a worker.

    Raises:
        NeighbourError: it reports an error, or is something else.
    """
    _require_no_error(line)
    try:
        return Ready(tuple(line["draft_tokens"]), dict(line["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise NeighbourError(f"its first line has no usable {error}; it must name its draft_tokens.") from error


def reply_from(line: Mapping[str, Any], question: Question) -> Reply:
    """The line that answers a question.

    Raises:
        NeighbourError: it reports an error, or its figures make no sense.
    """
    _require_no_error(line)
    try:
        ids, first_s, total_s = tuple(line["ids"]), float(line["first_s"]), float(line["total_s"])
        peak, drafted, accepted = int(line["peak_bytes"]), line.get("drafted"), line.get("accepted")
    except (KeyError, TypeError, ValueError) as error:
        raise NeighbourError(f"its answer has no usable {error}.") from error
    if not 0.0 < first_s < total_s or len(ids) < 2:
        raise NeighbourError(f"it gave {len(ids)} tokens, the first after {first_s} s, all after {total_s} s.")
    return Reply(ids, len(question.prompt), first_s, total_s, peak, drafted, accepted)


def _require_no_error(line: Mapping[str, Any]) -> None:
    if "error" in line:
        raise NeighbourError(str(line["error"]).rstrip(".") + ".")
