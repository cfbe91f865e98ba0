"""Gemma-4 assistants: recognised, and refused, since they read the key-value cache of their target."""

from __future__ import annotations

from mtp_engines.errors import CheckpointError
from mtp_exporter.families.description import Description, Wanted
from mtp_exporter.reading.checkpoint import Checkpoint

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
BUILDS = False
_MISSING = (
    "a Gemma-4 target family (sliding and full layers, scaled embedding, per-layer inputs)",
    "cross-attention from the draft's queries to the target's cache of the last layer of each kind",
    "draft steps at one constant position without a cache of their own",
)


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type alone."""
    return checkpoint.config.get("model_type") in MODEL_TYPES


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Refuse.

    Raises:
        CheckpointError: always; lists what is missing.
    """
    raise CheckpointError(
        f"{checkpoint.directory} is a Gemma-4 assistant, a draft that shares its target's key-value cache; to build it "
        f"this release lacks {'; '.join(_MISSING)}. Draft by lookup (--drafter ngram) or with another draft."
    )
