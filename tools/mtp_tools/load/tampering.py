"""Faults of a server, made on the way from it: what the soak must find, or it proves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mtp_engines.errors import RequestError
from mtp_tools.load.streams import Tamper

Chunk = dict[str, Any]
_EVERY = 50
"""Chunks between two faults."""


def _drop(chunk: Chunk) -> list[Chunk]:
    return []


def _double(chunk: Chunk) -> list[Chunk]:
    return [chunk, chunk]


def _change(chunk: Chunk) -> list[Chunk]:
    changed = deepcopy(chunk)
    changed["choices"][0]["token_ids"][-1] ^= 1
    return [changed]


def _swap_id(chunk: Chunk) -> list[Chunk]:
    return [{**chunk, "id": "cmpl-of-another"}]


def _change_text(chunk: Chunk) -> list[Chunk]:
    changed = deepcopy(chunk)
    changed["choices"][0]["text"] += "?"
    return [changed]


FAULTS: dict[str, Callable[[Chunk], list[Chunk]]] = {
    "drop-chunk": _drop,
    "double-chunk": _double,
    "change-token": _change,
    "change-text": _change_text,
    "swap-id": _swap_id,
}


def tamper_of(name: str | None, every: int = _EVERY) -> Tamper | None:
    """A fault in every so many chunks that have tokens; None for none.

    Raises:
        RequestError: there is no such fault.
    """
    if name is None:
        return None
    if name not in FAULTS:
        raise RequestError(f"--fault is {name!r}, expected one of {', '.join(FAULTS)}.")
    fault, counter = FAULTS[name], itertools.count(1)

    def tamper(chunks: list[Chunk]) -> list[Chunk]:
        (chunk,) = chunks
        has_tokens = any(choice.get("token_ids") for choice in chunk.get("choices", ()))
        return fault(chunk) if has_tokens and not next(counter) % every else chunks

    return tamper
