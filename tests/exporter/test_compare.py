"""`mtp-export check`: an honest bundle agrees, damage is named by its first stage, and every row is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mtp_engines.bundle import BACKBONE, MANIFEST_FILE, WEIGHTS, entry_of, mtp_graph, open_bundle
from mtp_engines.contracts.manifest import MANIFEST
from mtp_engines.errors import BuildError, BundleError, CheckpointError
from mtp_exporter.checking import compare
from mtp_exporter.checking.compare import DEFAULT_ROWS, TOLERANCE, Comparison, compare_bundle
from mtp_exporter.checking.compare_text import as_lines, as_report
from mtp_exporter.checking.sample import sample_ids
from mtp_exporter.cli import group
from mtp_exporter.prepare import Ingredients
from tests.fixtures.checkpoints import (
    drop_tensors,
    edit_config,
    edit_tensor,
    random_checkpoint,
    read_tensors,
    tinytext_tokenizer,
)
from tests.fixtures.dense_families import eagle_checkpoint, mimo_checkpoint, plain_checkpoint
from tests.fixtures.dense_tensors import MIMO_PREFIX
from tests.fixtures.files import Array
from tests.fixtures.moe_families import (
    deepseek_v3_checkpoint,
    glm4_moe_checkpoint,
    qwen3_5_moe_checkpoint,
    qwen3_next_checkpoint,
)
from tests.support import build_bundle, copy_of, refused, run_command

ROWS = 8
"""Rows of most comparisons here; the default is 16."""
Q35, HEAD = "model.language_model.layers.", "mtp.layers.0."
TWO_KINDS = ["linear_attention", "full_attention"]
# One of each family, two layers where the family has no use for more.
MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_5": lambda place: random_checkpoint(place, seed=3, layer_types=TWO_KINDS),
    "qwen3_next": lambda place: qwen3_next_checkpoint(place, seed=3, num_hidden_layers=2, full_attention_interval=2),
    "qwen3_5_moe": lambda place: qwen3_5_moe_checkpoint(place, seed=3, layer_types=TWO_KINDS, num_experts=6),
    "deepseek_v3": lambda place: deepseek_v3_checkpoint(place, seed=3, layers=2),
    "glm4_moe": lambda place: glm4_moe_checkpoint(place, seed=3, layers=2),
    "mimo": lambda place: mimo_checkpoint(place, seed=3, layers=2, depths=2),
    "llama": lambda place: plain_checkpoint(place, seed=3, layers=4, rope_scaling="llama3"),
    "qwen2": lambda place: plain_checkpoint(place, seed=3, layers=2, kind="qwen2"),
    "qwen3": lambda place: plain_checkpoint(place, seed=3, layers=2, kind="qwen3", tied=True),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle": {"version": 1, "fc_bias": True, "own_embedding": True},
    "eagle3": {"version": 3, "draft_vocab": 44, "own_embedding": True},
}
"""Both for "llama"."""


class Sound:
    """Checkpoints, drafts and honest bundles, each made once."""

    def __init__(self, place: Path) -> None:
        self._place, self._made = place, dict[str, Path]()

    def checkpoint(self, name: str) -> Path:
        """The target of a family, or of a draft."""
        name = "llama" if name in DRAFTS else name
        return self._once(f"{name}.c", MAKERS[name])

    def draft(self, name: str) -> Path | None:
        if name not in DRAFTS:
            return None
        target = self.checkpoint(name)
        return self._once(f"{name}.d", lambda out: eagle_checkpoint(out, target=target, seed=4, **DRAFTS[name]))

    def bundle(self, name: str, **options: Any) -> Path:
        draft = self.draft(name)
        if draft is not None:
            options["draft_model"] = str(draft)
        label = "".join(f" {key}={value}" for key, value in options.items() if key != "draft_model")
        return self._once(f"{name}{label}.b", lambda out: build_bundle(self.checkpoint(name), out, **options))

    def ingredients(self, name: str) -> Ingredients:
        draft = self.draft(name)
        return Ingredients(str(self.checkpoint(name)), draft_model=None if draft is None else str(draft))

    def _once(self, name: str, make: Callable[[Path], Path]) -> Path:
        if name not in self._made:
            self._made[name] = make(self._place / name)
        return self._made[name]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound"))


def first(comparison: Comparison) -> str | None:
    """The name of the first stage that differs."""
    return comparison.first_difference.name if comparison.first_difference else None


# ------------------------------------------------------------------------------- honest bundles

HEAD_STAGES = [
    *("head.embedding_norm", "head.hidden_norm", "head.concatenation", "head.projection", "head.attention_input"),
    *("head.attention", "head.first_residual", "head.mlp_input", "head.mlp", "head.second_residual", "head.output"),
    "hidden_states_out",
]
WITHOUT = {
    "eagle": {"head.embedding_norm", "head.hidden_norm", "head.attention_input", "head.output"},
    "eagle3": {"head.attention_input"},
}


@pytest.mark.parametrize("name", [*MAKERS, *DRAFTS])
def test_an_honest_bundle_agrees_in_every_stage(sound: Sound, name: str) -> None:
    comparison = compare_bundle(sound.ingredients(name), sound.bundle(name))
    assert comparison.first_difference is None
    assert comparison.differences == ()
    model = open_bundle(sound.bundle(name)).manifest.model
    layers, depths = len(model.layers), model.mtp.depth if model.mtp else 0
    want = [*(f"residual.{index}" for index in range(layers + 1)), "hidden_states", "logits"]
    one = [stage for stage in HEAD_STAGES if stage not in WITHOUT.get(name, ())]
    if name == "eagle3":
        # The taps go through the projection before anything is normed.
        one.remove("head.projection")
        one.insert(0, "head.projection")
    for depth in range(depths):
        want += [f"{stage} of depth {depth}" if depth else stage for stage in one]
    want += ["logits of the draft head", "ids of the draft vocabulary"] if name == "eagle3" else []
    assert [stage.name for stage in comparison.stages] == want
    rows = [DEFAULT_ROWS - 1 - (" of depth 1" in stage or 0) for stage in want]
    rows[: layers + 3] = [DEFAULT_ROWS] * (layers + 3)
    rows[-1] = 1 if name == "eagle3" else rows[-1]
    assert [stage.rows for stage in comparison.stages] == rows
    assert comparison.rows_proved == sum(rows)
    assert max(stage.worst for stage in comparison.stages) < TOLERANCE / 10


@pytest.mark.parametrize(
    ("name", "options"),
    [("mimo", {"mtp": False}), ("mimo", {"hidden_tap": "post-norm"}), ("qwen3_5", {"hidden_tap": "pre-norm"})],
)
def test_the_choices_of_the_build_are_taken_from_the_bundle(sound: Sound, name: str, options: dict[str, Any]) -> None:
    """A head that was left out is not missed, and the tap is the one that was built."""
    comparison = compare_bundle(sound.ingredients(name), sound.bundle(name, **options), ROWS)
    assert (first(comparison), comparison.differences) == (None, ())
    heads = [stage for stage in comparison.stages if stage.name.startswith("head.")]
    assert bool(heads) == options.get("mtp", True)


def test_a_head_from_another_checkpoint_is_compared_with_it(sound: Sound, tmp_path: Path) -> None:
    base = sound.checkpoint("mimo")
    tuned = copy_of(base, tmp_path / "tuned")
    drop_tensors(tuned, lambda name: name.startswith(MIMO_PREFIX))
    bundle = build_bundle(tuned, tmp_path / "b", mtp_from=str(base))
    assert first(compare_bundle(Ingredients(str(tuned), mtp_from=str(base)), bundle, ROWS)) is None
    with refused("--mtp-from", "0 of 32 tensors", error=CheckpointError):
        compare_bundle(Ingredients(str(tuned)), bundle, ROWS)
    other = copy_of(base, tmp_path / "other")
    edit_tensor(other, f"{MIMO_PREFIX}0.hidden_layernorm.weight", nudged)
    comparison = compare_bundle(Ingredients(str(tuned), mtp_from=str(other)), bundle, ROWS)
    assert first(comparison) == "head.hidden_norm"


# ----------------------------------------------------------------------- damage in the checkpoint


def nudged(array: Array) -> Array:
    """The first entry moved by a tenth of the size of all."""
    changed = array.copy()
    changed[(0,) * array.ndim] += 0.1 * np.abs(array).max()
    return changed


def halves_swapped(array: Array) -> Array:
    return np.roll(array, array.shape[1] // 2, axis=1)


def rolled(array: Array) -> Array:
    return np.roll(array, 1, axis=0)


def doubled(array: Array) -> Array:
    return 2 * array


# Family, tensor, what is done to it, and the stage that must be named. The tensor is the draft's where there is one,
# and of the target with a leading "target:".
DAMAGE: list[tuple[str, str, Callable[[Array], Array], str]] = [
    ("qwen3_5", "model.language_model.embed_tokens.weight", rolled, "residual.0"),
    ("qwen3_5", f"{Q35}0.input_layernorm.weight", nudged, "residual.1"),
    ("qwen3_5", f"{Q35}0.linear_attn.A_log", nudged, "residual.1"),
    ("qwen3_5", f"{Q35}1.post_attention_layernorm.weight", nudged, "residual.2"),
    ("qwen3_5", "model.language_model.norm.weight", nudged, "hidden_states"),
    ("qwen3_5", "lm_head.weight", nudged, "logits"),
    ("qwen3_5", "mtp.pre_fc_norm_embedding.weight", nudged, "head.embedding_norm"),
    ("qwen3_5", "mtp.pre_fc_norm_hidden.weight", nudged, "head.hidden_norm"),
    ("qwen3_5", "mtp.fc.weight", halves_swapped, "head.projection"),
    ("qwen3_5", f"{HEAD}input_layernorm.weight", nudged, "head.attention_input"),
    ("qwen3_5", f"{HEAD}self_attn.q_norm.weight", nudged, "head.attention"),
    ("qwen3_5", f"{HEAD}post_attention_layernorm.weight", nudged, "head.mlp_input"),
    ("qwen3_5", f"{HEAD}mlp.down_proj.weight", nudged, "head.mlp"),
    ("qwen3_5", "mtp.norm.weight", nudged, "head.output"),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_qkvz.weight", rolled, "residual.1"),
    ("qwen3_next", "model.layers.1.mlp.shared_expert_gate.weight", doubled, "residual.2"),
    ("qwen3_next", "model.layers.1.mlp.experts.2.down_proj.weight", nudged, "residual.2"),
    ("qwen3_5_moe", f"{Q35}0.mlp.experts.down_proj", nudged, "residual.1"),
    ("deepseek_v3", "model.layers.0.self_attn.kv_a_layernorm.weight", nudged, "residual.1"),
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", rolled, "residual.2"),
    ("deepseek_v3", "model.layers.1.mlp.experts.3.down_proj.weight", nudged, "residual.2"),
    ("deepseek_v3", "model.layers.2.hnorm.weight", nudged, "head.hidden_norm"),
    ("deepseek_v3", "model.layers.2.eh_proj.weight", halves_swapped, "head.projection"),
    ("deepseek_v3", "model.layers.2.shared_head.norm.weight", nudged, "head.output"),
    ("glm4_moe", "model.layers.1.self_attn.k_proj.bias", nudged, "residual.2"),
    ("mimo", "model.layers.1.self_attn.v_proj.bias", nudged, "residual.2"),
    ("mimo", f"{MIMO_PREFIX}0.input_proj.weight", halves_swapped, "head.projection"),
    ("mimo", f"{MIMO_PREFIX}1.hidden_layernorm.weight", nudged, "head.hidden_norm of depth 1"),
    ("mimo", f"{MIMO_PREFIX}1.final_layernorm.weight", nudged, "head.output of depth 1"),
    ("qwen3", "model.layers.0.self_attn.k_norm.weight", nudged, "residual.1"),
    ("qwen2", "model.layers.0.self_attn.q_proj.bias", nudged, "residual.1"),
    ("eagle", "target:model.layers.3.mlp.gate_proj.weight", nudged, "residual.4"),
    ("eagle", "fc.bias", nudged, "head.projection"),
    ("eagle", "embed_tokens.weight", rolled, "head.concatenation"),
    ("eagle", "layers.0.mlp.down_proj.weight", nudged, "head.mlp"),
    ("eagle3", "fc.weight", nudged, "head.projection"),
    ("eagle3", "embed_tokens.weight", rolled, "head.embedding_norm"),
    ("eagle3", "midlayer.hidden_norm.weight", nudged, "head.hidden_norm"),
    ("eagle3", "midlayer.self_attn.q_proj.weight", halves_swapped, "head.attention"),
    ("eagle3", "norm.weight", nudged, "head.output"),
    ("eagle3", "lm_head.weight", nudged, "logits of the draft head"),
]


def damaged(sound: Sound, name: str, place: Path, tensor: str, edit: Callable[[Array], Array]) -> Ingredients:
    """The ingredients with a copy in which one tensor was edited."""
    given, (_, colon, plain) = sound.ingredients(name), tensor.rpartition("target:")
    source = sound.draft(name) if not colon else None
    copy = copy_of(source or sound.checkpoint(name), place / "damaged")
    edit_tensor(copy, plain, edit)
    return replace(given, draft_model=str(copy)) if source else replace(given, model=str(copy))


@pytest.mark.parametrize(
    ("name", "tensor", "edit", "stage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_changed_tensor_is_named_by_the_first_stage_that_uses_it(
    sound: Sound, tmp_path: Path, name: str, tensor: str, edit: Callable[[Array], Array], stage: str
) -> None:
    comparison = compare_bundle(damaged(sound, name, tmp_path, tensor, edit), sound.bundle(name), ROWS)
    assert first(comparison) == stage
    # Every layer starts from the graph's own values, so a damaged one leaves those of the next alone.
    wrong = [found.name for found in comparison.stages if not found.holds]
    if stage.startswith("residual.") and stage != "residual.0":
        assert wrong == [stage]


def test_a_table_of_draft_ids_is_compared(sound: Sound, tmp_path: Path) -> None:
    """One offset of d2t: the graph drafts another token than the checkpoint's table says."""

    def one_off(table: Array) -> Array:
        changed = table.copy()
        changed[5] -= 1
        return changed

    given = damaged(sound, "eagle3", tmp_path, "d2t", one_off)
    comparison = compare_bundle(given, sound.bundle("eagle3"), ROWS)
    assert first(comparison) == "ids of the draft vocabulary"
    assert [stage.name for stage in comparison.stages if not stage.holds] == ["ids of the draft vocabulary"]


