"""What a configuration says, wherever it says it: ties, end tokens, positions, layer kinds, the head's conventions.

Over 300 lines because it is a list of independent cases, each short and found by its case id.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mtp_exporter.inspecting.inspect import inspect_checkpoint
from mtp_exporter.inspecting.text import as_text
from tests.exporter.plain_graph import PlainGraph, distance, states_after
from tests.fixtures.checkpoints import (
    add_tensor,
    edit_config,
    edit_tensor,
    markov_checkpoint,
    random_checkpoint,
    tinytext_tokenizer,
    write_tokenizer,
)
from tests.oracles.float64 import Oracle, load_checkpoint
from tests.support import (
    build_bundle,
    build_refused,
    command_refused,
    copy_of,
    generate,
    ids_of,
    load_model,
    refused,
    run_command,
)

PROMPT = [5, 6, 7]
ALL_K = (1, 2, 3, 4)
FULL = {"layer_types": ["full_attention"] * 3}
LETTERS = [bytes([byte]) for byte in range(0x30, 0x70)]
HEAD_NORMS = (
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    "mtp.layers.0.self_attn.q_norm.weight",
    "mtp.layers.0.self_attn.k_norm.weight",
)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The language part of a configuration."""
    return config.get("text_config", config)


def acceptance(bundle: Path, draft_tokens: int) -> tuple[int, int]:
    """Accepted and drafted tokens of a run of the chain; the ids must be right whatever is drafted."""
    end = generate(bundle, [5], 17, draft_tokens)
    assert list(end.token_ids) == list(range(6, 23))
    return end.stats.accepted, end.stats.drafted


# -------------------------------------------------------------------------- LD-08, LD-10: the head


@pytest.mark.parametrize(("top", "nested"), [(None, True), (True, None), (False, True)])
def test_a_tie_at_either_level_makes_the_embedding_the_head(
    tmp_path: Path, top: bool | None, nested: bool | None
) -> None:
    """LD-08: declared at the top level, in text_config, or there against a false above."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, tied=True)

    def edit(config: dict[str, Any]) -> None:
        for level, value in ((config, top), (config["text_config"], nested)):
            level.pop("tie_word_embeddings", None)
            if value is not None:
                level["tie_word_embeddings"] = value

    edit_config(checkpoint, edit)
    oracle = Oracle(load_checkpoint(checkpoint))
    right = oracle.greedy(PROMPT, 16)
    noise = np.random.default_rng(0).standard_normal(oracle.checkpoint.lm_head.shape)
    random_head = Oracle(replace(oracle.checkpoint, lm_head=noise))
    assert random_head.greedy(PROMPT, 16) != right, "this test cannot see a random head"
    assert ids_of(build_bundle(checkpoint, tmp_path / "out"), PROMPT, 16, 3) == right


def test_a_missing_head_without_a_tie_is_refused(tmp_path: Path) -> None:
    """LD-08: no flag at any level, so nothing says that the embedding is the head."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, tied=True)

    def edit(config: dict[str, Any]) -> None:
        for level in (config, config["text_config"]):
            del level["tie_word_embeddings"]

    edit_config(checkpoint, edit)
    build_refused(checkpoint, tmp_path / "out", "'lm_head.weight'", "tie_word_embeddings")


