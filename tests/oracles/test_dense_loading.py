"""The dense oracle on chains with known counts, and what its loader reads and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.checkpoints import add_tensor, drop_tensors, edit_config, edit_tensor, read_tensors, rename_tensor
from tests.fixtures.dense_families import (
    eagle_checkpoint,
    eagle_markov_checkpoint,
    mimo_checkpoint,
    mimo_markov_checkpoint,
    plain_checkpoint,
    plain_markov_checkpoint,
)
from tests.oracles.dense_families import load_dense_checkpoint, open_dense_oracle

IDS = np.random.default_rng(0).integers(0, 64, 23).tolist()
ODD = range(1, 64, 2)
TokenMap = Callable[[int], int]


def one_on(token: int) -> int:
    return (token + 1) % 64


def two_on(token: int) -> int:
    return (token + 2) % 64


def _counted(target: TokenMap, draft: str, limit: int, drafts: int) -> tuple[list[int], list[int]]:
    """Ids and accepted drafts per cycle after token 5, by counting alone."""

    def mistaken(token: int) -> bool:
        return draft == "wrong" or (draft == "third" and token % 3 == 0)

    ids, accepted = [target(5)], []
    while len(ids) < limit:
        count, kept, block = min(drafts, limit - len(ids) - 1), 0, [target(ids[-1])]
        before = ids[-1]
        while kept < count and not mistaken(before):
            before = block[-1]
            block.append(target(before))
            kept += 1
        ids += block
        accepted.append(kept)
    return ids, accepted


# ----------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("draft", ["perfect", "wrong", "third"])
@pytest.mark.parametrize("depths", [1, 3])
def test_a_mimo_chain_gives_the_counts_of_its_closed_form(tmp_path: Path, draft: str, depths: int) -> None:
    oracle = open_dense_oracle(mimo_markov_checkpoint(tmp_path, draft=draft, depths=depths))
    for drafts in range(4):
        result = oracle.speculate([5], 12, drafts)
        assert (result.ids, result.accepted) == _counted(one_on, draft, 12, drafts)


def test_every_mimo_depth_drafts_with_its_own_layer(tmp_path: Path) -> None:
    directory = mimo_markov_checkpoint(tmp_path, depths=3, draft=["perfect", "perfect", "wrong"])
    assert set(open_dense_oracle(directory).speculate([5], 20, 3).accepted[:-1]) == {2}
    assert set(open_dense_oracle(directory, broken="depth_reused").speculate([5], 20, 3).accepted[:-1]) == {3}
    with pytest.raises(ValueError, match="3 depths cannot draft 4"):
        open_dense_oracle(directory).speculate([5], 20, 4)


@pytest.mark.parametrize("draft", ["perfect", "wrong", "third"])
@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_chain_gives_the_counts_of_its_closed_form(tmp_path: Path, draft: str, version: int) -> None:
    target = plain_markov_checkpoint(tmp_path / "target")
    way = {"version": 3, "through": "tokens"} if version == 3 else {"version": 1}
    oracle = open_dense_oracle(target, eagle_markov_checkpoint(tmp_path / "draft", target=target, draft=draft, **way))
    for drafts in range(5):
        result = oracle.speculate([5], 12, drafts)
        assert (result.ids, result.accepted) == _counted(one_on, draft, 12, drafts)


def test_swapped_halves_never_draft_right_on_a_chain(tmp_path: Path) -> None:
    target = plain_markov_checkpoint(tmp_path / "target")
    pairs = [(mimo_markov_checkpoint(tmp_path / "mimo"), None)]
    for version, way in ((1, {}), (3, {"through": "tokens"})):
        path = tmp_path / f"eagle {version}"
        pairs.append((target, eagle_markov_checkpoint(path, target=target, version=version, **way)))
    for pair in pairs:
        for drafts in (1, 4):
            assert sum(open_dense_oracle(*pair, broken="swap_concat").speculate([5], 20, drafts).accepted) == 0


@pytest.mark.parametrize("through", ["taps", "tokens"])
def test_odd_ids_alone_need_the_table(tmp_path: Path, through: str) -> None:
    target = plain_markov_checkpoint(tmp_path / "target", target=two_on)
    options = {"target": target, "version": 3, "target_map": two_on, "through": through}
    draft = eagle_markov_checkpoint(tmp_path / "a", draft_ids=ODD, **options)
    np.testing.assert_array_equal(read_tensors(draft)["d2t"], np.arange(32) + 1)
    result = open_dense_oracle(target, draft).speculate([5], 20, 1)
    assert (result.ids, result.accepted) == _counted(two_on, "perfect", 20, 1)
    for fault in ("d2t_as_index", "d2t_ignored"):
        assert sum(open_dense_oracle(target, draft, broken=fault).speculate([5], 20, 1).accepted) == 0
    without = eagle_markov_checkpoint(tmp_path / "b", draft_ids=ODD, d2t=False, **options)
    with pytest.raises(ValueError, match="d2t is None"):
        open_dense_oracle(target, without)
    for name, tables in (("c", {}), ("d", {"draft_ids": ODD, "t2d": False})):
        draft = eagle_markov_checkpoint(tmp_path / name, **tables, **options)
        assert open_dense_oracle(target, draft).speculate([5], 20, 1).accepted == result.accepted


def test_taps_know_one_token_and_chained_rows_no_more(tmp_path: Path) -> None:
    target = plain_markov_checkpoint(tmp_path / "target")
    oracle = open_dense_oracle(target, eagle_markov_checkpoint(tmp_path / "draft", target=target, version=3))
    assert oracle.speculate([5], 20, 3).drafts[0] == [7, 7, 7]


def test_a_table_becomes_exact_probabilities_and_end_ids_cut(tmp_path: Path) -> None:
    table = np.random.default_rng(1).dirichlet(np.ones(64), 64)
    for make in (plain_markov_checkpoint, mimo_markov_checkpoint):
        oracle = open_dense_oracle(make(tmp_path / make.__name__, table=table))
        np.testing.assert_allclose(np.exp(oracle.forward([5, 9]).logits), table[[5, 9]], atol=1e-6)
    oracle = open_dense_oracle(mimo_markov_checkpoint(tmp_path / "eos", eos=[12, 40]))
    assert oracle.checkpoint.eos == (12, 40)
    result = oracle.speculate([5], 20, 3, oracle.checkpoint.eos)
    assert (result.ids[-1], result.drafted, result.accepted) == (12, [3, 3], [3, 2])
    assert oracle.greedy([5], 20, (12,)) == result.ids


# ---------------------------------------------------------------------------------------- loading


def test_rope_is_read_from_either_place(tmp_path: Path) -> None:
    for scaling in (None, "linear", "llama3", "yarn"):
        logits = [
            open_dense_oracle(
                plain_checkpoint(tmp_path / f"{scaling} {nested}", seed=4, rope_scaling=scaling, nested_rope=nested)
            ).forward(IDS)
            for nested in (False, True)
        ]
        np.testing.assert_array_equal(logits[0].logits, logits[1].logits)
    directory = plain_checkpoint(tmp_path / "both", seed=4)
    edit_config(directory, lambda config: {**config, "rope_parameters": {"rope_theta": 1e4}})
    with pytest.raises(ValueError, match="rope_theta must have one value"):
        open_dense_oracle(directory)


def test_tapped_layers_count_from_where_they_are_named(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=3, layers=8)
    draft = eagle_checkpoint(tmp_path / "draft", target=target, seed=4, version=3)
    assert open_dense_oracle(target, draft).checkpoint.head.taps == (2, 4, 5)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}
    flat = {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}
    for fields in (nested, flat, {**nested, **flat}):
        edit_config(draft, lambda config, f=fields: {**config, **f})
        assert open_dense_oracle(target, draft).checkpoint.head.taps == (2, 5, 7)
    for fields, message in (
        ({**nested, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, "counted as inputs"),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "the target has 8 layers"),
    ):
        edit_config(draft, lambda config, f=fields: {**config, **f})
        with pytest.raises(ValueError, match=message):
            open_dense_oracle(target, draft)


def test_norm_before_residual_is_read_from_either_place(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=3, layers=8)
    draft = eagle_checkpoint(tmp_path / "draft", target=target, seed=4, version=3)
    assert not open_dense_oracle(target, draft).checkpoint.head.norm_before_residual
    edit_config(draft, lambda config: {**config, "eagle_config": {"norm_before_residual": True}})
    assert open_dense_oracle(target, draft).checkpoint.head.norm_before_residual
    edit_config(draft, lambda config: {**config, "norm_before_residual": False})
    with pytest.raises(ValueError, match="norm_before_residual is"):
        open_dense_oracle(target, draft)


def test_a_draft_uses_its_own_embedding_and_head_where_it_has_them(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=3)
    stored = read_tensors(target)
    options = {"target": target, "seed": 4}
    shared = {own: eagle_checkpoint(tmp_path / f"{own}", own_embedding=own, **options) for own in ("copy", False, True)}
    logits = {own: open_dense_oracle(target, path).head_over(IDS).logits for own, path in shared.items()}
    np.testing.assert_array_equal(logits["copy"], logits[False])
    assert np.abs(logits[True] - logits[False]).max() > 1.0
    assert "embed_tokens.weight" not in read_tensors(shared[False])
    draft = eagle_checkpoint(tmp_path / "head", own_head="copy", **options)
    np.testing.assert_array_equal(read_tensors(draft)["lm_head.weight"], stored["lm_head.weight"])
    np.testing.assert_array_equal(open_dense_oracle(target, draft).head_over(IDS).logits, logits["copy"])


def test_a_lost_or_contradictory_head_is_seen(tmp_path: Path) -> None:
    lost = mimo_checkpoint(tmp_path / "lost", seed=3, depths=0, declared=1)
    oracle = open_dense_oracle(lost)
    assert oracle.speculate([5], 4, 0).ids == oracle.greedy([5], 4)
    with pytest.raises(ValueError, match="no head and no draft"):
        oracle.speculate([5], 4, 1)
    other = mimo_checkpoint(tmp_path / "other", seed=3, depths=2, declared=1)
    with pytest.raises(ValueError, match=r"depths \[0, 1\], num_nextn_predict_layers is 1"):
        load_dense_checkpoint(other)


def test_what_the_oracle_would_ignore_is_refused(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=3)
    draft = eagle_checkpoint(tmp_path / "draft", target=target, seed=4)
    add_tensor(draft, "layers.0.input_layernorm.weight", np.ones(56, np.float32))
    with pytest.raises(ValueError, match="no input norm"):
        open_dense_oracle(target, draft)
    edit_config(draft, lambda config: {**config, "add_para_norm": True})
    with pytest.raises(ValueError, match="add_para_norm"):
        open_dense_oracle(target, draft)
    rename_tensor(draft, "layers.0.input_layernorm.weight", "embedding_layernorm.weight")
    with pytest.raises(ValueError, match=r"would ignore \['embedding_layernorm"):
        open_dense_oracle(target, draft)
    rename_tensor(target, "lm_head.weight", "head.weight")
    with pytest.raises(ValueError, match=r"would ignore \['head.weight'\]"):
        open_dense_oracle(target)


def test_a_tied_model_uses_its_embedding_and_refuses_another_head(tmp_path: Path) -> None:
    directory = plain_checkpoint(tmp_path, seed=4, tied=True, dtype="bfloat16")
    embedding = read_tensors(directory)["model.embed_tokens.weight"]
    assert embedding.dtype.name == "bfloat16"
    np.testing.assert_array_equal(load_dense_checkpoint(directory).lm_head, embedding.astype(np.float64))
    add_tensor(directory, "lm_head.weight", embedding)
    load_dense_checkpoint(directory)
    edit_tensor(directory, "lm_head.weight", lambda weight: weight + 1.0)
    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        load_dense_checkpoint(directory)
    drop_tensors(directory, lambda name: name == "lm_head.weight")
    edit_config(directory, lambda config: {**config, "tie_word_embeddings": False})
    with pytest.raises(ValueError, match="does not excuse it"):
        load_dense_checkpoint(directory)