@pytest.mark.parametrize(
    ("name", "stage"),
    [("embed_tokens.weight", "head.embedding_norm"), ("shared_head.head.weight", "logits of the draft head")],
)
def test_a_copy_that_is_none_any_more_differs(sound: Sound, tmp_path: Path, name: str, stage: str) -> None:
    """The bundle shares the target's matrix; the checkpoint now has another one for the head."""
    given = damaged(sound, "deepseek_v3", tmp_path, f"model.layers.2.{name}", rolled)
    comparison = compare_bundle(given, sound.bundle("deepseek_v3"), ROWS)
    assert (first(comparison), comparison.differences) == (stage, ("mtp",))


def test_an_own_head_that_became_a_copy_differs(sound: Sound, tmp_path: Path) -> None:
    """The reverse: the bundle has a vocabulary head of its own, the checkpoint repeats the target's."""
    own = deepseek_v3_checkpoint(tmp_path / "own", seed=3, layers=2, own_head="different")
    edit_tensor(own, "model.layers.2.embed_tokens.weight", lambda _: read_tensors(own)["model.embed_tokens.weight"])
    bundle = build_bundle(own, tmp_path / "b")
    assert first(compare_bundle(Ingredients(str(own)), bundle, ROWS)) is None
    again = copy_of(own, tmp_path / "again")
    edit_tensor(again, "model.layers.2.shared_head.head.weight", lambda _: read_tensors(own)["lm_head.weight"])
    comparison = compare_bundle(Ingredients(str(again)), bundle, ROWS)
    assert (first(comparison), comparison.differences) == ("logits of the draft head", ("mtp",))


