"""Committed and staged state of several sequences, as arrays; a window of them shares the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, zeros
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, CachedMixer, ModelSpec
from mtp_engines.lowering.caches import cache_shape

Arrays = dict[str, AnyArray]


class Cache:
    """The cache of one layer, read and written in place: key and value, or one latent that is both."""

    def __init__(self, layer: int, past: Arrays) -> None:
        """`past` has the arrays under their input names, [batch, heads, capacity, width]."""
        self._layer, self.past = layer, past
        self.present: Arrays
        if names.past_latent(layer) in past:
            latent = past[names.past_latent(layer)]
            name = names.present_latent(layer)
            self.present = {name: latent, names.again(name): latent}
        else:
            key, value = past[names.past_key(layer)], past[names.past_value(layer)]
            self.present = {names.present_key(layer): key, names.present_value(layer): value}

    @classmethod
    def empty(cls, layer: int, mixer: CachedMixer, limits: Limits, batch: int) -> Cache:
        """Memory for `batch` sequences."""
        heads, width = cache_shape(mixer)
        latent = (names.past_latent(layer),)
        kinds = (names.past_key(layer), names.past_value(layer)) if isinstance(mixer, AttentionSpec) else latent
        return cls(layer, {name: zeros(batch, heads, limits.capacity, width) for name in kinds})

    def window(self, start: int, stop: int) -> Cache:
        """The cache of some of the sequences."""
        return Cache(self._layer, {name: array[start:stop] for name, array in self.past.items()})

    def rows(self, sequence: int, start: int, stop: int) -> Arrays:
        """Views of rows of one sequence, [heads, rows, width], by input name."""
        return {name: array[sequence, :, start:stop] for name, array in self.past.items()}


class TargetState:
    """Caches and recurrent states of the target.

    A verify reads the committed half of every recurrent state and writes the other half. When every
    staged row is kept, the halves change places and nothing is computed; otherwise the kept rows are
    repeated from the committed half into the other one first. The committed half is never written.
    """

    def __init__(
        self,
        caches: list[Cache],
        recurrent: dict[int, tuple[AnyArray, AnyArray]],
        conv: dict[int, tuple[AnyArray, AnyArray]],
        halves: npt.NDArray[np.int8],
    ) -> None:
        """`halves` says for each sequence which half of its recurrent and convolution states is the committed one."""
        self.caches, self.recurrent, self.conv, self._halves = caches, recurrent, conv, halves

    @classmethod
    def empty(cls, spec: ModelSpec, limits: Limits, batch: int) -> TargetState:
        """Memory for `batch` sequences."""
        recurrent, conv = {}, {}
        for index, mixer in spec.delta_layers():
            shape = (batch, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
            recurrent[index] = (zeros(*shape), zeros(*shape))
            shape_conv = (batch, mixer.conv_kernel - 1, mixer.conv_width)
            conv[index] = (zeros(*shape_conv), zeros(*shape_conv))
        caches = [Cache.empty(index, mixer, limits, batch) for index, mixer in spec.cached_layers()]
        return cls(caches, recurrent, conv, np.zeros(batch, np.int8))

    def window(self, start: int, stop: int) -> TargetState:
        """The state of some of the sequences."""
        recurrent, conv = (
            {index: (halves[0][start:stop], halves[1][start:stop]) for index, halves in states.items()}
            for states in (self.recurrent, self.conv)
        )
        return TargetState(
            [cache.window(start, stop) for cache in self.caches], recurrent, conv, self._halves[start:stop]
        )

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self._halves)

    def committed(self) -> int:
        """The half that is committed in all sequences; where they disagree, the fewer ones are copied over.

        They disagree only if they did not run together before.
        """
        half = int(self._halves[0])
        if self.batch > 1 and (self._halves != half).any():
            half = int(2 * int(self._halves.sum()) > self.batch)
            for sequence in np.flatnonzero(self._halves != half):
                for halves in (*self.recurrent.values(), *self.conv.values()):
                    halves[half][sequence] = halves[1 - half][sequence]
            self._halves[:] = half
        return half

    def swap(self) -> None:
        """Make the other half the committed one."""
        self._halves ^= 1

    def past(self, half: int) -> Arrays:
        """Inputs of the backbone when `half` is committed."""
        arrays: Arrays = {}
        for cache in self.caches:
            arrays |= cache.past
        for index in self.recurrent:
            arrays |= self.past_of(index, half)
        return arrays

    def past_of(self, layer: int, half: int) -> Arrays:
        """The two states of one gated delta layer in `half`."""
        return {
            names.past_conv(layer): self.conv[layer][half],
            names.past_recurrent(layer): self.recurrent[layer][half],
        }

    def present(self, half: int) -> Arrays:
        """Outputs of the backbone when `half` is committed: caches in place, states in the other half."""
        arrays: Arrays = {}
        for cache in self.caches:
            arrays |= cache.present
        for index in self.recurrent:
            arrays |= self.present_of(index, 1 - half)
        return arrays

    def present_of(self, layer: int, half: int) -> Arrays:
        """The two states of one gated delta layer in `half`, under their output names."""
        return {
            names.present_conv(layer): self.conv[layer][half],
            names.present_recurrent(layer): self.recurrent[layer][half],
        }

    def rows(self, sequence: int, start: int, stop: int) -> Arrays:
        """Views of rows of every cache of one sequence, by input name."""
        arrays: Arrays = {}
        for cache in self.caches:
            arrays |= cache.rows(sequence, start, stop)
        return arrays

    def recurrent_of(self, sequence: int) -> Arrays:
        """Views of the committed recurrent and convolution states of one sequence, by input name."""
        half = self._halves[sequence]
        arrays: Arrays = {}
        for index in self.recurrent:
            arrays |= {name: array[sequence] for name, array in self.past_of(index, half).items()}
        return arrays

    def reset(self) -> None:
        """Zero the states; caches need no clearing, since their length says what counts."""
        self._halves[:] = 0
        for halves in (*self.recurrent.values(), *self.conv.values()):
            halves[0].fill(0)


class Scratch:
    """Memory for the replay factors of staged rows; runs of all widths share it, since one at a time is staged."""

    def __init__(self, spec: ModelSpec, most_rows: int) -> None:
        """Room for `most_rows` rows, those of all sequences together."""
        self._widths = {index: sum(mixer.factor_widths.values()) for index, mixer in spec.delta_layers()}
        self._most = most_rows
        self._flat = {layer: zeros(most_rows * width) for layer, width in self._widths.items()}

    def factors(self, batch: int, rows: int) -> dict[int, AnyArray]:
        """Arrays [batch, rows, width] by layer; of their own where the shared memory is too small."""
        if batch * rows > self._most:
            return {layer: zeros(batch, rows, width) for layer, width in self._widths.items()}
        return {
            layer: self._flat[layer][: batch * rows * width].reshape(batch, rows, width)
            for layer, width in self._widths.items()
        }


def copies(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Copies under the same names."""
    return {name: array.copy() for name, array in arrays.items()}
