"""Server-sent events: one line of JSON each, and a last line that says that it is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mtp_serving.openai.answers import end, gone
from mtp_serving.openai.errors import ApiError, api_error_from, json_bytes

_LOG = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Chunks = Callable[[Any], AsyncIterator[dict[str, Any]]]


class EventStream(Response):
    """Chunks as server-sent events.

    It ends as soon as the client goes, or takes nothing for a while; an error in the middle is an event of its own.
    """

    def __init__(self, exchange: AbstractAsyncContextManager[Any], chunks: Chunks, send_timeout: float) -> None:
        """`exchange` is entered before anything is sent, so that its refusal is an ordinary response.

        `send_timeout` is how many seconds the client may leave a chunk where it is.
        """
        super().__init__()
        self._exchange, self._chunks, self._send_timeout = exchange, chunks, send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            ApiError, MtpError: it is refused, and nothing was sent.
        """
        async with self._exchange as exchange:
            leaving = asyncio.create_task(gone(receive))
            sending = asyncio.create_task(self._all(exchange, send))
            try:
                await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            except (TimeoutError, OSError):
                # An unfinished response: the connection is closed.
                _LOG.info("a client took nothing of its stream for %g seconds, or went", self._send_timeout)
            finally:
                await end(leaving, sending)

    async def _all(self, exchange: Any, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for chunk in self._chunks(exchange):
                await self._event(send, json_bytes(chunk))
        except (TimeoutError, OSError):
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                _LOG.exception("a stream failed")
            await self._event(send, json_bytes(api_error_from(error).body))
        await self._event(send, b"[DONE]")
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, data: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send(message)