# --------------------------------------------------------------------- damage in the configuration


@pytest.mark.parametrize(
    ("name", "fields", "stage", "differences"),
    [
        ("mimo", {"rope_theta": 1000}, "residual.1", ("layers", "mtp")),
        ("mimo", {"rms_norm_eps": 0.5}, "residual.1", ("norm_epsilon",)),
        ("mimo", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "residual.1", ("layers", "mtp")),
        ("mimo", {"max_position_embeddings": 128}, None, ("max_position",)),
        ("glm4_moe", {"routed_scaling_factor": 1.7}, "residual.2", ("layers", "mtp")),
        ("eagle3", {"norm_before_residual": True}, "head.first_residual", ("mtp",)),
        ("eagle3", {"rms_norm_eps": 0.5}, "head.embedding_norm", ("mtp",)),
    ],
    ids=str,
)
def test_another_configuration_is_named_too(
    sound: Sound, tmp_path: Path, name: str, fields: dict[str, Any], stage: str | None, differences: tuple[str, ...]
) -> None:
    comparison = compare_bundle(configured(sound, name, tmp_path, fields), sound.bundle(name), ROWS)
    assert first(comparison) == stage
    assert comparison.differences == differences
    assert all(f"note  {field} is another in the checkpoint" in as_lines(comparison) for field in differences)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "taps of the head is (0, 1, 3) and (2, 2, 1)"),
        ({"return_hidden_post_norm": True}, "chain of the head is output and residual"),
    ],
    ids=["other taps", "other chain"],
)
def test_a_draft_that_is_fed_otherwise_is_refused(
    sound: Sound, tmp_path: Path, fields: dict[str, Any], part: str
) -> None:
    """No stage of one run shows which rows a head was trained on, or what it feeds back."""
    given = configured(sound, "eagle3", tmp_path, fields)
    with refused(part, error=CheckpointError):
        compare_bundle(given, sound.bundle("eagle3"), ROWS)


