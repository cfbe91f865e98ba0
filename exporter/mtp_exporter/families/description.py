"""What a family file says about a checkpoint, and the check that every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.checkpoint import Checkpoint
from mtp_exporter.safetensors_file import FLOAT_TYPES, TensorInfo

Transform = Literal["none", "one_plus"]
"""`one_plus` turns a zero-centred norm weight w into the gain 1 + w, in float32."""


@dataclass(frozen=True)
class Need:
    """A tensor that a graph needs: its role in our graphs, its key on disk, its shape."""

    role: str
    key: str
    shape: tuple[int, ...]
    transform: Transform = "none"


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
    duplicates: tuple[tuple[str, str], ...] = ()
    """Pairs of tensors that the configuration says are one matrix; the first of each is left out."""
    notes: tuple[str, ...] = ()
    """Sentences that a user should see: what was assumed because nothing said otherwise."""


def claim(checkpoint: Checkpoint, description: Description) -> dict[str, tuple[Need, TensorInfo]]:
    """Match what the graphs need with what the files hold: each tensor used, or left out with a reason.

    Returns:
        Role -> need and tensor.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape.
    """
    for need in description.needs:
        checkpoint.require(need.key)
    found = checkpoint.tensors
    missing = [need.key for need in description.needs if need.key not in found]
    left_out = {key for keys in description.ignored.values() for key in keys}
    known = {need.key for need in description.needs} | left_out
    unknown = sorted(key for key in found if key not in known)
    if missing or unknown:
        raise CheckpointError(_unmatched(checkpoint, missing, unknown))
    for need in description.needs:
        if found[need.key].shape != need.shape:
            raise CheckpointError(
                f"Tensor {need.key!r} in {found[need.key].file} has shape {list(found[need.key].shape)}, config.json "
                f"makes it {list(need.shape)}. The two belong to different checkpoints; fetch them again."
            )
    return {need.role: (need, found[need.key]) for need in description.needs}


def check_duplicates(checkpoint: Checkpoint, description: Description) -> None:
    """Read both tensors of every declared pair and refuse if they differ anywhere.

    Raises:
        CheckpointError: names both.
    """
    for left_out, kept in description.duplicates:
        if checkpoint.tensors[left_out].digest() != checkpoint.tensors[kept].digest():
            raise CheckpointError(
                f"{checkpoint.directory / 'config.json'} sets tie_word_embeddings, but {left_out!r} differs from "
                f"{kept!r}. Remove the flag to use the head as it is, or the tensor to use the embedding."
            )


def refuse_packed(checkpoint: Checkpoint, left_out: tuple[str, ...]) -> None:
    """Refuse a quantised checkpoint, by what its tensors are and not by what its configuration says.

    Args:
        left_out: prefixes of tensors that the build does not use.

    Raises:
        CheckpointError: names the method and the first packed tensor.
    """
    for name, tensor in sorted(checkpoint.tensors.items()):
        packed = tensor.dtype not in FLOAT_TYPES or name.endswith(("_scale", "_scale_inv", "_packed", "qweight"))
        if packed and not name.startswith(left_out):
            method = checkpoint.config.get("quantization_config") or {}
            kind = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
            raise CheckpointError(
                f"{checkpoint.directory} is quantised (method {kind!r}; first packed tensor {name!r}, dtype "
                f"{tensor.dtype}). Quantised checkpoints cannot be built yet; use the bf16 or fp32 checkpoint."
            )


def require_head(checkpoint: Checkpoint, declared: int | None, keys: Iterable[str], field: str) -> bool:
    """Whether the checkpoint holds a complete head, given what its configuration declares.

    Raises:
        CheckpointError: declared and missing, declared absent and present, or incomplete.
    """
    if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int)):
        raise CheckpointError(
            f"{checkpoint.directory / 'config.json'} has {field} = {declared!r}, expected a whole number. Mend "
            "the file."
        )
    wanted = list(keys)
    for key in wanted:
        checkpoint.require(key)
    absent = [key for key in wanted if key not in checkpoint.tensors]
    present = len(wanted) - len(absent)
    if declared == 0 and present:
        raise CheckpointError(
            f"config.json has {field} = 0, but {checkpoint.directory} holds {present} of the head's {len(wanted)} "
            f"tensors. Set {field} to 1, or build with --no-mtp."
        )
    if declared and declared > 1:
        raise CheckpointError(
            f"config.json has {field} = {declared}; heads of this family are built for 1 layer. Build with --no-mtp, "
            "or use a checkpoint with one layer."
        )
    if absent and (declared or present):
        raise CheckpointError(
            f"config.json declares {declared if declared is not None else 'no'} MTP layer, {checkpoint.directory} "
            "holds "
            f"{present} of {len(wanted)} tensors of the head (first missing: {absent[0]!r}). Take the head from the "
            "base model with --mtp-from, or build with --no-mtp."
        )
    return not absent


def _unmatched(checkpoint: Checkpoint, missing: list[str], unknown: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors that the model needs ({_some(missing)})")
    if unknown:
        parts.append(f"holds {len(unknown)} that no rule knows ({_some(unknown)})")
    return f"{checkpoint.directory} {' and '.join(parts)}. Check the names, or fetch the checkpoint again."


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:4]) + (", …" if len(names) > 4 else "")
