"""Taking the MTP head, and only the head, from another checkpoint: fine-tuning often loses it."""

from __future__ import annotations

from dataclasses import fields, replace

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families import describe
from mtp_exporter.families.description import Wanted, claim, differing_copies
from mtp_exporter.reading.checkpoint import Checkpoint

_OWN = ("tied_head", "max_position", "mtp")
"""Fields in which a fine-tune may differ from its base without harm to the head."""


def graft_head(checkpoint: Checkpoint, base: Checkpoint) -> Checkpoint:
    """`checkpoint` with the head tensors of `base` in the place of its own, whole, partial or lost.

    Raises:
        CheckpointError: the base has no complete head, or the two models differ in a size or convention.
    """
    description = describe(base)
    claim(base, description)
    if own := differing_copies(base, description):
        description = describe(base, Wanted(own_copies=own))
    if description.spec.mtp is None:
        raise CheckpointError(f"{base.directory} has no MTP head to take; name a checkpoint that has one.")
    _compare(describe(checkpoint, Wanted(mtp=False)).spec, description.spec, checkpoint, base)
    head = {part.key for need in description.needs if need.role.startswith("mtp.") for part in need.parts}
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in head}
    taken = {name: base.tensors[name] for name in head}
    lost = tuple(
        replace(shard, tensors=tuple(name for name in shard.tensors if name not in head))
        for shard in checkpoint.missing
    )
    return replace(checkpoint, tensors=kept | taken, missing=tuple(shard for shard in lost if shard.tensors))


def _compare(ours: ModelSpec, theirs: ModelSpec, checkpoint: Checkpoint, base: Checkpoint) -> None:
    for field in fields(ModelSpec):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _OWN and mine != other:
            what = "their layers differ" if field.name == "layers" else f"{field.name} is {mine!r} and {other!r}"
            raise CheckpointError(
                f"The head of {base.directory} does not fit {checkpoint.directory}: {what}. Name the "
                "checkpoint that this one was made from."
            )