def configured(sound: Sound, name: str, place: Path, fields: dict[str, Any]) -> Ingredients:
    """The ingredients with a copy whose configuration has other fields."""
    given, draft = sound.ingredients(name), sound.draft(name)
    copy = copy_of(draft or sound.checkpoint(name), place / "configured")
    edit_config(copy, lambda config: {**config, **fields})
    return replace(given, draft_model=str(copy)) if draft else replace(given, model=str(copy))


# --------------------------------------------------------------------------- damage in the bundle


def changed(bundle: Path, out: Path, graph: str, tensor: str, at: tuple[int, ...], value: float) -> Path:
    """A copy of the bundle with one float of the weight file replaced, and the manifest's digests with it."""
    copy_of(bundle, out)
    proto = onnx.load(out / graph, load_external_data=False).graph
    (found,) = (initializer for initializer in proto.initializer if initializer.name == tensor)
    place = {entry.key: entry.value for entry in found.external_data}
    weights = np.memmap(out / WEIGHTS, np.float32, "r+", int(place["offset"]), tuple(found.dims))
    assert weights[at] != value
    weights[at] = value
    weights.flush()
    manifest = MANIFEST.validate_json((out / MANIFEST_FILE).read_bytes())
    files = {**manifest.files, WEIGHTS: entry_of(out / WEIGHTS)}
    (out / MANIFEST_FILE).write_bytes(MANIFEST.dump_json(replace(manifest, files=files)))
    open_bundle(out, thorough=True)
    return out


