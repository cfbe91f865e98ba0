"""What the responses of both interfaces have in common."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from mtp_runtime.events import Finished
from mtp_runtime.stats import merge
from mtp_serving.openai.bodies import CommonBody
from mtp_serving.openai.service import Exchange

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length", "timeout": "length"}
"""How an answer ended -> `finish_reason`, which knows no more words; `stop_reason` has ours."""


def head_of(exchange: Exchange, body: CommonBody, kind: str) -> dict[str, Any]:
    """What every response and every chunk of a stream begins with."""
    return {
        "id": exchange.identity,
        "object": kind,
        "created": exchange.created,
        "model": body.model,
        "system_fingerprint": f"mtp-export-{version('mtp-export')}",
    }


def ending_of(finished: Finished, *, called: bool = False) -> dict[str, Any]:
    """How an answer ended, for its choice."""
    reason = REASONS[finished.finish_reason]
    ending: dict[str, Any] = {
        "finish_reason": "tool_calls" if called and reason == "stop" else reason,
        "stop_reason": finished.finish_reason,
    }
    completion = finished.completion
    if completion.seed is not None:
        ending["seed"] = completion.seed
    if completion.lossy:
        ending |= {"acceptor": completion.acceptor, "lossy": True}
    if finished.constraint is not None:
        ending["constraint"] = finished.constraint
    return ending


def usage_of(results: Sequence[Finished], body: CommonBody) -> dict[str, Any]:
    """Tokens of all answers; those of a prompt count once, and as cached where none of its answers had to read them."""
    groups = [results[start : start + body.n] for start in range(0, len(results), body.n)]
    prompt = sum(group[0].prompt_tokens for group in groups)
    generated = sum(len(one.token_ids) for one in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(min(one.cached_tokens for one in group) for group in groups)},
    }


def stats_of(results: Sequence[Finished]) -> dict[str, Any]:
    """Speculative statistics of all answers together."""
    return merge([one.stats for one in results]).as_dict()


def closing_of(results: Sequence[Finished], body: CommonBody) -> dict[str, Any] | None:
    """What the last chunk of a stream tells, if anything was asked for."""
    asked: dict[str, Any] = {}
    if body.stream_options is not None and body.stream_options.include_usage:
        asked["usage"] = usage_of(results, body)
    if body.speculative_stats:
        asked["speculative_stats"] = stats_of(results)
    return {"choices": [], **asked} if asked else None


def whole(head: dict[str, Any], choices: list[dict[str, Any]], results: Sequence[Finished], body: CommonBody) -> Any:
    """A response that is no stream."""
    response = {**head, "choices": choices, "usage": usage_of(results, body)}
    if body.speculative_stats:
        response["speculative_stats"] = stats_of(results)
    return response
