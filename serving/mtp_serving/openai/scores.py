"""Log-probabilities in the forms of the two interfaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mtp_runtime.prompts import Prompts
from mtp_runtime.sampling.logprobs import TokenLogprobs

_EXCLUDED = -9999.0
"""JSON has no infinity: what the interface says of a token that the model excludes."""


class Scores:
    """Writes tokens of one bundle."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def completion(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """`logprobs` of /v1/completions; `offset` is where the text of these tokens begins."""
        texts = [self._text(one.token) for one in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_number(one.logprob) for one in tokens],
            "top_logprobs": [{self._text(token): _number(value) for token, value in one.top} for one in tokens],
            "text_offset": [offset + sum(map(len, texts[:place])) for place in range(len(texts))],
        }

    def length(self, tokens: Sequence[TokenLogprobs]) -> int:
        """Characters of the tokens, as `completion` counts them."""
        return sum(len(self._text(one.token)) for one in tokens)

    def chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of /v1/chat/completions."""
        content = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._prompts.bytes_of(token)
        return {"token": self._text(token), "logprob": _number(logprob), "bytes": list(raw)}

    def _text(self, token: int) -> str:
        """Parts of a character show as U+FFFD; a token without a text as its id."""
        return self._prompts.bytes_of(token).decode("utf-8", "replace") or f"token_id:{token}"


def _number(value: float) -> float:
    return value if math.isfinite(value) else _EXCLUDED
