"""Digests of committed states, so that every cycle can be compared without keeping every state."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy.typing as npt

from mtp_engines.engine import Sequences

Digests = dict[str, bytes]


def state_digests(sequences: Sequences, sequence: int = 0) -> Digests:
    """State name -> digest of its committed bytes."""
    return {name: digest(array) for name, array in sequences.snapshot(sequence).items()}


def digest(array: npt.NDArray[Any]) -> bytes:
    """Digest of the bytes of an array."""
    return hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def first_difference(ours: Digests, theirs: Digests) -> str | None:
    """Name of the first state that differs, or None."""
    return next((name for name, digest in theirs.items() if ours.get(name) != digest), None)
