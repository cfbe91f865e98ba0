"""What the model is given: prompts of a file, a text of ours, or made-up ids."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.cli import requests_from_file
from mtp_runtime.prompts import Prompts
from mtp_runtime.request import Request

DEFAULT_PROMPT_TOKENS = 128
_ASKED = ("prompt", "prompt_ids", "messages", "id", "chat")
_TEXT = (
    "A harbour town keeps its own calendar. In spring the boats are painted and the nets are mended, in summer the "
    "ferries bring visitors, and in autumn the fish market opens before sunrise. An old clerk writes every arrival "
    "into a ledger: the name of the vessel, the weight of the catch, the hour, and the weather in one word. When the "
    "wind turns north he adds a line under the page and goes home early.\n"
)


@dataclass(frozen=True)
class Given:
    """The prompts of a benchmark and where they are from."""

    ids: list[list[int]]
    source: str

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.ids)


def prompts_of(prompts: Prompts, manifest: Manifest, file: Path | None, prompt_tokens: int | None, seed: int) -> Given:
    """Prompts of the file; without one, of as many tokens as were asked for, text if the bundle has a tokenizer.

    Raises:
        RequestError: a prompt of the file cannot be served, or carries an option that a benchmark sets itself.
    """
    if file is not None:
        requests = requests_from_file(file, {})
        return Given([_ids(request, prompts, manifest) for request in requests], f"{len(requests)} from {file}")
    count = prompt_tokens or DEFAULT_PROMPT_TOKENS
    if prompts.tokenizer is not None and (ids := _text_ids(prompts.tokenizer, count)):
        return Given([ids], f"{count} tokens of a text that the tool brings")
    generator = np.random.default_rng(seed)
    made_up: list[int] = generator.integers(0, manifest.model.vocab_size, count).tolist()
    return Given([made_up], f"{count} made-up token ids, since the bundle has no tokenizer")


def _ids(request: Request, prompts: Prompts, manifest: Manifest) -> list[int]:
    for field in fields(Request):
        found = getattr(request, field.name)
        if field.name not in _ASKED and found != field.default:
            raise RequestError(
                f"a prompt of the benchmark has {field.name} = {found!r}, which the benchmark sets itself; leave it "
                f"out, only {', '.join(_ASKED)} may be given."
            )
    return prompts.prepare(replace(request, max_new_tokens=1, draft_tokens=0), manifest).prompt


def _text_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of the text, repeated; empty if the tokenizer makes nothing of it."""
    text = _TEXT
    ids: list[int] = tokenizer.encode(text).ids
    while 0 < len(ids) < count:
        text += text
        ids = tokenizer.encode(text).ids
    return ids[:count]
