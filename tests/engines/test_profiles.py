"""Which profile of a TensorRT engine takes which call."""

from __future__ import annotations

import pytest

from mtp_engines.backends.tensorrt.profiles import profile_of
from mtp_engines.builders.tensorrt.io import BACKBONE, HEAD, MTP, interface_of, profiles_of
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import BundleError

WIDTHS = (1, 2, 3, 4, 8, 64, 256)
LIMITS = Limits(max_model_len=512, max_batch_size=4, max_draft_tokens=7)
SPEC = ModelSpec("made up", 40, 96, 1e-6, 512, True, (), None)


def engine_of(graph: str) -> EngineFile:
    """An engine of these widths."""
    return EngineFile(graph, f"{graph}.plan", "tensorrt", "11.4", "sm_90", "bf16", WIDTHS, (), ())


@pytest.mark.parametrize("rows", WIDTHS)
def test_a_backbone_takes_the_profile_of_its_rows(rows: int) -> None:
    assert profile_of(engine_of(BACKBONE), {names.INPUT_IDS: (2, rows)}, 4) == WIDTHS.index(rows)


def test_a_vocabulary_head_takes_a_profile_that_it_has() -> None:
    """Every number of rows that the runner scores, within the ranges that the builder gives the engine."""
    profiles = profiles_of(HEAD, interface_of(HEAD, SPEC, LIMITS, "bf16"), WIDTHS, LIMITS)
    for batch in range(1, LIMITS.max_batch_size + 1):
        for rows in (1, 2, 3, 4, 8):
            place = profile_of(engine_of(HEAD), {names.HIDDEN: (batch * rows, 40)}, LIMITS.max_batch_size)
            least, _, most = profiles[place][names.HIDDEN]
            assert least[0] <= batch * rows <= most[0]


def test_a_chained_row_of_its_own_takes_the_last_profile() -> None:
    ids = {names.INPUT_IDS: (1, 1)}
    assert profile_of(engine_of(MTP), ids | {names.CHAIN: (1, 1, 40)}, 4) == len(WIDTHS)
    assert profile_of(engine_of(MTP), ids | {names.CHAIN: (1, 0, 40)}, 4) == 0, "control: a row of the target's"


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [
        (BACKBONE, {names.INPUT_IDS: (1, 5)}),
        (MTP, {names.INPUT_IDS: (1, 4), names.CHAIN: (1, 4, 40)}),
        (HEAD, {names.HIDDEN: (512, 40)}),
    ],
)
def test_rows_without_a_profile_are_refused(graph: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(BundleError, match=r"has no profile for .* rows"):
        profile_of(engine_of(graph), shapes, 4)
