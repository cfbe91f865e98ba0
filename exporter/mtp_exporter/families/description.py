"""What a family file says about a checkpoint, and the check that every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from mtp_engines.contracts.model import ModelSpec, MtpSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised import StoredTensor, Unsupported
from mtp_exporter.reading.checkpoint import Checkpoint, same_values

Transform = Literal["none", "one_plus", "row_to_id", "place"]
"""`one_plus` turns a zero-centred norm weight w into the gain 1 + w, in float32; `row_to_id` turns an offset
table int64[rows] into ids, row + offset; `place` takes no values: int64, where each row of the parts lies in its
tensor."""
INTEGERS: tuple[Transform, ...] = ("row_to_id", "place")
"""Transforms that give int64."""


@dataclass(frozen=True)
class Wanted:
    """What the user wants of a checkpoint, where it leaves a choice.

    Attributes:
        mtp: False leaves the draft head out on purpose.
        hidden_tap: which hidden state of the target the head is fed: `post-norm` (what the vocabulary head
            consumes) or `pre-norm` (the residual stream before the final norm); None takes the family's own.
        own_copies: tensors of the head that usually repeat a tensor of the target and do not in this checkpoint.
    """

    mtp: bool = True
    hidden_tap: Literal["post-norm", "pre-norm"] | None = None
    own_copies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Part:
    """Entries start .. stop - 1 along the first axis of a tensor; `shape` is that of the whole tensor."""

    key: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Need:
    """A tensor that a graph needs: its role in our graphs, where it is on disk, its shape.

    `source` is the key of a tensor, or parts of tensors whose values follow each other in `shape`.
    """

    role: str
    source: str | tuple[Part, ...]
    shape: tuple[int, ...]
    transform: Transform = "none"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Where the values are."""
        return (Part(self.source, self.shape),) if isinstance(self.source, str) else self.source


@dataclass(frozen=True)
class Duplicate:
    """A tensor that should equal another one, so that only `kept` is used.

    `own` says what happens if it does not: True uses it, False refuses the checkpoint.
    """

    left_out: str
    kept: str
    own: bool = False


@dataclass(frozen=True)
class Description:
    """A checkpoint as its family understands it."""

    spec: ModelSpec
    needs: tuple[Need, ...]
    ignored: dict[str, tuple[str, ...]]
    """Reason -> tensors that are left out on purpose."""
    declared_mtp_layers: int | None
    """What the configuration says about the head; None if it says nothing."""
    mtp_keys: tuple[str, ...]
    """Every tensor that a complete head of this family has."""
    duplicates: tuple[Duplicate, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences that a user should see: what was assumed because nothing said otherwise."""


@dataclass(frozen=True)
class Draft:
    """A draft head in a directory of its own, for one target."""

    mtp: MtpSpec
    needs: tuple[Need, ...]
    ignored: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()


ClaimedTensor = tuple[Need, tuple[StoredTensor, ...]]
"""A need, and the tensor of each of its parts."""
Claimed = dict[str, ClaimedTensor]
"""By role."""


def claim(checkpoint: Checkpoint, description: Description | Draft) -> Claimed:
    """Match what the graphs need with what the files hold: each tensor used, or left out with a reason.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape.
    """
    parts = [part for need in description.needs for part in need.parts]
    for part in parts:
        checkpoint.require(part.key)
    found = checkpoint.tensors
    missing = sorted({part.key for part in parts if part.key not in found})
    known = {part.key for part in parts}.union(*description.ignored.values())
    unknown = sorted(key for key in found if key not in known)
    if missing or unknown:
        raise CheckpointError(_unmatched(checkpoint, missing, unknown))
    for part in parts:
        tensor = found[part.key]
        if isinstance(tensor, Unsupported):
            tensor.read()  # Refuses, with the method and what to do.
        if tensor.shape != part.shape:
            raise CheckpointError(
                f"Tensor {part.key!r} in {tensor.file} has shape {list(tensor.shape)}, config.json makes it "
                f"{list(part.shape)}. The two belong to different checkpoints; fetch them again."
            )
    return {need.role: (need, tuple(found[part.key] for part in need.parts)) for need in description.needs}


def differing_copies(checkpoint: Checkpoint, description: Description) -> frozenset[str]:
    """Read every pair of tensors that should be equal; those that differ and may.

    Raises:
        CheckpointError: a pair differs that may not; names both.
    """
    differing = set()
    for pair in description.duplicates:
        checkpoint.require(pair.left_out)
        if not same_values(checkpoint.tensors[pair.left_out], checkpoint.tensors[pair.kept]):
            if not pair.own:
                raise CheckpointError(
                    f"{checkpoint.directory / 'config.json'} sets tie_word_embeddings, but {pair.left_out!r} differs "
                    f"from {pair.kept!r}. Remove the flag to use the head as it is, or the tensor to use the embedding."
                )
            differing.add(pair.left_out)
    return frozenset(differing)


def require_head(
    checkpoint: Checkpoint, declared: int | None, keys: Callable[[int], Iterable[str]], field: str, most: int = 1
) -> int:
    """How many trained depths the checkpoint holds, given what its configuration declares.

    Args:
        keys: depth -> the tensors that it needs.
        field: name of the configuration's field, for messages.
        most: depths that the family composes.

    Raises:
        CheckpointError: declared and missing, declared absent and present, incomplete, or another number.
    """
    if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int) or declared < 0):
        raise CheckpointError(
            f"{checkpoint.directory / 'config.json'} has {field} = {declared!r}, expected a whole number. Mend "
            "the file."
        )
    held = 0
    while any(checkpoint.names(key) for key in keys(held)):
        held += 1
    if (declared or 0) > most or held > max(most, declared or 0):
        raise CheckpointError(
            f"config.json has {field} = {declared}, {checkpoint.directory} holds {held} trained depths; heads of this "
            f"family are built for at most {most}. Build with --no-mtp, or use a checkpoint with fewer depths."
        )
    if declared and held > declared:
        raise CheckpointError(
            f"config.json has {field} = {declared}, but {checkpoint.directory} holds tensors of {held} trained depths. "
            f"Set {field} to {held}, remove the tensors of the others, or build with --no-mtp."
        )
    depths = max(declared or 0, held)
    wanted = [key for depth in range(max(depths, 1)) for key in keys(depth)]
    for key in wanted:
        checkpoint.require(key)
    absent = [key for key in wanted if key not in checkpoint.tensors]
    present = len(wanted) - len(absent)
    if declared == 0 and present:
        raise CheckpointError(
            f"config.json has {field} = 0, but {checkpoint.directory} holds {present} of the head's {len(wanted)} "
            f"tensors. Set {field} to {held}, or build with --no-mtp."
        )
    if absent and (declared or present):
        layers = f"{declared if declared is not None else 'no'} MTP layer{'s' if (declared or 0) > 1 else ''}"
        raise CheckpointError(
            f"config.json declares {layers}, {checkpoint.directory} holds {present} of {len(wanted)} tensors of the "
            f"head (first missing: {absent[0]!r}). Take the head from the base model with --mtp-from, or build with "
            "--no-mtp."
        )
    return 0 if absent else depths


def _unmatched(checkpoint: Checkpoint, missing: list[str], unknown: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors that the model needs ({_some(missing)})")
    if unknown:
        parts.append(f"holds {len(unknown)} that no rule knows ({_some(unknown)})")
    return f"{checkpoint.directory} {' and '.join(parts)}. Check the names, or fetch the checkpoint again."


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:4]) + (", …" if len(names) > 4 else "")
