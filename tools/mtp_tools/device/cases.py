"""Fresh random inputs of every kernel, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.torch.call import Call, Tensor, Values
from mtp_plugins.accept.reference import accept
from mtp_plugins.deferred_conv.reference import deferred_conv
from mtp_plugins.deferred_delta.reference import Factors, deferred_delta
from mtp_plugins.paged_attention.reference import paged_attention
from mtp_plugins.paged_kv_append.reference import paged_kv_append
from mtp_plugins.skinny_product.reference import skinny_product

Float64 = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are.

    Attributes:
        context: committed rows before the new ones.
    """

    batch: int
    key_heads: int
    value_heads: int
    delta_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    hidden: int
    intermediate: int
    page_size: int = 32
    staged_rows: int = 16
    taps: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.delta_dim + self.value_heads * self.delta_dim


@dataclass(frozen=True)
class Case:
    """One call of one operator.

    Attributes:
        rows: inputs with one row a token, which can be cut to fewer.
        expected: the outputs in float64; None where they mean nothing.
    """

    operator: str
    inputs: list[Tensor]
    rows: tuple[int, ...]
    outputs: int
    expected: list[Float64 | None]

    def run(self, kernel: Callable[[Call], Values], first: int = 0, count: int | None = None) -> list[Tensor]:
        """Outputs of the kernel over all rows, or over `count` of them from `first`."""
        inputs = [
            x if place not in self.rows or count is None else x[:, first : first + count].contiguous()
            for place, x in enumerate(self.inputs)
        ]
        # What a kernel writes in place must not be the case's own.
        inputs = [x if place in self.rows else x.clone() for place, x in enumerate(inputs)]
        return list(kernel(Call(inputs, {}, self.outputs, self.inputs[0].device)))


