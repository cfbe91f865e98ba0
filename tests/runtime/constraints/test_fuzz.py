"""Hundreds of small schemas: every complete answer is valid, and greedy ones are the same for every K and drafter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtp_runtime import Model
from mtp_runtime.constraints.matcher import TokenConstraint
from mtp_runtime.sampling import transforms
from tests.runtime.constraints.fuzz import Seen, faults
from tests.runtime.constraints.schemas import schema

SCHEMAS, IN_THE_SUITE = range(300), range(25)
CONTROLS = range(9)


def test_answers_under_small_schemas(carried: Model) -> None:
    _require(carried, IN_THE_SUITE)


@pytest.mark.slow
def test_answers_under_all_small_schemas(carried: Model) -> None:
    _require(carried, SCHEMAS)


def _require(model: Model, seeds: range) -> None:
    seen = Seen()
    assert faults(model, seeds, seen) == []
    assert seen.complete > 0.7 * seen.answers, "most answers have to be whole to say anything"
    assert set(seen.emitted) == {1, 2, 3, 4, 5}, "cycles of four drafts have to keep none, some and all"


def test_the_schemas_are_of_every_kind() -> None:
    text = " ".join(repr(schema(seed)) for seed in SCHEMAS)
    kinds = ("object", "array", "enum", "const", "anyOf", "pattern", "maxLength", "number", "integer", "multipleOf")
    assert [kind for kind in (*kinds, "minItems", "boolean", "null") if f"'{kind}'" not in text] == []


def _never_rolled_back(self: TokenConstraint, count: int) -> None:
    """A deliberate fault: rejected drafts stay in the matcher."""


def _first_row_only(logits: Any, draft: Any, context: Any, *others: Any) -> Any:
    """A deliberate fault: rows behind draft tokens are not masked."""
    kept, context.constraint = context.constraint, None if draft else context.constraint
    try:
        return _LAW_BEHIND(logits, draft, context, *others)
    finally:
        context.constraint = kept


def _one_row_late(logits: Any, draft: Any, context: Any, *others: Any) -> Any:
    """A deliberate fault: a row has the mask of the row before it."""
    constraint = context.constraint
    if constraint is None or not draft:
        return _LAW_BEHIND(logits, draft, context, *others)
    constraint.advance(draft[:-1])
    allowed = constraint.allowed()
    constraint.roll_back(len(draft) - 1)
    context.constraint = None
    try:
        masked = logits if allowed is None else np.where(allowed, logits, -np.inf)
        return _LAW_BEHIND(masked, draft, context, *others)
    finally:
        context.constraint = constraint


_LAW_BEHIND = transforms.law_behind


def test_control_a_matcher_that_is_not_rolled_back_is_seen(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenConstraint, "roll_back", _never_rolled_back)
    assert faults(carried, CONTROLS)


@pytest.mark.parametrize("fault", [_first_row_only, _one_row_late])
def test_control_a_mask_of_another_row_is_seen(carried: Model, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """In the verify alone: the drafts are still masked, as they come from `Sampler`."""
    monkeypatch.setattr(transforms, "law_behind", fault)
    assert faults(carried, CONTROLS)
