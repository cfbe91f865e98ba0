"""Integers with a scale and a zero point for each group of input columns: what three packed formats share.

Every one of them defines value = (code - zero) * scale. The kernels that come with them round this to
the 16 bits of their activations; here it stays float32, in which a code of at most 8 bits times a
16-bit scale is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised.raw import whole
from mtp_exporter.quantised.stored import Floats, UnreadableError
from mtp_exporter.reading.safetensors_file import TensorInfo

ADVICE = "use the bf16 checkpoint"


def dequantise(codes: npt.NDArray[np.uint8], zeros: Floats, scales: Floats, group_of: npt.NDArray[np.intp]) -> Floats:
    """float32[rows, columns]: (code - zero) * scale.

    Args:
        codes: uint8[rows, columns].
        zeros: float32[rows, groups].
        scales: float32[rows, groups].
        group_of: intp[columns]; the group of each column.
    """
    values = codes.astype(np.float32)
    values -= zeros.take(group_of, axis=1)
    # A scale that is no number makes values that are none; whoever reads them checks that they are finite.
    with np.errstate(invalid="ignore", over="ignore"):
        values *= scales.take(group_of, axis=1)
    return values


def group_size(columns: int, groups: int, stated: frozenset[int]) -> int:
    """Columns in a group, from the shapes; the last group may be shorter only where the configuration says so.

    Args:
        stated: sizes that config.json names, -1 for whole rows; empty if it names none.

    Raises:
        UnreadableError: no stated size gives this number of groups, or the size is open.
    """
    if groups < 1:
        raise UnreadableError(f"its scales have {groups} groups")
    sizes = {columns if size == -1 else size for size in stated}
    fitting = {size for size in sizes if size > 0 and -(-columns // size) == groups}
    if sizes and not fitting:
        raise UnreadableError(
            f"its scales have {groups} groups for {columns} columns where config.json says group size "
            f"{' or '.join(map(str, sorted(stated)))}"
        )
    if groups == 1:
        return columns
    if len(fitting) == 1:
        return fitting.pop()
    if columns % groups or fitting:
        raise UnreadableError(f"{columns} columns in {groups} groups leave the group size open")
    return columns // groups


def group_of_columns(columns: int, size: int) -> npt.NDArray[np.intp]:
    """intp[columns]: groups in the order of the columns."""
    return np.arange(columns) // size


def stored_groups(g_idx: TensorInfo, groups: int) -> npt.NDArray[np.intp]:
    """intp[columns]: the group of each column as the file has it.

    Raises:
        CheckpointError: a group does not exist, or all columns are in the first of several.
    """
    found = whole(g_idx).astype(np.intp)
    if found.size and (found.min() < 0 or found.max() >= groups):
        raise CheckpointError(
            f"Tensor {g_idx.name!r} in {g_idx.file} puts columns into groups {found.min()} to {found.max()}, but the "
            f"scales have groups 0 to {groups - 1}; {ADVICE}."
        )
    # Some kernels take zeros for "in order", others for "all in group 0"; a true index reaches every group.
    if groups > 1 and not found.any():
        raise CheckpointError(
            f"Tensor {g_idx.name!r} in {g_idx.file} puts every column into group 0 where the scales have {groups} "
            f"groups, so the order is unknown; {ADVICE}."
        )
    return found
