"""Model families: one file each, found by looking into this folder.

A family file has `recognises(checkpoint)` and either `describe(checkpoint, wanted)`, for targets, or
`describe_draft(checkpoint, target)`, for drafts in a directory of their own. A target's file also lists
`MODEL_TYPES`; one that only refuses sets `BUILDS = False`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from types import ModuleType

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.description import Description, Draft, Wanted
from mtp_exporter.reading.checkpoint import Checkpoint


def families() -> tuple[ModuleType, ...]:
    """Every family file, in the order of their names."""
    found = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(module for module in found if hasattr(module, "recognises"))


def describe(checkpoint: Checkpoint, wanted: Wanted | None = None) -> Description:
    """Describe a target through the family that recognises it.

    Raises:
        CheckpointError: no family knows it, it is a draft, or the configuration is contradictory.
    """
    wanted = wanted or Wanted()
    family = family_of(checkpoint)
    if family is None:
        raise _unknown(checkpoint)
    if not hasattr(family, "describe"):
        raise CheckpointError(
            f"{checkpoint.directory} is a separate draft, not a target. Build the target and name this directory with "
            "--draft-model."
        )
    described: Description = family.describe(checkpoint, wanted)
    return _tapped(described, wanted)


def describe_draft(checkpoint: Checkpoint, target: ModelSpec) -> Draft:
    """Describe a separate draft for a target.

    Raises:
        CheckpointError: no family knows it as a draft, or it does not fit the target.
    """
    family = family_of(checkpoint)
    if family is None:
        raise _unknown(checkpoint)
    if not hasattr(family, "describe_draft"):
        family.describe(checkpoint, Wanted())  # A family that only refuses says why.
        raise CheckpointError(
            f"{checkpoint.directory} is a whole model, not a draft head. Build it as a bundle of its own and name that "
            "to `mtp-run generate` with --draft-model."
        )
    described: Draft = family.describe_draft(checkpoint, target)
    return described


def family_of(checkpoint: Checkpoint) -> ModuleType | None:
    """The family that recognises a checkpoint; drafts are asked first, since they carry a target's model_type."""
    ordered = sorted(families(), key=lambda family: not hasattr(family, "describe_draft"))
    return next((family for family in ordered if family.recognises(checkpoint)), None)


def _tapped(described: Description, wanted: Wanted) -> Description:
    """The description with the tap that the user asked for."""
    mtp = described.spec.mtp
    if wanted.hidden_tap is None or mtp is None:
        return described
    taps = () if wanted.hidden_tap == "post-norm" else (len(described.spec.layers),)
    return replace(described, spec=replace(described.spec, mtp=replace(mtp, taps=taps)))


def _unknown(checkpoint: Checkpoint) -> CheckpointError:
    types = {name for family in families() if getattr(family, "BUILDS", True) for name in _types(family)}
    return CheckpointError(
        f"{checkpoint.directory / 'config.json'} has model_type {checkpoint.config.get('model_type')!r} (architectures "
        f"{checkpoint.config.get('architectures')!r}), which no family of this release describes. Supported: "
        f"{', '.join(sorted(types))}."
    )


def _types(family: ModuleType) -> tuple[str, ...]:
    return getattr(family, "MODEL_TYPES", ())
