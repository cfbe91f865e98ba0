"""The held-out prompts: short pieces of documents that training never saw."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_tools.train_tiny.corpus import Document

PROMPT_COUNT = 64
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """A prompt of exactly PROMPT_TOKENS tokens."""

    id: str
    prompt: str


def cut_prompts(documents: Sequence[Document], tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Cut prompts at line starts, visiting the documents in turn until there are enough."""
    texts: list[str] = []
    candidates = {document.name: _line_starts(document) for document in documents}
    while len(texts) < PROMPT_COUNT:
        assert any(candidates.values()), "the held-out documents have far more lines than prompts"
        for document in documents:
            text = _next_prompt(document, candidates[document.name], tokenizer)
            if text is not None and len(texts) < PROMPT_COUNT:
                texts.append(text)
    return tuple(Prompt(f"heldout-{index:02d}", text) for index, text in enumerate(texts))


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write one JSON object a line."""
    lines = [json.dumps({"id": p.id, "prompt": p.prompt}, ensure_ascii=False) for p in prompts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read what write_prompts wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(**json.loads(line)) for line in lines)


def prompt_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Tensor:
    """Return int64[prompts, PROMPT_TOKENS]."""
    return torch.tensor([tokenizer.encode(p.prompt).ids for p in prompts], dtype=torch.int64)


def _line_starts(document: Document) -> list[int]:
    """Return the offsets of non-empty, unindented lines in an order fixed by a hash."""
    starts, offset = [], 0
    for line in document.text.splitlines(keepends=True):
        if line[0].isalpha():
            starts.append(offset)
        offset += len(line)
    return sorted(starts, key=lambda at: hashlib.sha256(f"{document.name}:{at}".encode()).digest())


def _next_prompt(document: Document, starts: list[int], tokenizer: Tokenizer) -> str | None:
    """Take starts off the list until one gives a prompt whose text encodes to the same tokens."""
    while starts:
        at = starts.pop(0)
        # No token of this vocabulary is near 16 characters on average, so this is enough text.
        ids = tokenizer.encode(document.text[at : at + 16 * PROMPT_TOKENS]).ids[:PROMPT_TOKENS]
        text: str = tokenizer.decode(ids)
        if len(ids) == PROMPT_TOKENS and tokenizer.encode(text).ids == ids:
            return text
    return None
