"""Heads stored as the decoder layer after the last (DeepSeek-V3, GLM-4.5): which tensors are whose, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mtp_runtime.request import request_from
from tests.fixtures.files import add_tensor, drop_tensors, edit_config, read_tensors, rename_tensor
from tests.fixtures.moe_families import MAKERS, partial_checkpoint
from tests.runtime.parts import recorded
from tests.support import build_bundle, build_refused, generate, load_model, refused

FAMILIES = ("deepseek_v3", "glm4_moe")
IDS = list(range(6, 26))
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


def chain(place: Path, family: str, **options: Any) -> Path:
    """A chain t -> t + 1 with a head that is always right, and the head at layer 3 unless told otherwise."""
    return MAKERS[family](place, seed=1, markov=True, **options)


def in_head(name: str, layer: int = 3) -> bool:
    return name.startswith(f"model.layers.{layer}.")


def always_right(bundle: Path) -> None:
    """Every draft is accepted at every K up to 4."""
    model = load_model(bundle)
    for draft_tokens in range(1, 5):
        finished = generate(model, [5], 20, draft_tokens)
        assert list(finished.token_ids) == IDS
        assert finished.stats.accepted == finished.stats.drafted > 0


# ------------------------------------------------------------------------------------ whose is what


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [3, 11])
def test_the_head_is_no_layer_of_the_trunk_and_the_trunk_none_of_the_head(
    tmp_path: Path, family: str, layers: int
) -> None:
    """LD-23. Noise too small to matter makes every row of every tensor a fingerprint of where it came from."""
    options = {"noise": 1e-6, "layers": layers, "own_head": "absent"}
    checkpoint = chain(tmp_path / "c", family, **options)
    bundle = build_bundle(checkpoint, tmp_path / "b", draft_tokens=4)
    always_right(bundle)
    trunk, head = (set(_sources(bundle, name, checkpoint)) for name in ("backbone", "mtp"))
    stored = set(read_tensors(checkpoint))
    assert head - {"model.embed_tokens.weight", "lm_head.weight"} == {n for n in stored if in_head(n, layers)}
    assert trunk == {name for name in stored if not in_head(name, layers)}
    assert {int(name.split(".")[2]) for name in trunk if ".layers." in name} == set(range(layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_mtp_nothing_of_the_head_is_in_the_bundle(tmp_path: Path, family: str) -> None:
    checkpoint = chain(tmp_path / "c", family, noise=1e-6)
    notes: list[str] = []
    bundle = build_bundle(checkpoint, tmp_path / "b", mtp=False, notes=notes)
    count = sum(map(in_head, read_tensors(checkpoint)))
    assert f"ignored {count} tensors of the MTP head (--no-mtp)" in notes
    assert sorted(path.name for path in (bundle / "graphs").iterdir()) == ["backbone.onnx", "weights.data"]
    sources = set(_sources(bundle, "backbone", checkpoint))
    # The head's copies of embedding and output head have the same rows as the trunk's.
    assert {name for name in sources if in_head(name)} <= set(COPIES)
    assert generate(bundle, [5], 20, 0).token_ids == tuple(IDS)
    with refused("draft_tokens is 1", "without an MTP head"):
        generate(bundle, [5], 20, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_the_trunk_is_never_taken_for_a_head(tmp_path: Path, family: str) -> None:
    """LD-23: with a smaller num_hidden_layers, --no-mtp must not drop ordinary layers as if they were the head."""
    checkpoint = chain(tmp_path / "c", family)
    edit_config(checkpoint, lambda config: {**config, "num_hidden_layers": 2})
    build_refused(checkpoint, tmp_path / "b", "num_nextn_predict_layers = 1")
    build_refused(checkpoint, tmp_path / "b", "model.layers.2.", mtp=False)


def _sources(bundle: Path, graph: str, checkpoint: Path) -> Iterator[str]:
    """The tensors of the checkpoint that have a row of a graph's weights."""
    owners: dict[bytes, set[str]] = {}
    for name, array in read_tensors(checkpoint).items():
        for row in array.reshape(-1, array.shape[-1]):
            owners.setdefault(row.tobytes(), set()).add(name)
    weights = [value.const_value for value in ir.load(bundle / f"graphs/{graph}.onnx").graph.initializers.values()]
    for weight in weights:
        if isinstance(weight, ir.ExternalTensor):
            array = weight.numpy()
            for row in array.reshape(-1, array.shape[-1]):
                yield from owners[row.tobytes()]


# ------------------------------------------------------------------- own embedding and own output head