@pytest.mark.parametrize(
    ("name", "graph", "tensor", "at", "stage"),
    [
        ("qwen3_5", BACKBONE, "layers.1.post_norm", (7,), "residual.2"),
        ("qwen3_5", BACKBONE, "layers.0.mixer.a_log", (2,), "residual.1"),
        ("qwen3_5", BACKBONE, "final_norm", (0,), "hidden_states"),
        ("qwen3_5", BACKBONE, "head", (111, 39), "logits"),
        ("qwen3_5", mtp_graph(0), "mtp.projection", (3, 41), "head.projection"),
        ("mimo", mtp_graph(1), "mtp.1.layer.mlp.down", (0, 0), "head.mlp of depth 1"),
        ("eagle3", mtp_graph(0), "mtp.head", (43, 0), "logits of the draft head"),
    ],
)
def test_one_changed_float_of_the_bundle_is_named(
    sound: Sound, tmp_path: Path, name: str, graph: str, tensor: str, at: tuple[int, ...], stage: str
) -> None:
    bundle = changed(sound.bundle(name), tmp_path / "b", graph, tensor, at, 9.5)
    assert first(compare_bundle(sound.ingredients(name), bundle, ROWS)) == stage


@pytest.mark.parametrize("row", [0, 3, ROWS - 1])
def test_a_fault_in_one_row_is_named_with_that_row(sound: Sound, tmp_path: Path, row: int) -> None:
    """The embedding of a token that stands at that row alone, in the bundle."""
    ids = sample_ids(sound.checkpoint("mimo"), 64, ROWS).tolist()
    assert ids.count(ids[row]) == 1
    bundle = changed(sound.bundle("mimo"), tmp_path / "b", BACKBONE, "embedding", (ids[row], 5), 9.5)
    comparison = compare_bundle(sound.ingredients("mimo"), bundle, ROWS)
    assert comparison.first_difference is not None
    assert (comparison.first_difference.name, comparison.first_difference.worst_row) == ("residual.0", row)
    assert f"first difference: residual.0, row {row} (" in as_lines(comparison)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_no_number_differs(sound: Sound, tmp_path: Path, value: float) -> None:
    """Nothing compares greater than NaN, which must not read as no difference."""
    bundle = changed(sound.bundle("mimo"), tmp_path / "b", BACKBONE, "layers.1.mixer.output", (0, 0), value)
    comparison = compare_bundle(sound.ingredients("mimo"), bundle, ROWS)
    assert first(comparison) == "residual.2"
    assert comparison.first_difference is not None
    assert comparison.first_difference.worst == float("inf")


