"""A family that nobody knew: one file in a folder, and build, verify, inspect and check work with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from mtp_exporter import families
from mtp_exporter.checking.compare import compare_bundle
from mtp_exporter.inspecting.inspect import inspect_checkpoint
from mtp_exporter.prepare import Ingredients
from mtp_tools.verify.checks import checks
from tests.exporter.dense.parts import (
    IDS,
    PROMPT,
    TOLERANCE,
    VISIBLE,
    Pair,
    agrees,
    head_logits,
    head_run,
    share,
    target_run,
)
from tests.fixtures.checkpoints import drop_tensors, edit_config, edit_tensor, rename_tensor
from tests.fixtures.dense_families import mimo_checkpoint, partial_mimo_checkpoint
from tests.fixtures.files import read_tensors
from tests.support import build_bundle, build_refused, copy_of, load_model

NAME = "gyre"
# A Llama-like layout with names of its own; its head joins the hidden state before the embedding.
FAMILY = dedent('''
    """Gyre: a made-up family."""

    from dataclasses import replace

    from mtp_engines.contracts.model import MtpSpec
    from mtp_exporter.reading.config import Config
    from mtp_exporter.families.common import belongs
    from mtp_exporter.families.dense import dense_layer, dense_spec
    from mtp_exporter.families.description import Description, Need, require_head

    MODEL_TYPES = ("gyre",)
    ARCHITECTURES = ("GyreForCausalLM",)


    def recognises(checkpoint):
        return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


    def describe(checkpoint, wanted):
        config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
        layer, notes = dense_layer(config, qk_norm=False, bias=True)
        spec = dense_spec(checkpoint, config, "gyre", layer)
        hidden, vocab = spec.hidden_size, spec.vocab_size
        needs = [
            Need("embedding", "wte.weight", (vocab, hidden)),
            Need("final_norm", "ln_f.weight", (hidden,)),
            Need("head", "lm_head.weight", (vocab, hidden)),
        ]
        for index in range(len(spec.layers)):
            needs += layer_needs(f"layers.{index}.", f"blocks.{index}.", layer, hidden)
        head = [
            Need("mtp.hidden_norm", "lookahead.norm_state.weight", (hidden,)),
            Need("mtp.embedding_norm", "lookahead.norm_token.weight", (hidden,)),
            Need("mtp.projection", "lookahead.join.weight", (hidden, 2 * hidden)),
            Need("mtp.output_norm", "lookahead.norm_out.weight", (hidden,)),
            *layer_needs("mtp.layer.", "lookahead.block.", layer, hidden),
        ]
        keys = tuple(need.source for need in head)
        declared = config.text.get("lookahead_layers")
        depths = [keys, ()]
        if wanted.mtp and require_head(checkpoint, declared, lambda depth: depths[min(depth, 1)], "lookahead_layers"):
            mtp = MtpSpec((layer,), hidden, concat="hidden_first", taps=(len(spec.layers),))
            spec, needs = replace(spec, mtp=mtp), needs + head
        left = {} if wanted.mtp else {"tensors of the head (--no-mtp)": keys}
        return Description(spec, tuple(needs), left, declared, keys, notes=notes)


    def layer_needs(role, key, layer, hidden):
        mixer, size = layer.mixer, layer.mlp.intermediate_size
        needs = [
            Need(f"{role}input_norm", f"{key}ln_1.weight", (hidden,)),
            Need(f"{role}post_norm", f"{key}ln_2.weight", (hidden,)),
            Need(f"{role}mixer.output", f"{key}attn.wo.weight", (hidden, mixer.query_width)),
            Need(f"{role}mlp.gate", f"{key}ffn.w1.weight", (size, hidden)),
            Need(f"{role}mlp.up", f"{key}ffn.w3.weight", (size, hidden)),
            Need(f"{role}mlp.down", f"{key}ffn.w2.weight", (hidden, size)),
        ]
        for name, short, width in (
            ("query", "wq", mixer.query_width), ("key", "wk", mixer.kv_width), ("value", "wv", mixer.kv_width)
        ):
            needs.append(Need(f"{role}mixer.{name}", f"{key}attn.{short}.weight", (width, hidden)))
            needs.append(Need(f"{role}mixer.{name}_bias", f"{key}attn.{short}.bias", (width,)))
        return needs
''')
RENAMES = {
    "model.embed_tokens.": "wte.",
    "model.norm.": "ln_f.",
    "model.layers.": "blocks.",
    "model.mtp_layers.0.hidden_layernorm.": "lookahead.norm_state.",
    "model.mtp_layers.0.token_layernorm.": "lookahead.norm_token.",
    "model.mtp_layers.0.input_proj.": "lookahead.join.",
    "model.mtp_layers.0.final_layernorm.": "lookahead.norm_out.",
    "model.mtp_layers.0.": "lookahead.block.",
    "input_layernorm.": "ln_1.",
    "post_attention_layernorm.": "ln_2.",
    **{f"self_attn.{name}_proj.": f"attn.w{name}." for name in "qkvo"},
    "mlp.gate_proj.": "ffn.w1.",
    "mlp.up_proj.": "ffn.w3.",
    "mlp.down_proj.": "ffn.w2.",
}


def renamed(source: Path, out: Path) -> Path:
    """The same model as `source`, a MiMo, in the layout of the made-up family."""
    copy_of(source, out)
    for name in read_tensors(out):
        other = name
        for old, new in RENAMES.items():
            other = other.replace(old, new)
        if other != name:
            rename_tensor(out, name, other)
    known = {"model_type": NAME, "architectures": ["GyreForCausalLM"], "lookahead_layers": 1}
    edit_config(out, lambda config: {key: value for key, value in config.items() if key not in UNUSED} | known)
    assert not [name for name in read_tensors(out) if name.startswith("model.")]
    return out


UNUSED = ("num_nextn_predict_layers", "auto_map")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder beside those of the release, still empty; what was imported from it is forgotten after the test."""
    place = tmp_path / "families"
    place.mkdir()
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(place)])
    yield place
    sys.modules.pop(f"{families.__name__}.{NAME}", None)
    vars(families).pop(NAME, None)


