"""What the sender of one request is told: data as it comes, and exactly one final response."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtp_engines.errors import MtpError
from mtp_runtime.batching.tickets import Failed, Ticket, Told
from mtp_runtime.events import Finished
from mtp_runtime.records import record_of
from mtp_runtime.request import Request

_LOG = logging.getLogger(__name__)


@dataclass
class _Piece:
    """What came of one answer since the last response."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None


class Reply:
    """The responses to one request. All of it belongs to the engine's thread.

    Attributes:
        ticket: None until it is submitted.
        closed: the final response was sent, or could not be.
    """

    def __init__(self, utils: Any, sender: Any) -> None:
        """`utils` is the module `triton_python_backend_utils`, `sender` the request's response sender."""
        self._utils, self._sender = utils, sender
        self._request, self._stream, self._left = Request(), True, 1
        self._pieces: dict[int, _Piece] = {}
        self._failed: Failed | None = None
        self.ticket: Ticket | None = None
        self.closed = False

    def expect(self, request: Request, stream: bool) -> None:
        """The request is known: so many answers will come."""
        self._request, self._stream, self._left = request, stream, request.n

    def tell(self, told: Told) -> None:
        """Keep an event until `flush`; the listener of the ticket."""
        if isinstance(told, Failed):
            self._failed = told
            return
        if isinstance(told, Finished):
            self._pieces.setdefault(told.completion.index, _Piece()).finished = told
            return
        piece = self._pieces.setdefault(told.index, _Piece())
        piece.text += told.text
        piece.token_ids += told.token_ids

    def flush(self) -> None:
        """Send what came since the last time: one response for each answer; the last one is the final one."""
        if self.closed:
            return
        if self._stream or any(piece.finished for piece in self._pieces.values()):
            pieces, self._pieces = self._pieces, {}
            for index, piece in sorted(pieces.items()):
                self._left -= piece.finished is not None
                self._send(functools.partial(self._response, index, piece), final=not self._left)
        if self._failed is not None:
            self._give_up()
            self.fail(self._failed.error)

    def fail(self, error: Exception, code: int | None = None) -> None:
        """End it with an error; INTERNAL unless a code is given."""
        text = str(error) if isinstance(error, MtpError) else f"{type(error).__name__}: {error}"
        kind = self._utils.TritonError.INTERNAL if code is None else code
        self._send(functools.partial(self._error, text, kind), final=True)

    def poll(self) -> None:
        """Give the request up if its sender did."""
        if self.ticket is None or self.ticket.cancelled:
            return
        try:
            if self._sender.is_cancelled():
                self.ticket.cancel()
        except Exception as error:
            _LOG.exception("the server cannot say whether a request was cancelled; it is given up")
            self._give_up()
            self.fail(error)

    def _response(self, index: int, piece: _Piece) -> Any:
        finished, statistics = piece.finished, ""
        text, token_ids = piece.text, piece.token_ids
        if finished is not None:
            if not self._stream:
                text, token_ids = finished.text, list(finished.token_ids)
            record = record_of(self._request, finished)
            record["usage"]["prompt_tokens_details"] = {"cached_tokens": finished.cached_tokens}
            statistics = json.dumps({name: record[name] for name in record if name not in _IN_TENSORS})
        reason = "" if finished is None else finished.finish_reason
        tensors = {
            "text_output": _bytes(text),
            "output_ids": np.array(token_ids, np.int64),
            "index": np.array([index], np.int64),
            "finish_reason": _bytes(reason),
            "statistics": _bytes(statistics),
        }
        return self._utils.InferenceResponse([self._utils.Tensor(name, array) for name, array in tensors.items()])

    def _error(self, text: str, kind: int) -> Any:
        return self._utils.InferenceResponse(error=self._utils.TritonError(text, kind))

    def _send(self, make: Callable[[], Any], *, final: bool) -> None:
        """Send a response; if it cannot be made or sent, an error takes its place, once."""
        if self.closed:
            return
        flags = self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.closed = final
        try:
            self._sender.send(make(), flags=flags if final else 0)
        except Exception as error:
            _LOG.exception("a response could not be sent; its request is given up")
            self._give_up()
            self.closed = True
            text = f"a response could not be sent: {type(error).__name__}: {error}"
            try:
                self._sender.send(self._error(text, self._utils.TritonError.INTERNAL), flags=flags)
            except Exception:
                _LOG.exception("nor could the error that says so")

    def _give_up(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()


_IN_TENSORS = ("index", "text", "token_ids", "finish_reason")


def _bytes(text: str) -> Any:
    return np.array([text.encode()], np.object_)