def test_a_bundle_that_was_changed_without_its_digests_is_not_opened(sound: Sound, tmp_path: Path) -> None:
    bundle = copy_of(sound.bundle("mimo"), tmp_path / "b")
    with (bundle / WEIGHTS).open("r+b") as stream:
        stream.write(b"\1")
    with refused("weights.data", "was changed", error=BundleError):
        compare_bundle(sound.ingredients("mimo"), bundle, ROWS)


# ------------------------------------------------------------------------------------- refusals


def test_too_few_and_too_many_rows_are_refused(sound: Sound) -> None:
    given, bundle = sound.ingredients("mimo"), sound.bundle("mimo")
    for rows in (4, 1, 0, -1):
        with refused(f"--rows is {rows}", "at least 5", error=BuildError):
            compare_bundle(given, bundle, rows)
    for rows in (65, 100_000):
        with refused(f"--rows is {rows}", "at most 64", error=BuildError):
            compare_bundle(given, bundle, rows)
    for rows in (5, 64):
        assert compare_bundle(given, bundle, rows).stages[0].rows == rows


def test_the_wrong_checkpoint_is_refused_by_name(sound: Sound, tmp_path: Path) -> None:
    bundle = sound.bundle("mimo")
    sizes = {"layers": 3, "hidden_size": 72, "vocab_size": 80, "depths": 1}
    built = {"layers": 2, "hidden_size": 56, "vocab_size": 64, "depths": 2}
    for name, size in sizes.items():
        other = mimo_checkpoint(tmp_path / name, seed=3, **{"layers": 2, "depths": 2, name: size})
        said = "trained depths of the head" if name == "depths" else name
        with refused(f"{said} is {size} and {built[name]}", str(other), str(bundle), error=CheckpointError):
            compare_bundle(Ingredients(str(other)), bundle, ROWS)
    # Of the same shape and other weights it is compared, and differs from the first stage on.
    twin = mimo_checkpoint(tmp_path / "twin", seed=4, layers=2, depths=2)
    assert first(compare_bundle(Ingredients(str(twin)), bundle, ROWS)) == "residual.0"


