"""Work on the rows of a matrix by all processors; NumPy lets go of the interpreter while it computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_POOL = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mtp-rows")


def in_parts(count: int, step: int, work: Callable[[slice], None]) -> None:
    """Do `work` on rows 0 to `count`, `step` at a time, in any order.

    Raises:
        Exception: the first that `work` raised.
    """
    for _ in _POOL.map(lambda start: work(slice(start, min(start + step, count))), range(0, count, step)):
        pass
