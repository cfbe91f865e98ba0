"""Readings of a configuration that several families share."""

from __future__ import annotations

from mtp_engines.errors import CheckpointError
from mtp_exporter.checkpoint import Checkpoint
from mtp_exporter.config import Config


def is_tied(checkpoint: Checkpoint, config: Config) -> bool:
    """Whether embedding and vocabulary head are one matrix.

    Raises:
        CheckpointError: there is no head, and no flag says that the embedding serves as one.
    """
    names = [*checkpoint.tensors, *(name for shard in checkpoint.missing for name in shard.tensors)]
    flagged = config.flag("tie_word_embeddings")
    if "lm_head.weight" not in names:
        if not flagged:
            raise CheckpointError(
                f"{checkpoint.directory} holds no 'lm_head.weight', and neither level of config.json sets "
                "tie_word_embeddings. Set it if embedding and head are one matrix, or restore the tensor."
            )
        return True
    # With the flag set, the two must be one matrix: a build reads both and refuses if they differ.
    return flagged


def default_rotation_only(config: Config) -> None:
    """Refuse scaled rotary positions.

    Raises:
        CheckpointError: names the place and the kind of scaling.
    """
    for group in ("rope_parameters", "rope_scaling"):
        rope = config.text.get(group)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
        if kind != "default":
            raise CheckpointError(
                f"{config.path} has {group} with rope_type {kind!r}; only 'default' is supported for this family. "
                "Remove the scaling to build for the context the model was trained on."
            )


def attention_heads(config: Config) -> tuple[int, int]:
    """Query heads and key-value heads.

    Raises:
        CheckpointError: the first is no multiple of the second.
    """
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.path} has num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the first must be "
            "a multiple of the second. Mend the file."
        )
    return heads, kv_heads
