"""Weights of one byte each, fp8 or int8, with scales for the tensor, its rows, groups or blocks.

value = stored * scale for fp8 (`weight_scale_inv` too is a factor: it is the inverse of the scale that
quantised) and (stored - zero point) * scale for int8, both in float32. Sources: `Fp8Dequantize` in
transformers' finegrained_fp8.py; `_dequantize` and `_process_block` in compressed-tensors'
quantization/lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from mtp_exporter.quantised.grouped import group_size
from mtp_exporter.quantised.raw import FP8_TYPES, SCALE_TYPES, floats, rows_of, whole
from mtp_exporter.quantised.settings import Settings
from mtp_exporter.quantised.stored import Floats, QuantisedTensor, UnreadableError
from mtp_exporter.reading.safetensors_file import TensorInfo


@dataclass(frozen=True)
class Grid:
    """How the scales lie over a tensor: `cells` is the extent along each axis that shares one scale."""

    label: str
    cells: tuple[int, ...]

    def counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Number of scales along each axis; a cell at the end of an axis may be cut short."""
        return tuple(-(-size // cell) for size, cell in zip(shape, self.cells, strict=True))


def scaled_tensor(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> QuantisedTensor:
    """The tensor of the one-byte weight in `roles`, which has a scale beside it.

    Args:
        roles: `weight` [out, in] or [experts, out, in], and its companions by their usual names.

    Raises:
        UnreadableError: the companions are not those of a known method, or do not fit the weight.
    """
    weight = roles["weight"]
    if not weight.shape:
        raise UnreadableError("it is a single number")
    is_fp8 = weight.dtype in FP8_TYPES
    zeros = roles.get("weight_zero_point")
    allowed = {"weight", "weight_scale"} | ({"weight_scale_inv"} if is_fp8 else {"weight_zero_point"})
    unknown = sorted(roles[role].name for role in roles if role not in allowed)
    if unknown:
        raise UnreadableError(f"it has a companion {unknown[0]!r} of unknown meaning")
    scale = _only_scale(roles, is_fp8)
    if zeros is None and not is_fp8 and settings.symmetric == {False}:
        raise UnreadableError("config.json says that it is not symmetric, and it has no zero point")
    if zeros is not None and (zeros.dtype != "I8" or zeros.shape != scale.shape):
        raise UnreadableError(
            f"its zero point is {zeros.dtype} {list(zeros.shape)}, expected I8 {list(scale.shape)} as its scale"
        )
    grid = _fp8_grid(weight.shape, scale.shape, settings) if is_fp8 else _int_grid(weight.shape, scale.shape, settings)

    def decode(start: int, count: int) -> Floats:
        values = floats(rows_of(weight, start, count))
        # Powers of two and NaN may leave the range; whoever reads the values checks that they are finite.
        with np.errstate(invalid="ignore", over="ignore"):
            if zeros is not None:
                values -= _spread(zeros, grid, weight.shape, start, count)
            values *= _spread(scale, grid, weight.shape, start, count)
        return values

    parts = (weight, scale) if zeros is None else (weight, scale, zeros)
    return QuantisedTensor(name, f"{weight.dtype} ({grid.label})", weight.shape, parts, decode)


def _only_scale(roles: Mapping[str, TensorInfo], is_fp8: bool) -> TensorInfo:
    scales = [roles[role] for role in ("weight_scale", "weight_scale_inv") if role in roles]
    if not scales:
        raise UnreadableError("it has no scale")
    if len(scales) > 1:
        raise UnreadableError("it has both weight_scale and weight_scale_inv")
    # An exponent stored as U8 looks like an integer scale; only the dtype that says what it is is taken.
    allowed = (*SCALE_TYPES, "F8_E8M0") if is_fp8 else SCALE_TYPES
    if scales[0].dtype not in allowed:
        raise UnreadableError(f"its scale has dtype {scales[0].dtype}, expected {' or '.join(allowed)}")
    return scales[0]


def _fp8_grid(shape: tuple[int, ...], scales: tuple[int, ...], settings: Settings) -> Grid:
    plain = _plain_grid(shape, scales)
    if plain is not None and not settings.has_blocks:
        return plain
    blocks = settings.blocks() if len(scales) == len(shape) in (2, 3) else ()
    grids = [Grid(f"block {rows}x{columns}", (*(1,) * (len(shape) - 2), rows, columns)) for rows, columns in blocks]
    fitting = [grid for grid in grids if grid.counts(shape) == scales]
    if len(fitting) == 1:
        return fitting[0]
    if plain is not None:
        return plain
    sizes = " or ".join(f"{rows}x{columns}" for rows, columns in blocks)
    raise UnreadableError(
        f"its scale has shape {list(scales)}, which is neither one for the tensor or a row nor "
        f"{'exactly one size' if fitting else 'one'} for a block of {sizes or 'a matrix'} of its {list(shape)}"
    )


def _int_grid(shape: tuple[int, ...], scales: tuple[int, ...], settings: Settings) -> Grid:
    grid = _plain_grid(shape, scales)
    if grid is not None:
        return grid
    if len(scales) != len(shape) or scales[:-1] != shape[:-1]:
        raise UnreadableError(
            f"its scale has shape {list(scales)}, which is neither one for the tensor nor for rows or groups of its "
            f"{list(shape)}"
        )
    size = group_size(shape[-1], scales[-1], settings.group_sizes)
    return Grid(f"group {size}", (*(1,) * (len(shape) - 1), size))


def _plain_grid(shape: tuple[int, ...], scales: tuple[int, ...]) -> Grid | None:
    """One scale for the tensor, or for each entry along axes that the shapes name beyond doubt."""
    if prod(scales) == 1:
        return Grid("per tensor", tuple(max(size, 1) for size in shape))
    if scales == shape[:1] and len(shape) > 1:
        scales = (*scales, *(1,) * (len(shape) - 1))
    if len(shape) == 2 and scales == (shape[0], 1):
        return Grid("per channel", (1, shape[1]))
    if len(shape) == 3 and scales == (shape[0], 1, 1):
        return Grid("per expert", (1, shape[1], shape[2]))
    # The second form is that of experts whose output axis is the last.
    if len(shape) == 3 and scales in ((*shape[:2], 1), (shape[0], 1, shape[2])):
        return Grid("per channel", tuple(1 if size > 1 else full for size, full in zip(scales, shape, strict=True)))
    return None


def _spread(scale: TensorInfo, grid: Grid, shape: tuple[int, ...], start: int, count: int) -> Floats:
    """Scales of rows `start` to `start + count`, repeated so that they broadcast over float32[count, *shape[1:]]."""
    cell = grid.cells[0]
    counts = grid.counts(shape)
    if prod(scale.shape) == 1:
        return floats(whole(scale)).reshape(())
    first = start // cell
    stored = floats(rows_of(scale, first, -(-(start + count) // cell) - first))
    values = stored.reshape(-1, *counts[1:])[(start + np.arange(count)) // cell - first]
    for axis in range(1, len(shape)):
        if counts[axis] > 1:
            values = np.repeat(values, grid.cells[axis], axis=axis)[(slice(None),) * axis + (slice(shape[axis]),)]
    return values
