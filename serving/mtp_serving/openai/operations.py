"""What operators ask: models, health, readiness, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from mtp_serving.openai.errors import ApiError, json_response
from mtp_serving.openai.metrics import CONTENT_TYPE
from mtp_serving.openai.service import Service


def models_router(service: Service) -> APIRouter:
    """GET /v1/models."""
    routes = APIRouter()
    limits = service.model.engine.limits
    model: dict[str, Any] = {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mtp-export",
        "max_model_len": limits.max_model_len,
        "max_draft_tokens": limits.max_draft_tokens,
    }

    @routes.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [model]})

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        """What is known of it."""
        if name != service.options.name:
            raise ApiError(
                f"the model {name!r} does not exist here; this server has {service.options.name!r}.",
                "model",
                status=404,
                code="model_not_found",
            )
        return json_response(model)

    return routes


def health_router(service: Service) -> APIRouter:
    """GET /health and /health/ready."""
    routes = APIRouter()

    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """The process answers."""
        return json_response({"status": "alive"})

    @routes.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """Whether a request would be answered."""
        if service.ready:
            return json_response({"status": "ready"})
        return json_response({"status": "draining" if service.draining else "failed"}, 503)

    return routes


def metrics_router(service: Service) -> APIRouter:
    """GET /metrics."""
    routes = APIRouter()

    @routes.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    return routes
