"""The numbers of rows that graphs run at on a GPU. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_engines.contracts.manifest import Limits
from mtp_engines.errors import ContractError

_SHORT_PREFILL = 64


@dataclass(frozen=True)
class Widths:
    """The numbers of rows that a bundle's graphs run at; others are padded to the next one.

    Attributes:
        verify: ascending; the last is the widest verify. A backend whose products depend on their number of
            rows has only that one, so that a row's bits are those of plain decoding.
        prefill: ascending, for rows of a prompt, which are kept at once.
    """

    verify: tuple[int, ...]
    prefill: tuple[int, ...]

    @property
    def widest(self) -> int:
        """Rows of the widest verify."""
        return self.verify[-1]

    def fit(self, rows: int) -> int:
        """The smallest width that holds so many rows.

        Raises:
            ContractError: there is none.
        """
        widths = (*self.verify, *self.prefill)
        if rows > max(widths):
            raise ContractError(
                f"{rows} rows were to run at once, and the graphs of this bundle run at most {max(widths)}. Give them "
                "in several calls."
            )
        return next(width for width in widths if width >= rows)


def prefill_widths(limits: Limits) -> tuple[int, ...]:
    """Widths of rows of a prompt: a short one, so that a short prompt costs little, and the chunk."""
    chunk = min(limits.prefill_chunk, limits.max_model_len)
    return tuple(sorted({min(_SHORT_PREFILL, chunk), chunk}))


def widths_of(limits: Limits, *, skinny: bool) -> Widths:
    """The widths of a bundle; a library's products depend on the number of rows, so every verify then has the same."""
    widest = limits.max_draft_tokens + 1
    return Widths(tuple(range(1, widest + 1)) if skinny else (widest,), prefill_widths(limits))


def engine_widths(limits: Limits) -> tuple[int, ...]:
    """Rows of every call that a built engine has to take: each verify, a chained draft, rows of a prompt."""
    return (*range(1, limits.max_draft_tokens + 2), *prefill_widths(limits))
