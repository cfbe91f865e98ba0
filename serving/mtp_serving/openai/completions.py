"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtp_runtime.events import Emitted, Finished
from mtp_serving.openai.answers import unless_gone
from mtp_serving.openai.bodies import CompletionBody
from mtp_serving.openai.errors import json_response
from mtp_serving.openai.mapping import plan_completion
from mtp_serving.openai.pieces import Pieces
from mtp_serving.openai.responses import closing_of, ending_of, head_of, whole
from mtp_serving.openai.scores import Scores
from mtp_serving.openai.service import Exchange, Service
from mtp_serving.openai.streaming import EventStream

_KIND = "text_completion"


def router(service: Service) -> APIRouter:
    """Its route."""
    routes, scores = APIRouter(), Scores(service.model.prompts)

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: HttpRequest) -> Response:
        """Continue texts."""
        exchange = service.exchange(body, "cmpl", plan_completion)
        if body.stream:
            chunks = _Chunks(body, scores, Pieces(body, service.model.prompts.tokenizer))
            return EventStream(exchange, chunks.of, service.options.send_timeout)
        async with exchange as entered:
            results = await unless_gone(request, entered.answers.results())
            choices = [_choice(number, one, body, scores) for number, one in enumerate(results)]
            return json_response(whole(head_of(entered, body, _KIND), choices, results, body))

    return routes


def _choice(number: int, finished: Finished, body: CompletionBody, scores: Scores) -> dict[str, Any]:
    logprobs = None if finished.logprobs is None else scores.completion(finished.logprobs, 0)
    choice = {"index": number, "text": finished.text, "logprobs": logprobs, **ending_of(finished)}
    return choice | ({"token_ids": list(finished.token_ids)} if body.return_token_ids else {})


class _Chunks:
    """Chunks of one stream."""

    def __init__(self, body: CompletionBody, scores: Scores, pieces: Pieces) -> None:
        self._body, self._scores, self._pieces = body, scores, pieces
        self._offsets: dict[int, int] = {}

    async def of(self, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
        """What each event says; an answer's last chunk has its reason."""
        head = head_of(exchange, self._body, _KIND)
        usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        head |= {"usage": None} if usage else {}
        async for number, event in exchange.answers.events():
            if isinstance(event, Finished):
                yield head | {"choices": [{"index": number, "text": "", "logprobs": None, **ending_of(event)}]}
            elif event.text or event.logprobs or self._pieces.are_asked:
                yield head | {"choices": [self._choice(number, event)]}
        results = [exchange.answers.finished[number] for number in sorted(exchange.answers.finished)]
        if (closing := closing_of(results, self._body)) is not None:
            yield head | closing

    def _choice(self, number: int, event: Emitted) -> dict[str, Any]:
        logprobs = None
        if event.logprobs is not None:
            offset = self._offsets.get(number, 0)
            logprobs = self._scores.completion(event.logprobs, offset)
            self._offsets[number] = offset + self._scores.length(event.logprobs)
        choice = {"index": number, "text": event.text, "logprobs": logprobs, "finish_reason": None}
        return choice | self._pieces.of(number, event)