def test_a_checkpoint_without_the_head_of_the_bundle_is_refused(sound: Sound, tmp_path: Path) -> None:
    headless = mimo_checkpoint(tmp_path / "c", seed=3, layers=2, depths=0)
    with refused("trained depths of the head is 0 and 2", error=CheckpointError):
        compare_bundle(Ingredients(str(headless)), sound.bundle("mimo"), ROWS)


def test_a_bundle_with_a_draft_needs_the_draft(sound: Sound) -> None:
    for name in DRAFTS:
        with refused(f"separate draft ({name})", "--draft-model", error=BuildError):
            compare_bundle(Ingredients(str(sound.checkpoint(name))), sound.bundle(name), ROWS)
    with refused("trained depths of the head is 1 and 0", error=CheckpointError):
        compare_bundle(sound.ingredients("eagle"), sound.bundle("llama"), ROWS)


@pytest.mark.parametrize(
    ("target", "options", "part"),
    [
        ("eagle", {"version": 3, "draft_vocab": 44}, "kind of the head is eagle3 and eagle"),
        ("eagle3", {"version": 1}, "kind of the head is eagle and eagle3"),
        ("eagle3", {"version": 3, "draft_vocab": 44, "hidden_size": 40}, "hidden_size of the head is 40 and 56"),
        ("eagle3", {"version": 3, "own_embedding": True}, "draft_vocab_size of the head is None and 44"),
        (
            "eagle3",
            {"version": 3, "draft_vocab": 40, "own_embedding": True},
            "draft_vocab_size of the head is 40 and 44",
        ),
        ("eagle3", {"version": 3, "draft_vocab": 44, "aux_layers": [1, 2]}, "taps of the head is (2, 3) and (2, 2, 1)"),
    ],
    ids=["EAGLE-3 for EAGLE-1", "EAGLE-1 for EAGLE-3", "narrower", "whole vocabulary", "fewer ids", "two taps"],
)
def test_a_draft_of_another_shape_is_refused_by_name(
    sound: Sound, tmp_path: Path, target: str, options: dict[str, Any], part: str
) -> None:
    checkpoint = sound.checkpoint(target)
    draft = eagle_checkpoint(tmp_path / "d", target=checkpoint, seed=4, **options)
    with refused(part, error=CheckpointError):
        compare_bundle(Ingredients(str(checkpoint), draft_model=str(draft)), sound.bundle(target), ROWS)


@pytest.mark.parametrize("options", [{"version": 1}, {"version": 3, "aux_layers": [0, 1]}], ids=["EAGLE-1", "EAGLE-3"])
def test_a_draft_for_a_bundle_with_an_embedded_head_is_refused(
    sound: Sound, tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=3, layers=2, depths=1)
    bundle = sound.bundle("mimo")
    draft = eagle_checkpoint(tmp_path / "d", target=checkpoint, seed=4, **options)
    with refused("of the head is", error=CheckpointError):
        compare_bundle(Ingredients(str(checkpoint), draft_model=str(draft)), bundle, ROWS)
    one = build_bundle(checkpoint, tmp_path / "b")
    with refused("kind of the head is eagle", "and mtp", error=CheckpointError):
        compare_bundle(Ingredients(str(checkpoint), draft_model=str(draft)), one, ROWS)


def test_what_is_no_checkpoint_and_what_is_no_bundle_is_refused(sound: Sound, tmp_path: Path) -> None:
    given, bundle = sound.ingredients("mimo"), sound.bundle("mimo")
    with refused("does not exist", "bundle", error=BundleError):
        compare_bundle(given, tmp_path / "nowhere", ROWS)
    with refused("no bundle but a checkpoint", error=BundleError):
        compare_bundle(given, sound.checkpoint("mimo"), ROWS)
    with refused("is a bundle, not a checkpoint", error=CheckpointError):
        compare_bundle(Ingredients(str(bundle)), bundle, ROWS)


