"""Dense targets with every scaling of positions against transformers and float64; families that are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_exporter.inspecting.inspect import inspect_checkpoint
from mtp_tools.verify.checks import checks
from tests.exporter.dense.parts import IDS, TOLERANCE, VISIBLE, Pair, pair_of, share, target_run
from tests.fixtures.checkpoints import edit_config
from tests.fixtures.dense_families import (
    eagle_checkpoint,
    gemma4_assistant_checkpoint,
    glm_moe_dsa_checkpoint,
    mimo_checkpoint,
    plain_checkpoint,
)
from tests.oracles.dense_families import FAULT_KINDS, FAULTS
from tests.support import build_refused

BLOCKS = {"whole": [23], "row by row": [1] * 23, "uneven": [8, 1, 5, 9]}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 20,
    "beta_slow": 2,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
    "truncate": False,
}
TARGETS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "qwen2, linear under its old name": (
        plain_checkpoint,
        {"kind": "qwen2", "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    "llama, llama3, nested": (plain_checkpoint, {"rope_scaling": "llama3", "nested_rope": True}),
    "qwen3, tied, yarn": (plain_checkpoint, {"kind": "qwen3", "tied": True, "rope_scaling": "yarn"}),
    "qwen2, yarn with every field": (plain_checkpoint, {"kind": "qwen2", "rope_scaling": YARN}),
    "llama, yarn, length outside": (
        plain_checkpoint,
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
            "original_max_position_embeddings": 128,
        },
    ),
    "mimo, linear": (mimo_checkpoint, {"rope_scaling": "linear"}),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The target of a name with its bundle, each made once; a head that it has is built too."""
    place, pairs = tmp_path_factory.mktemp("targets"), dict[str, Pair]()

    def get(name: str) -> Pair:
        if name not in pairs:
            make, options = TARGETS[name]
            checkpoint = make(place / f"{name}.c", seed=3, layers=2, **options)
            pairs[name] = pair_of(place / name, checkpoint, draft_tokens=2)
        return pairs[name]

    return get


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module of references, which needs packages that the product does without."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it is the oracle here")
    from tests.oracles import dense_reference

    return dense_reference


@pytest.mark.parametrize("name", TARGETS)
def test_logits_equal_transformers_in_any_blocks(built: Callable[[str], Pair], reference: Any, name: str) -> None:
    """A MiMo trunk is a Qwen2; the head beside it changes nothing."""
    pair = built(name)
    with reference.double_everywhere():
        streams, _, logits = reference.run_backbone(reference.backbone(pair.target), IDS)
    want, last = logits.numpy(), streams[-1].numpy()
    runs = {label: target_run(pair.model, IDS, blocks) for label, blocks in BLOCKS.items()}
    for label, (tap, got) in runs.items():
        assert share(got, want) < TOLERANCE, label
        np.testing.assert_array_equal(got, runs["whole"][1], label)
        if name.startswith("mimo"):
            assert share(tap, last) < TOLERANCE, f"{label}: the head is fed the stream before the final norm"
    # The control: neither the order of the tokens nor their positions are invisible.
    other = target_run(pair.model, [*IDS[1:], IDS[0]], [23])[1]
    assert np.abs(other - want).max() > 1


@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_states_equal_the_float64_oracle(built: Callable[[str], Pair], name: str) -> None:
    pair = built(name)
    want = pair.oracle.forward(IDS)
    assert share(target_run(pair.model, IDS, [8, 1, 5, 9])[1], want.logits) < TOLERANCE
    sequences = pair.model.engine.sequences()
    sequences.verify(np.array([IDS]), 0)
    sequences.commit(np.array([23]))
    found = sequences.snapshot(0)
    for index, state in enumerate(want.states):
        for kind, rows in (("key", state.key), ("value", state.value)):
            assert share(found[f"past_key_values.{index}.{kind}"], rows.transpose(1, 0, 2)) < TOLERANCE


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "plain" in FAULT_KINDS[fault]])
def test_control_a_broken_convention_of_a_target_is_noticed(built: Callable[[str], Pair], fault: str) -> None:
    """Every fault that the oracle knows for a target, on every target that has what it is about."""
    found = {}
    for name in TARGETS:
        pair = built(name)
        if pair.oracle.kind == "plain" and (wrong := pair.or_none(fault)) is not None:
            found[name] = share(target_run(pair.model, IDS, [23])[1], wrong.forward(IDS).logits)
    assert found, "no target has what this fault is about"
    assert VISIBLE >= 100 * TOLERANCE
    assert all(moved > VISIBLE for moved in found.values()), f"{found}: this test cannot see that {FAULTS[fault]}"


