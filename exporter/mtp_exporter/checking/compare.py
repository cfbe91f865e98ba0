"""`mtp-export check`: a bundle's graphs beside a NumPy forward of a checkpoint, stage by stage, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec, MtpSpec
from mtp_engines.errors import BuildError, BundleError, CheckpointError
from mtp_exporter.checking.pieces import Backbone
from mtp_exporter.checking.sample import sample_ids
from mtp_exporter.checking.trace import Pair, Taps, head_pairs, target_pairs
from mtp_exporter.checking.vocabulary import choices
from mtp_exporter.draft_ids.choice import with_draft_ids
from mtp_exporter.prepare import Ingredients, Prepared, prepare
from mtp_plugins.arrays import Array

LEAST_ROWS, DEFAULT_ROWS = 5, 16
TOLERANCE = 1e-4
"""Greatest difference in a row over the row's greatest value. Rounding of one stage stays under 1e-5."""
_SHOWN_BY_STAGES = ("layers", "concat", "residual_normed", "norm_epsilon", "own_embedding", "own_head")
"""Fields of a head that need not agree, since a difference shows in a stage; the others decide which stages there are,
or what is fed from outside."""
_FLOOR = 1e-3
"""A row whose values are this much smaller than the stage's greatest is measured against that share of it."""


@dataclass(frozen=True)
class StageResult:
    """One stage: its name, its rows, the row that differs most and by how much (share of the row's values)."""

    name: str
    rows: int
    worst_row: int
    worst: float

    @property
    def holds(self) -> bool:
        return self.worst <= TOLERANCE


@dataclass(frozen=True)
class Comparison:
    """All stages in order, and which rows of which stage the comparison was shown to read."""

    stages: tuple[StageResult, ...]
    rows_proved: int
    differences: tuple[str, ...]
    """Fields in which the checkpoint's description and the bundle's manifest differ."""

    @property
    def first_difference(self) -> StageResult | None:
        """The first stage that differs."""
        return next((stage for stage in self.stages if not stage.holds), None)


# exp of great values is inf in the reference, and a gate of it 0 or 1: right, and not worth a warning.
@np.errstate(over="ignore", under="ignore")
def compare_bundle(ingredients: Ingredients, bundle: Path, rows: int = DEFAULT_ROWS) -> Comparison:
    """Run a bundle's graphs and NumPy over one text and compare every row of every stage.

    Args:
        ingredients: where the bundle was made from; whether there is a head, and which hidden state an embedded one
            is fed, is taken from the bundle.
        rows: tokens of the text, at least 5: one row hides every mistake in attention.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another shape than the bundle.
        BundleError: the bundle cannot be opened.
        BuildError: fewer rows than 5 or more than fit, or a change of a row went unnoticed.
    """
    opened = open_bundle(bundle)
    limits, spec = opened.manifest.limits, opened.manifest.model
    if rows < LEAST_ROWS:
        raise BuildError(f"--rows is {rows}, expected at least {LEAST_ROWS}: fewer hide mistakes in attention.")
    if rows > min(limits.max_model_len, limits.prefill_chunk):
        most = min(limits.max_model_len, limits.prefill_chunk)
        raise BuildError(f"--rows is {rows}, but this bundle runs at most {most} rows at once. Choose at most that.")
    prepared = _cut_alike(_fed_alike(prepare(_as_built(ingredients, spec)), spec), opened)
    differences = tuple(_differences(prepared.spec, spec))
    _same_shape(prepared, opened)
    ids = sample_ids(prepared.directory, spec.vocab_size, rows)
    stages, proved = [], 0
    for pair in _pairs(prepared, opened, ids):
        stages.append(_measure(pair))
        proved += _prove_read(pair)
    return Comparison(tuple(stages), proved, differences)


def _as_built(ingredients: Ingredients, spec: ModelSpec) -> Ingredients:
    """The ingredients with or without a head, as the bundle has one."""
    if spec.mtp is None or ingredients.draft_model is not None:
        return replace(ingredients, mtp=False, mtp_from=None)
    if spec.mtp.kind != "mtp":
        raise BuildError(
            f"The bundle's head is a separate draft ({spec.mtp.kind}); name its directory with --draft-model."
        )
    return ingredients


def _fed_alike(prepared: Prepared, spec: ModelSpec) -> Prepared:
    """The description with the tap of the bundle, which is an input of an embedded head and not a part of it."""
    ours, theirs = prepared.spec.mtp, spec.mtp
    if ours is None or theirs is None or {ours.kind, theirs.kind} != {"mtp"}:
        return prepared
    return replace(prepared, spec=replace(prepared.spec, mtp=replace(ours, taps=theirs.taps)))


