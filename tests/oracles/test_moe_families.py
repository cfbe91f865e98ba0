"""The float64 oracle of the mixture-of-experts families: against transformers, closed forms, its faults."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.checkpoints import random_checkpoint
from tests.fixtures.files import edit_config, edit_tensor, read_tensors
from tests.fixtures.moe_families import MAKERS, partial_checkpoint
from tests.oracles.moe_families import FAULTS, FamilyOracle, Forward, HeadForward, Speculation, open_oracle
from tests.oracles.moe_families_reference import Reference

IDS = np.random.default_rng(0).integers(0, 64, 23).tolist()
PROMPT = [5, 6, 20]
YARN = {"mscale": 0.7, "mscale_all_dim": 1.3}
GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {}),
    "next, tied": ("qwen3_next", {"tied": True}),
    "next, some layers dense": ("qwen3_next", {"mlp_only_layers": [1, 3]}),
    "next, every second layer sparse": ("qwen3_next", {"decoder_sparse_step": 2}),
    "next, weights not renormalised": ("qwen3_next", {"norm_topk_prob": False}),
    "3.5": ("qwen3_5_moe", {}),
    "3.5, experts split": ("qwen3_5_moe", {"trunk_experts": "split", "head_experts": "split"}),
    "3.5, flat, head split": ("qwen3_5_moe", {"flat": True, "head_experts": "split"}),
    "3.5, trunk split, three to a key head": (
        "qwen3_5_moe",
        {"trunk_experts": "split", "linear_num_value_heads": 15},
    ),
    "deepseek": ("deepseek_v3", {}),
    "deepseek, one query matrix": ("deepseek_v3", {"q_lora": False}),
    "deepseek, YaRN": ("deepseek_v3", {"yarn": True}),
    "deepseek, YaRN, two mscales": ("deepseek_v3", {"yarn": YARN}),
    "deepseek, YaRN, no mscale": ("deepseek_v3", {"yarn": {"mscale": None, "mscale_all_dim": None}}),
    "deepseek, YaRN, one mscale": ("deepseek_v3", {"yarn": {"mscale": None}}),
    "deepseek, own head": ("deepseek_v3", {"own_head": "different"}),
    "deepseek, no copies, 11 layers": ("deepseek_v3", {"own_head": "absent", "layers": 11}),
    "deepseek, large epsilon, 2 dense": ("deepseek_v3", {"rms_norm_eps": 1e-2, "first_k_dense_replace": 2}),
    "deepseek, halves rotated": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek, weights not renormalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "glm": ("glm4_moe", {}),
    "glm, no bias": ("glm4_moe", {"bias": False}),
    "glm, no norms": ("glm4_moe", {"qk_norm": False}),
    "glm, groups, wide shared expert": ("glm4_moe", {**GROUPS, "n_shared_experts": 3}),
    "glm, own head, weights not renormalised": ("glm4_moe", {"own_head": "different", "norm_topk_prob": False}),
}


# ---------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize(("family", "options"), CASES.values(), ids=CASES)
def test_target_and_head_equal_transformers_in_float64(tmp_path: Path, family: str, options: dict) -> None:
    oracle = open_oracle(MAKERS[family](tmp_path, seed=3, **options))
    reference = Reference(family, tmp_path)
    want, want_head = oracle.forward(IDS), oracle.head_over(IDS)
    # Its own rounding alone: the choices of experts must not fall otherwise.
    assert np.abs(reference.float32_logits(IDS) - want.logits).max() < 1e-4 * np.abs(want.logits).max()
    whole = reference.whole(IDS)
    # Measured: below 1e-12. The smallest fault, the norms' epsilon, moves the head by 1e-2.
    for row, got in zip(want.layers[:-1], whole.layers, strict=True):
        _equal(got, row)
    _equal(whole.hidden, want.hidden)
    _equal(whole.logits, want.logits)
    logits, states = reference.decoded(IDS, prompt=7)
    _equal(logits, want.logits)
    for state, (first, second) in zip(want.states, states, strict=True):
        _equal(first, state[1])
        _equal(second, _as_transformers_has_it(oracle, state[2]))
    table = oracle.checkpoint.head.embedding
    _equal(reference.head(table, IDS[1:], want.hidden[:-1]), want_head.out)
    # A row of its own output after two blocks of the target's, as in drafting.
    rows = np.concatenate([want.hidden[:-1], want_head.out[-1:]])
    got = reference.head(table, [*IDS[1:], 9], rows, blocks=[9, 22])
    chained = oracle.head([9], want_head.out[-1:], want_head.cache, start=22)
    _equal(got, np.concatenate([want_head.out, chained.out]))


def _equal(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def _as_transformers_has_it(oracle: FamilyOracle, rows: np.ndarray) -> np.ndarray:
    """It sorts rotated pairs into halves; the oracle leaves them where the checkpoint has them."""
    interleaved = oracle.config.text.get("rope_interleave", True)
    if oracle.config.family != "deepseek_v3" or not interleaved:
        return rows
    return np.concatenate([rows[..., 0::2], rows[..., 1::2]], axis=-1)


# ---------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("family", MAKERS)
def test_a_chain_gives_known_tokens_and_counts(tmp_path: Path, family: str) -> None:
    oracles = {
        draft: open_oracle(MAKERS[family](tmp_path / draft, seed=1, markov=True, draft=draft))
        for draft in ("perfect", "wrong", "third")
    }
    ids = list(range(6, 26))
    assert oracles["perfect"].greedy([60], 8) == [61, 62, 63, 0, 1, 2, 3, 4]
    for drafts in range(5):
        result = oracles["perfect"].speculate([5], 20, drafts)
        assert (result.ids, result.accepted) == (ids, result.drafted)
    wrong, third = (oracles[draft].speculate([5], 20, 3) for draft in ("wrong", "third"))
    assert (wrong.ids, wrong.accepted, sum(wrong.drafted)) == (ids, [0] * 19, 51)
    assert (third.ids, third.accepted) == (ids, [0, 2, 2, 2, 2, 2, 2])
    # 32 logits ahead of all other tokens.
    ranked = np.sort(oracles["perfect"].forward(IDS).logits, axis=-1)
    np.testing.assert_allclose(ranked[:, -1] - ranked[:, -2], 32.0, atol=0.02)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("layers", [3, 11])
def test_a_head_stored_as_a_layer_is_no_layer_of_the_trunk(tmp_path: Path, family: str, layers: int) -> None:
    for own_head in ("copy", "absent", "different"):
        directory = MAKERS[family](tmp_path / own_head, seed=1, markov=True, layers=layers, own_head=own_head)
        oracle = open_oracle(directory)
        assert len(oracle.forward([5]).states) == layers
        result = oracle.speculate([5], 20, 3)
        assert result.ids == list(range(6, 26))
        assert result.accepted == ([0] * 19 if own_head == "different" else result.drafted)


def test_end_tokens_are_the_union_of_all_places(tmp_path: Path) -> None:
    options = {"seed": 1, "markov": True, "eos": 12, "generation_config": {"eos_token_id": [40, 9]}}
    oracle = open_oracle(MAKERS["qwen3_5_moe"](tmp_path, **options))
    assert oracle.checkpoint.eos == (9, 12, 40)
    assert oracle.speculate([5], 20, 3, oracle.checkpoint.eos).ids == [6, 7, 8, 9]


# ------------------------------------------------------------------------------- self-consistency


@pytest.mark.parametrize("family", MAKERS)
def test_one_row_at_a_time_equals_the_whole_text(random: dict[str, Path], family: str) -> None:
    oracle = open_oracle(random[family])
    whole, head = oracle.forward(IDS), oracle.head_over(IDS)
    _equal(_stepped(oracle, IDS), whole.logits)
    first = oracle.head(IDS[1:9], whole.hidden[:8])
    second = oracle.head(IDS[9:], whole.hidden[8:-1], first.cache, start=8)
    _equal(np.concatenate([first.logits, second.logits]), head.logits)
    _equal(second.key, head.key)


@pytest.mark.parametrize("family", MAKERS)
def test_tokens_go_to_different_experts(random: dict[str, Path], family: str) -> None:
    text = np.random.default_rng(1).integers(0, 64, 40).tolist()
    routes = open_oracle(random[family]).routes(text)
    assert len(routes) == {"qwen3_next": 5, "qwen3_5_moe": 5, "deepseek_v3": 3, "glm4_moe": 3}[family]
    for found in routes:
        assert (found.chosen.sum(1) == 3).all()
        assert found.chosen.any(0).sum() >= 10
        assert len(np.unique(found.chosen, axis=0)) >= 12
    if "no_correction_bias" in FAULTS[family]:
        unbiased = open_oracle(random[family], "no_correction_bias").routes(text)
        assert all((a.chosen != b.chosen).any() for a, b in zip(routes, unbiased, strict=True))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_bias_that_all_experts_share_changes_nothing(tmp_path: Path, family: str) -> None:
    directory = MAKERS[family](tmp_path, seed=3, **GROUPS)
    want = open_oracle(directory).head_over(IDS).logits
    _shift_biases(directory)
    np.testing.assert_allclose(open_oracle(directory).head_over(IDS).logits, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", MAKERS)
def test_speculation_emits_the_greedy_ids_at_every_acceptance_length(partial: dict[str, Path], family: str) -> None:
    oracle = open_oracle(partial[family])
    want = oracle.greedy(PROMPT, 48)
    for drafts in range(5):
        result = oracle.speculate(PROMPT, 48, drafts)
        assert result.ids == want
        assert len(result.ids) == 1 + sum(result.accepted) + len(result.accepted)
    assert set(oracle.speculate(PROMPT, 48, 3).accepted) == {0, 1, 2, 3}


# ----------------------------------------------------------------------------------------- faults

HEAD_ALONE = {
    "swap_concat",
    "pre_norm_hidden",
    "unshifted_ids",
    "hidden_row_off_by_one",
    "position_zero_masked",
    "own_head_ignored",
}
TARGET_ALONE = {
    "linear_norm_zero_centred",
    "repeat_not_interleave",
    "read_before_update",
    "no_decay",
    "qkvz_flat",
    "ba_flat",
}
# Seen in no single run over a text.
IN_SPECULATION = {"mtp_rejected_rows_kept", "chained_rows_kept", "pre_norm_chain", "state_not_rolled_back"}
IN_STEPS = {"conv_state_post_silu"}
# Options with which every fault of a family can be seen, but for those below.
VISIBLE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"yarn": YARN, "rms_norm_eps": 1e-2, "own_head": "different"},
    "glm4_moe": {**GROUPS, "own_head": "different"},
}
VISIBLE_ELSEWHERE = {("qwen3_next", "softmax_after_topk"): {"norm_topk_prob": False}}
ALL_FAULTS = [(family, fault) for family, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("family", "fault"), ALL_FAULTS)
def test_control_a_fault_changes_what_it_should(
    visible: dict[str, Path], partial: dict[str, Path], tmp_path: Path, family: str, fault: str
) -> None:
    directory = visible[family]
    if (family, fault) in VISIBLE_ELSEWHERE:
        directory = MAKERS[family](tmp_path, seed=3, **VISIBLE_ELSEWHERE[family, fault])
    changed = _changes(directory, fault)
    if fault in IN_SPECULATION:
        assert changed == set()
    elif fault in IN_STEPS:
        assert changed == {"steps"}
    elif fault in HEAD_ALONE:
        assert changed == {"head"}
    elif fault in TARGET_ALONE:
        assert changed == {"target", "steps"}
    else:
        assert changed == {"target", "steps", "head"}
    if fault in (HEAD_ALONE - {"own_head_ignored"}) | (IN_SPECULATION - {"state_not_rolled_back"}):
        want, got = _speculation(partial[family]), _speculation(partial[family], fault)
        assert got.drafts != want.drafts
        assert got.ids == want.ids, "a draft changed the emitted text"
    if fault in {"state_not_rolled_back", "conv_state_post_silu"}:
        assert _speculation(partial[family], fault).ids != _speculation(partial[family]).ids


def test_an_unknown_fault_is_refused(random: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="Unknown fault 'mla_split' of glm4_moe"):
        open_oracle(random["glm4_moe"], "mla_split")


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights of every family."""
    directory = tmp_path_factory.mktemp("random")
    return {family: make(directory / family, seed=2) for family, make in MAKERS.items()}


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The chain with noise of every family."""
    directory = tmp_path_factory.mktemp("partial")
    return {family: partial_checkpoint(family, directory / family) for family in MAKERS}


@pytest.fixture(scope="module")
def visible(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights with options under which the faults show."""
    directory = tmp_path_factory.mktemp("visible")
    made = {family: make(directory / family, seed=3, **VISIBLE.get(family, {})) for family, make in MAKERS.items()}
    for family in VISIBLE:
        _shift_biases(made[family])
    return made


