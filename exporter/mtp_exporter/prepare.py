"""From what a user names to a described and fully claimed checkpoint, head included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from mtp_engines.contracts.manifest import WeightFormats
from mtp_engines.contracts.model import ModelSpec, MtpSpec
from mtp_engines.errors import BuildError, CheckpointError
from mtp_engines.vocabularies import Vocabulary, compare_vocabularies
from mtp_exporter.families import describe, describe_draft
from mtp_exporter.families.description import (
    Claimed,
    ClaimedTensor,
    Description,
    Wanted,
    claim,
    differing_copies,
)
from mtp_exporter.reading.checkpoint import Checkpoint, open_checkpoint, same_values
from mtp_exporter.reading.graft import graft_head
from mtp_exporter.reading.resolve import resolve
from mtp_exporter.reading.source import Source
from mtp_exporter.storing.formats import StoredSource
from mtp_exporter.storing.weights import shared_key, stored_bytes

HiddenTap = Literal["post-norm", "pre-norm"]


@dataclass(frozen=True)
class Ingredients:
    """Where the parts of a bundle come from.

    Attributes:
        model: directory, hub id or short name of the target.
        mtp: False leaves the target's own head out.
        mtp_from: checkpoint to take the head from, if the target lost it.
        draft_model: directory of a separate draft (EAGLE), used in the place of the target's own head.
        hidden_tap: which hidden state the target's own head is fed; None takes what its family was trained on.
    """

    model: str
    mtp: bool = True
    mtp_from: str | None = None
    draft_model: str | None = None
    hidden_tap: HiddenTap | None = None


@dataclass(frozen=True)
class Prepared:
    """A described checkpoint with every tensor claimed."""

    directory: Path
    checkpoint: Checkpoint
    spec: ModelSpec
    claimed: Claimed
    notes: tuple[str, ...]

    @property
    def source(self) -> Source:
        """The values by role."""
        return Source(self.claimed)

    def stored(self, formats: WeightFormats) -> Source:
        """The values as a bundle of these formats holds them."""
        return StoredSource(self.claimed, formats)

    def distinct(self, formats: WeightFormats) -> dict[str, int]:
        """Roles without those that share the values of another one, and how many bytes each is in a bundle."""
        seen: dict[object, str] = {}
        for role, (need, tensors) in self.claimed.items():
            seen.setdefault(shared_key(need, tensors), role)
        return {role: stored_bytes(self.claimed[role][0], formats) for role in seen.values()}


def prepare(ingredients: Ingredients) -> Prepared:
    """Resolve, describe and claim.

    Raises:
        CheckpointError: a checkpoint is incomplete, damaged, of an unknown kind, or the parts do not fit.
        BuildError: options exclude each other.
    """
    _check(ingredients)
    directory = resolve(ingredients.model)
    checkpoint = open_checkpoint(directory)
    notes: list[str] = []
    if ingredients.mtp_from is not None:
        checkpoint = graft_head(checkpoint, open_checkpoint(resolve(ingredients.mtp_from)))
        notes.append(f"the MTP head is taken from {ingredients.mtp_from}")
    own_head = ingredients.mtp and ingredients.draft_model is None
    description = describe_exactly(checkpoint, Wanted(own_head, ingredients.hidden_tap))
    claimed = claim(checkpoint, description)
    notes += [f"ignored {len(keys)} {reason}" for reason, keys in description.ignored.items()]
    notes += description.notes
    spec = description.spec
    if ingredients.draft_model is not None:
        mtp, draft, said = _draft_of(resolve(ingredients.draft_model), directory, spec)
        mtp, draft = _without_copies(mtp, draft, claimed)
        spec, claimed = replace(spec, mtp=mtp), claimed | draft
        notes += said
    elif ingredients.hidden_tap is not None and spec.mtp is None:
        raise BuildError(f"--hidden-tap {ingredients.hidden_tap} is for an MTP head, and {directory} has none.")
    return Prepared(directory, checkpoint, spec, claimed, tuple(notes))


def describe_exactly(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe, with the head's own copies of shared tensors where they differ from the target's."""
    description = describe(checkpoint, wanted)
    claim(checkpoint, description)  # Before any weight is read.
    if own := differing_copies(checkpoint, description):
        return describe(checkpoint, replace(wanted, own_copies=own))
    return description


def _without_copies(mtp: MtpSpec, draft: Claimed, target: Claimed) -> tuple[MtpSpec, Claimed]:
    """The draft without an embedding or head that only repeats the target's, which are then kept once."""
    repeated = {role for role in ("embedding", "head") if _repeats(draft.get(f"mtp.{role}"), target[role])}
    if mtp.draft_vocab_size is not None:
        repeated.discard("head")  # A table goes with it, which may reorder even a whole vocabulary.
    kept = {role: claimed for role, claimed in draft.items() if role.removeprefix("mtp.") not in repeated}
    own_embedding, own_head = (own and role not in repeated for role, own in _own(mtp).items())
    return replace(mtp, own_embedding=own_embedding, own_head=own_head), kept


def _own(mtp: MtpSpec) -> dict[str, bool]:
    return {"embedding": mtp.own_embedding, "head": mtp.own_head}


def _repeats(own: ClaimedTensor | None, target: ClaimedTensor) -> bool:
    return own is not None and same_values(own[1][0], target[1][0])


def _draft_of(directory: Path, target_directory: Path, target: ModelSpec) -> tuple[MtpSpec, Claimed, list[str]]:
    """A separate draft as the head of a target: what it is, its tensors, and what to tell the user."""
    checkpoint = open_checkpoint(directory)
    draft = describe_draft(checkpoint, target)
    ours, theirs = (Vocabulary(path, target.vocab_size) for path in (target_directory, directory))
    compared = compare_vocabularies(ours, theirs)
    if compared.problem:
        raise CheckpointError(compared.problem[0].upper() + compared.problem[1:])
    notes = [f"the draft head ({draft.mtp.kind}) is taken from {directory}"]
    notes += [f"ignored {len(keys)} {reason} of the draft" for reason, keys in draft.ignored.items()]
    notes += [*draft.notes, *([compared.note] if compared.note else [])]
    claimed = claim(checkpoint, draft)
    if "mtp.ids" in claimed:
        _check_ids(Source(claimed), target.vocab_size)
    return draft.mtp, claimed, notes


def _check_ids(source: Source, vocab_size: int) -> None:
    """Refuse a table that leads out of the vocabulary."""
    ids = source("mtp.ids")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        row, (tensor,) = int(outside[0]), source.tensors("mtp.ids")
        raise CheckpointError(
            f"Tensor {tensor.name!r} in {tensor.file} makes row {row} of the draft's vocabulary the token {ids[row]}, "
            f"and the target has 0 to {vocab_size - 1}. Fetch the file again."
        )


def _check(ingredients: Ingredients) -> None:
    if ingredients.mtp_from is not None and not ingredients.mtp:
        raise BuildError("--mtp-from takes a head and --no-mtp leaves it out; give one of them.")
    if ingredients.draft_model is not None and ingredients.mtp_from is not None:
        raise BuildError("--draft-model and --mtp-from both name a head; give one of them.")
    if ingredients.draft_model is not None and ingredients.hidden_tap is not None:
        raise BuildError("--hidden-tap is for an MTP head; a separate draft says itself what it was trained on.")
