"""GET / and the files that the page needs."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_DIRECTORY = Path(__file__).parent
_HEADERS = {
    "Cache-Control": "no-cache",
    # Nothing from anywhere else, so that no text of a model can bring a script to run.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/script.js": ("script.js", "text/javascript; charset=utf-8"),
    "/page/reading.js": ("reading.js", "text/javascript; charset=utf-8"),
}
"""Path -> file, and what it is."""


def page_router() -> APIRouter:
    """Its routes, which need no key: what they show was asked of /v1 with one."""
    routes = APIRouter()
    for path, (name, kind) in FILES.items():
        _add(routes, path, (_DIRECTORY / name).read_bytes(), kind)
    return routes


def _add(routes: APIRouter, path: str, content: bytes, kind: str) -> None:
    @routes.get(path, response_model=None, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)
