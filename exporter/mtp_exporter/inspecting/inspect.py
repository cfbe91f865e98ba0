"""What a checkpoint is and whether it can be exported, from its headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from mtp_engines.contracts.model import GatedDeltaSpec, ModelSpec, MoeSpec
from mtp_engines.errors import CheckpointError
from mtp_engines.lowering.caches import cache_bytes_per_token
from mtp_exporter.families import describe, family_of
from mtp_exporter.families.description import Description, Wanted, claim
from mtp_exporter.options import MAX_DRAFT_TOKENS
from mtp_exporter.reading.checkpoint import Checkpoint, open_checkpoint
from mtp_exporter.reading.end_tokens import end_tokens
from mtp_exporter.storing.weights import stored_bytes


def inspect_checkpoint(directory: Path) -> dict[str, Any]:
    """A report for people and programs; keys are stable.

    `problems` says why the checkpoint cannot be built, in the words that `build` would use; the other
    fields hold what could be read all the same.

    Raises:
        CheckpointError: the directory, its config.json or a file's header cannot be read at all.
    """
    checkpoint = open_checkpoint(directory)
    problems: list[str] = []
    description = _describe(checkpoint, problems)
    return {
        "directory": str(directory),
        "model_type": checkpoint.config.get("model_type"),
        "architectures": checkpoint.config.get("architectures"),
        "family": _family(checkpoint, description),
        "can_build": not problems,
        "problems": problems,
        "files": _files(checkpoint),
        "parameters": sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        "dtypes": _dtypes(checkpoint, description),
        "end_tokens": [{"id": token.id, "sources": list(token.sources)} for token in end_tokens(checkpoint)],
        "mtp": _mtp(checkpoint, description),
        "model": _model(description.spec) if description else None,
        "notes": _notes(checkpoint, description),
        "ignored": {reason: len(keys) for reason, keys in description.ignored.items()} if description else {},
        "memory": _memory(description) if description else None,
    }


def _describe(checkpoint: Checkpoint, problems: list[str]) -> Description | None:
    """The description with the head, or without it where only the head stands in the way."""
    try:
        description = describe(checkpoint)
        claim(checkpoint, description)
        return description
    except CheckpointError as error:
        problems.append(str(error))
    for with_mtp in (True, False):
        try:
            return describe(checkpoint, Wanted(mtp=with_mtp))
        except CheckpointError:
            continue
    return None


def _family(checkpoint: Checkpoint, description: Description | None) -> str | None:
    """The family's name; that of its file where it describes no target."""
    if description is not None:
        return description.spec.family
    family = family_of(checkpoint)
    return family.__name__.rsplit(".", 1)[-1] if family else None


def _notes(checkpoint: Checkpoint, description: Description | None) -> list[str]:
    notes = list(description.notes) if description else []
    if not (checkpoint.directory / "tokenizer.json").is_file():
        notes.append("no tokenizer.json: a bundle will take and give token ids, no text")
    return notes


def _files(checkpoint: Checkpoint) -> dict[str, Any]:
    declared, found = checkpoint.declared_bytes, checkpoint.tensor_bytes
    return {
        "complete": not checkpoint.missing and declared in (None, found),
        "tensors": len(checkpoint.tensors),
        "bytes": found,
        "bytes_declared": declared,
        "missing": [{"file": shard.file, "tensors": len(shard.tensors)} for shard in checkpoint.missing],
        "not_in_index": list(checkpoint.ignored_files),
    }


def _dtypes(checkpoint: Checkpoint, description: Description | None) -> dict[str, dict[str, int]]:
    """Tensors by group and dtype, or quantisation method."""
    head = set(description.mtp_keys) if description else set()
    groups: dict[str, Counter[str]] = {}
    for name, tensor in checkpoint.tensors.items():
        groups.setdefault("mtp" if name in head else _group(name), Counter())[tensor.dtype] += 1
    return {group: dict(sorted(counts.items())) for group, counts in sorted(groups.items())}


def _group(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    if "visual" in name:
        return "vision"
    if "embed_tokens" in name or name == "lm_head.weight":
        return "embedding and head"
    for part in ("linear_attn", "self_attn", "mlp"):
        if f".{part}." in name:
            return part
    return "norms" if "norm" in name else "other"


def _mtp(checkpoint: Checkpoint, description: Description | None) -> dict[str, Any] | None:
    if description is None:
        return None
    found = [key for key in description.mtp_keys if key in checkpoint.tensors]
    head = description.spec.mtp
    return {
        "layers_declared": description.declared_mtp_layers,
        "tensors_expected": len(description.mtp_keys),
        "tensors_found": len(found),
        "first_missing": next((key for key in description.mtp_keys if key not in checkpoint.tensors), None),
        "depths": head.depth if head else 0,
        "hidden_tap": head.tap if head else None,
        "concat": head.concat if head else None,
    }


def _model(spec: ModelSpec) -> dict[str, Any]:
    pattern = "".join("L" if isinstance(layer.mixer, GatedDeltaSpec) else "F" for layer in spec.layers)
    return {
        "layers": len(spec.layers),
        "layer_pattern": pattern,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "tied_head": spec.tied_head,
        "max_position": spec.max_position,
        "norm_epsilon": spec.norm_epsilon,
        "mixers": {layer.mixer.kind: asdict(layer.mixer) for layer in spec.layers},
        "mlps": {layer.mlp.kind: asdict(layer.mlp) for layer in spec.layers},
        "moe_layers": sum(isinstance(layer.mlp, MoeSpec) for layer in spec.layers),
    }


def _memory(description: Description) -> dict[str, Any]:
    """Bytes in float32, as the CPU engine keeps them."""
    spec = description.spec
    row = spec.factor_bytes_per_row
    sizes = {(need.source, need.transform): stored_bytes(need) for need in description.needs}
    return {
        "weight_bytes": sum(sizes.values()),
        "kv_bytes_per_token": cache_bytes_per_token(spec),
        "state_bytes_per_sequence": spec.state_bytes_per_sequence,
        "replay_factor_bytes_by_draft_tokens": {str(k): (k + 1) * row if k else 0 for k in range(MAX_DRAFT_TOKENS + 1)},
    }
