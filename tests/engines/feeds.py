"""Inputs of a session over a backbone graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from mtp_engines.contracts import names


def empty_feed(session: ort.InferenceSession, rows: np.ndarray) -> dict[str, Any]:
    """Inputs of a backbone graph for rows at the start of a sequence."""
    feed: dict[str, Any] = {}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            shape = [axis if isinstance(axis, int) else {"batch": 1, "capacity": 32}[axis] for axis in value.shape]
            feed[value.name] = np.zeros(shape, np.float32)
    feed[names.INPUT_IDS] = rows
    feed[names.POSITION_IDS] = np.arange(rows.shape[1])[None]
    feed[names.PAST_LENGTH] = np.zeros(1, np.int64)
    return feed
