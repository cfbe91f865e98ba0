"""The tree draft of one generation: its paths, and what drafts for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_engines.engine import Sequences, SlotSequences
from mtp_engines.errors import RequestError
from mtp_runtime.trees.branching import Behind, Branching
from mtp_runtime.trees.paths import Paths


@dataclass(frozen=True)
class Tree:
    """What drafter and verification share.

    Attributes:
        paths: the sequences, as the prompt and the drafter see them.
        branching: what makes the tokens of a draft.
    """

    paths: Paths
    branching: Branching

    @classmethod
    def over(cls, sequences: Sequences, branches: int, behind: Behind | None = None) -> Tree:
        """A tree with its own sequences, one more than branches; `behind` chooses a token, None takes the best one.

        Raises:
            RequestError: they cannot take over one another's state.
        """
        if not isinstance(sequences, SlotSequences):
            raise RequestError(
                f"draft_branches is {branches}, but the backend that was opened cannot commit one path for all; use 0, "
                "or run the bundle with --backend onnxruntime --device cpu."
            )
        return cls(Paths(sequences), Branching(branches, behind))
