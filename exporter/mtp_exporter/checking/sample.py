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
    "you create a new object with the same name. The second argument is optional. When it is given, only values that "
    "are greater than it are returned, and the list is sorted. A value that was added twice is returned twice. The "
    "time that a call takes grows with the number of values, not with that of names, since the names are kept in a "
    "table of their own. Earlier versions returned a tuple; programs that rely on this should be changed. In the "
    "morning the two of them walked along the river to the old mill, where the water was low and the stones were dry. "
    "He had brought bread and a little cheese, and she had the letter in the pocket of her coat. Neither of them spoke "
    "about it until they had crossed the bridge. The town had changed less than they had feared. A baker stood where "
    "the baker had always stood, the clock over the gate was still four minutes late, and children ran across the "
    "square as if nobody had ever told them not to. What is the capital of France? The capital of France is Paris. How "
    "many days does a week have? A week has seven days."
)
SAMPLE_ROWS = 48
"""What a build checks."""


def sample_ids(directory: Path, vocab_size: int, count: int) -> npt.NDArray[np.int64]:
    """int64[count]: an English text, or seeded ids where the checkpoint has no tokenizer to read it, or too short."""
    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        ids = _encode(load_tokenizer(tokenizer))
        ids = ids[ids < vocab_size]
        if len(ids) >= count:
            return ids[:count]
    return np.random.default_rng(0).integers(0, vocab_size, count, dtype=np.int64)


def carried_counts(directory: Path, vocab_size: int) -> npt.NDArray[np.int64]:
    """int64[vocab_size]: how often each id is in the carried text; zeros without a tokenizer."""
    tokenizer = directory / "tokenizer.json"
    ids = _encode(load_tokenizer(tokenizer)) if tokenizer.is_file() else np.zeros(0, np.int64)
    return np.bincount(ids[ids < vocab_size], minlength=vocab_size)


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for every kind of bad file.
        raise CheckpointError(f"{file} cannot be read by the tokenizers library: {error}. Fetch it again.") from error


def _encode(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    return np.array(tokenizer.encode(_TEXT).ids, np.int64)
