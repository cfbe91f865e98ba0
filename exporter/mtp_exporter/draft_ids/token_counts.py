"""How often each token is in a text that may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mtp_engines.errors import BuildError

_PIECE = 1 << 14
"""Characters that are tokenised at once; a cut between words changes no token of most tokenizers."""
_BATCH = 64
_TURN = 256
"""Tokens that go to one half before the other has its turn."""
_FIELDS = ("text", "prompt")


def count_tokens(
    tokenizer: Tokenizer, files: tuple[Path, ...], vocab_size: int, advance: Callable[[int], None]
) -> npt.NDArray[np.int64]:
    """int64[2, vocab_size]: how often each id is in one half and in the other half of the files' tokens.

    Every 256 tokens the other half has its turn. Ids that the model does not know are left out.

    Args:
        files: UTF-8 text, or where the name ends in .jsonl a JSON object on each line with "text", "prompt" or
            "messages".
        advance: told of characters that were read.

    Raises:
        BuildError: a file is missing, no UTF-8, no JSON lines, or there is no token in any of them.
    """
    counts = np.zeros((2, vocab_size), np.int64)
    done = 0
    pieces = (piece for file in files for piece in _pieces(file))
    while batch := list(islice(pieces, _BATCH)):
        found = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = np.array([token for encoding in found for token in encoding.ids], np.int64)
        ids = ids[ids < vocab_size]
        turns = (done + np.arange(len(ids))) // _TURN % 2
        for half in (0, 1):
            counts[half] += np.bincount(ids[turns == half], minlength=vocab_size)
        done += len(ids)
        advance(sum(map(len, batch)))
    if not done:
        raise BuildError(
            f"--draft-vocab-text {', '.join(map(str, files))} holds no token of this model. Give a text like those "
            "that the model is to write."
        )
    return counts


def _pieces(file: Path) -> Iterator[str]:
    """A file in pieces that end before white space where they can."""
    try:
        # utf-8-sig: a byte order mark is no token of the text.
        with file.open(encoding="utf-8-sig") as stream:
            if file.suffix == ".jsonl":
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield from _cut(iter([_text_of(line, f"{file} line {number}")]))
            else:
                yield from _cut(iter(lambda: stream.read(_PIECE), ""))
    except UnicodeDecodeError as error:
        raise BuildError(
            f"--draft-vocab-text {file} is not UTF-8: {error.reason}. Give a plain text file in that encoding."
        ) from error
    except OSError as error:
        raise BuildError(
            f"--draft-vocab-text {file} cannot be read: {error.strerror}. Give a UTF-8 text file."
        ) from error


def _cut(parts: Iterator[str]) -> Iterator[str]:
    rest = ""
    for part in parts:
        rest += part
        while len(rest) >= _PIECE:
            place = max(rest.rfind(" ", 1, _PIECE), rest.rfind("\n", 1, _PIECE))
            place = place if place > 0 else _PIECE
            yield rest[:place]
            rest = rest[place:]
    if rest:
        yield rest


def _text_of(line: str, where: str) -> str:
    """The text of one JSON line: "text", "prompt", or the content of every message."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    found = _strings(entry) if isinstance(entry, dict) else []
    if not found:
        raise BuildError(
            f"--draft-vocab-text {where} is no JSON object with a text in 'text', 'prompt' or 'messages'. Mend the "
            "line, or give a plain text file of another name than .jsonl."
        )
    return "\n".join(found)


def _strings(entry: dict[str, Any]) -> list[str]:
    messages = entry.get("messages")
    said = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in said if isinstance(message, dict)]
    return [value for value in (*map(entry.get, _FIELDS), *contents) if isinstance(value, str)]
