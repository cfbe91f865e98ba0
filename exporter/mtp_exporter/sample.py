"""The text that a build's check runs over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mtp_engines.errors import CheckpointError

_TEXT = (
    "The function returns a list of all the values that were found, in the order in which they were added. If no "
    "value was found, it returns an empty list. This is useful when you want to check whether a name is in use before "
    "you create a new object with the same name."
)
SAMPLE_ROWS = 48
"""What a build checks."""


def sample_ids(directory: Path, vocab_size: int, count: int) -> npt.NDArray[np.int64]:
    """int64[count]: an English text, or seeded ids where the checkpoint has no tokenizer to read it, or too short."""
    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        ids = [i for i in _encode(tokenizer) if i < vocab_size]
        if len(ids) >= count:
            return np.array(ids[:count], np.int64)
    return np.random.default_rng(0).integers(0, vocab_size, count, dtype=np.int64)


def _encode(tokenizer: Path) -> list[int]:
    try:
        ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(_TEXT).ids
    except Exception as error:  # The library raises bare Exception for every kind of bad file.
        raise CheckpointError(
            f"{tokenizer} cannot be read by the tokenizers library: {error}. Fetch it again."
        ) from error
    return ids
