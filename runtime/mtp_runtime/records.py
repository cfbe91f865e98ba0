"""A finished generation as JSON, and as the line below an answer."""

from __future__ import annotations

import math
from typing import Any

from mtp_runtime.events import Finished
from mtp_runtime.request import Request
from mtp_runtime.sampling.logprobs import TokenLogprobs


def record_of(request: Request, finished: Finished) -> dict[str, Any]:
    """One JSON object; keys that the request did not ask for are left out."""
    count, completion = len(finished.token_ids), finished.completion
    record: dict[str, Any] = {} if request.id is None else {"id": request.id}
    if request.n > 1:
        record["index"] = completion.index
    record |= {
        "token_ids": list(finished.token_ids),
        "text": finished.text,
        "finish_reason": finished.finish_reason,
        "usage": {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": finished.prompt_tokens + count,
        },
        "seed": completion.seed,
        "acceptor": completion.acceptor,
        "lossy": completion.lossy,
    }
    if finished.constraint is not None:
        record["constraint"] = finished.constraint
    if finished.logprobs is not None:
        record["logprobs"] = [_scores(token) for token in finished.logprobs]
    if finished.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None if token is None else _scores(token) for token in finished.prompt_logprobs]
    return record | {"stats": finished.stats.as_dict()}


def footer_of(finished: Finished) -> str:
    """Length, acceptance, speed; the seed if anything was drawn, and whether the acceptor is lossy."""
    stats, completion = finished.stats.as_dict(), finished.completion
    seconds = stats["seconds"]
    cycles = seconds["draft"] + seconds["verify"] + seconds["accept"] + seconds["commit"]
    after_first = len(finished.token_ids) - 1
    speed = f", {after_first / cycles:.1f} tok/s after the first" if cycles and after_first > 0 else ""
    rate = "n/a" if stats["acceptance_rate"] is None else f"{stats['acceptance_rate']:.0%}"
    by_source = [
        f"{source} {stats['accepted_by_source'][source]} of {count}"
        for source, count in stats["drafted_by_source"].items()
    ]
    if by_source:
        rate += f" ({', '.join(by_source)})"
    ended = f"{len(finished.token_ids)} tokens, {finished.finish_reason}"
    seed = "" if completion.seed is None else f"; seed {completion.seed}"
    lossy = f"; LOSSY acceptor {completion.acceptor}" if completion.lossy else ""
    form = "" if finished.constraint is None else f"; constraint {finished.constraint}"
    return f"[{ended}; {stats['cycles']} cycles, acceptance {rate}{speed}{seed}{lossy}{form}]"


def _scores(token: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token.token,
        "logprob": _number(token.logprob),
        "top": [{"token_id": other, "logprob": _number(value)} for other, value in token.top],
    }


def _number(value: float) -> float | None:
    """JSON has no infinity: a token that the model excludes has null."""
    return value if math.isfinite(value) else None
