"""The float64 oracle against transformers, closed forms, itself, and its own faults."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.checkpoints import (
    add_tensor,
    drop_tensors,
    edit_config,
    edit_tensor,
    markov_checkpoint,
    partial_checkpoint,
    random_checkpoint,
    read_tensors,
    successor,
)
from tests.oracles.float64 import FAULTS, Forward, Oracle, Speculation, load_checkpoint

IDS = np.random.default_rng(0).integers(0, 112, 23).tolist()
SIZES: dict[str, dict[str, Any]] = {
    "tied, as many value heads as key heads": {
        "tied": True,
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 5,
    },
    "untied, three value heads to a key head": {"linear_num_value_heads": 15},
}
# What a fault must change. Target and head are compared on random weights, the head on rows of the
# right target; the others on the partial chain, where every state reaches the tokens.
DRAFTS = {"drafts", "accepted"}
CHANGES: dict[str, set[str]] = {
    "swap_concat": {"head"} | DRAFTS,
    "pre_norm_hidden": {"head"} | DRAFTS,
    "plain_gain": {"target", "head", "ids"},
    "flat_q_gate": {"target", "head", "ids"},
    "linear_norm_zero_centred": {"target", "ids"},
    "unshifted_ids": {"head"} | DRAFTS,
    "l2norm_eps_outside": {"target"},
    "q_unscaled": {"target"},
    "repeat_not_interleave": {"target", "ids"},
    "conv_state_post_silu": {"incremental", "ids"},
    "read_before_update": {"target", "ids"},
    "no_decay": {"target", "ids"},
    "mtp_rejected_rows_kept": DRAFTS,
    "chained_rows_kept": DRAFTS,
    "hidden_row_off_by_one": {"head"} | DRAFTS,
    "position_zero_masked": {"head"} | DRAFTS,
    "state_not_rolled_back": {"ids"},
    "rope_full": {"target", "head", "ids"},
    "unscaled_scores": {"target", "head", "ids"},
    "state_bf16": {"target", "ids"},
}


# ---------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_target_and_head_equal_transformers_in_float64(tmp_path: Path, sizes: dict) -> None:
    torch, model, head = _transformers_models(random_checkpoint(tmp_path, seed=3, **sizes))
    from transformers.cache_utils import MtpCache

    oracle = Oracle(load_checkpoint(tmp_path))
    want, want_head = oracle.forward(IDS), oracle.head_over(IDS)
    with _double_everywhere(torch), torch.no_grad():
        run = model.model(input_ids=torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
        logits = model.lm_head(run.last_hidden_state)
        # Its head counts positions from 1; only their differences matter.
        out = head.forward_layer(
            0,
            torch.tensor(want.hidden[:-1])[None],
            torch.arange(1, len(IDS))[None],
            MtpCache(config=model.config.get_mtp_config()),
            input_ids=torch.tensor([IDS[1:]]),
        )
    # Measured: below 1e-12. The smallest fault, l2norm_eps_outside, moves the logits by 2e-5.
    for row, got in zip(want.layers[:-1], run.hidden_states[1:-1], strict=True):
        np.testing.assert_allclose(row, got[0].numpy(), rtol=0, atol=1e-11)
    np.testing.assert_allclose(want.hidden, run.last_hidden_state[0].numpy(), rtol=0, atol=1e-11)
    np.testing.assert_allclose(want.logits, logits[0].numpy(), rtol=0, atol=1e-11)
    np.testing.assert_allclose(want_head.out, out[0].numpy(), rtol=0, atol=1e-11)


def _transformers_models(directory: Path) -> tuple[Any, Any, Any]:
    """torch, the target and the generic MTP model, both in float64."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the comparison needs it")
    import torch
    from transformers import Qwen3_5ForCausalLM
    from transformers.modeling_layers import MtpModel

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Qwen3_5ForCausalLM.from_pretrained(directory, **options).eval().double()
    # Two attributes that the family does not set turn the generic head on.
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    head = MtpModel.from_pretrained(model).eval().double()
    for module in (model.model, head):
        rope = model.config.rope_parameters
        rotated = int(model.config.head_dim * rope["partial_rotary_factor"])
        exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        # The frequencies were made in float32, before the model became float64.
        module.rotary_emb.inv_freq = float(rope["rope_theta"]) ** -exponents
    return torch, model, head


