"""Whether two models speak the same vocabulary: as many ids, and the same string behind each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a checkpoint or of a bundle.

    Attributes:
        directory: where its tokenizer.json lies, if it has one.
        size: how many ids its model knows.
    """

    directory: Path
    size: int


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison, in sentences for the user.

    Attributes:
        problem: why the two cannot work together; None if they can.
        note: what could not be compared; None if everything was.
    """

    problem: str | None = None
    note: str | None = None


def compare_vocabularies(target: Vocabulary, draft: Vocabulary) -> Comparison:
    """Compare a draft's vocabulary with its target's: sizes, then strings where both have a tokenizer.

    A draft in another vocabulary changes no token of a greedy answer, but all of its drafts are noise.
    """
    if target.size != draft.size:
        return Comparison(
            f"{draft.directory} knows {draft.size} token ids and {target.directory} {target.size}; a draft needs the "
            "vocabulary of its target, so use one that was made for this model."
        )
    files = [vocabulary.directory / TOKENIZER for vocabulary in (target, draft)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        return Comparison(
            note=f"{missing[0].parent} has no {TOKENIZER}, so only the sizes of the two vocabularies were compared, "
            "not their strings"
        )
    # The usual case, and it spares reading megabytes of JSON twice.
    if files[0].read_bytes() == files[1].read_bytes():
        return Comparison()
    tokenizers: list[Tokenizer] = []
    for file in files:
        try:
            tokenizers.append(Tokenizer.from_file(str(file)))
        except Exception as error:  # The library raises bare Exception for every kind of bad file.
            return Comparison(f"{file} cannot be read by the tokenizers library: {error}. Fetch the file again.")
    found = first_difference(tokenizers[0], tokenizers[1], target.size)
    if found is None:
        return Comparison()
    token, ours, theirs = found
    return Comparison(
        f"the token id {token} is {theirs!r} in {draft.directory} and {ours!r} in {target.directory}; a draft needs "
        "the vocabulary of its target, so use one that was made for this model."
    )


def first_difference(target: Tokenizer, draft: Tokenizer, size: int) -> tuple[int, str, str] | None:
    """The lowest id below `size` that means two strings, with the target's and the draft's; None without one.

    An id that only one tokenizer knows contradicts nothing: vocabularies are padded, and a fine-tune may give a
    name to an id that its base leaves free.
    """
    for token in range(size):
        ours, theirs = target.id_to_token(token), draft.id_to_token(token)
        if ours is not None and theirs is not None and ours != theirs:
            return token, ours, theirs
    return None
