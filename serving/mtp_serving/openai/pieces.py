"""What a chunk of a stream says of its tokens one by one: their ids, and with statistics text and source of each."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mtp_runtime.events import Emitted
from mtp_serving.openai.bodies import CommonBody


class Pieces:
    """Of all answers of one stream."""

    def __init__(self, body: CommonBody, tokenizer: Tokenizer | None) -> None:
        """No token has come; without a tokenizer they have no text."""
        self._body, self._tokenizer = body, tokenizer
        self._streams: dict[int, DecodeStream] = {}

    @property
    def are_asked(self) -> bool:
        """Whether chunks say anything of tokens."""
        return self._body.return_token_ids or self._body.speculative_stats

    def of(self, number: int, event: Emitted) -> dict[str, Any]:
        """Fields of the choice with this number."""
        said: dict[str, Any] = {}
        if self._body.return_token_ids:
            said["token_ids"] = list(event.token_ids)
        if self._body.speculative_stats:
            said["pieces"] = [
                {"id": token, "text": self._text(number, token), "drafted": drafted}
                for token, drafted in zip(event.token_ids, event.drafted, strict=True)
            ]
        return said

    def _text(self, number: int, token: int) -> str:
        """What it adds to the text: nothing while a character lacks a part."""
        if self._tokenizer is None:
            return ""
        if number not in self._streams:
            self._streams[number] = DecodeStream(skip_special_tokens=self._body.skip_special_tokens is not False)
        return self._streams[number].step(self._tokenizer, token) or ""
