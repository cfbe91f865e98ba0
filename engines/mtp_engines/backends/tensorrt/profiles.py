"""Which optimisation profile of an engine takes the tensors of a call. Importing this needs no TensorRT."""

from __future__ import annotations

from collections.abc import Mapping

from mtp_engines.builders.tensorrt.io import MOST_ROWS
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.errors import BundleError


def profile_of(file: EngineFile, shapes: Mapping[str, tuple[int, ...]], max_batch: int) -> int:
    """Number of the profile, as `mtp_engines.builders.tensorrt.io.profiles_of` makes them.

    Raises:
        BundleError: no profile has so many rows.
    """
    if names.INPUT_IDS not in shapes:
        rows = shapes[names.HIDDEN][0]
        scored = [width for width in file.rows if width <= MOST_ROWS]
        fitting = [place for place, width in enumerate(scored) if width <= rows <= width * max_batch]
    else:
        rows = shapes[names.INPUT_IDS][1]
        fitting = [place for place, width in enumerate(file.rows) if width == rows]
        if shapes.get(names.CHAIN, (0, 0))[1]:
            # A head that takes its own rows another way has one more profile, for one such row.
            fitting = [len(file.rows)] if rows == 1 else []
    if not fitting:
        raise BundleError(
            f"The engine {file.file} has no profile for {rows} rows; it was built for "
            f"{', '.join(map(str, file.rows))} rows of up to {max_batch} sequences. Build the engines again."
        )
    return fitting[0]
