"""What a backend offers a generation loop: verify rows, commit some of them, draft from the head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Choose = Callable[[Floats], Ids | None]
"""float32[batch, draft_vocab_size], a draft head's logits of one place -> int64[batch], the tokens drafted there.

None ends the draft before that place.

Row i of a smaller vocabulary is the token i.
"""


@dataclass(frozen=True)
class Verified:
    """Result of one target run over rows that are staged, not committed.

    Attributes:
        ids: int64[batch, logit_rows], the target's own choice after each of the last rows.
        hidden: float32[batch, rows, tap_width] at the draft head's tap. The engine owns the memory and
            writes over it at the next verify.
        logits: float32[batch, logit_rows, vocab_size], what `ids` were chosen from; None unless they were asked for.
    """

    ids: Ids
    hidden: Floats
    logits: Floats | None = None


class Sequences(Protocol):
    """The state of `batch` sequences that run together. Not for two threads at once."""

    lengths: Ids
    """int64[batch], rows of each sequence that the target has committed."""

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Run the target over int64[batch, rows] after the committed rows and stage the result.

        With `logits` those of the last `logit_rows` rows leave the graph too, which greedy decoding does without.

        More rows than the bundle's largest K and one are rows of a prompt, which a backend may keep at once:
        commit all of them before the next verify.

        Raises:
            ContractError: tokens have another shape or kind, or leave the context.
            NumericsError: a logit or hidden value is not finite.
        """

    def commit(self, rows: Ids) -> None:
        """Keep the first rows[b] staged rows of each sequence and drop the others.

        Raises:
            ContractError: nothing is staged, or more rows are asked for than were staged.
        """

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Let the head consume committed rows and propose tokens.

        Args:
            tokens: int64[batch, width]; row p is the token after position p.
            hidden: float32[batch, width, tap_width], the target's hidden state of position p.
            rows: int64[batch], how many rows of each sequence count; the others are padding. The
                drafts of a sequence with 0 rows mean nothing.
            draft_tokens: how many to propose; 0 only consumes.
            choose: makes a token of the head's logits, once for each draft token, oldest first; None takes the best
                one inside the graph.

        Returns:
            int64[batch, n], oldest first; n is smaller than asked when the head stops making sense
            (a value that is not finite), when `choose` ends the draft, or has fewer trained depths.

        Raises:
            ContractError: shapes do not fit each other; or there is a `choose`, and the head looks its ids up in a
                table, so that a row of its logits is no id.
        """

    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for hidden rows float32[rows, hidden_size]; for tools, not for the loop."""

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the committed state of one sequence, by state name; caches cut to their length."""

    def reset(self) -> None:
        """Forget everything: length 0, states zero."""


@dataclass(frozen=True)
class Saved:
    """A part of the target's committed state of one sequence.

    Attributes:
        since: the first row of the caches that is held; those before are in another part.
        length: rows that were committed.
        arrays: rows `since` to `length` of each cache [heads, rows, width], and the recurrent states, by name.
    """

    since: int
    length: int
    arrays: dict[str, npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@runtime_checkable
class SlotSequences(Sequences, Protocol):
    """Sequences that also run in parts, so that each of them can begin, wait and end on its own."""

    def window(self, start: int, count: int) -> SlotSequences:
        """Neighbouring sequences with the same memory. Rows that are staged in one window are dropped by any other.

        Raises:
            ContractError: there are no such sequences.
        """

    def save(self, sequence: int, since: int = 0) -> Saved:
        """A copy of the target's committed state of one sequence, without the rows before `since`.

        Raises:
            ContractError: `since` is more than was committed.
        """

    def restore(self, sequence: int, parts: Iterable[Saved]) -> None:
        """Put saved parts, oldest first, in the place of one sequence's state; its draft head starts anew.

        The head gets its rows back as it got them first: from the hidden states of the target.

        Raises:
            ContractError: the parts do not follow one another from row 0.
        """

    def copy(self, source: int, target: int, since: int = 0) -> None:
        """Make one sequence the same as another, whose rows before `since` are the same already; heads are left out."""


@runtime_checkable
class PooledSequences(SlotSequences, Protocol):
    """Slots whose caches may share their rows: each holds what it needs, and gives it back when its text is over.

    Rows of a verify that are to be kept need room that was held before; the others, as of slots between two that count,
    need none.
    """

    pool_rows: int
    """The most rows that one sequence can hold while the others hold none."""

    def hold(self, sequence: int, rows: int) -> bool:
        """Have room for the first `rows` rows of a sequence until it is released; False changes nothing.

        A reset keeps what is held.
        """

    def release(self, sequence: int) -> None:
        """Reset one sequence and give back its room."""


@dataclass(frozen=True)
class Cycle:
    """Result of a whole cycle of a batch, one list for each sequence.

    Attributes:
        draft: what the head proposed.
        emitted: what the target made of it, at least one token.
    """

    draft: list[list[int]]
    emitted: list[list[int]]


@runtime_checkable
class CycleSequences(Sequences, Protocol):
    """Sequences whose backend drafts, verifies, accepts and commits in one call, without the host in between."""

    def prefill(self, tokens: Ids, *, drafting: bool) -> Ids:
        """Consume prompts of one length and keep them.

        Args:
            tokens: int64[batch, length].
            drafting: the draft head follows, so that cycles with drafts can come.

        Returns:
            int64[batch], the target's first tokens, which no row has consumed yet.

        Raises:
            ContractError: as `verify`.
            NumericsError: as `verify`.
        """

    def cycle(self, draft_tokens: int) -> Cycle:
        """Draft so many tokens behind the newest one, verify, commit what is right.

        Raises:
            ContractError: there was no `prefill` with `drafting`, or the context is full.
            NumericsError: the target makes no numbers even without a draft.
        """


class Engine(Protocol):
    """A loaded bundle on one backend."""

    spec: ModelSpec
    limits: Limits
    numerics: str
    """`exact` or `near-tie`, as tested where the bundle was built."""
    runs_on: str
    """`cpu`, or the compute capability of a CUDA device as in `sm_90`."""

    def sequences(self, batch: int = 1, cache_rows: int | None = None) -> Sequences:
        """Fresh state for `batch` sequences.

        Args:
            cache_rows: rows of the caches that they share as `PooledSequences`; None has room for the whole context of
                each.

        Raises:
            RequestError: batch is larger than the bundle was built for; or the backend's sequences share nothing.
        """
