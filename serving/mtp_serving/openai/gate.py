"""Who may come in, and with how much."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_serving.openai.access import write_refusal
from mtp_serving.openai.errors import ApiError, error_response
from mtp_serving.openai.options import ServeOptions

_LOG = logging.getLogger(__name__)
_GUARDED = "/v1/"


class Gate:
    """Asks for the key, if there is one, refuses bodies that are too large or too slow, and tells of bugs."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            write_refusal(scope["method"], scope["path"], refusal)
            await error_response(refusal)(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, self._counted(receive), noted)
        except Exception as error:  # A bug, of which the client is told no more than that; its connection lives on.
            if started:
                raise
            _LOG.exception("a request failed")
            await error_response(error)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        key = self._options.api_key
        if key is not None and path.startswith(_GUARDED):
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return ApiError(
                    "the key is missing or wrong; send it in the header Authorization, as in 'Bearer KEY'.",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._options.max_body_bytes:
            return self._too_large()
        return None

    def _counted(self, receive: Receive) -> Receive:
        """A body as it comes, which may say nothing of its length; behind it only the end of the connection is told."""
        read, whole = 0, False
        until = asyncio.get_running_loop().time() + self._options.body_timeout

        async def counted() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, str(self._too_slow())) from error
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._options.max_body_bytes:
                raise HTTPException(413, str(self._too_large()))
            return message

        return counted

    def _too_slow(self) -> ApiError:
        return ApiError(
            f"the body did not come within {self._options.body_timeout:g} seconds, which is the most that this server "
            "waits for it. Send it faster."
        )

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body has more than {self._options.max_body_bytes} bytes, which is the most that this server takes. "
            "Send less.",
            status=413,
            code="body_too_large",
        )
