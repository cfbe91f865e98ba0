"""The one thread that runs the model and makes every call into Triton: a server crashes if several threads do."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from mtp_engines.errors import RequestError
from mtp_runtime.batching.scheduler import ClosedError, QueueFullError, Scheduler
from mtp_serving.triton.incoming import read
from mtp_serving.triton.metrics import Metrics
from mtp_serving.triton.reply import Reply

_LOG = logging.getLogger(__name__)
_END = None
_AT_ONCE = 8
"""Requests that are begun between two rounds: prompts have to be encoded, and running answers wait for that."""


class EngineLoop:
    """Takes requests, runs rounds, sends responses, looks for cancellations."""

    def __init__(self, utils: Any, scheduler: Scheduler, metrics: Metrics) -> None:
        """Nothing runs before `start`; `metrics` is the scheduler's watch."""
        self._utils, self._scheduler, self._metrics = utils, scheduler, metrics
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open: list[Reply] = []
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="mtp-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, requests: Sequence[Any]) -> None:
        """Hand requests over, from any thread."""
        for request in requests:
            self._inbox.put(request)

    def close(self) -> None:
        """Give up what is still open, tell its senders, and end the thread."""
        self._inbox.put(_END)
        self._thread.join()

    def _run(self) -> None:
        while self._receive():
            if self._broken is None:
                self._round()
            self._flush()
        self._end()

    def _round(self) -> None:
        try:
            for reply in self._open:
                reply.poll()
            self._scheduler.step()
        except Exception as error:
            _LOG.exception("the engine loop failed")
            self._broken = error
            for reply in self._open:
                reply.fail(error)

    @property
    def _works(self) -> bool:
        return self._broken is None and bool(self._open or self._scheduler.running or self._scheduler.queued)

    def _receive(self) -> bool:
        """Take what came, and wait for something if there is nothing to do; False to end."""
        for _ in range(_AT_ONCE):
            try:
                request = self._inbox.get(block=not self._works)
            except queue.Empty:
                break
            if request is _END:
                return False
            self._begin(request)
        return True

    def _begin(self, triton_request: Any) -> None:
        """Submit a request, or refuse it; others go on in any case."""
        try:
            reply = Reply(self._utils, triton_request.get_response_sender())
        except Exception:
            _LOG.exception("a request has no response sender, so nothing can be answered")
            return
        errors = self._utils.TritonError
        try:
            if self._broken is not None:
                raise ClosedError(
                    f"the engine takes no more requests, it failed: {self._broken}. Load the model again."
                )
            incoming = read(triton_request)
            reply.expect(incoming.request, incoming.delivery.stream)
            delivery = incoming.delivery
            reply.ticket = self._scheduler.submit(
                incoming.request, priority=delivery.priority, timeout=delivery.timeout, listener=reply.tell
            )
        except RequestError as error:
            reply.fail(error, errors.INVALID_ARG)
        except (QueueFullError, ClosedError) as error:
            reply.fail(error, errors.UNAVAILABLE)
        except Exception as error:
            _LOG.exception("a request could not be begun")
            reply.fail(error)
        if not reply.closed:
            self._open.append(reply)

    def _flush(self) -> None:
        for reply in self._open:
            reply.flush()
        self._open = [reply for reply in self._open if not reply.closed]
        self._metrics.publish()

    def _end(self) -> None:
        self._scheduler.close(drain=False)
        while self._works:
            self._round()
            self._flush()
        self._metrics.close()
