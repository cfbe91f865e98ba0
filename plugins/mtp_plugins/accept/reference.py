"""NumPy reference of Accept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def accept(draft: Ids, chosen: Ids) -> tuple[int, Ids, int]:
    """Greedy acceptance for one sequence.

    Args:
        draft: int64[draft_tokens].
        chosen: int64[draft_tokens + 1]; entry i is the target's choice at the place of draft[i].

    Returns:
        The number of accepted draft tokens; the emitted tokens, int64[accepted + 1]; the bonus token.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    emitted = np.append(draft[:accepted], chosen[accepted])
    return accepted, emitted, int(emitted[-1])