def _cut_alike(prepared: Prepared, bundle: Bundle) -> Prepared:
    """The description with the draft vocabulary of the bundle, whose ids then say which rows to compare."""
    mtp = bundle.manifest.model.mtp
    if mtp is None or mtp.kind != "mtp" or mtp.draft_vocab_size is None:
        return prepared
    ids = _table(bundle.mtp[0]) if mtp.has_table else np.arange(mtp.draft_vocab_size)
    if ids[0] < 0 or ids[-1] >= prepared.spec.vocab_size or (np.diff(ids) < 1).any():
        raise BundleError(
            f"The ids of the draft vocabulary in {bundle.directory} do not rise from 0 up to at most "
            f"{prepared.spec.vocab_size - 1}, as a build writes them. Build the bundle again."
        )
    return with_draft_ids(prepared, ids)


def _differences(ours: ModelSpec, theirs: ModelSpec) -> Iterator[str]:
    for field in fields(ModelSpec):
        if getattr(ours, field.name) != getattr(theirs, field.name):
            yield field.name


def _same_shape(prepared: Prepared, bundle: Bundle) -> None:
    """Refuse to compare models whose stages do not correspond."""
    ours, theirs = prepared.spec, bundle.manifest.model
    depths = (ours.mtp.depth if ours.mtp else 0, theirs.mtp.depth if theirs.mtp else 0)
    sizes: dict[str, tuple[object, object]] = {
        "layers": (len(ours.layers), len(theirs.layers)),
        "hidden_size": (ours.hidden_size, theirs.hidden_size),
        "vocab_size": (ours.vocab_size, theirs.vocab_size),
        "trained depths of the head": depths,
    }
    for field in fields(MtpSpec) if ours.mtp and theirs.mtp else ():
        if field.name not in _SHOWN_BY_STAGES:
            sizes[f"{field.name} of the head"] = (getattr(ours.mtp, field.name), getattr(theirs.mtp, field.name))
    for name, (mine, other) in sizes.items():
        if mine != other:
            raise CheckpointError(
                f"{prepared.directory} and {bundle.directory} are different models: {name} is {mine} and {other}. Name "
                "the checkpoint that the bundle was built from."
            )


def _pairs(prepared: Prepared, bundle: Bundle, ids: npt.NDArray[np.int64]) -> Iterator[Pair]:
    spec, limits, source = bundle.manifest.model, bundle.manifest.limits, prepared.stored(bundle.manifest.weights)
    taps = Taps(spec)
    yield from target_pairs(prepared.spec, Backbone(bundle.backbone, spec, limits), source, ids, taps)
    logits: list[Pair] = []
    choices(bundle.backbone, source, "head", taps.hidden[0], logits.append)
    yield from logits
    output: Array | None = None
    for pair in head_pairs(prepared.spec, limits, bundle.mtp, source, ids, taps.states) if bundle.mtp else ():
        output = pair.built if pair.name == names.HIDDEN_OUT else output
        yield pair
    mtp = prepared.spec.mtp
    if output is not None and mtp is not None and spec.mtp is not None and (mtp.own_head or spec.mtp.own_head):
        logits.clear()
        role = "mtp.head" if mtp.own_head else "head"
        choices(bundle.mtp[0], source, role, np.asarray(output, np.float32), logits.append)
        yield from (replace(pair, name="logits of the draft head") for pair in logits)
    if spec.mtp is not None and spec.mtp.has_table:
        yield _table_pair(bundle.mtp[0], source("mtp.ids"))


def _table_pair(head: Path, expected: npt.NDArray[np.int64]) -> Pair:
    """The ids of a reduced vocabulary, as one row of ones with a two wherever they differ."""
    ones = np.ones((1, len(expected)))
    return Pair("ids of the draft vocabulary", ones + (_table(head) != expected), ones)


def _table(head: Path) -> npt.NDArray[np.int64]:
    table = ir.load(head).graph.initializers["mtp.ids"].const_value
    assert table is not None
    return np.asarray(table.numpy(), np.int64)


def _measure(pair: Pair) -> StageResult:
    errors = _row_errors(pair.built, pair.expected)
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    error = float(errors[worst])
    return StageResult(pair.name, len(errors), worst, error if np.isfinite(error) else float("inf"))


def _row_errors(built: Array, expected: Array) -> npt.NDArray[Any]:
    if built.shape != expected.shape:
        raise BuildError(f"A stage has the shape {built.shape} in the graph and {expected.shape} in NumPy.")
    size = np.abs(expected).max(-1)
    return np.asarray(np.abs(built - expected).max(-1) / np.maximum(size, max(_FLOOR * float(size.max()), 1e-30)))


def _prove_read(pair: Pair) -> int:
    """Change each row of what the graph gave by a tenth of its size and see that very row stand out.

    Returns:
        The number of rows.

    Raises:
        BuildError: a change went unnoticed, so that the comparison proves nothing.
    """
    before = _row_errors(pair.built, pair.expected)
    size = max(float(np.abs(pair.expected).max()), 1e-30)
    for row in range(len(before)):
        changed = pair.built.copy()
        changed[row, row % changed.shape[1]] += 0.1 * size
        after = _row_errors(changed, pair.expected)
        others = np.delete(after, row)
        if after[row] <= TOLERANCE or not np.array_equal(others, np.delete(before, row), equal_nan=True):
            raise BuildError(f"A changed row {row} of stage {pair.name} went unnoticed; the comparison proves nothing.")
    return len(before)
