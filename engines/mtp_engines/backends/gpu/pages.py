"""Which pages of a pool belong to which sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import Limits
from mtp_engines.errors import ContractError

PAGE_SIZE = 32
"""Rows of a page."""
NO_PAGE = -1


def page_columns(limits: Limits) -> int:
    """Columns of a block table: the context, and a chunk of a prompt that is padded behind it."""
    return -(-(limits.capacity + limits.prefill_chunk) // PAGE_SIZE)


class PagePool:
    """Pages of a fixed size, handed out as sequences grow.

    Attributes:
        table: int32[batch, max_pages], the pages of each sequence in order of position, then `NO_PAGE`.
    """

    def __init__(self, pages: int, page_size: int, batch: int, max_pages: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.table: npt.NDArray[np.int32] = np.full((batch, max_pages), NO_PAGE, np.int32)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def held(self, sequence: int) -> int:
        """Pages of a sequence."""
        return int((self.table[sequence] != NO_PAGE).sum())

    def fits(self, sequence: int, rows: int) -> bool:
        """Whether a sequence can have pages for its first `rows` rows."""
        wanted = -(-rows // self.page_size)
        return wanted - self.held(sequence) <= self.free and wanted <= self.table.shape[1]

    def reserve(self, sequence: int, rows: int) -> bool:
        """Give a sequence pages for its first `rows` rows; True if the table changed.

        Raises:
            ContractError: the pool has not enough pages left, or the table not enough columns.
        """
        held, wanted = self.held(sequence), -(-rows // self.page_size)
        if wanted <= held:
            return False
        if not self.fits(sequence, rows):
            raise ContractError(
                f"Sequence {sequence} needs {wanted} pages of {self.page_size} rows, holds {held}, and the pool has "
                f"{self.free} left. Build the bundle with a larger --max-model-len, or run fewer sequences."
            )
        for column in range(held, wanted):
            self.table[sequence, column] = self._free.pop()
        return True

    def release(self, sequence: int) -> None:
        """Take back every page of a sequence."""
        self._free += [int(page) for page in self.table[sequence] if page != NO_PAGE][::-1]
        self.table[sequence] = NO_PAGE
