"""Llama, Qwen2 and Qwen3 dense against transformers, with one control for each difference between them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_exporter.reference import mixers, model
from mtp_runtime import Model
from mtp_tools.verify.checks import checks
from tests.fixtures.checkpoints import add_tensor, edit_config
from tests.support import build_bundle, build_refused, load_model

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch and transformers are not installed; they are the oracle here", allow_module_level=True)

import torch
import transformers

IDS: list[int] = np.random.default_rng(0).integers(0, 112, 19).tolist()
SIZES: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "eos_token_id": 7,
}
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
# float32 rounding over three layers stays under 1e-4 on logits up to 10; the controls move them by more than 1e-2.
TOLERANCE = 1e-3


def checkpoint_of(directory: Path, kind: str, tied: bool) -> Path:
    """Random weights with norm gains and biases that matter, saved by transformers itself."""
    torch.manual_seed(3)
    sizes = {key: value for key, value in SIZES.items() if kind != "qwen2" or key != "head_dim"}
    config = getattr(transformers, f"{KINDS[kind]}Config")(**sizes, tie_word_embeddings=tied)
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.3 * parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=[(kind, tied) for kind in KINDS for tied in (True, False)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    kind, tied = request.param
    place = tmp_path_factory.mktemp(kind)
    checkpoint = checkpoint_of(place / "model", kind, tied)
    return checkpoint, load_model(build_bundle(checkpoint, place / "bundle", draft_tokens=3))


def logits(model: Model, blocks: list[int]) -> np.ndarray:
    sequences = model.engine.sequences()
    hidden, start = [], 0
    for size in blocks:
        hidden.append(sequences.verify(np.array([IDS[start : start + size]]), 0).hidden[0].copy())
        sequences.commit(np.array([size]))
        start += size
    return sequences.logits(np.concatenate(hidden))


def test_prefill_and_cached_decoding_equal_transformers(pair: tuple[Path, Model]) -> None:
    checkpoint, model = pair
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        want = oracle(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()
        other = oracle(input_ids=torch.tensor([IDS[::-1]]), use_cache=False).logits[0].numpy()
    for blocks in ([19], [1] * 19, [8, 1, 10]):
        np.testing.assert_allclose(logits(model, blocks), want, rtol=0, atol=TOLERANCE)
    assert np.abs(want - other).max() > 1, "control: the order of the tokens matters"


def test_it_is_lossless_with_every_forced_draft(pair: tuple[Path, Model]) -> None:
    assert [line.text for line in checks(pair[1], 8, 12) if not line.holds] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["rms_norm", "rotate"])
def test_control_the_builds_own_check_sees_a_norm_or_a_rotation_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    """The NumPy forward without the part disagrees with the graph that has it."""
    checkpoint = checkpoint_of(tmp_path / "model", kind, tied=False)
    for module in (mixers, model):
        monkeypatch.setattr(module, fault, lambda x, *_: x, raising=False)
    build_refused(checkpoint, tmp_path / "out", "disagree with a NumPy forward")


def test_control_biases_and_head_norms_cannot_be_passed_over(tmp_path: Path) -> None:
    """Read as a relative without them, the tensors are left over and named."""
    for kind, relative, name in (("qwen2", "Llama", "q_proj.bias"), ("qwen3", "Llama", "q_norm.weight")):
        checkpoint = checkpoint_of(tmp_path / kind, kind, tied=False)
        change = {"model_type": relative.lower(), "architectures": [f"{relative}ForCausalLM"]}
        edit_config(checkpoint, lambda config, change=change: {**config, **change})
        build_refused(checkpoint, tmp_path / "out", "no rule knows", name.split(".")[0])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 8.0, "rope_theta": 5e5}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}, "low_freq_factor = None"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_attention'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_variant_that_the_graphs_do_not_compute_is_refused(tmp_path: Path, change: dict, part: str) -> None:
    checkpoint = checkpoint_of(tmp_path / "model", "llama", tied=False)
    (checkpoint / "config.json").write_text(json.dumps(json.loads((checkpoint / "config.json").read_text()) | change))
    build_refused(checkpoint, tmp_path / "out", part)


def test_rotary_frequencies_that_old_files_store_are_left_out_and_said(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path / "model", "llama", tied=False)
    add_tensor(checkpoint, "model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(8, np.float32))
    notes: list[str] = []
    build_bundle(checkpoint, tmp_path / "out", notes=notes)
    assert any("ignored 1 stored rotary frequencies" in note for note in notes)


def test_it_drafts_by_lookup(pair: tuple[Path, Model]) -> None:
    model = pair[1]
    prompt = [5, 6, 5, 6, 5, 6]
    plain = model.complete(prompt_ids=prompt, max_new_tokens=24, ignore_eos=True)
    looked_up = model.complete(prompt_ids=prompt, max_new_tokens=24, drafter="ngram", ignore_eos=True)
    assert plain.stats.drafted == 0
    assert looked_up.stats.drafted > 0
    assert looked_up.token_ids == plain.token_ids
