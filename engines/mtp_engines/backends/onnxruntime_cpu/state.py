"""Committed and staged state of a batch of sequences, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.buffers import AnyArray, zeros
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, CachedMixer, ModelSpec
from mtp_engines.lowering.caches import cache_shape
from mtp_engines.lowering.commit import factor_shapes


class Cache:
    """The cache of one layer, read and written in place: key and value, or one latent that is both."""

    def __init__(self, layer: int, mixer: CachedMixer, limits: Limits, batch: int) -> None:
        heads, width = cache_shape(mixer)
        shape = (batch, heads, limits.capacity, width)
        self.past: dict[str, AnyArray]
        self.present: dict[str, AnyArray]
        if isinstance(mixer, AttentionSpec):
            key, value = zeros(*shape), zeros(*shape)
            self.past = {names.past_key(layer): key, names.past_value(layer): value}
            self.present = {names.present_key(layer): key, names.present_value(layer): value}
        else:
            latent = zeros(*shape)
            name = names.present_latent(layer)
            self.past = {names.past_latent(layer): latent}
            self.present = {name: latent, names.again(name): latent}


class TargetState:
    """Caches and recurrent states of the target.

    A verify reads the committed half of every recurrent state and writes the other half. When every
    staged row is kept, the halves change places and nothing is computed; otherwise the kept rows are
    repeated from the committed half into the other one first. The committed half is never written.
    """

    def __init__(self, spec: ModelSpec, limits: Limits, batch: int) -> None:
        self.batch = batch
        self.caches = [Cache(index, mixer, limits, batch) for index, mixer in spec.cached_layers()]
        self.recurrent: dict[int, tuple[AnyArray, AnyArray]] = {}
        self.conv: dict[int, tuple[AnyArray, AnyArray]] = {}
        for index, mixer in spec.delta_layers():
            shape = (batch, mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim)
            self.recurrent[index] = (zeros(*shape), zeros(*shape))
            shape_conv = (batch, mixer.conv_kernel - 1, mixer.conv_width)
            self.conv[index] = (zeros(*shape_conv), zeros(*shape_conv))
        self.committed = 0
        """Which half of each recurrent and convolution state is the committed one."""

    def past(self, half: int) -> dict[str, AnyArray]:
        """Inputs of the backbone when `half` is committed."""
        arrays: dict[str, AnyArray] = {}
        for cache in self.caches:
            arrays |= cache.past
        for index in self.recurrent:
            arrays |= self.past_of(index, half)
        return arrays

    def past_of(self, layer: int, half: int) -> dict[str, AnyArray]:
        """The two states of one gated delta layer in `half`."""
        return {
            names.past_conv(layer): self.conv[layer][half],
            names.past_recurrent(layer): self.recurrent[layer][half],
        }

    def present(self, half: int) -> dict[str, AnyArray]:
        """Outputs of the backbone when `half` is committed: caches in place, states in the other half."""
        arrays: dict[str, AnyArray] = {}
        for cache in self.caches:
            arrays |= cache.present
        for index in self.recurrent:
            arrays |= self.present_of(index, 1 - half)
        return arrays

    def present_of(self, layer: int, half: int) -> dict[str, AnyArray]:
        """The two states of one gated delta layer in `half`, under their output names."""
        return {
            names.present_conv(layer): self.conv[layer][half],
            names.present_recurrent(layer): self.recurrent[layer][half],
        }

    def snapshot(self, sequence: int, length: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the committed state of one sequence."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for cache in self.caches:
            arrays |= {name: array[sequence, :, :length].copy() for name, array in cache.past.items()}
        for index in self.recurrent:
            arrays[names.past_conv(index)] = self.conv[index][self.committed][sequence].copy()
            arrays[names.past_recurrent(index)] = self.recurrent[index][self.committed][sequence].copy()
        return arrays

    def reset(self) -> None:
        """Zero the committed half; caches need no clearing, since their length says what counts."""
        self.committed = 0
        for halves in (*self.recurrent.values(), *self.conv.values()):
            halves[0].fill(0)


def factor_buffers(spec: ModelSpec, batch: int, rows: int) -> dict[str, AnyArray]:
    """Replay factors of every gated delta layer for `rows` staged rows."""
    return {
        names.factor(index, name): np.zeros((batch, rows, *shape), np.float32)
        for index, mixer in spec.delta_layers()
        for name, shape in factor_shapes(mixer).items()
    }