@pytest.mark.parametrize(("family", "dropped"), list(zip(FAMILIES, COPIES, strict=True)))
def test_either_copy_may_be_absent(tmp_path: Path, family: str, dropped: str) -> None:
    """LD-25 a and b in one; both copies are in the test of LD-17, none in that of LD-23."""
    checkpoint = chain(tmp_path / "c", family)
    drop_tensors(checkpoint, lambda name: name == dropped)
    notes: list[str] = []
    bundle = build_bundle(checkpoint, tmp_path / "b", draft_tokens=4, notes=notes)
    assert "ignored 1 tensors equal to the target's embedding or head" in notes
    always_right(bundle)
    mtp = load_model(bundle).manifest.model.mtp
    assert mtp is not None
    assert not mtp.own_head
    assert not mtp.own_embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_head_of_its_own_is_used(tmp_path: Path, family: str) -> None:
    """LD-25 c: it says t + 2, so no draft is right and the output is the same."""
    bundle = build_bundle(chain(tmp_path / "c", family, own_head="different"), tmp_path / "b", draft_tokens=4)
    run, recorder = recorded(load_model(bundle), [5], 20, draft_tokens=4)
    assert run.ids == IDS
    assert run.finished.stats.accepted == 0
    assert [draft[0] for draft in recorder.drafts] == list(range(8, 26))


def test_an_own_output_head_in_a_lost_shard_is_not_taken_for_shared(tmp_path: Path) -> None:
    """LD-01 and LD-25: the index knows the tensor, so whether it equals the target's cannot be assumed."""
    checkpoint = chain(tmp_path / "c", "deepseek_v3", own_head="different", shards=2)
    own = read_tensors(checkpoint)[COPIES[1]]
    _move_to_a_shard_of_its_own(checkpoint, COPIES[1])
    assert np.count_nonzero(own)
    build_refused(checkpoint, tmp_path / "b", "model-00009-of-00009.safetensors", COPIES[1])


def _move_to_a_shard_of_its_own(checkpoint: Path, name: str) -> None:
    """Take a tensor out of its file and let the index name another file, which does not exist."""
    drop_tensors(checkpoint, lambda other: other == name)

    def moved(index: dict[str, Any]) -> None:
        index["weight_map"][name] = "model-00009-of-00009.safetensors"

    edit_config(checkpoint, moved, "model.safetensors.index.json")


