"""Every convention of the mixture-of-experts families is one that a built bundle could have got wrong visibly.

The float64 oracle is broken in one place at a time, and the bundle must disagree with it by far more than it
disagrees with the right one. What no run over a text can show is in `test_moe_drafting`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.exporter.families.moe_cases import IDS, MARGIN, SEEDS, case_of, run_head, run_target
from tests.exporter.families.test_moe_drafting import IN_DRAFTS, IN_IDS
from tests.fixtures.files import edit_tensor, read_tensors
from tests.fixtures.moe_families import MAKERS
from tests.oracles.float64_checkpoint import Array
from tests.oracles.moe_families import FAULTS, FamilyOracle, open_oracle
from tests.oracles.test_moe_families import HEAD_ALONE, TARGET_ALONE, VISIBLE, VISIBLE_ELSEWHERE

# As in `test_moe_built`: rounding moves a logit by less than 3e-4, the mildest fault here by more than 1e-1.
TOLERANCE, FAULT = 1e-3, 3e-2
# How rows and tokens are paired is the loop's business; the graphs are given both.
PAIRING = {"unshifted_ids", "hidden_row_off_by_one"}
IN_GRAPHS = [
    (family, fault)
    for family, faults in FAULTS.items()
    for fault in faults
    if fault not in PAIRING | (IN_DRAFTS - HEAD_ALONE) | IN_IDS
]


class Built(NamedTuple):
    """A checkpoint, its right oracle, and what the bundle says over IDS: the head after the bundle's own rows."""

    checkpoint: Path
    oracle: FamilyOracle
    logits: Array
    head: Array


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Built]:
    """Bundles with options under which each fault shows, by family and fault."""
    place = tmp_path_factory.mktemp("faults")
    usual = {family: _built(place / family, family, VISIBLE.get(family, {})) for family in MAKERS}
    special = {key: _built(place / key[1], key[0], options) for key, options in VISIBLE_ELSEWHERE.items()}
    return {(family, fault): usual[family] for family, fault in IN_GRAPHS} | special


def _built(place: Path, family: str, options: dict) -> Built:
    checkpoint = MAKERS[family](place / "checkpoint", seed=SEEDS[family], **options)
    for name in read_tensors(checkpoint):
        if name.endswith("e_score_correction_bias"):
            # A bias that all experts share changes nothing, unless a choice takes 0 for less than anything.
            edit_tensor(checkpoint, name, lambda bias: bias - 2.0)
    case = case_of(family, checkpoint, place / "bundle")
    assert case.oracle.routing_margin(IDS) > MARGIN
    hidden, logits, _ = run_target(case.model, [8, 1, 5, 9])
    _, head = run_head(case.model, IDS[1:], hidden[:-1])
    return Built(case.checkpoint, case.oracle, logits, head)


def _distances(found: Built, oracle: FamilyOracle) -> tuple[float, float]:
    """How far the bundle's target and head are from an oracle, the head after rows of the right target."""
    rows = oracle.head_input(found.oracle.forward(IDS))[:-1]
    head = oracle.head(*oracle.pair(IDS, rows)).logits
    return float(np.abs(found.logits - oracle.forward(IDS).logits).max()), float(np.abs(found.head - head).max())


def test_the_bundles_agree_with_the_right_oracle(built: dict[tuple[str, str], Built]) -> None:
    for found in {place.checkpoint: place for place in built.values()}.values():
        assert max(_distances(found, found.oracle)) < TOLERANCE


@pytest.mark.parametrize(("family", "fault"), IN_GRAPHS)
def test_control_a_broken_convention_is_noticed(built: dict[tuple[str, str], Built], family: str, fault: str) -> None:
    found = built[family, fault]
    target, head = _distances(found, open_oracle(found.checkpoint, fault))
    if fault not in HEAD_ALONE:
        assert target > FAULT, f"the target cannot show that {FAULTS[family][fault]}"
    if fault not in TARGET_ALONE:
        assert head > FAULT, f"the head cannot show that {FAULTS[family][fault]}"


def test_no_fault_of_the_oracle_is_left_out() -> None:
    for family, faults in FAULTS.items():
        assert set(faults) <= {fault for name, fault in IN_GRAPHS if name == family} | IN_DRAFTS | IN_IDS