class Cases:
    """Makes cases on a device, in one type of elements."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._s, self._device, self._dtype = sizes, device, dtype
        self._random = np.random.default_rng(seed)

    def delta(self, rows: int, accepted: int) -> Case:
        """DeferredDelta with `accepted` staged rows."""
        s = self._s
        key_width, value_width = s.key_heads * s.delta_dim, s.value_heads * s.delta_dim
        new = [self._draw(s.batch, rows, width) for width in (key_width, key_width, value_width)]
        decay = self._put(-np.abs(self._normal(s.batch, rows, s.value_heads)), torch.float32)
        beta = self._put(1 / (1 + np.exp(-self._normal(s.batch, rows, s.value_heads))), torch.float32)
        state = self._put(0.1 * self._normal(s.batch, s.value_heads, s.delta_dim, s.delta_dim), torch.float32)
        unit = self._normal(s.batch, s.staged_rows, s.key_heads, s.delta_dim)
        unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
        staged = [
            self._put(unit.reshape(s.batch, s.staged_rows, key_width), torch.float32),
            self._draw(s.batch, s.staged_rows, value_width),
            self._put(-np.abs(self._normal(s.batch, s.staged_rows, s.value_heads)), torch.float32),
            self._put(self._random.random((s.batch, s.staged_rows, s.value_heads)), torch.float32),
        ]
        counts = [self._counts(accepted), self._counts(0)]
        inputs = [*new, decay, beta, state, *staged, *counts]
        results = [self._delta_of([wide(x)[b] for x in inputs], accepted) for b in range(s.batch)]
        outputs, states = zip(*results, strict=True)
        expected: list[Float64 | None] = [np.stack(outputs), np.stack(states), None, None, None, None]
        return Case("DeferredDelta", inputs, (0, 1, 2, 3, 4), 6, expected)

    def _delta_of(self, x: list[Float64], accepted: int) -> tuple[Float64, Float64]:
        s = self._s

        def split(rows: Float64, heads: int) -> Float64:
            return rows.reshape(len(rows), heads, s.delta_dim)

        query, key = (split(rows, s.key_heads) for rows in x[:2])
        factors = Factors(split(x[6], s.key_heads), split(x[7], s.value_heads), x[8], x[9])
        output, state, _ = deferred_delta(
            query, key, split(x[2], s.value_heads), x[3], x[4], x[5], factors, accepted, 0
        )
        return output.reshape(len(output), -1), state

    def conv(self, rows: int, accepted: int) -> Case:
        """DeferredConv with `accepted` staged rows."""
        s = self._s
        x, staged = self._draw(s.batch, rows, s.channels), self._draw(s.batch, s.staged_rows, s.channels)
        weight = self._draw(s.channels, 1, s.taps)
        state = self._put(self._normal(s.batch, s.taps - 1, s.channels), torch.float32)
        inputs = [x, weight, state, staged, self._counts(accepted), self._counts(0)]
        wides = [wide(value) for value in inputs]
        results = [
            deferred_conv(wides[0][b], wides[1], wides[2][b], wides[3][b], accepted, 0)[:2] for b in range(s.batch)
        ]
        outputs, states = zip(*results, strict=True)
        return Case("DeferredConv", inputs, (0,), 3, [np.stack(outputs), np.stack(states), None])

    def append(self, rows: int) -> Case:
        """PagedKvAppend over shuffled pages."""
        s = self._s
        pages, table, lengths = self._pages(rows)
        new = [self._draw(s.batch, rows, s.kv_heads * s.head_dim) for _ in range(2)]
        expected = [
            paged_kv_append(wide(x), wide(store), table.cpu().numpy(), lengths.cpu().numpy())
            for x, store in zip(new, pages, strict=True)
        ]
        return Case("PagedKvAppend", [*new, *pages, table, lengths], (0, 1), 2, [*expected])

    def attention(self, rows: int) -> Case:
        """PagedAttention over shuffled pages that hold the new rows already."""
        s = self._s
        pages, table, lengths = self._pages(rows)
        query = self._draw(s.batch, rows, s.heads * s.head_dim)
        keys, values = (wide(store) for store in pages)
        expected = paged_attention(wide(query), keys, values, table.cpu().numpy(), lengths.cpu().numpy())
        return Case("PagedAttention", [query, *pages, table, lengths], (0,), 1, [expected])

    def product(self, rows: int, width_in: int, width_out: int) -> Case:
        """SkinnyProduct."""
        x = self._draw(self._s.batch, rows, width_in)
        weight = self._put(self._normal(width_out, width_in) * width_in**-0.5, self._dtype)
        return Case("SkinnyProduct", [x, weight], (0,), 1, [skinny_product(wide(x), wide(weight))])

    def accept(self, draft_tokens: int) -> Case:
        """Accept with a prefix of some length right in each sequence."""
        chosen = self._random.integers(0, 9, (self._s.batch, draft_tokens + 1))
        draft = chosen[:, :-1].copy()
        for b in range(self._s.batch):
            draft[b, self._random.integers(0, draft_tokens + 1) :] += 1
        emitted = np.zeros_like(chosen)
        results = [accept(draft[b], chosen[b]) for b in range(self._s.batch)]
        for b, (count, tokens, _) in enumerate(results):
            emitted[b, : count + 1] = tokens
        counts = np.array([count for count, _, _ in results])
        last = np.array([bonus for _, _, bonus in results])
        expected = [x.astype(np.float64) for x in (counts, counts + 1, emitted, last)]
        ids = [torch.from_numpy(x).to(self._device) for x in (draft, chosen)]
        return Case("Accept", ids, (), 4, [*expected])

    def _pages(self, rows: int) -> tuple[list[Tensor], Tensor, Tensor]:
        s = self._s
        columns = -(-(s.context + rows) // s.page_size)
        shape = (s.batch * columns, s.page_size, s.kv_heads, s.head_dim)
        table = self._random.permutation(s.batch * columns).reshape(s.batch, columns).astype(np.int32)
        lengths = np.array([s.context - b for b in range(s.batch)], np.int32)
        stores = [self._draw(*shape) for _ in range(2)]
        return stores, torch.from_numpy(table).to(self._device), torch.from_numpy(lengths).to(self._device)

    def _normal(self, *shape: int) -> Float64:
        return self._random.standard_normal(shape)

    def _draw(self, *shape: int) -> Tensor:
        return self._put(self._normal(*shape), self._dtype)

    def _put(self, array: Float64, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(dtype).to(self._device)

    def _counts(self, count: int) -> Tensor:
        return torch.full((self._s.batch,), count, dtype=torch.int32, device=self._device)


def wide(tensor: Tensor) -> Float64:
    """The very values of a tensor in float64."""
    array: Float64 = tensor.double().cpu().numpy()
    return array
