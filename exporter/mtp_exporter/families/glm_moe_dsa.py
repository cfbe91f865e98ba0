"""GLM-5: recognised, and refused until its sparse attention exists here."""

from __future__ import annotations

from mtp_engines.errors import CheckpointError
from mtp_exporter.families.common import belongs
from mtp_exporter.families.description import Description, Wanted
from mtp_exporter.reading.checkpoint import Checkpoint

MODEL_TYPES = ("glm_moe_dsa",)
ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
BUILDS = False


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Refuse.

    Raises:
        CheckpointError: always; says which operator is missing.
    """
    raise CheckpointError(
        f"{checkpoint.directory} is a GLM-5 checkpoint (model_type 'glm_moe_dsa'): its layers choose the keys that "
        "they attend to with a sparse indexer, which no graph of this release has, and dense attention would give "
        "other tokens. Use a GLM-4.5 checkpoint."
    )
