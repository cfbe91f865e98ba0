"""The check at the end of a build: the written graphs against NumPy, and rows against their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import DraftAgreement, Limits, Numerics, Parity
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import BuildError
from mtp_engines.lowering.products import FAST
from mtp_exporter.checking.pieces import Backbone, Floats
from mtp_exporter.checking.trace import Pair, Taps, head_pairs, target_pairs
from mtp_exporter.checking.vocabulary import choices
from mtp_exporter.reading.source import Source

TOLERANCE = 1e-3
"""Greatest difference over the greatest reference value. Rounding gave 1.5e-5 in 32 layers (the 4B shape, made-up
weights); each fault of `tests/exporter/test_check.py` is far above."""
_EXACT_ROWS = 8


@dataclass(frozen=True)
class Check:
    """What a check measured."""

    parity: Parity
    numerics: Numerics
    agreement: DraftAgreement | None


@dataclass
class _Record:
    worst: float = 0.0
    where: str = names.residual(0)

    def compare(self, pair: Pair) -> None:
        error = float(np.abs(pair.built - pair.expected).max() / max(float(np.abs(pair.expected).max()), 1e-30))
        if not error <= self.worst:
            self.worst, self.where = error, pair.name
        if not error <= TOLERANCE:
            raise BuildError(
                f"The built graphs disagree with a NumPy forward of the checkpoint at {pair.name}: the difference is "
                f"{error:.1e} of the greatest value, at most {TOLERANCE:.0e} is allowed. Nothing was written; report "
                "this with the output of `mtp-export inspect`."
            )


# exp of great values is inf in the reference, and a gate of it 0 or 1: right, and not worth a warning.
@np.errstate(over="ignore", under="ignore")
def check_graphs(
    spec: ModelSpec,
    limits: Limits,
    backbone: Path,
    heads: tuple[Path, ...],
    source: Source,
    ids: npt.NDArray[np.int64],
    advance: Callable[[int], None] = lambda layers: None,
) -> Check:
    """Run the graphs over one text and compare every layer of the target and every stage of the head with NumPy.

    Args:
        heads: one graph for each trained depth.
        source: the checkpoint's tensors by role.
        ids: int64[rows], a text of at least two tokens that fits the context.
        advance: told of every layer that was checked.

    Raises:
        BuildError: a stage differs by more than the tolerance.
    """
    record = _Record()
    first_difference: str | None = None
    # Values are compared in float32; rows are tested in the form that runs, which may round them by blocks.
    pieces = Backbone(backbone, spec, limits)
    running = Backbone(backbone, spec, limits, FAST) if pieces.rounds_rows else None
    taps = Taps(spec)
    for pair in target_pairs(spec, pieces, source, ids, taps):
        record.compare(pair)
        if pair.layer is not None and pair.index is not None and pair.entering is not None:
            layer = running.layer(pair.index) if running else pair.layer
            first_difference = first_difference or layer.first_difference(pair.entering[:, :_EXACT_ROWS])
            advance(1)
    picked = choices(backbone, source, "head", taps.hidden[0], record.compare)
    agreement = None
    if heads:
        out: Floats | None = None
        for pair in head_pairs(spec, limits, heads, source, ids, taps.states):
            record.compare(pair)
            out = pair.built if out is None and pair.name == names.HIDDEN_OUT else out
        assert out is not None and spec.mtp is not None
        agreement = _agreement(spec, backbone, heads[0], source, out, picked[1:], record)
    parity = Parity(len(ids), record.worst, record.where, TOLERANCE)
    promise = Numerics("near-tie" if first_difference else "exact", _EXACT_ROWS, first_difference)
    return Check(parity, promise, agreement)


def _agreement(
    spec: ModelSpec,
    backbone: Path,
    head: Path,
    source: Source,
    rows: Floats,
    picked: npt.NDArray[np.int64],
    record: _Record,
) -> DraftAgreement:
    """How many first drafts are what the target picked, for the head's rows float32[rows, hidden_size]."""
    mtp, whole = spec.mtp, None
    assert mtp is not None
    if mtp.own_head:
        drafts = choices(head, source, "mtp.head", rows, record.compare)
        drafts = source("mtp.ids")[drafts] if mtp.has_table else drafts
    else:
        drafts = choices(backbone, source, "head", rows, record.compare)
    if mtp.kind == "mtp" and mtp.draft_vocab_size is not None:
        whole = int((choices(backbone, source, "head", rows, record.compare) == picked).sum())
    return DraftAgreement(len(drafts), int((drafts == picked).sum()), whole)
