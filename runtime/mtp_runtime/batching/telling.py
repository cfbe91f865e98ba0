"""What happens to an answer, told to its request, to the watch, and in the log."""

from __future__ import annotations

import logging

from mtp_engines.errors import MtpError
from mtp_runtime.batching.lanes import Lane
from mtp_runtime.batching.tickets import Failed
from mtp_runtime.batching.watch import Watch
from mtp_runtime.events import Event, Finished

_LOG = logging.getLogger(__name__)


class Telling:
    """In the scheduler's thread."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def deliver(self, lane: Lane, event: Event) -> None:
        """An event of an answer."""
        if isinstance(event, Finished):
            self._watch.finished(lane.ticket, event)
        else:
            self._watch.emitted(lane.ticket, event)
        self.tell(lane, event)

    def fail(self, lane: Lane, error: BaseException) -> None:
        """An answer cannot be finished."""
        if not isinstance(error, MtpError):
            _LOG.error("an answer failed", exc_info=error)
        failure = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {error!r}")
        self._watch.failed(lane.ticket, failure)
        self.tell(lane, Failed(failure, lane.index))
        # Nobody waits for its other answers.
        lane.ticket.give_up()

    def drafter_failed(self, lane: Lane, error: Exception) -> None:
        """A drafter raised; the first time is told."""
        if lane.degraded:
            return
        lane.degraded = True
        named = (lane.ticket.prepared.drafter, type(error).__name__, error)
        _LOG.warning("the drafter %s failed, its answer goes on without drafts: %s: %s", *named)
        self._watch.degraded(lane.ticket, error)

    def tell(self, lane: Lane, told: Event | Failed) -> None:
        """The request alone; its listener is somebody else's code."""
        try:
            lane.ticket.tell(told)
        except Exception:
            _LOG.exception("a listener failed; its request is given up")
            lane.ticket.give_up()
