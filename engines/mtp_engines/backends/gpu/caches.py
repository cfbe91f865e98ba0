"""The caches of a batch on a device, and neighbouring sequences of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.pages import NO_PAGE, PAGE_SIZE, PagePool, page_columns
from mtp_engines.backends.gpu.parts import Part
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec
from mtp_engines.errors import ContractError

Tensor = torch.Tensor
Layers = Mapping[int, AttentionSpec]


class Caches(Protocol):
    """The caches of some attention layers, and one length for each sequence."""

    lengths: Tensor
    """int32[batch], on the device."""
    most_rows: int
    """Rows that one sequence can have while the others have none."""

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Make room for the first rows[b] rows of each sequence, unless whoever opened them sees to that.

        Raises:
            ContractError: there is none.
        """

    def load(self) -> None:
        """Before each run: what is bound as a copy."""

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph, the lengths among them."""

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""

    def rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        """Copies of rows of one sequence, [heads, rows, width] by name."""

    def put(self, sequence: int, start: int, rows: Mapping[str, Tensor]) -> None:
        """Write such rows from `start` on; there is room for them."""

    def window(self, start: int, stop: int) -> Caches:
        """Those of some of the sequences, in the same memory."""

    def hold(self, sequence: int, rows: int) -> bool:
        """Have room for the first `rows` rows of a sequence until `release`; False changes nothing."""

    def release(self, sequence: int) -> None:
        """Give back what one sequence holds, none of whose rows counts any longer."""

    def room(self, sequence: int) -> int:
        """How many first rows of a sequence can be kept."""

    def reset(self) -> None:
        """Forget every row."""


class PageTable:
    """The pages of all sequences of a batch, of one pool, and their table on the device.

    Attributes:
        shared: the pool holds less than every whole context, so that pages are given and taken one sequence at a time
            by whoever knows which sequences count. Otherwise a run takes what it needs.
        tensor: int32[batch, max_pages].
        stored: pages of each cache.
    """

    def __init__(self, limits: Limits, batch: int, device: torch.device, cache_rows: int | None = None) -> None:
        """With `cache_rows` one pool of so many rows is shared; None has room for every sequence's whole context."""
        columns = page_columns(limits)
        whole = batch * -(-limits.capacity // PAGE_SIZE)
        pages = batch * columns if cache_rows is None else min(cache_rows // PAGE_SIZE, whole)
        self.shared = cache_rows is not None
        self.pool = PagePool(pages, PAGE_SIZE, batch, columns)
        # Engines are built for the pages of one sequence at least.
        self.stored = max(pages, columns)
        self.tensor = torch.full((batch, columns), NO_PAGE, dtype=torch.int32, device=device)

    def reserve(self, first: int, rows: npt.NDArray[np.int64]) -> None:
        """Pages for the first rows[b] rows of each sequence from `first` on.

        Raises:
            ContractError: there are none left.
        """
        changed = [self.pool.reserve(first + place, int(count)) for place, count in enumerate(rows)]
        if any(changed):
            self._bring()

    def release(self, sequence: int) -> None:
        """Take back every page of a sequence."""
        if self.pool.held(sequence):
            self.pool.release(sequence)
            self._bring()

    def _bring(self) -> None:
        self.tensor.copy_(torch.from_numpy(self.pool.table))


class CachePages:
    """Pages of some attention layers: a tensor of pages for each cache, all by one table."""

    def __init__(
        self, tensors: dict[str, Tensor], table: PageTable, lengths: Tensor, last_position: int, start: int, stop: int
    ) -> None:
        """Sequences `start` to `stop` of a batch; `lengths` are those of all."""
        self.tensors, self.table, self.start, self.stop = tensors, table, start, stop
        self._all_lengths, self._last_position = lengths, last_position
        self._lengths, self._table = Part(lengths, start, stop), Part(table.tensor, start, stop)
        self.lengths = self._lengths.view
        self.most_rows = min(table.pool.pages, len(table.pool.table[0])) * PAGE_SIZE

    @classmethod
    def empty(cls, layers: Layers, limits: Limits, table: PageTable, dtype: torch.dtype) -> CachePages:
        """Memory for all sequences of a table."""
        tensors = {}
        for index, mixer in layers.items():
            shape = (table.stored, PAGE_SIZE, mixer.num_kv_heads, mixer.head_dim)
            for name in (names.past_key(index), names.past_value(index)):
                tensors[name] = torch.zeros(shape, dtype=dtype, device=table.tensor.device)
        lengths = torch.zeros(len(table.tensor), dtype=torch.int32, device=table.tensor.device)
        return cls(tensors, table, lengths, limits.capacity - 1, 0, len(lengths))

    def window(self, start: int, stop: int) -> CachePages:
        """Those of some of the sequences, in the same memory."""
        bounds = self.start + start, self.start + stop
        return CachePages(self.tensors, self.table, self._all_lengths, self._last_position, *bounds)

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Make room for the first rows[b] rows of each sequence; of a shared pool nothing is taken here."""
        if not self.table.shared:
            self.table.reserve(self.start, rows)

    def load(self) -> None:
        """Lengths and pages, where they are bound as copies."""
        self._lengths.load()
        self._table.load()

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph."""
        return self.tensors | {names.BLOCK_TABLE: self._table.bound, names.PAST_LENGTH: self._lengths.bound}

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""
        return _presents(self.tensors)

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""
        return _positions(lengths, rows, self._last_position)

    def rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        """Copies of rows of one sequence, [heads, rows, width] by name."""
        places = self._places(sequence, start, stop)
        return {name: pages.flatten(0, 1)[places].transpose(0, 1) for name, pages in self.tensors.items()}

    def put(self, sequence: int, start: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows of one sequence."""
        for name, pages in self.tensors.items():
            places = self._places(sequence, start, start + rows[name].shape[1])
            pages.flatten(0, 1).index_copy_(0, places, rows[name].transpose(0, 1).to(pages))

    def hold(self, sequence: int, rows: int) -> bool:
        """Have room for the first `rows` rows of a sequence until `release`, if there is room."""
        place = self.start + sequence
        if not self.table.pool.fits(place, rows):
            return False
        self.table.reserve(place, np.array([rows]))
        return True

    def release(self, sequence: int) -> None:
        """Give back the pages of one sequence."""
        self.table.release(self.start + sequence)

    def room(self, sequence: int) -> int:
        """How many first rows of a sequence have a page, or could have."""
        pool = self.table.pool
        return (pool.held(self.start + sequence) if self.table.shared else pool.table.shape[1]) * PAGE_SIZE

    def reset(self) -> None:
        """Forget every row; pages go back, unless they are those of a shared pool, which go back apart."""
        if not self.table.shared:
            for sequence in range(self.start, self.stop):
                self.table.release(sequence)
        self.lengths.zero_()

    def _places(self, sequence: int, start: int, stop: int) -> Tensor:
        """int64[rows], where they lie if the pages are one after the other."""
        positions = np.arange(start, stop)
        pages = self.table.pool.table[self.start + sequence].astype(np.int64)[positions // PAGE_SIZE]
        return torch.from_numpy(pages * PAGE_SIZE + positions % PAGE_SIZE).to(self.lengths.device)


class DenseCaches:
    """Caches with the same number of rows for every sequence, for kernels that know no pages."""

    def __init__(self, tensors: dict[str, Tensor], lengths: Part, capacity: int, last_position: int) -> None:
        """`tensors` are those of the sequences of `lengths`."""
        self.tensors, self._lengths, self.lengths = tensors, lengths, lengths.view
        self.most_rows, self._last_position = capacity, last_position

    @classmethod
    def empty(cls, layers: Layers, limits: Limits, batch: int, device: torch.device, dtype: torch.dtype) -> DenseCaches:
        """Memory for `batch` sequences."""
        # Its context, and the padding of a chunk of a prompt behind it.
        capacity = limits.capacity + limits.prefill_chunk
        tensors = {}
        for index, mixer in layers.items():
            shape = (batch, mixer.num_kv_heads, capacity, mixer.head_dim)
            for name in (names.past_key(index), names.past_value(index)):
                tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
        lengths = Part(torch.zeros(batch, dtype=torch.int32, device=device), 0, batch)
        return cls(tensors, lengths, capacity, limits.capacity - 1)

    def window(self, start: int, stop: int) -> DenseCaches:
        """Those of some of the sequences, in the same memory."""
        tensors = {name: tensor[start:stop] for name, tensor in self.tensors.items()}
        return DenseCaches(tensors, Part(self.lengths, start, stop), self.most_rows, self._last_position)

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Check that the first rows[b] rows of each sequence have room.

        Raises:
            ContractError: they have none.
        """
        if rows.max() > self.most_rows:
            raise ContractError(
                f"Sequence {int(rows.argmax())} needs {int(rows.max())} rows, and its caches have {self.most_rows}. "
                "Build the bundle with a larger --max-model-len."
            )

    def load(self) -> None:
        """Lengths, where they are bound as a copy."""
        self._lengths.load()

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph."""
        return self.tensors | {names.PAST_LENGTH: self._lengths.bound}

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""
        return _presents(self.tensors)

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""
        return _positions(lengths, rows, self._last_position)

    def rows(self, sequence: int, start: int, stop: int) -> dict[str, Tensor]:
        """Copies of rows of one sequence, [heads, rows, width] by name."""
        return {name: tensor[sequence, :, start:stop].clone() for name, tensor in self.tensors.items()}

    def put(self, sequence: int, start: int, rows: Mapping[str, Tensor]) -> None:
        """Write rows of one sequence."""
        for name, tensor in self.tensors.items():
            tensor[sequence, :, start : start + rows[name].shape[1]] = rows[name].to(tensor)

    def hold(self, sequence: int, rows: int) -> bool:
        """Whether a sequence has room for the first `rows` rows, which it always holds."""
        return rows <= self.most_rows

    def release(self, sequence: int) -> None:
        """Nothing goes back."""

    def room(self, sequence: int) -> int:
        """How many first rows of a sequence can be kept."""
        return self.most_rows

    def reset(self) -> None:
        """Forget every row; their length says what counts."""
        self.lengths.zero_()


def _presents(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("past_key_values", "present"): tensor for name, tensor in tensors.items()}


def _positions(lengths: Tensor, rows: int, last: int) -> Tensor:
    steps = torch.arange(rows, device=lengths.device)
    return (lengths[:, None] + steps).to(torch.int64).clamp_max(last)