# ---------------------------------------------------------------------- the proof that rows are read


def ignores_the_last_row(built: Array, expected: Array) -> Array:
    errors = HONEST(built, expected)
    errors[-1] = 0
    return errors


def takes_the_greatest_of_all(built: Array, expected: Array) -> Array:
    errors = HONEST(built, expected)
    return np.full_like(errors, errors.max())


def ignores_one_column(built: Array, expected: Array) -> Array:
    return HONEST(built[:, 1:], expected[:, 1:])


def averages_columns(built: Array, expected: Array) -> Array:
    return np.abs(built - expected).mean(-1) * 1e-3


HONEST = compare._row_errors


@pytest.mark.parametrize(
    "fault", [ignores_the_last_row, takes_the_greatest_of_all, ignores_one_column, averages_columns]
)
def test_control_a_comparison_that_does_not_read_every_row_is_refused(
    sound: Sound, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Array, Array], Array]
) -> None:
    monkeypatch.setattr(compare, "_row_errors", fault)
    with refused("went unnoticed", "proves nothing", error=BuildError):
        compare_bundle(sound.ingredients("mimo"), sound.bundle("mimo"), ROWS)


def test_rows_of_a_text_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Where there is a tokenizer the text is English, and all rows are there as well."""
    pieces = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [" ", ",", "."]
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=3, layers=2, tokenizer=tinytext_tokenizer(pieces))
    comparison = compare_bundle(Ingredients(str(checkpoint)), build_bundle(checkpoint, tmp_path / "b"), ROWS)
    assert (first(comparison), comparison.stages[0].rows) == (None, ROWS)


# ------------------------------------------------------------------------------ reports and command


def test_the_report_has_stable_keys(sound: Sound, tmp_path: Path) -> None:
    given = damaged(sound, "mimo", tmp_path, "model.norm.weight", nudged)
    wrong, right = (compare_bundle(each, sound.bundle("mimo"), ROWS) for each in (given, sound.ingredients("mimo")))
    report = json.loads(json.dumps(as_report(wrong)))
    assert list(report) == [
        "agrees",
        "first_difference",
        "tolerance",
        "rows_proved",
        "described_differently",
        "stages",
    ]
    assert (report["agrees"], report["first_difference"]) == (False, "hidden_states")
    assert (report["tolerance"], report["rows_proved"], report["described_differently"]) == (
        TOLERANCE,
        wrong.rows_proved,
        [],
    )
    assert all(list(stage) == ["name", "rows", "worst_row", "worst", "agrees"] for stage in report["stages"])
    assert [stage["name"] for stage in report["stages"] if not stage["agrees"]] == ["hidden_states"]
    honest = as_report(right)
    assert (honest["agrees"], honest["first_difference"]) == (True, None)
    lines = as_lines(wrong).splitlines()
    assert lines[0].startswith(f"every row was read: {wrong.rows_proved} rows of {len(wrong.stages)} stages")
    assert lines[-1].startswith("first difference: hidden_states, row ")
    assert lines[-1].endswith(f"1 of {len(wrong.stages)} stages differ")
    assert as_lines(right).splitlines()[-1] == f"the bundle agrees with the checkpoint in {len(right.stages)} stages"


def test_the_command_exits_with_1_when_something_differs(
    sound: Sound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", str(sound.checkpoint("eagle")), str(sound.bundle("eagle")), "--rows", "8", "--draft-model"]
    assert group.main([*arguments, str(sound.draft("eagle"))], standalone_mode=False) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("the bundle agrees with the checkpoint")
    given = damaged(sound, "eagle", tmp_path, "fc.weight", halves_swapped)
    done = run_command("mtp-export", *arguments, str(given.draft_model), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert (report["agrees"], report["first_difference"]) == (False, "head.projection")
    with refused("separate draft (eagle)", "--draft-model"):
        group.main(arguments[:-1], standalone_mode=False)
