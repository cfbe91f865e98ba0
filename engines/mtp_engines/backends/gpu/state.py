"""Recurrent states of a batch on a device, and the rows that wait for a decision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.parts import Part
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


class DeltaStates:
    """Recurrent and convolution states, and two sets of staged rows that change places with every call.

    A call commits the first `accepted` rows of the set that the last one left, so that a state is read and
    written once a cycle and taking rows back costs nothing. Each sequence has a newest set of its own, since not all
    of them run together.

    Attributes:
        states: float32[batch, ...] by input name.
        staged: the two sets, float32[batch, staged_rows, ...] by layer and name.
        accepted: int32[batch], rows of the newest set that are not in the states yet.
    """

    def __init__(
        self,
        states: Tensors,
        staged: tuple[Tensors, Tensors],
        accepted: Tensor,
        newest: npt.NDArray[np.int8],
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Sequences `start` to `stop` of the given ones; `newest` is the set of the last call, of each."""
        self._whole = states, staged, accepted, newest
        self._start, self._stop = start, len(newest) if stop is None else stop
        self._newest = newest[self._start : self._stop]
        self._accepted = self._part(accepted)
        self._states = {name: self._part(tensor) for name, tensor in states.items()}
        self._staged = tuple({name: self._part(rows) for name, rows in buffers.items()} for buffers in staged)
        self.accepted = self._accepted.view
        self.states = {name: part.view for name, part in self._states.items()}
        self.staged = tuple({name: part.view for name, part in parts.items()} for parts in self._staged)

    @classmethod
    def empty(cls, spec: ModelSpec, batch: int, staged_rows: int, device: torch.device) -> DeltaStates:
        """Memory for `batch` sequences."""
        states: Tensors = {}
        staged: tuple[Tensors, Tensors] = ({}, {})
        for index, mixer in spec.delta_layers():
            conv = (batch, mixer.conv_kernel - 1, mixer.conv_width)
            recurrent = (batch, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
            states[names.past_conv(index)] = torch.zeros(conv, device=device)
            states[names.past_recurrent(index)] = torch.zeros(recurrent, device=device)
            for buffers in staged:
                for name, width in mixer.factor_widths.items():
                    buffers[f"{index}.{name}"] = torch.zeros((batch, staged_rows, width), device=device)
        return cls(states, staged, torch.zeros(batch, dtype=torch.int32, device=device), np.zeros(batch, np.int8))

    def window(self, start: int, stop: int) -> DeltaStates:
        """Those of some of the sequences, in the same memory."""
        return DeltaStates(*self._whole, self._start + start, self._start + stop)

    def agreed(self) -> int:
        """The set with the rows of the last call of every sequence; where they disagree, the fewer ones are copied.

        They disagree only if they did not run together before. Not for a graph that is captured.
        """
        newest = int(self._newest[0])
        if (self._newest != newest).any():
            newest = int(2 * int(self._newest.sum()) > len(self._newest))
            for sequence in np.flatnonzero(self._newest != newest).tolist():
                for name, rows in self.staged[newest].items():
                    rows[sequence] = self.staged[1 - newest][name][sequence]
            self._newest[:] = newest
        return newest

    def swap(self) -> None:
        """The rows of this call are the newest of every sequence."""
        self._newest ^= 1

    def load(self, newest: int) -> None:
        """Before a run with the set `newest`."""
        for part in (self._accepted, *self._states.values(), *self._staged[newest].values()):
            part.load()

    def store(self, newest: int) -> None:
        """After it."""
        for part in (*self._states.values(), *self._staged[1 - newest].values()):
            part.store()

    def feeds(self, newest: int) -> Tensors:
        """Inputs of a graph when the set `newest` holds the rows of the last call."""
        states = {name: part.bound for name, part in self._states.items()}
        staged = {f"staged.{name}": part.bound for name, part in self._staged[newest].items()}
        return states | staged | {names.ACCEPTED_ROWS: self._accepted.bound}

    def into(self, newest: int) -> Tensors:
        """Outputs of the same graph: the states in place, the new rows in the other set."""
        states = {name.replace("past", "present"): part.bound for name, part in self._states.items()}
        return states | {f"next.{name}": part.bound for name, part in self._staged[1 - newest].items()}

    def of(self, sequence: int) -> Tensors:
        """Views of the states of one sequence by name; rows that are accepted and not yet in them are left out."""
        return {name: state[sequence] for name, state in self.states.items()}

    def reset(self) -> None:
        """No rows and no state."""
        self.accepted.zero_()
        for state in self.states.values():
            state.zero_()

    def _part(self, whole: Tensor) -> Part:
        return Part(whole, self._start, self._stop)
