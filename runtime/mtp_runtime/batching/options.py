"""How many answers run and wait, and the refusals of those that may not."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_engines.errors import MtpError, RequestError


class QueueFullError(MtpError):
    """More requests wait than may; come again later."""


class ClosedError(MtpError):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class BatchOptions:
    """How many run and wait.

    Attributes:
        slots: answers at once; None takes what the bundle was built for.
        max_queue: answers that may wait.
        prefill_budget: most rows of prompts between two cycles of the running answers; None takes one chunk.
        prefix_bytes: memory for states of texts that were read before; 0 keeps none.
        cache_rows: rows of the caches that all answers share, where the backend has pages; None has room for the whole
            context in every slot.

    Raises:
        RequestError: a number is out of range; names it.
    """

    slots: int | None = None
    max_queue: int = 256
    prefill_budget: int | None = None
    prefix_bytes: int = 1 << 30
    cache_rows: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        least_of = {"slots": 1, "max_queue": 0, "prefill_budget": 1, "prefix_bytes": 0, "cache_rows": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} is {value}, expected {least} or more.")

    def check_room(self, asked: int, waiting: int, free: int, slots: int) -> None:
        """Whether so many answers may wait, beside those that do and those that find a free slot.

        Raises:
            RequestError: they never may.
            QueueFullError: they may later.
        """
        if asked > self.max_queue + slots:
            raise RequestError(
                f"the request asks for {asked} answers, and at most {self.max_queue + slots} may run and wait; ask for "
                "fewer."
            )
        if waiting + asked > self.max_queue + free:
            raise QueueFullError(f"{waiting} answers wait already and at most {self.max_queue} may; try again later.")