def _shift_biases(directory: Path) -> None:
    """Make every correction bias negative, which no choice may depend on."""
    for name in read_tensors(directory):
        if name.endswith("e_score_correction_bias"):
            edit_tensor(directory, name, lambda bias: bias - 2.0)


@cache
def _right(directory: Path) -> tuple[Forward, HeadForward]:
    """Target and head over the text, without a fault."""
    oracle = open_oracle(directory)
    return oracle.forward(IDS), oracle.head_over(IDS)


@cache
def _speculation(directory: Path, fault: str | None = None) -> Speculation:
    return open_oracle(directory, fault).speculate(PROMPT, 28, 3)


def _stepped(oracle: FamilyOracle, ids: list[int]) -> np.ndarray:
    """The target's logits over a text, one row a run."""
    states, logits = oracle.initial_states(), []
    for position, token in enumerate(ids):
        row = oracle.extend([token], states, position)
        states = row.states
        logits.append(row.logits)
    return np.concatenate(logits)


def _changes(directory: Path, fault: str) -> set[str]:
    """What differs under the fault; the head is compared on rows of the right target."""
    (target, right_head), wrong = _right(directory), open_oracle(directory, fault)
    head = wrong.head(*wrong.pair(IDS, wrong.head_input(target)[:-1]))
    moved = {
        "target": np.abs(wrong.forward(IDS).logits - target.logits).max(),
        "steps": np.abs(_stepped(wrong, IDS[:9]) - target.logits[:9]).max(),
        "head": np.abs(head.logits - right_head.logits).max(),
    }
    # Between float64 noise, 1e-12, and the smallest fault, latent_norm_eps with 0.1 in the head.
    return {name for name, distance in moved.items() if distance > 1e-2}