@contextlib.contextmanager
def _double_everywhere(torch: Any) -> Iterator[None]:
    """Turn the explicit float32 casts inside the model into float64 ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


# ---------------------------------------------------------------------------------- closed forms


def _closed_form(
    draft_map: Callable[[int], int], last: int, limit: int, drafts: int, eos: Collection[int]
) -> tuple[list[int], list[int], list[int]]:
    """Ids, drafted and accepted per cycle of two chains, by counting alone."""
    ids, drafted, accepted = [successor(last)], [], []
    while len(ids) < limit and ids[-1] not in eos:
        count = min(drafts, limit - len(ids) - 1)
        draft = [ids[-1]]
        for _ in range(count):
            draft.append(draft_map(draft[-1]))
        right = [ids[-1]]
        for _ in range(count + 1):
            right.append(successor(right[-1]))
        kept = 0
        while kept < count and draft[kept + 1] == right[kept + 1]:
            kept += 1
        block = right[1 : kept + 2]
        ends = [i for i, token in enumerate(block) if token in eos]
        block = block[: ends[0] + 1] if ends else block
        ids += block
        drafted.append(count)
        accepted.append(min(kept, len(block)))
    return ids, drafted, accepted


DRAFT_MAPS: dict[str, Callable[[int], int]] = {
    "perfect": successor,
    "wrong": lambda token: successor(successor(token)),
    "third": lambda token: successor(token) if token % 3 else successor(successor(token)),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("draft", DRAFT_MAPS)
def test_a_chain_gives_the_counts_of_its_closed_form(tmp_path: Path, draft: str, tied: bool) -> None:
    oracle = Oracle(load_checkpoint(markov_checkpoint(tmp_path, draft=draft, tied=tied)))
    for limit in (1, 2, 7, 20):
        for eos in ((), (6,), (7,), (12,)):
            assert oracle.greedy([5], limit, eos) == _closed_form(successor, 5, limit, 0, eos)[0]
            for drafts in range(5):
                result = oracle.speculate([5], limit, drafts, eos)
                want = _closed_form(DRAFT_MAPS[draft], 5, limit, drafts, eos)
                assert (result.ids, result.drafted, result.accepted) == want


def test_an_end_token_inside_a_block_cuts_ids_and_accepted(tmp_path: Path) -> None:
    oracle = Oracle(load_checkpoint(markov_checkpoint(tmp_path)))
    result = oracle.speculate([5], 20, 3, eos=(12,))
    assert result.ids == [6, 7, 8, 9, 10, 11, 12]
    assert (result.drafted, result.accepted) == ([3, 3], [3, 2])


def test_a_table_becomes_exact_probabilities_and_the_lowest_id_wins_a_tie(tmp_path: Path) -> None:
    table = np.random.default_rng(1).dirichlet(np.ones(64), 64)
    oracle = Oracle(load_checkpoint(markov_checkpoint(tmp_path / "table", table=table)))
    np.testing.assert_allclose(np.exp(oracle.forward([5, 9]).logits), table[[5, 9]], atol=1e-6)
    head = np.zeros((64, 64))
    head[[20, 40]] = 1.0
    oracle = Oracle(load_checkpoint(markov_checkpoint(tmp_path / "tie", head=head)))
    assert oracle.greedy([5], 3) == [20, 20, 20]


# ------------------------------------------------------------------------------- self-consistency


def test_one_row_at_a_time_equals_the_whole_text(checkpoints: tuple[Path, Path]) -> None:
    oracle = _oracle(checkpoints[0])
    whole, rows = oracle.forward(IDS), _rows(oracle)
    np.testing.assert_allclose(np.concatenate([row.logits for row in rows]), whole.logits, rtol=0, atol=1e-9)
    for want, got in zip(whole.states, rows[-1].states, strict=True):
        assert want[0] == got[0]
        np.testing.assert_allclose(want[1], got[1], rtol=0, atol=1e-9)
        np.testing.assert_allclose(want[2], got[2], rtol=0, atol=1e-9)


def test_the_head_with_a_cache_equals_the_whole_text(checkpoints: tuple[Path, Path]) -> None:
    oracle = _oracle(checkpoints[0])
    whole, hidden = oracle.head_over(IDS), oracle.forward(IDS).hidden
    first = oracle.head(IDS[1:9], hidden[:8])
    second = oracle.head(IDS[9:], hidden[8:-1], first.cache, start=8)
    np.testing.assert_allclose(np.concatenate([first.logits, second.logits]), whole.logits, rtol=0, atol=1e-9)
    np.testing.assert_allclose(second.key, whole.key, rtol=0, atol=1e-9)


@pytest.mark.parametrize("drafts", range(5))
def test_speculation_emits_the_greedy_ids(checkpoints: tuple[Path, Path], drafts: int) -> None:
    for directory in checkpoints:
        oracle = _oracle(directory)
        result = oracle.speculate([5, 6, 20], 48, drafts)
        assert result.ids == oracle.greedy([5, 6, 20], 48)
        assert len(result.ids) == 1 + sum(result.accepted) + len(result.accepted)


def test_the_partial_chain_reaches_every_acceptance_length(checkpoints: tuple[Path, Path]) -> None:
    result = _oracle(checkpoints[1]).speculate([5, 6, 20], 48, 3)
    assert set(result.accepted) == {0, 1, 2, 3}


# ----------------------------------------------------------------------------------------- faults


def test_every_fault_has_an_expectation() -> None:
    assert set(CHANGES) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_changes_what_it_should(checkpoints: tuple[Path, Path], fault: str) -> None:
    changed = _changes(checkpoints, fault)
    assert changed >= CHANGES[fault], "this fault cannot be seen where it must be"
    model = {"target", "head"}
    assert changed & model == CHANGES[fault] & model, "this fault reaches further than its name"
    if CHANGES[fault] >= DRAFTS:
        assert not changed & {"incremental", "ids"}, "a draft changed the emitted text"


def test_an_unknown_fault_is_refused(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="Unknown fault 'swap_concatenation'"):
        Oracle(load_checkpoint(checkpoints[0]), broken="swap_concatenation")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Random weights, and the partial chain."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return (
        random_checkpoint(directory / "random", seed=3),
        partial_checkpoint(directory / "partial"),
    )


@cache
def _oracle(directory: Path, fault: str | None = None) -> Oracle:
    return Oracle(load_checkpoint(directory), fault)


@cache
def _speculation(directory: Path, fault: str | None = None) -> Speculation:
    return _oracle(directory, fault).speculate([5, 6, 20], 48, 3)


def _rows(oracle: Oracle) -> list[Forward]:
    rows: list[Forward] = []
    for position, token in enumerate(IDS):
        states = rows[-1].states if rows else oracle.initial_states()
        rows.append(oracle.extend([token], states, position))
    return rows


def _changes(checkpoints: tuple[Path, Path], fault: str) -> set[str]:
    """Which of the names of CHANGES differ under the fault."""
    random, partial = checkpoints
    right, wrong = _oracle(random), _oracle(random, fault)
    target = right.forward(IDS)
    stepped = np.concatenate([row.logits for row in _rows(wrong)])
    head = wrong.head(*wrong.pair(IDS, wrong.head_input(target)[:-1]))
    moved = {
        "target": np.abs(wrong.forward(IDS).logits - target.logits).max(),
        "incremental": np.abs(stepped - target.logits).max(),
        "head": np.abs(head.out - right.head_over(IDS).out).max(),
    }
    # Between float64 noise, 1e-12, and the smallest fault, l2norm_eps_outside with 2e-5.
    changed = {name for name, distance in moved.items() if distance > 1e-7}
    want, got = _speculation(partial), _speculation(partial, fault)
    return changed | {name for name in ("ids", "drafts", "accepted") if getattr(want, name) != getattr(got, name)}


# ---------------------------------------------------------------------------------------- loading


def _logits(directory: Path) -> np.ndarray:
    return Oracle(load_checkpoint(directory)).head_over(IDS).logits


def test_every_layout_of_the_same_weights_is_the_same_model(tmp_path: Path) -> None:
    want = _logits(random_checkpoint(tmp_path / "nested", seed=4))
    variants: dict[str, dict[str, Any]] = {
        "flat": {"flat": True},
        "sharded": {"shards": 3},
        "nested config, flat names": {"prefix": "model."},
        "interval": {"layer_types": None},
    }
    for name, options in variants.items():
        got = _logits(random_checkpoint(tmp_path / name, seed=4, **options))
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_rope_theta_is_found_in_all_three_places(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path, seed=4, flat=True)
    want = _logits(directory)
    rope = {"partial_rotary_factor": 0.25}
    for place in ({"rope_theta": 1e7}, {"rope_scaling": {"rope_theta": 1e7}}):
        edit_config(directory, lambda config, p=place: {**config, "rope_parameters": rope, **p})
        np.testing.assert_array_equal(_logits(directory), want)
        edit_config(directory, lambda config, p=place: {k: config[k] for k in config if k not in p})
    with pytest.raises(ValueError, match="rope_theta must have one value"):
        load_checkpoint(directory)
    edit_config(directory, lambda config: {**config, "rope_theta": 1e4})
    assert np.abs(_logits(directory) - want).max() > 1e-3


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path, seed=4, dtype="bfloat16")
    loaded = load_checkpoint(directory)
    for name, array in read_tensors(directory).items():
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        assert array.dtype.name == ("float32" if kept else "bfloat16")
    norm = read_tensors(directory)["mtp.norm.weight"]
    np.testing.assert_array_equal(loaded.head["norm.weight"], norm.astype(np.float64))


def test_a_tied_model_uses_its_embedding_and_refuses_another_head(tmp_path: Path) -> None:
    directory = random_checkpoint(tmp_path, seed=4, tied=True)
    embedding = read_tensors(directory)["model.language_model.embed_tokens.weight"]
    np.testing.assert_array_equal(load_checkpoint(directory).lm_head, embedding)
    add_tensor(directory, "lm_head.weight", embedding)
    np.testing.assert_array_equal(load_checkpoint(directory).lm_head, embedding)
    edit_tensor(directory, "lm_head.weight", lambda weight: weight + 1.0)
    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        load_checkpoint(directory)


def test_end_tokens_are_the_union_of_all_places(tmp_path: Path) -> None:
    directory = markov_checkpoint(tmp_path, eos=12, generation_config={"eos_token_id": [40, 9]})
    assert load_checkpoint(directory).eos == (9, 12, 40)


def test_a_checkpoint_without_a_head_decodes_but_does_not_draft(tmp_path: Path) -> None:
    directory = markov_checkpoint(tmp_path, shards=2)
    drop_tensors(directory, lambda name: name.startswith("mtp."))
    oracle = Oracle(load_checkpoint(directory))
    assert oracle.speculate([5], 4, 0).ids == [6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"no mtp\.\* tensors"):
        oracle.speculate([5], 4, 1)