def test_a_tie_against_a_head_of_its_own_is_refused_and_an_equal_head_is_not(tmp_path: Path) -> None:
    """LD-08: flag and tensor contradict each other; a copy of the embedding does not."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    edit_config(checkpoint, lambda config: {**config, "tie_word_embeddings": True})
    build_refused(checkpoint, tmp_path / "out", "tie_word_embeddings", "'lm_head.weight'", "embed_tokens.weight")
    embedding = load_checkpoint(random_checkpoint(tmp_path / "other", seed=1)).target["embed_tokens.weight"]
    add_tensor(checkpoint, "lm_head.weight", embedding.astype(np.float32))
    notes: list[str] = []
    out = build_bundle(checkpoint, tmp_path / "out", notes=notes)
    assert ids_of(out, PROMPT, 16, 3) == Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 16)
    assert any("ignored 1 tensors equal to the tied embedding" in note for note in notes)


def test_an_untied_head_is_used_by_target_and_draft(tmp_path: Path) -> None:
    """LD-10: the identity embedding as head would repeat the last token for ever, as the control does."""
    out = build_bundle(markov_checkpoint(tmp_path / "model"), tmp_path / "out")
    for draft_tokens in ALL_K:
        accepted, drafted = acceptance(out, draft_tokens)
        assert accepted == drafted >= 8
    repeating = markov_checkpoint(tmp_path / "identity", head=4.0 * np.eye(64))
    assert ids_of(build_bundle(repeating, tmp_path / "control"), [5], 4) == [5, 5, 5, 5]


# --------------------------------------------------------------------- LD-11, LD-12: end tokens


@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_an_end_token_of_the_text_configuration_ends_a_generation(tmp_path: Path, draft_tokens: int) -> None:
    """LD-11: nothing at the top level and no generation_config.json."""
    checkpoint = markov_checkpoint(tmp_path / "model", eos=12)
    end = generate(build_bundle(checkpoint, tmp_path / "out"), [5], 20, draft_tokens)
    assert (list(end.token_ids), end.finish_reason) == ([6, 7, 8, 9, 10, 11, 12], "eos")
    control = generate(build_bundle(markov_checkpoint(tmp_path / "none"), tmp_path / "b"), [5], 20, draft_tokens)
    assert (list(control.token_ids), control.finish_reason) == (list(range(6, 26)), "length")


GENERATION: dict[str, tuple[Any, dict[int, list[str]]]] = {
    "a list": (
        [40, 12],
        {
            9: ["tokenizer_config.json"],
            12: ["generation_config.json"],
            40: ["generation_config.json", "config.json text_config"],
        },
    ),
    "an empty list": ([], {9: ["tokenizer_config.json"], 40: ["config.json text_config"]}),
    "null": (None, {9: ["tokenizer_config.json"], 40: ["config.json text_config"]}),
    "one id in a list": (
        [12],
        {9: ["tokenizer_config.json"], 12: ["generation_config.json"], 40: ["config.json text_config"]},
    ),
    "one id": (
        8,
        {8: ["generation_config.json"], 9: ["tokenizer_config.json"], 40: ["config.json text_config"]},
    ),
}


@pytest.mark.parametrize("case", GENERATION.values(), ids=GENERATION)
def test_end_tokens_are_the_union_of_all_places_and_are_shown_with_them(
    tmp_path: Path, case: tuple[Any, dict[int, list[str]]]
) -> None:
    """LD-12: the rule is a union, the same for every K, and `inspect` shows who named what."""
    value, places = case
    checkpoint = markov_checkpoint(tmp_path / "model", eos=40, generation_config={"eos_token_id": value})
    write_tokenizer(checkpoint, tinytext_tokenizer(LETTERS), eos=9)
    model = load_model(build_bundle(checkpoint, tmp_path / "out"))
    assert {token.id: list(token.sources) for token in model.manifest.end_tokens} == places
    first = min(places)
    for draft_tokens in (0, 1, 3):
        end = generate(model, [5], 40, draft_tokens)
        assert (list(end.token_ids), end.finish_reason) == (list(range(6, first + 1)), "eos")
    text = as_text(inspect_checkpoint(checkpoint))
    assert f"{first} ({' and '.join(places[first])})" in text


def test_the_build_command_prints_the_end_tokens_with_their_places(tmp_path: Path) -> None:
    """LD-12: the rule's result is printed by the tool; what was ignored and checked stands on stderr."""
    checkpoint = markov_checkpoint(tmp_path / "model", eos=40, generation_config={"eos_token_id": [12, 40]})
    done = run_command("mtp-export", "build", "--model", checkpoint, "--out", tmp_path / "out", "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    assert (
        "end tokens: 12 (generation_config.json), 40 (generation_config.json and config.json text_conf" in done.stdout
    )


@pytest.mark.parametrize("value", [[], None])
def test_a_model_without_any_end_token_is_built_with_a_notice(tmp_path: Path, value: Any) -> None:
    """LD-12: an empty list everywhere means that nothing ends a generation, which is said."""
    checkpoint = markov_checkpoint(tmp_path / "model", generation_config={"eos_token_id": value})
    notes: list[str] = []
    build_bundle(checkpoint, tmp_path / "out", notes=notes)
    assert any("no end token was found" in note for note in notes)
    notes.clear()
    build_bundle(markov_checkpoint(tmp_path / "control", eos=7), tmp_path / "second", notes=notes)
    assert not any("no end token" in note for note in notes)


