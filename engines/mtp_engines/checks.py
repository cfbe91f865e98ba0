"""What every backend checks before it runs rows of a caller."""

from __future__ import annotations

import numpy as np

from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Floats, Ids
from mtp_engines.errors import ContractError, RequestError


def check_rows(tokens: Ids, lengths: Ids, spec: ModelSpec, limits: Limits) -> None:
    """Rows for a verify behind int64[batch] committed ones.

    Raises:
        ContractError: they have another shape or kind, are outside the vocabulary, or leave the context.
    """
    batch = len(lengths)
    if tokens.dtype != np.int64 or tokens.ndim != 2 or tokens.shape[0] != batch or tokens.shape[1] < 1:
        raise ContractError(
            f"verify got {tokens.dtype}{list(tokens.shape)}, expected int64[{batch}, rows] with rows >= 1."
        )
    _check_vocabulary(tokens, spec)
    check_room(tokens.shape[1], lengths, limits)


def check_room(rows: int, lengths: Ids, limits: Limits) -> None:
    """So many rows behind int64[batch] committed ones.

    Raises:
        ContractError: they leave the context.
    """
    if lengths.max() + rows > limits.capacity - 1:
        raise ContractError(
            f"{rows} rows after {lengths.max()} committed ones leave the context of {limits.max_model_len} tokens. "
            "Build the bundle with a larger --max-model-len."
        )


def check_draft(
    tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, batch: int, spec: ModelSpec, limits: Limits
) -> None:
    """Arguments of `Sequences.draft` for `batch` sequences.

    Raises:
        ContractError: shapes do not fit each other, ids are outside the vocabulary, or K is out of range.
    """
    width = tokens.shape[-1]
    expected = ((batch, width), (batch, width, spec.tap_width), (batch,))
    found = (tokens.shape, hidden.shape, rows.shape)
    if found != expected or not width or rows.min() < 0 or rows.max() > width:
        raise ContractError(
            f"draft got tokens{list(found[0])}, hidden{list(found[1])}, rows {rows.tolist()}; expected "
            f"tokens{list(expected[0])}, hidden{list(expected[1])} and {batch} counts of 0..{width}."
        )
    _check_vocabulary(tokens, spec)
    if not 0 <= draft_tokens <= limits.max_draft_tokens:
        raise ContractError(f"draft got draft_tokens = {draft_tokens}, expected 0..{limits.max_draft_tokens}.")


def refuse_cache_rows(cache_rows: int | None) -> None:
    """For backends whose sequences each have a cache of their own.

    Raises:
        RequestError: a number of rows for all of them was given.
    """
    if cache_rows is not None:
        raise RequestError(
            f"cache_rows is {cache_rows}, but on this backend every answer has a cache of its own; leave it out, or "
            "run the bundle with --backend torch or tensorrt."
        )


def check_choose(spec: ModelSpec) -> None:
    """A choice among a draft head's logits.

    Raises:
        ContractError: the head looks its ids up in a table.
    """
    if spec.mtp is not None and spec.mtp.has_table:
        raise ContractError(
            "draft got a choose, but this head looks the ids of its rows up in a table, so they are no ids; leave it "
            "out, and the head takes the best one."
        )


def _check_vocabulary(tokens: Ids, spec: ModelSpec) -> None:
    last = spec.vocab_size - 1
    if tokens.min() < 0 or tokens.max() > last:
        bad = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ContractError(f"Token id {bad} is outside the vocabulary 0..{last} of this model.")
