"""Whether a row of an engine depends on how many rows run with it, tested on the engine itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import Numerics
from mtp_engines.engine import Engine, Floats, Ids

_CONTEXT = 5
"""Committed rows before the tested ones, so that caches and states are not empty."""


def measure_promise(engine: Engine, ids: Ids) -> Numerics:
    """Run a text in verifies of one row, and in verifies of every width up to the widest, and compare bit by bit.

    Args:
        ids: int64[rows], a text of at least 16 tokens.

    Returns:
        `exact` if every hidden state and choice, and the states at the end, have the same bits in all of them.
    """
    widest = engine.limits.max_draft_tokens + 1
    count = min(len(ids), engine.limits.max_model_len) - 1
    alone, chosen, states = _run(engine, ids[:count], 1)
    for width in range(2, widest + 1):
        hidden, choices, after = _run(engine, ids[:count], width)
        differing = (hidden != alone).any(axis=1) | (choices != chosen)
        row = min(_CONTEXT, count - 1) + int(np.argmax(differing))
        where = [f"row {row} of {count}"] if differing.any() else []
        where += [name for name, state in states.items() if not np.array_equal(state, after[name])]
        if where:
            return Numerics("near-tie", count, f"{where[0]} in verifies of {width} rows")
    return Numerics("exact", count)


def _run(engine: Engine, ids: Ids, width: int) -> tuple[Floats, Ids, dict[str, npt.NDArray[Any]]]:
    """A text behind a short context, `width` rows at a time.

    Returns:
        float32[rows, tap_width], int64[rows] choices, and the states after all rows.
    """
    sequences = engine.sequences()
    hidden, choices = [], []
    context = min(_CONTEXT, len(ids) - 1)
    for start in range(context):
        sequences.verify(ids[None, start : start + 1], 0)
        sequences.commit(np.array([1]))
    for start in range(context, len(ids), width):
        rows = ids[None, start : start + width]
        verified = sequences.verify(rows, rows.shape[1])
        hidden.append(verified.hidden[0].copy())
        choices.append(verified.ids[0].copy())
        sequences.commit(np.array([rows.shape[1]]))
    return np.concatenate(hidden), np.concatenate(choices), sequences.snapshot(0)
