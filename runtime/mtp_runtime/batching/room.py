"""Room in the caches of slots, where an engine lets them share it; elsewhere there always is enough."""

from __future__ import annotations

from mtp_engines.engine import PooledSequences, SlotSequences
from mtp_engines.errors import RequestError
from mtp_runtime.batching.lanes import Lane
from mtp_runtime.prepare import Prepared


class Room:
    """Rows that answers hold: those of their text, and of the next verify."""

    def __init__(self, slots: SlotSequences, narrow: int) -> None:
        """`narrow` is the most rows of a verify."""
        self._pool = slots if isinstance(slots, PooledSequences) else None
        self._narrow = narrow

    def require(self, prepared: Prepared) -> None:
        """Whether an answer can ever be finished, alone if need be.

        Raises:
            RequestError: it cannot.
        """
        prompt, limit = len(prepared.prompt), prepared.limit
        if self._pool is not None and prompt + limit > self._pool.pool_rows:
            raise RequestError(
                f"the prompt has {prompt} tokens and the answer may have {limit}, but the caches have "
                f"{self._pool.pool_rows} rows for all answers together; ask for fewer, or start with more --cache-rows."
            )

    def take(self, lane: Lane, slot: int) -> bool:
        """Hold what an answer needs in the next round, in its slot; False if others hold too much."""
        if self._pool is None:
            return True
        prepared, generation = lane.ticket.prepared, lane.generation
        said = 0 if generation is None else max(len(generation.emitted) - 1, 0)
        # What may be said is all it ever holds, so that the last one left always can go on.
        most = len(prepared.prompt) + prepared.limit
        return self._pool.hold(slot, min(len(prepared.prompt) + said + self._narrow, most))

    def give_back(self, slot: int) -> None:
        """Of a slot that nobody is in."""
        if self._pool is not None:
            self._pool.release(slot)
