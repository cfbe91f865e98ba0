"""Errors in OpenAI's shape: the status and the object that go with what went wrong."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from mtp_engines.errors import RequestError
from mtp_runtime.batching.scheduler import ClosedError, QueueFullError

INVALID = "invalid_request_error"
_RETRY_SECONDS = 1
_LONGEST = 1000
"""Characters of a message."""


class ApiError(Exception):
    """A refusal with its status.

    Attributes:
        status: of HTTP.
        kind: `type` of the object.
        param: the field that is at fault.
        code: a word for programs.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, kind: str = INVALID, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        message = str(self)
        if len(message) > _LONGEST:
            # What was found is said again, and may be as long as a body.
            message = f"{message[: _LONGEST // 2]}…{message[-_LONGEST // 2 :]}"
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def api_error_from(error: Exception) -> ApiError:
    """What to tell of an error; of one that is a bug, no more than that it is one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error))
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, kind="rate_limit_error", code="queue_full")
    if isinstance(error, ClosedError):
        return ApiError(str(error), status=503, kind="server_error", code="shutting_down")
    known = error if type(error).__module__.startswith("mtp_engines") else None
    message = str(known) if known else f"the answer failed ({type(error).__name__}); the server's log has the reason."
    return ApiError(message, status=500, kind="server_error", code="engine_error")


def json_bytes(value: Any) -> bytes:
    """As UTF-8 JSON; half a surrogate pair, which a client may have sent, stays the escape that it was."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(json_bytes(value), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    """The response to an error."""
    told = api_error_from(error)
    headers = {"Retry-After": str(_RETRY_SECONDS)} if told.status in (429, 503) else {}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if told.status == 408:
        # Else what still comes of the body would keep the connection.
        headers["Connection"] = "close"
    return json_response(told.body, told.status, headers)
