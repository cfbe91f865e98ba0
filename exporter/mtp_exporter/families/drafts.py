"""What separate drafts share: where their tensors are, and whose embedding and vocabulary head they use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.description import Need
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config


@dataclass(frozen=True)
class DraftVocabulary:
    """Embedding and vocabulary head of a draft: fields of its MtpSpec, its own tensors, tensors left out."""

    fields: dict[str, Any]
    needs: tuple[Need, ...]
    ignored: dict[str, tuple[str, ...]]


def prefix_of(checkpoint: Checkpoint) -> str:
    """What stands before the names of a draft's tensors: nothing, or `model.`."""
    return "model." if any(name.startswith("model.") for name in checkpoint.tensors) else ""


def has_any(checkpoint: Checkpoint, start: str) -> bool:
    """Whether there is a tensor whose name starts so."""
    return any(name.startswith(start) for name in checkpoint.tensors)


def draft_vocabulary(checkpoint: Checkpoint, config: Config, target: ModelSpec, prefix: str) -> DraftVocabulary:
    """Take the draft's own embedding and head where it has them, the target's otherwise.

    Raises:
        CheckpointError: the vocabularies differ in size, or a reduced one comes without its table.
    """
    hidden, vocab = config.positive("hidden_size"), config.positive("vocab_size", target.vocab_size)
    if vocab != target.vocab_size:
        raise CheckpointError(
            f"{checkpoint.directory} drafts for a vocabulary of {vocab}, the target has {target.vocab_size}. Name the "
            "draft that was trained for this target."
        )
    fields: dict[str, Any] = {}
    needs: list[Need] = []
    ignored: dict[str, tuple[str, ...]] = {}
    if checkpoint.names(f"{prefix}embed_tokens.weight"):
        fields["own_embedding"] = True
        needs.append(Need("mtp.embedding", f"{prefix}embed_tokens.weight", (vocab, hidden)))
    elif hidden != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint.directory} has hidden size {hidden} and no embed_tokens.weight, and the target's embedding "
            f"is {target.hidden_size} wide. Fetch the whole draft."
        )
    head = next((key for key in ("lm_head.weight", f"{prefix}lm_head.weight") if checkpoint.names(key)), None)
    if head is not None:
        rows = config.positive("draft_vocab_size", vocab)
        fields["own_head"] = True
        needs.append(Need("mtp.head", head, (rows, hidden)))
        needs += _table(checkpoint, prefix, rows, vocab)
        fields["draft_vocab_size"] = rows if any(need.transform == "row_to_id" for need in needs) else None
    elif hidden != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint.directory} has hidden size {hidden} and no lm_head.weight, and the target's vocabulary head "
            f"takes {target.hidden_size}. Fetch the whole draft."
        )
    elif config.positive("draft_vocab_size", vocab) != vocab or checkpoint.names(f"{prefix}d2t"):
        rows = config.positive("draft_vocab_size", vocab)
        raise CheckpointError(
            f"{checkpoint.directory} drafts over {rows} of {vocab} tokens and holds no lm_head.weight that scores "
            "them. Fetch the whole draft."
        )
    tables = tuple(f"{prefix}{name}" for name in ("t2d", "d2t") if f"{prefix}{name}" in checkpoint.tensors)
    used = {part.key for need in needs for part in need.parts}
    if unused := tuple(name for name in tables if name not in used):
        ignored["vocabulary tables that drafting does not need"] = unused
    return DraftVocabulary(fields, tuple(needs), ignored)


def _table(checkpoint: Checkpoint, prefix: str, rows: int, vocab: int) -> list[Need]:
    """The table from rows of a reduced vocabulary to ids.

    Raises:
        CheckpointError: the vocabulary is reduced and there is no table.
    """
    if checkpoint.names(f"{prefix}d2t"):
        return [Need("mtp.ids", f"{prefix}d2t", (rows,), "row_to_id")]
    if rows != vocab:
        raise CheckpointError(
            f"{checkpoint.directory} drafts over {rows} of {vocab} tokens and lacks the tensor 'd2t' that says which. "
            "Fetch the whole draft."
        )
    return []