@pytest.fixture
def family(folder: Path) -> None:
    """The file, and nothing else."""
    (folder / f"{NAME}.py").write_text(FAMILY)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mimo_checkpoint(tmp_path_factory.mktemp("original") / "mimo", seed=7)


@pytest.fixture(scope="module")
def checkpoint(original: Path) -> Path:
    return renamed(original, original.with_name(NAME))


def test_control_without_the_file_it_is_unknown(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    build_refused(checkpoint, tmp_path / "out", "model_type 'gyre'", "which no family of this release describes")
    report = inspect_checkpoint(checkpoint)
    assert (report["family"], report["can_build"]) == (None, False)
    (folder / f"{NAME}.py").write_text("# no family, a file of helpers\n")
    build_refused(checkpoint, tmp_path / "out", "which no family of this release describes")


@pytest.mark.usefixtures("family")
def test_inspect_knows_it(checkpoint: Path, tmp_path: Path) -> None:
    report = inspect_checkpoint(checkpoint)
    assert (report["family"], report["can_build"], report["problems"]) == (NAME, True, [])
    assert report["mtp"] == {
        "layers_declared": 1,
        "tensors_expected": 16,
        "tensors_found": 16,
        "first_missing": None,
        "depths": 1,
        "hidden_tap": "residual 3",
        "concat": "hidden_first",
    }
    assert report["dtypes"]["mtp"] == {"F32": 16}
    other = copy_of(checkpoint, tmp_path / "other")
    edit_config(other, lambda config: {**config, "model_type": "other"})
    (problem,) = inspect_checkpoint(other)["problems"]
    assert f" {NAME}," in problem.partition("Supported:")[2]


@pytest.mark.usefixtures("family")
def test_it_builds_and_computes_what_the_oracle_does(original: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The numbers are those of the MiMo that has the same weights under other names."""
    pair = Pair(original, None, load_model(build_bundle(checkpoint, tmp_path / "b", max_model_len=96)))
    assert pair.model.manifest.model.family == NAME
    forward = pair.oracle.forward(IDS)
    tap, logits = target_run(pair.model, IDS, [8, 1, 5, 9])
    assert share(logits, forward.logits) < TOLERANCE
    outputs, _ = head_run(pair.model, 0, IDS[1:], tap[:-1])
    got = head_logits(pair.model, outputs)
    assert share(got, pair.oracle.head_over(IDS).logits) < TOLERANCE
    for fault in ("swap_concat", "post_norm_hidden", "unshifted_ids"):
        assert share(got, pair.broken(fault).head_over(IDS).logits) > VISIBLE, "control"


@pytest.mark.usefixtures("family")
def test_it_generates_and_verifies(tmp_path: Path) -> None:
    """A chain that is right sometimes, so that every accepted count occurs."""
    chain = partial_mimo_checkpoint(tmp_path / "mimo")
    bundle = build_bundle(renamed(chain, tmp_path / NAME), tmp_path / "b", draft_tokens=3)
    pair = Pair(chain, None, load_model(bundle))
    assert agrees(pair, PROMPT, 48, 3) == {0, 1, 2, 3}
    lines = list(checks(pair.model, 8, 12))
    assert [line.text for line in lines if not line.holds] == []
    assert any("own head" in line.text for line in lines)


@pytest.mark.usefixtures("family")
def test_check_names_the_stage_of_a_changed_tensor(checkpoint: Path, tmp_path: Path) -> None:
    bundle = build_bundle(checkpoint, tmp_path / "b")
    assert compare_bundle(Ingredients(str(checkpoint)), bundle, 8).first_difference is None
    for name, stage in (("blocks.1.ffn.w2.weight", "residual.2"), ("lookahead.norm_state.weight", "head.hidden_norm")):
        wrong = copy_of(checkpoint, tmp_path / stage)
        edit_tensor(wrong, name, lambda array: np.roll(array, 1, axis=0))
        found = compare_bundle(Ingredients(str(wrong)), bundle, 8).first_difference
        assert found is not None
        assert found.name == stage


@pytest.mark.usefixtures("family")
def test_what_every_family_has_comes_with_it(checkpoint: Path, tmp_path: Path) -> None:
    """A lost tensor, an unknown one, a head left out or taken from elsewhere: nothing of that is in the file."""
    lost = copy_of(checkpoint, tmp_path / "lost")
    drop_tensors(lost, lambda name: name.startswith("lookahead."))
    build_refused(lost, tmp_path / "out", "declares 1 MTP layer", "0 of 16 tensors", "lookahead.norm_state.weight")
    taken = load_model(build_bundle(lost, tmp_path / "taken", mtp_from=str(checkpoint))).manifest.model
    assert taken.mtp is not None
    plain = load_model(build_bundle(checkpoint, tmp_path / "plain", mtp=False)).manifest.model
    assert plain.mtp is None
    broken = copy_of(checkpoint, tmp_path / "broken")
    rename_tensor(broken, "blocks.0.attn.wq.weight", "blocks.0.attn.wx.weight")
    build_refused(broken, tmp_path / "out", "'blocks.0.attn.wq.weight'", "'blocks.0.attn.wx.weight'")
