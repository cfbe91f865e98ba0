"""A draft head over a part of the vocabulary: which ids, and the head cut down to them.

A draft costs a pass over the rows that are scored, and the verify stays whole: no token changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import DraftStep, DraftVocabulary, WeightFormats
from mtp_engines.errors import BuildError
from mtp_exporter.checking.sample import carried_counts, load_tokenizer
from mtp_exporter.draft_ids.cost import draft_weight_bytes
from mtp_exporter.draft_ids.token_counts import count_tokens
from mtp_exporter.families.description import Need
from mtp_exporter.prepare import Prepared

Size = int | Literal["auto"]
Ids = npt.NDArray[np.int64]

LADDER = tuple(sorted(base << power for base in (1024, 1536) for power in range(8)))
"""Sizes that `auto` tries, multiples of 512: full tiles of every kernel that multiplies by the head."""
SHARE = 0.99
"""Of the tokens of a text, what `auto` wants among the ids."""
LEAST_RANKS = 0.25
"""Of the vocabulary, what `auto` takes at least where ranks alone say which tokens are frequent: the carried text is
too short, and of one language, to take less."""
LEAST_SAVED = 0.1
"""Of the weights that a draft step reads; where less would be saved, `auto` leaves the vocabulary whole."""


@dataclass(frozen=True)
class Wish:
    """What a user wants of the draft vocabulary.

    Attributes:
        size: how many ids.
        texts: files whose tokens are counted; empty for the first ids.
        ends: ids that are always taken where a text decides; they end an answer, and no text need have them.
    """

    size: Size
    texts: tuple[Path, ...]
    ends: Collection[int]


@dataclass(frozen=True)
class Chosen:
    """The checkpoint with its head cut down, and how that was chosen; or as it was, and why."""

    prepared: Prepared
    vocabulary: DraftVocabulary | None
    note: str | None = None


def choose_draft_vocabulary(
    prepared: Prepared, wish: Wish, formats: WeightFormats, advance: Callable[[int], None] = lambda characters: None
) -> Chosen:
    """Choose the ids of a draft head and cut it down to them.

    Args:
        formats: of the weights, which decide what a draft step reads.
        advance: told of the characters of the text that were read.

    Raises:
        BuildError: the model has no head that can be cut, the number is out of range, or the text cannot be used.
    """
    _check(prepared, wish)
    vocab_size = prepared.spec.vocab_size
    ends = np.array(sorted(token for token in wish.ends if 0 <= token < vocab_size), np.int64)
    lists: _ByRank | _ByText
    if wish.texts:
        tokenizer = load_tokenizer(prepared.directory / "tokenizer.json")
        lists = _ByText(count_tokens(tokenizer, wish.texts, vocab_size, advance), ends)
    else:
        lists = _ByRank(carried_counts(prepared.directory, vocab_size))
    whole = draft_weight_bytes(prepared, formats)
    size: int | None
    size, reason = _smallest(lists, vocab_size) if wish.size == "auto" else (wish.size, "")
    if size is not None:
        cut = with_draft_ids(prepared, lists.ids(size))
        read = draft_weight_bytes(cut, formats)
        if wish.size != "auto" or whole - read >= LEAST_SAVED * whole:
            steps = DraftStep(read), DraftStep(whole)
            return Chosen(cut, DraftVocabulary(lists.origin, lists.text_tokens, lists.held(size), *steps))
        reason = (
            f"the smallest part that would do, {size:,} ids, spares {1 - read / whole:.1%} of the weights that a draft "
            f"reads, and less than {LEAST_SAVED:.0%} is not worth the drafts that are lost"
        )
    return Chosen(prepared, None, f"the draft vocabulary is left whole ({vocab_size:,} ids): {reason}")


def with_draft_ids(prepared: Prepared, ids: Ids) -> Prepared:
    """The checkpoint whose head scores these ids only, int64[size] in rising order.

    Raises:
        BuildError: the model has no head that can be cut down.
    """
    spec, mtp = prepared.spec, prepared.spec.mtp
    if mtp is None or mtp.depth > 1 or mtp.own_head:
        found = (
            "no head" if mtp is None else "several trained depths" if mtp.depth > 1 else "a vocabulary head of its own"
        )
        raise BuildError(
            f"--draft-vocab cuts down the vocabulary of an MTP head, and this model has {found}. Leave it out."
        )
    need, tensors = prepared.claimed["head"]
    (part,) = need.parts
    assert part.start == 0, "rows of the head are ids"
    first = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    last = np.append(first[1:], len(ids)) - 1
    runs = tuple(
        replace(part, start=int(start), stop=int(stop) + 1) for start, stop in zip(ids[first], ids[last], strict=True)
    )
    claimed = dict(prepared.claimed)
    claimed["mtp.head"] = (Need("mtp.head", runs, (len(ids), *need.shape[1:]), need.transform), tensors * len(runs))
    are_first = bool(ids[-1] == len(ids) - 1)
    if not are_first:
        claimed["mtp.ids"] = (Need("mtp.ids", runs, (len(ids),), "place"), tensors * len(runs))
    mtp = replace(mtp, own_head=True, draft_vocab_size=len(ids), draft_ids="first" if are_first else "table")
    return replace(prepared, spec=replace(spec, mtp=mtp), claimed=claimed)


def untimed(vocabulary: DraftVocabulary | None) -> DraftVocabulary | None:
    """What was chosen, without what was measured."""
    if vocabulary is None:
        return None
    step, step_whole = (replace(step, milliseconds=None) for step in (vocabulary.step, vocabulary.step_whole))
    return replace(vocabulary, step=step, step_whole=step_whole)


class _ByRank:
    """The first ids: tokenizers number frequent pieces first."""

    origin: Literal["ranks", "text"] = "ranks"

    def __init__(self, counts: Ids) -> None:
        """`counts` int64[vocab_size] of the carried text."""
        self._counts = counts
        self.text_tokens = int(counts.sum())
        self.least = LEAST_RANKS * len(counts)

    def ids(self, size: int) -> Ids:
        """int64[size], in rising order."""
        return np.arange(size)

    def held(self, size: int) -> int:
        """How many tokens of the text are among them."""
        return int(self._counts[:size].sum())


class _ByText:
    """The most frequent tokens of a text, ties and the rest in the order of the ids."""

    origin: Literal["ranks", "text"] = "text"

    def __init__(self, counts: Ids, ends: Ids) -> None:
        """`counts` int64[2, vocab_size] of the halves of the text."""
        self._counts, self._ends = counts, ends
        self._halves = [_order(half, ends) for half in counts]
        self.text_tokens = int(counts.sum())
        self.least = 0.0

    def ids(self, size: int) -> Ids:
        """int64[size], in rising order."""
        return np.sort(_order(self._counts.sum(0), self._ends)[:size])

    def held(self, size: int) -> int:
        """How many tokens of each half are in the list that comes from the other one.

        A list holds its own text better than any that is still to be written.
        """
        return sum(int(self._counts[1 - half][order[:size]].sum()) for half, order in enumerate(self._halves))


def _order(counts: Ids, ends: Ids) -> Ids:
    """All ids: end tokens first, then by how often they are counted, then by rank."""
    ranks = np.arange(len(counts))
    return np.lexsort((ranks, -counts, ~np.isin(ranks, ends)))


def _smallest(lists: _ByRank | _ByText, vocab_size: int) -> tuple[int | None, str]:
    """The smallest size of the ladder that holds enough of the text; None with the reason if there is none."""
    sizes = [size for size in LADDER if size < vocab_size]
    if not sizes:
        return None, f"it is no larger than the smallest part that is tried, {LADDER[0]:,} ids"
    for size in sizes:
        if size >= lists.least and lists.held(size) >= SHARE * lists.text_tokens:
            return size, ""
    return None, f"no smaller part that is tried holds {SHARE:.0%} of the {lists.text_tokens:,} tokens of the text"


def _check(prepared: Prepared, wish: Wish) -> None:
    vocab_size = prepared.spec.vocab_size
    with_draft_ids(prepared, np.arange(1))  # Refuses a model whose head cannot be cut.
    if wish.size != "auto" and not 1 <= wish.size < vocab_size:
        raise BuildError(f"--draft-vocab is {wish.size}, expected 1 to {vocab_size - 1}, a part of the vocabulary.")
    if wish.texts and wish.size != "auto" and wish.size < len(wish.ends):
        raise BuildError(
            f"--draft-vocab is {wish.size}, and the {len(wish.ends)} end tokens are always among the ids that a text "
            "chooses. Choose at least as many."
        )
    if wish.texts and not (prepared.directory / "tokenizer.json").is_file():
        raise BuildError(
            f"--draft-vocab-text needs a tokenizer, and {prepared.directory} has no tokenizer.json. Leave it out for "
            "the first ids, or add the file."
        )
