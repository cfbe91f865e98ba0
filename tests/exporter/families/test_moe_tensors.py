"""Tensors of the mixture-of-experts families: each claimed once, none missed, wherever and however it is stored."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_exporter.families import describe
from mtp_exporter.families.description import Description, Wanted, claim
from mtp_exporter.prepare import Ingredients, describe_exactly, prepare
from mtp_exporter.reading.checkpoint import Checkpoint, open_checkpoint
from tests.exporter.families.test_moe_built import CASES, SPLIT, YARN
from tests.fixtures.files import edit_config
from tests.fixtures.moe_families import MAKERS
from tests.support import refused


def described(place: Path, family: str, **options: Any) -> tuple[Checkpoint, Description]:
    checkpoint = open_checkpoint(MAKERS[family](place, **{"seed": 1, **options}))
    return checkpoint, describe_exactly(checkpoint, Wanted())


@pytest.mark.parametrize(("family", "options"), CASES.values(), ids=CASES)
def test_every_row_of_every_tensor_is_claimed_exactly_once(tmp_path: Path, family: str, options: dict) -> None:
    checkpoint, description = described(tmp_path, family, **options)
    claim(checkpoint, description)
    claims = {name: np.zeros(tensor.shape[0], int) for name, tensor in checkpoint.tensors.items()}
    for need in description.needs:
        for part in need.parts:
            claims[part.key][part.start : part.stop] += 1
    for name in (name for names in description.ignored.values() for name in names):
        assert not claims.pop(name).any(), f"{name} is left out and used"
    tied = {"model.embed_tokens.weight"} if options.get("tied") else set()
    assert {name for name, rows in claims.items() if not (rows == 1).all()} == tied
    assert all((claims[name] == 2).all() for name in tied), "embedding and output head"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_next", {"mlp_only_layers": [1]}),
        ("qwen3_5_moe", SPLIT),
        ("deepseek_v3", {"own_head": "absent"}),
        ("deepseek_v3", {"own_head": "absent", "q_lora": False}),
        ("glm4_moe", {"own_head": "absent"}),
    ],
    ids=str,
)
def test_a_lost_tensor_is_named(tmp_path: Path, family: str, options: dict) -> None:
    """One of every kind, of the trunk and of the head."""
    checkpoint, _ = described(tmp_path, family, **options)
    kinds = {re.sub(r"layers\.[0-2]\.|experts\.\d+\.", "", name): name for name in checkpoint.tensors}
    assert len(kinds) > 30
    for name in kinds.values():
        _refused_without(checkpoint, name)


@pytest.mark.parametrize("place", ["model.language_model.layers.2.", "mtp.layers.0."])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_lost_stack_of_experts_is_named(tmp_path: Path, place: str, name: str) -> None:
    """Not one of the single experts that another layout would have: LD-06 names the one that is missing."""
    checkpoint, _ = described(tmp_path, "qwen3_5_moe")
    _refused_without(checkpoint, f"{place}mlp.experts.{name}")


def _refused_without(checkpoint: Checkpoint, name: str) -> None:
    less = replace(checkpoint, tensors={key: value for key, value in checkpoint.tensors.items() if key != name})
    with refused(f"'{name}'"):
        claim(less, describe_exactly(less, Wanted()))


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen3_next": [{"shards": 3}, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}],
    "qwen3_5_moe": [
        {"trunk_experts": trunk, "head_experts": head, "flat": flat, "shards": shards}
        for trunk, head, flat, shards in product(("fused", "split"), ("fused", "split"), (False, True), (1, 3))
    ],
    "deepseek_v3": [{"shards": 3}, {"own_head": "absent"}],
    "glm4_moe": [{"shards": 3}, {"own_head": "absent"}],
}


@pytest.mark.parametrize("family", MAKERS)
def test_every_layout_of_the_same_weights_is_the_same_bundle(tmp_path: Path, family: str) -> None:
    """Trunk and head in files of their own, experts fused or one by one, nested or flat, copies or none."""
    first = _values(MAKERS[family](tmp_path / "first", seed=1))
    for i, options in enumerate(LAYOUTS[family]):
        assert _values(MAKERS[family](tmp_path / str(i), seed=1, **options)) == first, str(options)
    assert _values(MAKERS[family](tmp_path / "other", seed=2)) != first, "control: other weights"


def _values(checkpoint: Path) -> tuple[object, dict[str, str]]:
    """All that the graphs and the weight file of a bundle are made from."""
    prepared = prepare(Ingredients(str(checkpoint)))
    return prepared.spec, {role: prepared.source.digest(role) for role in prepared.claimed}


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_next", {}), ("deepseek_v3", {"yarn": YARN}), ("deepseek_v3", {}), ("glm4_moe", {})],
    ids=str,
)
def test_rotary_fields_are_found_where_newer_configurations_have_them(
    tmp_path: Path, family: str, options: dict
) -> None:
    checkpoint, before = described(tmp_path, family, **options)

    def moved(config: dict[str, Any]) -> dict[str, Any]:
        scaling = config.pop("rope_scaling") or {"type": "default"}
        names = [name for name in ("rope_theta", "partial_rotary_factor") if name in config]
        found = {name: config.pop(name) for name in names}
        return {**config, "rope_parameters": {"rope_type": scaling.pop("type"), **scaling, **found}}

    edit_config(tmp_path, moved)
    after = describe(open_checkpoint(tmp_path))
    assert after.spec == before.spec
    assert after.notes == ()
    assert open_checkpoint(tmp_path).config != checkpoint.config