# ------------------------------------------------------------------------------ LD-13: positions

LONG_PROMPT = np.random.default_rng(2).integers(0, 112, 40).tolist()
ROPE_TEXT = {"partial_rotary_factor": 0.25, "rope_type": "default"}
ROPE_PLACES: dict[str, dict[str, Any]] = {
    "beside the other fields": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_parameters": None},
    "in rope_parameters": {"rope_parameters": {**ROPE_TEXT, "rope_theta": 1e6}},
    "in rope_scaling": {"rope_scaling": {**ROPE_TEXT, "rope_theta": 1e6}, "rope_parameters": None},
}


@pytest.mark.parametrize("place", ROPE_PLACES.values(), ids=ROPE_PLACES)
def test_the_rotary_base_is_found_in_every_place(tmp_path: Path, place: dict[str, Any]) -> None:
    """LD-13: old style, new style and inside rope_scaling give the ids of 1e6, not of 1e4 or the family's 1e7."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=13, **FULL, **place)
    loaded = load_checkpoint(checkpoint)
    assert loaded.config.rope_theta == 1e6
    right = Oracle(loaded).greedy(LONG_PROMPT, 16)
    for base in (1e4, 1e7):
        other = Oracle(replace(loaded, config=replace(loaded.config, rope_theta=base)))
        assert other.greedy(LONG_PROMPT, 16) != right, f"this test cannot see a base of {base}"
    assert ids_of(build_bundle(checkpoint, tmp_path / "out"), LONG_PROMPT, 16, 3) == right


def test_without_a_rotary_base_the_family_default_is_used_and_said(tmp_path: Path) -> None:
    """LD-13: no place names a base, so the published one of the family counts, and the build says so."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=2, **FULL, rope_parameters=ROPE_TEXT)
    loaded = load_checkpoint(random_checkpoint(tmp_path / "named", seed=2, **FULL))
    assert loaded.config.rope_theta == 1e7
    notes: list[str] = []
    out = build_bundle(checkpoint, tmp_path / "out", notes=notes)
    assert ids_of(out, LONG_PROMPT, 16) == Oracle(loaded).greedy(LONG_PROMPT, 16)
    assert any("rope_theta" in note for note in notes), "the default base is used without a word"


