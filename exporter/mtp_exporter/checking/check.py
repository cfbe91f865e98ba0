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
from mtp_engines.kernels.library import path_of_kernels
from mtp_engines.lowering.attention_trial import attention_that_splits
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
    first_difference = attention_that_splits(spec) if path_of_kernels() is None else None
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
    out: Floats | None = None
    for pair in head_pairs(spec, limits, heads, source, ids, taps.states) if heads else ():
        record.compare(pair)
        out = pair.built if out is None and pair.name == names.HIDDEN_OUT else out
    agreement = _agreement(spec, backbone, heads, source, taps.hidden[0], out, record)
    parity = Parity(len(ids), record.worst, record.where, TOLERANCE)
    promise = Numerics("near-tie" if first_difference else "exact", _EXACT_ROWS, first_difference)
    return Check(parity, promise, agreement)


def _agreement(
    spec: ModelSpec,
    backbone: Path,
    heads: tuple[Path, ...],
    source: Source,
    hidden: Floats,
    out: Floats | None,
    record: _Record,
) -> DraftAgreement | None:
    """How many first drafts are what the target picks, for its rows and the head's, float32[rows, hidden_size] each.

    The target's vocabulary head is read once for both: nothing else in a checkpoint is as large.
    """
    mtp = spec.mtp
    if mtp is None or out is None:
        choices(backbone, source, "head", hidden, record.compare)
        return None
    trimmed = mtp.kind == "mtp" and mtp.draft_vocab_size is not None
    shared = [hidden, out] if trimmed or not mtp.own_head else [hidden]
    found = choices(backbone, source, "head", np.concatenate(shared), record.compare)
    picked, whole = found[1 : len(hidden)], found[len(hidden) :]
    drafts = whole
    if mtp.own_head:
        drafts = choices(heads[0], source, "mtp.head", out, record.compare)
        drafts = source("mtp.ids")[drafts] if mtp.has_table else drafts
    return DraftAgreement(len(drafts), int((drafts == picked).sum()), int((whole == picked).sum()) if trimmed else None)
