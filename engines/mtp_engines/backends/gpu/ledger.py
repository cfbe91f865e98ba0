"""What the host knows of the sequences of a batch."""

from __future__ import annotations

import threading

import numpy as np

from mtp_engines.engine import Ids


class Ledger:
    """What the host knows of the sequences of a batch; all their windows share it.

    Attributes:
        lengths, head_lengths: int64[batch], committed rows of the target, and rows of the head.
        waiting: rows are committed that are not in the states yet.
        unkept: rows of a prompt are in the states already and not committed.
        broken: a call failed half-way, with a part of its work done.
        staged: first sequence, count and rows of the newest verify, until it is committed.
        begun: whole cycles may follow.
    """

    def __init__(self, batch: int) -> None:
        self.lengths: Ids = np.zeros(batch, np.int64)
        self.head_lengths: Ids = np.zeros(batch, np.int64)
        self.waiting, self.unkept, self.broken = (np.zeros(batch, np.bool_) for _ in range(3))
        self.staged: tuple[int, int, int] | None = None
        self.begun = False
        self.lock = threading.Lock()
