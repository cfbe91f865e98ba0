"""What a scheduler tells of itself, for metrics; every method does nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mtp_runtime.batching.prefixes import PrefixCache
from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.events import Emitted, Finished


class Busy(Protocol):
    """What a scheduler shows of itself; see `mtp_runtime.batching.scheduler.Scheduler`."""

    slots: int
    prefixes: PrefixCache

    @property
    def queued(self) -> int:
        """Answers that wait for a slot."""

    @property
    def running(self) -> int:
        """Answers that have a slot."""


class Watch:
    """Called in the scheduler's thread, but for `submitted`, which comes from the sender's."""

    def submitted(self, ticket: Ticket) -> None:
        """A request waits."""

    def entered(self, ticket: Ticket) -> None:
        """An answer has a slot."""

    def preempted(self, ticket: Ticket) -> None:
        """An answer had to leave its slot."""

    def emitted(self, ticket: Ticket, event: Emitted) -> None:
        """Tokens or text of an answer."""

    def finished(self, ticket: Ticket, event: Finished) -> None:
        """An answer has ended, or was given up."""

    def failed(self, ticket: Ticket, error: Exception) -> None:
        """An answer could not be finished."""

    def degraded(self, ticket: Ticket, error: Exception) -> None:
        """A drafter failed."""

    def round(self, widths: Sequence[int], scheduler: Busy) -> None:
        """A round is over; `widths` are the rows of each answer in its verify."""