def test_a_scaled_rotary_embedding_is_refused(tmp_path: Path) -> None:
    """LD-13: a scaling that the graphs do not apply is never dropped."""
    rope = {**ROPE_TEXT, "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}
    checkpoint = random_checkpoint(tmp_path / "model", seed=2, **FULL, rope_parameters=rope)
    build_refused(checkpoint, tmp_path / "out", "rope_type 'yarn'")
    scaling = {"type": "linear", "factor": 2.0}
    checkpoint = random_checkpoint(tmp_path / "second", seed=2, **FULL, rope_scaling=scaling)
    build_refused(checkpoint, tmp_path / "out", "'linear'")


@pytest.mark.parametrize("base", ["1e6", 0, -1.0, True])
def test_a_rotary_base_that_is_no_positive_number_is_refused(tmp_path: Path, base: Any) -> None:
    """LD-13: quoted with its place and value."""
    rope = {**ROPE_TEXT, "rope_theta": base}
    checkpoint = random_checkpoint(tmp_path / "model", seed=2, **FULL, rope_parameters=rope)
    build_refused(checkpoint, tmp_path / "out", "rope_parameters.rope_theta", repr(base))


# ------------------------------------------------- LD-15, LD-17, LD-19: conventions of the head


@pytest.mark.parametrize("weight", [0.0, -0.4])
def test_the_head_norms_have_the_zero_centred_gain(tmp_path: Path, weight: float) -> None:
    """LD-15: a perfect head stays perfect; what a reader of the plain weight would see accepts nothing."""
    checkpoint = markov_checkpoint(tmp_path / "model")
    for name in HEAD_NORMS:
        edit_tensor(checkpoint, name, lambda array: np.full_like(array, weight))
    out = build_bundle(checkpoint, tmp_path / "out")
    for draft_tokens in ALL_K:
        accepted, drafted = acceptance(out, draft_tokens)
        assert accepted == drafted >= 8
    control = copy_of(checkpoint, tmp_path / "plain")
    # On disk one less: the gain becomes the weight itself. Both signs would cancel, so one norm only.
    edit_tensor(control, HEAD_NORMS[0], lambda array: array - 1.0)
    assert acceptance(build_bundle(control, tmp_path / "control"), 3)[0] == 0


def test_a_head_that_never_agrees_is_built_with_a_warning(tmp_path: Path) -> None:
    """LD-15: none of at least 16 first drafts is right; a perfect head draws no warning."""
    found = {}
    for draft in ("wrong", "perfect"):
        notes: list[str] = []
        checkpoint = markov_checkpoint(tmp_path / draft, draft=draft)
        out = build_bundle(checkpoint, tmp_path / f"{draft}.out", notes=notes)
        agreement = load_model(out).manifest.draft_agreement
        assert agreement is not None
        assert agreement.drafted >= 16
        assert agreement.accepted == (0 if draft == "wrong" else agreement.drafted)
        found[draft] = [note for note in notes if "WARNING" in note and "looks broken" in note]
    assert (len(found["wrong"]), len(found["perfect"])) == (1, 0)


def test_the_projection_takes_the_embedding_first(tmp_path: Path) -> None:
    """LD-17: with its halves swapped on disk the same head drafts the current token again."""
    checkpoint = markov_checkpoint(tmp_path / "model")
    out = build_bundle(checkpoint, tmp_path / "out")
    for draft_tokens in ALL_K:
        accepted, drafted = acceptance(out, draft_tokens)
        assert accepted == drafted >= 8
    edit_tensor(checkpoint, "mtp.fc.weight", lambda array: np.roll(array, 64, axis=1))
    swapped = build_bundle(checkpoint, tmp_path / "swapped")
    for draft_tokens in ALL_K:
        accepted, drafted = acceptance(swapped, draft_tokens)
        assert (accepted, drafted >= 8) == (0, True)


HEAD_FAULTS = ("flat_q_gate", "plain_gain", "swap_concat", "rope_full", "unscaled_scores")


def test_the_doubled_query_projection_is_split_head_by_head(tmp_path: Path) -> None:
    """LD-19: ids of the target and logits of the head, with a flat split as the control of both."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=4, **FULL, num_attention_heads=4)
    loaded = load_checkpoint(checkpoint)
    oracle = Oracle(loaded)
    right = oracle.greedy(PROMPT, 24)
    assert Oracle(loaded, broken="flat_q_gate").greedy(PROMPT, 24) != right, "this seed cannot see a flat split"
    out = build_bundle(checkpoint, tmp_path / "out")
    assert ids_of(out, PROMPT, 24, 3) == right

    ids = np.random.default_rng(4).integers(0, 112, 20).tolist()
    hidden = oracle.forward(ids).hidden[:-1]
    want = oracle.head(ids[1:], hidden)
    empty = states_after(oracle, [])[:1]
    run = PlainGraph(out / "graphs/mtp.onnx").run([ids[1:]], [empty], [0], hidden=hidden[None])
    # float32 gives below 3e-6 of the greatest value; the mildest fault below moves it by more than 1e-2.
    assert distance(run.logits[0], want.logits) < 1e-5
    assert distance(run.outputs["hidden_states_out"][0], want.out) < 1e-5
    for fault in HEAD_FAULTS:
        wrong = Oracle(loaded, broken=fault).head(ids[1:], hidden).logits
        assert distance(run.logits[0], wrong) > 1e-2, f"the comparison cannot see {fault}"


# -------------------------------------------------------------------- LD-21, LD-22: layer kinds


def kinds_of(pattern: str) -> list[str]:
    return [{"L": "linear_attention", "F": "full_attention"}[letter] for letter in pattern]


def state_counts(bundle: Path) -> tuple[int, int]:
    """Key caches and recurrent states among the inputs of the backbone graph."""
    names = [value.name for value in onnx.load(bundle / "graphs/backbone.onnx", load_external_data=False).graph.input]
    return sum(name.endswith(".key") for name in names), sum(name.endswith(".recurrent") for name in names)


def test_an_irregular_list_of_layers_wins_over_the_interval(tmp_path: Path) -> None:
    """LD-21: full attention at 1 and 4 of six; the interval would put it at 3 and find no tensors there."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, layer_types=kinds_of("LFLLFL"))
    assert json.loads((checkpoint / "config.json").read_text())["text_config"]["full_attention_interval"] == 4
    out = build_bundle(checkpoint, tmp_path / "out")
    assert state_counts(out) == (2, 4)
    assert ids_of(out, PROMPT, 24, 3) == Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 24)
    assert inspect_checkpoint(checkpoint)["model"]["layer_pattern"] == "LFLLFL"
    edit_config(checkpoint, lambda config: text_of(config).pop("layer_types") and None)
    build_refused(checkpoint, tmp_path / "control", "layers.1.linear_attn")