# ------------------------------------------------------------------------------- lost and renamed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_the_configuration_announces_must_be_there(tmp_path: Path, family: str) -> None:
    """LD-06: all tensors gone, all but the copies gone, one gone."""
    whole = sum(map(in_head, read_tensors(chain(tmp_path / "whole", family)))) - len(COPIES)
    remedies = ("--mtp-from", "--no-mtp")
    gone = chain(tmp_path / "gone", family, mtp=False)
    part = f"declares 1 MTP layer, {gone} holds 0 of {whole} tensors"
    build_refused(gone, tmp_path / "b", part, "first missing: 'model.layers.3.", *remedies)
    copies = chain(tmp_path / "copies", family)
    drop_tensors(copies, lambda name: in_head(name) and name not in COPIES)
    build_refused(copies, tmp_path / "b", f"holds 0 of {whole} tensors", *remedies)
    for lost in ("hnorm.weight", "mlp.experts.7.up_proj.weight", "mlp.gate.e_score_correction_bias"):
        checkpoint = chain(tmp_path / lost, family)
        drop_tensors(checkpoint, lambda name, lost=lost: name == f"model.layers.3.{lost}")
        build_refused(checkpoint, tmp_path / "b", f"{whole - 1} of {whole}", f"'model.layers.3.{lost}'", *remedies)
    assert generate(build_bundle(copies, tmp_path / "b", mtp=False), [5], 20, 0).token_ids == tuple(IDS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_head", ["absent", "copy"])
def test_renamed_embedding_and_output_head_are_named(tmp_path: Path, family: str, own_head: str) -> None:
    """LD-26: both what is unmatched and what is unfilled."""
    checkpoint = chain(tmp_path / "c", family, own_head=own_head)
    rename_tensor(checkpoint, "lm_head.weight", "head.weight")
    rename_tensor(checkpoint, "model.embed_tokens.weight", "embed.weight")
    unmatched, unfilled = ("'head.weight'", "'embed.weight'"), ("'lm_head.weight'", "'model.embed_tokens.weight'")
    build_refused(checkpoint, tmp_path / "b", *unmatched, *unfilled)


@pytest.mark.parametrize("own_head", ["absent", "copy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lost_embedding_is_named(tmp_path: Path, family: str, own_head: str) -> None:
    checkpoint = chain(tmp_path / "c", family, own_head=own_head)
    rename_tensor(checkpoint, "model.embed_tokens.weight", "embed.weight")
    build_refused(checkpoint, tmp_path / "b", "'model.embed_tokens.weight'", "'embed.weight'")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_lost_shard_is_named(tmp_path: Path, family: str, shard: int) -> None:
    """LD-01: the first holds the trunk's embedding, the second its output head, the third the head."""
    checkpoint = chain(tmp_path / "c", family, shards=3)
    name = f"model-{shard:05d}-of-00003.safetensors"
    (checkpoint / name).unlink()
    build_refused(checkpoint, tmp_path / "b", f"{checkpoint / name} is missing", "index.json")


def test_a_tensor_that_no_rule_knows_is_refused(tmp_path: Path) -> None:
    """LD-26: with and without the head."""
    checkpoint = chain(tmp_path / "c", "deepseek_v3")
    add_tensor(checkpoint, "mtp.0.main_norm.weight", np.ones(64, np.float32))
    for mtp in (True, False):
        build_refused(checkpoint, tmp_path / "b", "1 that no rule knows", "'mtp.0.main_norm.weight'", mtp=mtp)


# ------------------------------------------------------------------------------------------- K


def test_one_trained_depth_serves_every_k_and_other_values_are_refused(tmp_path: Path) -> None:
    """LD-36. That every K gives the ids of plain decoding is `always_right`'s."""
    bundle = build_bundle(chain(tmp_path / "c", "deepseek_v3"), tmp_path / "b", draft_tokens=4)
    model = load_model(bundle)
    assert model.manifest.model.mtp is not None
    assert (model.manifest.model.mtp.depth, model.manifest.limits.max_draft_tokens) == (1, 4)
    plain = generate(model, [5], 20, 0)
    assert list(plain.token_ids) == IDS
    assert (plain.stats.drafted, plain.stats.cycles) == (0, 19)
    for draft_tokens in (-1, 5, 99):
        with refused(f"draft_tokens is {draft_tokens}", "0 to 4"):
            generate(model, [5], 20, draft_tokens)
    with refused("draft_tokens = 2.5", "whole number"):
        request_from({"prompt_ids": [5], "draft_tokens": 2.5}, "the request")


# -------------------------------------------------------------------------------------- --mtp-from


def test_a_lost_head_is_taken_from_the_base(tmp_path: Path) -> None:
    base = partial_checkpoint("deepseek_v3", tmp_path / "base")
    tuned = partial_checkpoint("deepseek_v3", tmp_path / "tuned", mtp=False)
    build_refused(tuned, tmp_path / "b", "0 of", "--mtp-from")
    stats = []
    for out, options in (("own", {}), ("taken", {"mtp_from": str(base)})):
        finished = generate(build_bundle(tuned if options else base, tmp_path / out, **options), [5, 6, 20], 40, 3)
        stats.append((finished.token_ids, finished.stats.accepted, finished.stats.emitted_histogram))
    assert stats[0] == stats[1]
    assert stats[0][1] > 5, "a head that is never right would show nothing"


def test_an_own_output_head_is_taken_with_the_rest(tmp_path: Path) -> None:
    base = chain(tmp_path / "base", "deepseek_v3", own_head="different")
    tuned = chain(tmp_path / "tuned", "deepseek_v3", mtp=False)
    run, recorder = recorded(
        load_model(build_bundle(tuned, tmp_path / "b", mtp_from=str(base))), [5], 9, draft_tokens=1
    )
    assert run.ids == IDS[:9]
    assert recorder.drafts == [[token] for token in range(8, 15)]


def test_a_base_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    tuned = chain(tmp_path / "tuned", "deepseek_v3", mtp=False)
    others = {
        "no MTP head to take": chain(tmp_path / "none", "deepseek_v3", mtp=False, num_nextn_predict_layers=None),
        "their layers differ": chain(tmp_path / "deeper", "deepseek_v3", layers=4),
        "family is 'deepseek_v3' and 'glm4_moe'": chain(tmp_path / "glm", "glm4_moe"),
        "norm_epsilon is": chain(tmp_path / "epsilon", "deepseek_v3", rms_norm_eps=1e-5),
    }
    for part, base in others.items():
        build_refused(tuned, tmp_path / "b", part, mtp_from=str(base))
    build_refused(tuned, tmp_path / "b", "holds 0 of", mtp_from=str(tuned))
    base = chain(tmp_path / "base", "deepseek_v3")
    build_refused(tuned, tmp_path / "b", "--mtp-from", "--no-mtp", mtp_from=str(base), mtp=False)
