"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mtp_runtime.events import Emitted, Finished
from mtp_serving.openai.answers import unless_gone
from mtp_serving.openai.bodies import ChatBody
from mtp_serving.openai.calls import Fragment
from mtp_serving.openai.errors import json_response
from mtp_serving.openai.mapping import plan_chat
from mtp_serving.openai.parsing import AnswerReader, Piece, Reading
from mtp_serving.openai.pieces import Pieces
from mtp_serving.openai.responses import closing_of, ending_of, head_of, whole
from mtp_serving.openai.scores import Scores
from mtp_serving.openai.service import Exchange, Service
from mtp_serving.openai.streaming import EventStream

_FIELDS = {"content": "content", "reasoning": "reasoning_content"}


def router(service: Service) -> APIRouter:
    """Its route."""
    routes, scores = APIRouter(), Scores(service.model.prompts)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: HttpRequest) -> Response:
        """Answer a conversation."""
        exchange = service.exchange(body, "chatcmpl", plan_chat)
        if body.stream:
            chunks = _Chunks(body, scores, Pieces(body, service.model.prompts.tokenizer))
            return EventStream(exchange, chunks.of, service.options.send_timeout)
        async with exchange as entered:
            results = await unless_gone(request, entered.answers.results())
            reading = entered.plan.reading or Reading()
            choices = [_choice(number, one, body, scores, reading) for number, one in enumerate(results)]
            return json_response(whole(head_of(entered, body, "chat.completion"), choices, results, body))

    return routes


def _choice(number: int, finished: Finished, body: ChatBody, scores: Scores, reading: Reading) -> dict[str, Any]:
    reader = AnswerReader(reading)
    pieces = [*reader.push(finished.text), *reader.finish()]
    texts = {
        kind: "".join(piece.text for piece in pieces if isinstance(piece, Piece) and piece.kind == kind)
        for kind in _FIELDS
    }
    calls = _whole_calls(piece for piece in pieces if isinstance(piece, Fragment))
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
    if calls:
        message |= {"content": texts["content"] or None, "tool_calls": calls}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    logprobs = None if finished.logprobs is None else scores.chat(finished.logprobs)
    choice = {"index": number, "message": message, "logprobs": logprobs, **ending_of(finished, called=bool(calls))}
    return choice | ({"token_ids": list(finished.token_ids)} if body.return_token_ids else {})


def _whole_calls(fragments: Iterable[Fragment]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for fragment in fragments:
        if fragment.kind == "name":
            calls.append({"id": _new_id(), "type": "function", "function": {"name": fragment.text, "arguments": ""}})
        else:
            calls[fragment.index]["function"]["arguments"] += fragment.text
    return calls


class _Chunks:
    """Chunks of one stream."""

    def __init__(self, body: ChatBody, scores: Scores, pieces: Pieces) -> None:
        self._body, self._scores, self._pieces = body, scores, pieces
        self._readers: dict[int, AnswerReader] = {}

    async def of(self, exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
        """Who speaks, then what each event says; an answer's last chunk has its reason."""
        head = head_of(exchange, self._body, "chat.completion.chunk")
        usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        head |= {"usage": None} if usage else {}
        reading = exchange.plan.reading or Reading()
        for number in range(self._body.n):
            self._readers[number] = AnswerReader(reading)
            yield head | {"choices": [_delta(number, {"role": "assistant", "content": ""})]}
        async for number, event in exchange.answers.events():
            for choice in self._of_event(number, event):
                yield head | {"choices": [choice]}
        results = [exchange.answers.finished[number] for number in sorted(exchange.answers.finished)]
        if (closing := closing_of(results, self._body)) is not None:
            yield head | closing

    def _of_event(self, number: int, event: Emitted | Finished) -> Iterable[dict[str, Any]]:
        reader = self._readers[number]
        if isinstance(event, Finished):
            yield from (_delta(number, _said(piece)) for piece in reader.finish())
            yield _delta(number, {}) | ending_of(event, called=bool(reader.calls))
            return
        choices = [_delta(number, _said(piece)) for piece in reader.push(event.text)]
        extras = self._pieces.of(number, event)
        if event.logprobs is not None:
            extras["logprobs"] = self._scores.chat(event.logprobs)
        if extras and not choices:
            choices.append(_delta(number, {}))
        if choices:
            # The text may lag behind the tokens, which are told of as soon as they are known.
            choices[0] |= extras
        yield from choices


def _delta(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


def _said(piece: Piece | Fragment) -> dict[str, Any]:
    if isinstance(piece, Piece):
        return {_FIELDS[piece.kind]: piece.text}
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.text}}
    if piece.kind == "name":
        call |= {"id": _new_id(), "type": "function", "function": {"name": piece.text, "arguments": ""}}
    return {"tool_calls": [call]}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
