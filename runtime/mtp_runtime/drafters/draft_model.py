"""Drafting with a second, smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts.manifest import Limits
from mtp_engines.engine import Choose, Floats, Ids, Sequences, Verified
from mtp_engines.errors import BundleError, ContractError, NumericsError
from mtp_engines.vocabularies import Vocabulary, compare_vocabularies


class DraftModelDrafter:
    """Proposes what the draft model itself would say next, greedily or as the request draws its tokens.

    Only text that is final is committed to the draft model: before a draft it consumes what it has not seen, the
    newest token included, and the last of these rows gives draft 1. For draft j it verifies drafts 1 to j - 1
    as one block behind the text and leaves them staged, so the next verify forgets them: a rejection takes nothing
    back, recurrent states included, and a verify of a few rows costs about as much as one of a single row.
    """

    source = "draft-model"

    def __init__(
        self,
        sequences: Sequences,
        prompt: list[int],
        limits: Limits,
        drafting: Callable[[], Choose] | None = None,
    ) -> None:
        """`sequences` are fresh ones of the draft model's engine, `limits` those of its bundle.

        `drafting` begins a draft and gives what chooses its tokens from logits; None takes the best ones.
        """
        self._sequences, self._limits, self._drafting = sequences, limits, drafting
        self._text = prompt[:1]
        """Every token that is final; the draft model has consumed the first `sequences.lengths[0]` of them."""
        self._newest: Verified | None = None
        """The draft model's last row of the text that it has consumed."""
        self._broken = False

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Append the tokens; the target's hidden rows are not needed."""
        self._text += tokens.tolist()

    def propose(self, draft_tokens: int) -> list[int]:
        """At most `draft_tokens` ids, as many as the draft model could answer itself within its own limits."""
        # A block that is dropped again may be as wide as the bundle's widest verify, and gives one draft more.
        most = self._limits.max_draft_tokens + 2
        wanted = min(draft_tokens, most, self._limits.max_model_len - len(self._text))
        draft: list[int] = []
        if wanted < 1 or self._broken:
            return draft
        try:
            verified = self._catch_up()
            choose = None if self._drafting is None else self._drafting()
            while (token := _chosen(verified, choose)) is not None:
                draft.append(token)
                if len(draft) == wanted:
                    break
                verified = self._verify(draft, 1)
        except NumericsError:
            # What the text itself broke stays in the caches and states of every later row, so asking again is
            # vain; what a draft broke was never committed.
            self._broken = not draft
        return draft

    def _catch_up(self) -> Verified:
        """Consume the text that was not seen yet, in blocks; the row after all of it."""
        while (start := int(self._sequences.lengths[0])) < len(self._text):
            block = self._text[start : start + self._limits.prefill_chunk]
            is_last = start + len(block) == len(self._text)
            self._newest = self._verify(block, int(is_last))
            self._sequences.commit(np.array([len(block)]))
        if self._newest is None:
            raise ContractError(
                f"The draft model's sequences hold {int(self._sequences.lengths[0])} rows that this drafter has not "
                "written; open sequences for each generation."
            )
        return self._newest

    def _verify(self, tokens: list[int], logit_rows: int) -> Verified:
        if self._drafting is None:
            return self._sequences.verify(np.array([tokens]), logit_rows)
        return self._sequences.verify(np.array([tokens]), logit_rows, logits=True)


def _chosen(verified: Verified, choose: Choose | None) -> int | None:
    """The draft token after the one row that was scored; None where the draft ends."""
    if choose is None:
        return int(verified.ids[0, 0])
    assert verified.logits is not None
    ids = choose(verified.logits[:, 0])
    return None if ids is None else int(ids[0])


def open_draft_bundle(directory: Path, target: Bundle) -> tuple[Bundle, str | None]:
    """Open the bundle of a draft model for a target.

    Returns:
        The bundle, and a note for the user if the strings of the two vocabularies could not be compared.

    Raises:
        BundleError: it cannot be opened, or speaks another vocabulary.
    """
    draft = open_bundle(directory)
    found = compare_vocabularies(*(Vocabulary(b.directory, b.manifest.model.vocab_size) for b in (target, draft)))
    if found.problem is not None:
        raise BundleError(found.problem)
    return draft, found.note