def test_an_interval_that_does_not_divide_the_layers_builds(tmp_path: Path) -> None:
    """LD-22: interval 4 and six layers make layer 3 the only full one."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1, layer_types=None, num_hidden_layers=6)
    out = build_bundle(checkpoint, tmp_path / "out")
    assert state_counts(out) == (1, 5)
    assert ids_of(out, PROMPT, 24, 3) == Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 24)


MALFORMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a short list": ({"layer_types": kinds_of("LLL")}, ("3 layer_types", "num_hidden_layers = 4")),
    "a long list": ({"layer_types": kinds_of("LLLFL")}, ("5 layer_types", "num_hidden_layers = 4")),
    "an empty list": ({"layer_types": []}, ("0 layer_types", "num_hidden_layers = 4")),
    "an unknown word": (
        {"layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]},
        ("layer_types[1] = 'sliding_attention'", "expected 'linear_attention' or 'full_attention'"),
    ),
    "a word instead of a list": ({"layer_types": "full_attention"}, ("'full_attention'", "num_hidden_layers = 4")),
    "neither list nor interval": (
        {"layer_types": None, "full_attention_interval": None},
        ("neither layer_types nor full_attention_interval",),
    ),
    "interval 0": ({"layer_types": None, "full_attention_interval": 0}, ("full_attention_interval = 0",)),
    "no number of layers": ({"num_hidden_layers": None}, ("num_hidden_layers = None",)),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_list_of_layers_is_refused_with_field_and_value(
    tmp_path: Path, case: tuple[dict[str, Any], tuple[str, ...]]
) -> None:
    """LD-22: never an index or modulo error."""
    change, parts = case
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)

    def edit(config: dict[str, Any]) -> None:
        for name, value in change.items():
            text_of(config).pop(name, None)
            if value is not None:
                text_of(config)[name] = value

    edit_config(checkpoint, edit)
    build_refused(checkpoint, tmp_path / "out", *parts, "config.json")


VARIANTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "attn_output_gate": False,
    "mtp_use_dedicated_embeddings": True,
    "mlp_only_layers": [0],
    "mtp_num_hidden_layers": 2,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_that_the_graphs_do_not_compute_is_refused(tmp_path: Path, name: str) -> None:
    """LD-22, LD-25, LD-36: a field that would change the equations is never passed over."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    edit_config(checkpoint, lambda config: text_of(config).update({name: VARIANTS[name]}))
    build_refused(checkpoint, tmp_path / "out", f"{name} = {VARIANTS[name]!r}")


LAYOUTS: dict[str, dict[str, Any]] = {
    "nested": {},
    "nested configuration, short names": {"prefix": "model."},
    "flat": {"flat": True},
    "flat, tied": {"flat": True, "tied": True},
    "key heads equal to value heads": {"linear_num_key_heads": 5, "linear_num_value_heads": 5},
    "three value heads a key head": {"linear_num_value_heads": 15},
    "a short convolution": {"linear_conv_kernel_dim": 2},
    "all delta layers": {"layer_types": kinds_of("LL")},
}


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_equals_the_oracle(tmp_path: Path, options: dict[str, Any]) -> None:
    """LD-08, LD-21: the two forms of a release and sizes in which heads and channels can be confused."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=3, **options)
    right = Oracle(load_checkpoint(checkpoint)).greedy(PROMPT, 24)
    assert len(set(right)) > 4, "too few different ids to show anything"
    assert ids_of(build_bundle(checkpoint, tmp_path / "out"), PROMPT, 24, 2) == right


# -------------------------------------------------------------------------- LD-36: draft tokens


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain with a perfect head, built for at most four draft tokens."""
    directory = tmp_path_factory.mktemp("chain")
    return build_bundle(markov_checkpoint(directory / "model"), directory / "out", draft_tokens=4)


