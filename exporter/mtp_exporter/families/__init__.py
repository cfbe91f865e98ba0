"""Model families: one file each, found by model_type."""

from __future__ import annotations

from types import ModuleType

from mtp_engines.errors import CheckpointError
from mtp_exporter.checkpoint import Checkpoint
from mtp_exporter.families import plain_decoder, qwen3_5
from mtp_exporter.families.description import Description

_FAMILIES: tuple[ModuleType, ...] = (plain_decoder, qwen3_5)


def describe(checkpoint: Checkpoint, with_mtp: bool = True) -> Description:
    """Describe a checkpoint through the family that its model_type names.

    Raises:
        CheckpointError: no family knows the model_type, or the configuration is contradictory.
    """
    model_type = checkpoint.config.get("model_type")
    for family in _FAMILIES:
        if model_type in family.MODEL_TYPES and _is_of(family, checkpoint.config.get("architectures")):
            described: Description = family.describe(checkpoint, with_mtp)
            return described
    known = ", ".join(sorted(name for family in _FAMILIES for name in family.MODEL_TYPES))
    raise CheckpointError(
        f"{checkpoint.directory / 'config.json'} has model_type {model_type!r} (architectures "
        f"{checkpoint.config.get('architectures')!r}), which no family of this release describes. Supported: {known}."
    )


def _is_of(family: ModuleType, architectures: object) -> bool:
    """Whether the architectures are the family's: separate drafts carry the model_type of their target."""
    known = family.ARCHITECTURES
    return not architectures or (isinstance(architectures, list) and all(name in known for name in architectures))
