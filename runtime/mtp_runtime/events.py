"""What a generation yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtp_runtime.stats import Stats

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Emitted:
    """Tokens of one cycle, committed and final.

    `text` may lag behind the ids: it never ends inside a character, and never shows the beginning of a
    stop text that may still complete.
    """

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Finished:
    """The end of a generation, with everything that was emitted."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats


Event = Emitted | Finished
