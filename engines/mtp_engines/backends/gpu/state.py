"""The state of a batch on a device: pages, recurrent states, and the rows that wait for a decision."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.pages import PAGE_SIZE, PagePool, page_columns
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, ModelSpec
from mtp_engines.errors import ContractError
from mtp_engines.lowering.commit import factor_shapes

Tensor = torch.Tensor


class Caches(Protocol):
    """The caches of some attention layers, and one length for each sequence."""

    lengths: Tensor
    """int32[batch], on the device."""

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Make room for the first rows[b] rows of each sequence.

        Raises:
            ContractError: there is none.
        """

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph."""

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""

    def snapshot(self, sequence: int, length: int) -> dict[str, npt.NDArray[Any]]:
        """The rows of one sequence, float32[heads, length, width] by name."""

    def reset(self) -> None:
        """Forget every row."""


class CachePages:
    """Pages of some attention layers: one table, one length for each sequence, a pool of pages for each cache."""

    def __init__(
        self, layers: dict[int, AttentionSpec], limits: Limits, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        columns = page_columns(limits)
        self.pool = PagePool(batch * columns, PAGE_SIZE, batch, columns)
        self.table = torch.full((batch, columns), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._last_position = limits.capacity - 1
        self._layers = layers
        self.tensors: dict[str, Tensor] = {}
        for index, mixer in layers.items():
            shape = (batch * columns, PAGE_SIZE, mixer.num_kv_heads, mixer.head_dim)
            for name in (names.past_key(index), names.past_value(index)):
                self.tensors[name] = torch.zeros(shape, dtype=dtype, device=device)

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Make room for the first rows[b] rows of each sequence."""
        changed = [self.pool.reserve(sequence, int(count)) for sequence, count in enumerate(rows)]
        if any(changed):
            self.table.copy_(torch.from_numpy(self.pool.table))

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph."""
        return self.tensors | {names.BLOCK_TABLE: self.table}

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""
        return _presents(self.tensors)

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""
        return _positions(lengths, rows, self._last_position)

    def snapshot(self, sequence: int, length: int) -> dict[str, npt.NDArray[Any]]:
        """The rows of one sequence, float32[heads, length, width] by name."""
        pages = torch.from_numpy(self.pool.table[sequence]).long()
        pages = pages[: -(-length // PAGE_SIZE)].to(self.lengths.device)
        return {
            name: tensor[pages].flatten(0, 1)[:length].transpose(0, 1).float().cpu().numpy().copy()
            for name, tensor in self.tensors.items()
        }

    def reset(self) -> None:
        """Give back every page."""
        for sequence in range(len(self.pool.table)):
            self.pool.release(sequence)
        self.table.fill_(-1)
        self.lengths.zero_()


class DenseCaches:
    """Caches with the same number of rows for every sequence, for kernels that know no pages."""

    def __init__(
        self, layers: dict[int, AttentionSpec], limits: Limits, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._capacity, self._last_position = _room(limits), limits.capacity - 1
        self.tensors: dict[str, Tensor] = {}
        for index, mixer in layers.items():
            shape = (batch, mixer.num_kv_heads, self._capacity, mixer.head_dim)
            for name in (names.past_key(index), names.past_value(index)):
                self.tensors[name] = torch.zeros(shape, dtype=dtype, device=device)

    def reserve(self, rows: npt.NDArray[np.int64]) -> None:
        """Check that the first rows[b] rows of each sequence have room.

        Raises:
            ContractError: they have none.
        """
        if rows.max() > self._capacity:
            raise ContractError(
                f"Sequence {int(rows.argmax())} needs {int(rows.max())} rows, and its caches have {self._capacity}. "
                "Build the bundle with a larger --max-model-len."
            )

    def feeds(self) -> dict[str, Tensor]:
        """Inputs of a graph."""
        return dict(self.tensors)

    def into(self) -> dict[str, Tensor]:
        """Outputs of a graph, in place."""
        return _presents(self.tensors)

    def positions(self, lengths: Tensor, rows: int) -> Tensor:
        """int64[batch, rows]; padding behind the context stays inside the rotary tables."""
        return _positions(lengths, rows, self._last_position)

    def snapshot(self, sequence: int, length: int) -> dict[str, npt.NDArray[Any]]:
        """The rows of one sequence, float32[heads, length, width] by name."""
        rows = {name: tensor[sequence, :, :length] for name, tensor in self.tensors.items()}
        return {name: tensor.float().cpu().numpy().copy() for name, tensor in rows.items()}

    def reset(self) -> None:
        """Forget every row; their length says what counts."""
        self.lengths.zero_()


def _room(limits: Limits) -> int:
    """Rows of a sequence: its context, and the padding of a chunk of a prompt behind it."""
    return limits.capacity + limits.prefill_chunk


def _presents(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("past_key_values", "present"): tensor for name, tensor in tensors.items()}


def _positions(lengths: Tensor, rows: int, last: int) -> Tensor:
    steps = torch.arange(rows, device=lengths.device)
    return (lengths[:, None] + steps).to(torch.int64).clamp_max(last)


class DeltaStates:
    """Recurrent and convolution states, and two sets of staged rows that change places with every call.

    A call commits the first `accepted` rows of the set that the last one left, so that a state is read and
    written once a cycle and taking rows back costs nothing.
    """

    def __init__(self, spec: ModelSpec, batch: int, staged_rows: int, device: torch.device) -> None:
        self._layers = dict(spec.delta_layers())
        self.accepted = torch.zeros(batch, dtype=torch.int32, device=device)
        self.states: dict[str, Tensor] = {}
        self.staged: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self.newest = 0
        """The set that holds the rows of the last call."""
        for index, mixer in self._layers.items():
            conv = (batch, mixer.conv_kernel - 1, mixer.conv_width)
            recurrent = (batch, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
            self.states[names.past_conv(index)] = torch.zeros(conv, device=device)
            self.states[names.past_recurrent(index)] = torch.zeros(recurrent, device=device)
            for buffers in self.staged:
                for name, shape in factor_shapes(mixer).items():
                    buffers[f"{index}.{name}"] = torch.zeros((batch, staged_rows, *shape), device=device)

    def feeds(self, newest: int) -> dict[str, Tensor]:
        """Inputs of a graph when the set `newest` holds the rows of the last call."""
        staged = {f"staged.{name}": rows for name, rows in self.staged[newest].items()}
        return self.states | staged | {names.ACCEPTED_ROWS: self.accepted}

    def into(self, newest: int) -> dict[str, Tensor]:
        """Outputs of the same graph: the states in place, the new rows in the other set."""
        states = {name.replace("past", "present"): state for name, state in self.states.items()}
        return states | {f"next.{name}": rows for name, rows in self.staged[1 - newest].items()}

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """The states of one sequence by name; rows that are accepted and not yet in them are left out."""
        return {name: state[sequence].cpu().numpy().copy() for name, state in self.states.items()}

    def reset(self) -> None:
        """No rows and no state."""
        self.accepted.zero_()
        for state in self.states.values():
            state.zero_()