@pytest.mark.parametrize("draft_tokens", [0, *ALL_K])
def test_every_draft_length_gives_the_same_ids_from_one_head_layer(chain: Path, draft_tokens: int) -> None:
    """LD-36: the manifest records the one layer that every further draft uses again."""
    model = load_model(chain)
    assert model.manifest.model.mtp is not None
    assert model.manifest.model.mtp.depth == 1
    assert model.manifest.limits.max_draft_tokens == 4
    end = generate(model, [5], 17, draft_tokens)
    assert list(end.token_ids) == list(range(6, 23))
    assert max(end.stats.emitted_histogram) == draft_tokens + 1


@pytest.mark.parametrize("draft_tokens", [-1, 5, 99])
def test_a_draft_length_outside_the_bundle_is_refused_with_the_range(chain: Path, draft_tokens: int) -> None:
    """LD-36: at run time the range is that of the build."""
    with refused(f"draft_tokens is {draft_tokens}", "0 to 4"):
        generate(chain, [5], 4, draft_tokens)


def test_a_draft_length_that_is_no_whole_number_is_refused(chain: Path) -> None:
    """LD-36: in the library, as a value of the wrong kind."""
    with refused("draft_tokens = 2.5"):
        generate(chain, [5], 4, 2.5)  # type: ignore[arg-type]


def test_a_draft_length_that_is_no_whole_number_is_bad_usage_of_the_command(tmp_path: Path) -> None:
    """LD-36: one line on stderr and exit code 2."""
    arguments = ("build", "--model", "m", "--out", tmp_path / "out", "--draft-tokens", "2.5")
    command_refused(run_command("mtp-export", *arguments), "--draft-tokens", "2.5", code=2)


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("draft_tokens", 0, "--draft-tokens is 0, expected 1 to 15"),
        ("draft_tokens", -1, "--draft-tokens is -1, expected 1 to 15"),
        ("draft_tokens", 99, "--draft-tokens is 99, expected 1 to 15"),
        ("max_batch_size", 0, "--max-batch-size is 0"),
        ("max_model_len", 1, "--max-model-len is 1"),
        ("max_model_len", 2**31, "made for 4096 positions"),
    ],
)
def test_a_build_option_out_of_range_is_refused_with_the_range(
    tmp_path: Path, option: str, value: int, part: str
) -> None:
    """LD-36, EX-11: before any weight is read."""
    build_refused(markov_checkpoint(tmp_path / "model"), tmp_path / "out", part, **{option: value})


def edits() -> dict[str, Callable[[dict[str, Any]], None]]:
    """Configurations whose sizes do not belong together."""
    return {
        "num_attention_heads = 5": lambda text: text.update(num_attention_heads=5),
        "linear_num_value_heads = 7": lambda text: text.update(linear_num_value_heads=7),
        "hidden_size = '40'": lambda text: text.update(hidden_size="40"),
        "vocab_size = None": lambda text: text.pop("vocab_size"),
        "rms_norm_eps = -1": lambda text: text.update(rms_norm_eps=-1),
        "rotary": lambda text: text["rope_parameters"].update(partial_rotary_factor=0.1),
    }


@pytest.mark.parametrize("part", edits())
def test_a_size_that_cannot_be_is_refused_with_field_and_value(tmp_path: Path, part: str) -> None:
    """LD-22: the same rule for the other sizes of a configuration."""
    checkpoint = random_checkpoint(tmp_path / "model", seed=1)
    edit_config(checkpoint, lambda config: edits()[part](text_of(config)) and None)
    build_refused(checkpoint, tmp_path / "out", part, "config.json")
