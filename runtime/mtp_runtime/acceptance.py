"""Which draft tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence


def accept_greedy(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Keep the longest prefix of the draft that the target chose itself, then the target's next token.

    Args:
        draft: K token ids, oldest first; K may be 0.
        chosen: K + 1 ids; chosen[i] is the target's choice in the place of draft[i], chosen[K] after all.

    Returns:
        The accepted draft tokens and the bonus token: 1 to K + 1 ids.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return [*draft[:accepted], chosen[accepted]]
