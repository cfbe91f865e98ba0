"""Work on rows by all processors."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_exporter.storing.parallel import in_parts


@pytest.mark.parametrize(("count", "step"), [(0, 4), (1, 4), (8, 4), (10, 4), (3, 100)])
def test_every_row_is_done_once(count: int, step: int) -> None:
    done = np.zeros(count, np.int64)

    def work(part: slice) -> None:
        done[part] += 1

    in_parts(count, step, work)
    assert (done == 1).all()


def test_what_fails_in_one_part_is_raised() -> None:
    def work(part: slice) -> None:
        if part.start == 8:
            raise ValueError("the third part")

    with pytest.raises(ValueError, match="the third part"):
        in_parts(20, 4, work)
    in_parts(8, 4, work)
