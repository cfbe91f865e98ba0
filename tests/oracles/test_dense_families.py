"""The float64 oracle of the dense families against compositions of transformers' classes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.dense_families import eagle_checkpoint, mimo_checkpoint, plain_checkpoint
from tests.oracles.dense_families import DenseOracle, open_dense_oracle

IDS = np.random.default_rng(0).integers(0, 64, 23).tolist()
# Of the greatest value. Measured: 3e-15, after four chained EAGLE-1 rows 1e-13; the smallest fault of
# the controls moves 2e-2.
TOLERANCE = 1e-12
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama with biases": {"kind": "llama", "attention_bias": True},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3"},
    "tied": {"kind": "qwen3", "tied": True},
    "linear": {"rope_scaling": "linear"},
    "linear, old name": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"rope_scaling": "llama3"},
    "yarn": {"rope_scaling": "yarn"},
    "yarn, every field": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 20,
            "beta_slow": 2,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
            "truncate": False,
        }
    },
    "yarn, original length outside": {
        "kind": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
        "original_max_position_embeddings": 128,
    },
    "llama3, nested": {"rope_scaling": "llama3", "nested_rope": True},
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module of references, which needs packages that the product does without."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the comparison needs it")
    from tests.oracles import dense_reference

    return dense_reference


def _close(got: Any, want: Any) -> None:
    want = np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS)
def test_a_target_equals_transformers(tmp_path: Path, reference: Any, options: dict) -> None:
    directory = plain_checkpoint(tmp_path, seed=3, **options)
    got = open_dense_oracle(directory).forward(IDS)
    with reference.double_everywhere():
        streams, hidden, logits = reference.run_backbone(reference.backbone(directory), IDS)
    for row, want in zip([got.embeddings, *got.layers], streams, strict=True):
        _close(row, want)
    _close(got.pre_norm, streams[-1])
    _close(got.hidden, hidden)
    _close(got.logits, logits)


@pytest.mark.parametrize("tap", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("depths", [1, 2])
def test_a_mimo_head_equals_the_generic_one_of_transformers(
    tmp_path: Path, reference: Any, depths: int, tap: str
) -> None:
    directory = mimo_checkpoint(tmp_path, seed=3, depths=depths)
    oracle = open_dense_oracle(directory, hidden_tap=tap)
    drafts = oracle.draft(IDS, depths)
    runs = oracle.depths_over(IDS, drafts[:-1])
    with reference.double_everywhere():
        model = reference.backbone(directory)
        streams, hidden, logits = reference.run_backbone(model, IDS)
        _close(oracle.forward(IDS).logits, logits)
        head, cache = reference.mimo_head(directory, model, depths)
        rows = (streams[-1] if tap == "pre_norm" else hidden)[:-1][None]
        for k, run in enumerate(runs):
            tokens = [*IDS, *drafts][k + 1 : k + len(IDS)]
            # Its positions are those of the tokens; only their differences matter.
            positions = reference.torch.arange(k + 1, k + len(IDS))[None]
            rows = head.forward_layer(k, rows, positions, cache, input_ids=reference.torch.tensor([tokens]))
            _close(run.out, rows[0])
            _close(run.stages["output"], rows[0])
            _close(run.logits, model.lm_head(rows)[0])


def test_two_mimo_depths_draft_what_the_generic_model_drafts(tmp_path: Path, reference: Any) -> None:
    """Its own loop picks the tokens: depth k appends a draft and drops the oldest token."""
    directory = mimo_checkpoint(tmp_path, seed=5, depths=2)
    oracle = open_dense_oracle(directory, hidden_tap="post_norm")
    with reference.double_everywhere():
        model = reference.backbone(directory)
        for length in range(2, len(IDS), 5):
            known = IDS[:length]
            hidden = reference.run_backbone(model, known)[1]
            head, cache = reference.mimo_head(directory, model, 2)
            drafts, logits, _ = head(
                input_ids=reference.torch.tensor([known[1:]]),
                last_hidden_states=hidden[:-1][None],
                attention_mask=None,
                position_ids=reference.torch.arange(1, length)[None],
                mtp_cache=cache,
            )
            assert oracle.draft(known, 2) == drafts[0].tolist()
            runs = oracle.depths_over(known, drafts[0, :1].tolist())
            _close(np.stack([run.logits[-1] for run in runs]), logits[0])


EAGLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EAGLE-1": ({}, {"version": 1}),
    "EAGLE-1, bias, other embedding": ({}, {"version": 1, "fc_bias": True, "own_embedding": True}),
    "EAGLE-1, no embedding, its own output head": ({}, {"version": 1, "own_embedding": False, "own_head": True}),
    "EAGLE-1, llama3": ({"rope_scaling": "llama3"}, {"version": 1, "rope_scaling": "llama3"}),
    "EAGLE-3": ({}, {"version": 3, "draft_vocab": 44}),
    "EAGLE-3 for tied Qwen3, yarn": ({"kind": "qwen3", "tied": True}, {"version": 3, "rope_scaling": "yarn"}),
    "EAGLE-3, narrower": ({}, {"version": 3, "draft_vocab": 44, "hidden_size": 40}),
    "EAGLE-3, norm before residual": ({}, {"version": 3, "norm_before_residual": True}),
    "EAGLE-3, four taps": ({}, {"version": 3, "aux_layers": [7, 0, 3, 5]}),
}


@pytest.mark.parametrize(("target", "draft"), EAGLES.values(), ids=EAGLES)
def test_an_eagle_draft_equals_its_composition(tmp_path: Path, reference: Any, target: dict, draft: dict) -> None:
    # Eight layers: the three usual taps differ from each other and from their neighbours.
    target_path = plain_checkpoint(tmp_path / "target", seed=3, layers=8, **target)
    draft_path = eagle_checkpoint(tmp_path / "draft", target=target_path, seed=4, **draft)
    oracle = open_dense_oracle(target_path, draft_path)
    got = oracle.head_over(IDS)
    with reference.double_everywhere():
        model = reference.backbone(target_path)
        composed = reference.EagleReference(draft_path, model, draft["version"])
        streams, hidden, _ = reference.run_backbone(model, IDS)
        if draft["version"] == 3:
            # Counted here as in the configuration: k is the output of layer k.
            taps = draft.get("aux_layers", [1, 3, 4])
            hidden = reference.torch.cat([streams[k + 1] for k in taps], dim=-1)
        rows = composed.start(hidden[:-1])
        out, logits = composed(IDS[1:], rows)
        _close(got.out, out)
        _close(got.logits, logits)
        _close_chain(reference.torch, oracle, composed, rows)


def _close_chain(torch: Any, oracle: DenseOracle, composed: Any, rows: Any) -> None:
    """Three more rows, each from the one before: with a cache here, all anew there."""
    drafts = oracle.draft(IDS, 4)
    run = oracle.head_over(IDS)
    out, logits = composed(IDS[1:], rows)
    for j, token in enumerate(drafts):
        _close(run.logits[-1], logits[-1])
        assert oracle.token(run.logits[-1]) == token
        run = oracle.head([token], run.out[-1:], run.cache, len(IDS) - 1 + j)
        rows = torch.cat([rows, out[-1:]])
        out, logits = composed([*IDS[1:], *drafts[: j + 1]], rows)