@pytest.mark.parametrize("name", ["qwen2, linear under its old name", "llama, llama3, nested", "qwen3, tied, yarn"])
def test_a_scaled_target_is_lossless(built: Callable[[str], Pair], name: str) -> None:
    assert [line.text for line in checks(built(name).model, 8, 12) if not line.holds] == []


def test_positions_beyond_the_trained_ones_use_the_scaling(tmp_path: Path) -> None:
    """300 rows in chunks, where the original length is 64: the oracle and one ten times as far from it."""
    checkpoint = plain_checkpoint(tmp_path / "c", seed=5, rope_scaling="yarn", max_position_embeddings=512, layers=2)
    pair = pair_of(tmp_path / "b", checkpoint, max_model_len=512, mtp=False)
    ids = np.random.default_rng(1).integers(0, 64, 300).tolist()
    got = target_run(pair.model, ids, [256, 44])[1]
    assert share(got, pair.oracle.forward(ids).logits) < TOLERANCE
    assert share(got, pair.broken("rope_scaling_ignored").forward(ids).logits) > VISIBLE


# ----------------------------------------------------------- recognised, and refused all the same


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What this release knows by name and does not build."""
    place = tmp_path_factory.mktemp("foreign")
    unified = gemma4_assistant_checkpoint(place / "unified", ordered=False)
    edit_config(unified, lambda config: {**config, "model_type": "gemma4_unified_assistant"})
    return {
        "glm_moe_dsa": glm_moe_dsa_checkpoint(place / "glm"),
        "gemma4_assistant": gemma4_assistant_checkpoint(place / "gemma"),
        "gemma4_assistant, unified": unified,
    }


REASONS = {
    "glm_moe_dsa": ("is a GLM-5 checkpoint", "sparse indexer"),
    "gemma4_assistant": ("is a Gemma-4 assistant", "target's key-value cache", "cross-attention"),
    "gemma4_assistant, unified": ("is a Gemma-4 assistant", "target's key-value cache"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_family_that_is_not_built_is_recognised_and_refused(
    foreign: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """As a target, as a draft, and by `inspect`, each with the reason."""
    checkpoint = foreign[name]
    build_refused(checkpoint, tmp_path / "out", *REASONS[name])
    report = inspect_checkpoint(checkpoint)
    assert report["family"] == name.partition(",")[0]
    assert report["can_build"] is False
    (problem,) = report["problems"]
    assert all(part in problem for part in REASONS[name])
    target = plain_checkpoint(tmp_path / "target", seed=1)
    build_refused(target, tmp_path / "out", *REASONS[name], draft_model=str(checkpoint))


def test_a_family_that_only_refuses_is_not_offered(tmp_path: Path) -> None:
    """The message about an unknown model lists what is built, and only that."""
    checkpoint = plain_checkpoint(tmp_path / "c", seed=1)
    edit_config(checkpoint, lambda config: {**config, "model_type": "other", "architectures": ["Other"]})
    (problem,) = inspect_checkpoint(checkpoint)["problems"]
    build_refused(checkpoint, tmp_path / "out", problem)
    offered = problem.partition("which no family of this release describes. Supported: ")[2]
    assert "mimo" in offered
    assert "qwen3" in offered
    assert not any(name in offered for name in ("glm_moe_dsa", "gemma4"))


def test_a_plain_target_is_no_draft_and_a_draft_no_target(tmp_path: Path) -> None:
    """LD-34: what a directory is decides which option takes it."""
    target = plain_checkpoint(tmp_path / "target", seed=1)
    other = plain_checkpoint(tmp_path / "other", seed=2, layers=1)
    build_refused(target, tmp_path / "out", "a whole model, not a draft head", str(other), draft_model=str(other))
    for version in (1, 3):
        draft = eagle_checkpoint(tmp_path / f"draft {version}", target=target, seed=2, version=version)
        build_refused(draft, tmp_path / "out", "is a separate draft, not a target", "--draft-model")
        report = inspect_checkpoint(draft)
        assert report["can_build"] is False
        assert report["family"] == ("eagle_draft" if version == 1 else "eagle3_draft")
        assert "--draft-model" in report["problems"][0]