# ---------------------------------------------------------------------------------------- loading


def test_every_layout_of_the_same_weights_is_the_same_model(tmp_path: Path) -> None:
    variants: dict[str, list[dict[str, Any]]] = {
        "qwen3_next": [{"shards": 3}, {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}],
        "qwen3_5_moe": [
            {"flat": True},
            {"trunk_experts": "split"},
            {"head_experts": "split", "shards": 2},
            {"layer_types": None},
        ],
        "deepseek_v3": [{"own_head": "absent"}, {"shards": 2}],
        "glm4_moe": [{"own_head": "absent"}, {"shards": 2}],
    }
    for family, options in variants.items():
        want = open_oracle(MAKERS[family](tmp_path / family, seed=4)).head_over(IDS).logits
        for i, option in enumerate(options):
            directory = MAKERS[family](tmp_path / f"{family}-{i}", seed=4, **option)
            np.testing.assert_array_equal(open_oracle(directory).head_over(IDS).logits, want, err_msg=str(option))


def test_rope_is_found_where_newer_configurations_have_it(tmp_path: Path) -> None:
    directory = MAKERS["deepseek_v3"](tmp_path, seed=4, yarn=YARN)
    want = open_oracle(directory).forward(IDS).logits

    def moved(config: dict[str, Any]) -> dict[str, Any]:
        scaling = config.pop("rope_scaling")
        kind = scaling.pop("type")
        return {**config, "rope_parameters": {**scaling, "rope_type": kind, "rope_theta": config.pop("rope_theta")}}

    edit_config(directory, moved)
    np.testing.assert_array_equal(open_oracle(directory).forward(IDS).logits, want)


@pytest.mark.parametrize("family", MAKERS)
def test_a_checkpoint_without_a_head_decodes_but_does_not_draft(tmp_path: Path, family: str) -> None:
    oracle = open_oracle(MAKERS[family](tmp_path, seed=1, markov=True, mtp=False))
    assert oracle.speculate([5], 4, 0).ids == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="no tensors of a head"):
        oracle.speculate([5], 4, 1)


def test_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type is 'qwen3_5_text'"):
        open_oracle(random_checkpoint(tmp_path, seed=1))
