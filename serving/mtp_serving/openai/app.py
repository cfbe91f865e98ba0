"""The application: routes, who may come in, and what an error looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtp_engines.errors import MtpError
from mtp_serving.openai import chat, completions
from mtp_serving.openai.access import write_refusal
from mtp_serving.openai.answers import ClientGoneError
from mtp_serving.openai.errors import ApiError, api_error_from, error_response
from mtp_serving.openai.gate import Gate
from mtp_serving.openai.operations import health_router, metrics_router, models_router
from mtp_serving.openai.params import param_of
from mtp_serving.openai.service import Service
from mtp_serving.page.routes import page_router

_CLIENT_GONE = 499
"""Nobody reads it; other servers log it under this number."""


def create_app(service: Service) -> FastAPI:
    """The application of one service, which its caller closes."""
    app = FastAPI(title="mtp-run serve", docs_url=None, redoc_url=None, openapi_url=None)
    for router in (
        completions.router(service),
        chat.router(service),
        models_router(service),
        health_router(service),
        metrics_router(service),
        page_router(),
    ):
        app.include_router(router)
    for kind in (ApiError, MtpError):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_middleware(Gate, options=service.options)
    return app


async def _told(request: HttpRequest, error: Exception) -> Response:
    told = api_error_from(error)
    write_refusal(request.method, request.url.path, told)
    return error_response(told)


async def _gone(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _http(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and "parsing the body" in str(error.detail):
        return await _told(request, ApiError("the body could not be read as JSON in UTF-8; send it so."))
    detail = str(error.detail).rstrip(".")
    if detail == HTTPStatus(error.status_code).phrase:  # A title, not a sentence.
        detail = detail.lower()
    message = f"{request.method} {quote(request.url.path)}: {detail[:1].lower()}{detail[1:]}."
    return await _told(request, ApiError(message, status=error.status_code))


async def _invalid(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _told(request, _refusal(error.errors()))


def _refusal(errors: Sequence[dict[str, Any]]) -> ApiError:
    """One sentence on what is wrong with a body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    place = _place(first["loc"])
    unknown = [_place(one["loc"]) for one in errors if one["type"] == "extra_forbidden"]
    if unknown:
        return ApiError(f"unknown fields: {', '.join(unknown)}. Leave them out.", unknown[0])
    if first["type"] in ("object", "model_attributes_type") or (first["type"] == "missing" and not place):
        return ApiError("the body is no JSON object; send one, with the header Content-Type: application/json.")
    if first["type"] == "missing":
        return ApiError(f"{place} is missing; give it.", place)
    said = _distinct(str(one["msg"]) for one in errors if _top(one["loc"]) == _top(first["loc"]))
    if not place:
        return ApiError(f"{said}.", param_of(said))
    return ApiError(f"{place} is {_shown(first.get('input'))}: {said}.", _top(first["loc"]))


def _place(loc: Sequence[Any]) -> str:
    """As in messages.0.role; without the alternatives of a type that the checker names."""
    return ".".join(
        str(part) for part in loc[1:] if isinstance(part, int) or (str(part).isidentifier() and part != "str")
    )


def _top(loc: Sequence[Any]) -> str | None:
    return str(loc[1]) if len(loc) > 1 else None


def _distinct(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(text[:1].lower() + text[1:] for text in texts))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
