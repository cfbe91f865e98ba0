"""EAGLE-1 and EAGLE-3 drafts: stages, generations, batches, controls, vocabularies and the refusals around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.bundle import WEIGHTS
from mtp_engines.contracts import names
from mtp_engines.errors import CheckpointError, MtpError, RequestError
from mtp_exporter.cli import group
from mtp_exporter.prepare import Ingredients, prepare
from mtp_tools.verify.checks import checks
from tests.exporter.dense.parts import (
    IDS,
    PROMPT,
    TOLERANCE,
    VISIBLE,
    Built,
    Pair,
    Slot,
    agrees,
    chain_of,
    decode_together,
    drafted_ids,
    generated,
    head_logits,
    head_run,
    head_stages,
    moved,
    pair_of,
    rows_of_depths,
    share,
    target_run,
)
from tests.fixtures.checkpoints import add_tensor, drop_tensors, edit_config, edit_tensor, read_tensors, rename_tensor
from tests.fixtures.dense_families import (
    eagle_checkpoint,
    eagle_markov_checkpoint,
    mimo_checkpoint,
    mimo_markov_checkpoint,
    partial_eagle_checkpoint,
    partial_plain_checkpoint,
    plain_checkpoint,
    plain_markov_checkpoint,
)
from tests.fixtures.tinytext import tinytext_tokenizer
from tests.oracles.dense_families import FAULT_KINDS, FAULTS, open_dense_oracle
from tests.support import build_bundle, build_refused, generate, load_model, refused

Options = dict[str, Any]
# Target and draft. Eight layers where EAGLE-3 reads three different ones.
RANDOM: dict[str, tuple[Options, Options]] = {
    "eagle": ({}, {"version": 1}),
    "eagle, bias, own embedding and head": (
        {},
        {"version": 1, "fc_bias": True, "own_embedding": True, "own_head": True},
    ),
    "eagle, scaled, for tied qwen3": (
        {"kind": "qwen3", "tied": True, "rope_scaling": "llama3"},
        {"version": 1, "own_embedding": False, "rope_scaling": "llama3"},
    ),
    "eagle3": ({"layers": 8}, {"version": 3, "draft_vocab": 44}),
    "eagle3, narrower, four taps, for qwen2": (
        {"layers": 8, "kind": "qwen2"},
        {"version": 3, "draft_vocab": 44, "hidden_size": 40, "aux_layers": [6, 0, 3, 5]},
    ),
    "eagle3, whole vocabulary, normed, scaled, for qwen3": (
        {"layers": 8, "kind": "qwen3"},
        {"version": 3, "norm_before_residual": True, "rope_scaling": "yarn"},
    ),
}
KIND = {name: name[:6].strip(", ") for name in RANDOM}
# Chains with noise, and random weights over five tokens: with these every accepted count occurs.
FIVE = {"layers": 8, "vocab_size": 5}
PARTIAL: dict[str, tuple[tuple[Callable[..., Path], Options], tuple[Callable[..., Path], Options], list[int]]] = {
    "eagle": ((partial_plain_checkpoint, {}), (partial_eagle_checkpoint, {"version": 1}), PROMPT),
    "eagle3": ((partial_plain_checkpoint, {}), (partial_eagle_checkpoint, {"version": 3}), PROMPT),
    "eagle3, 44 of 64 tokens": (
        (partial_plain_checkpoint, {}),
        (partial_eagle_checkpoint, {"version": 3, "draft_ids": range(20, 64)}),
        PROMPT,
    ),
    "eagle3, narrower, 4 of 5 tokens": (
        (plain_checkpoint, {**FIVE, "seed": 11}),
        (eagle_checkpoint, {"version": 3, "seed": 31, "hidden_size": 40, "draft_vocab": 4}),
        [1, 2, 0],
    ),
    "eagle3, other taps": (
        (plain_checkpoint, {**FIVE, "seed": 3}),
        (eagle_checkpoint, {"version": 3, "seed": 23, "aux_layers": [1, 4, 6]}),
        [1, 2, 0],
    ),
}
Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    place, pairs = tmp_path_factory.mktemp("random"), dict[str, Pair]()

    def get(name: str) -> Pair:
        if name not in pairs:
            target = plain_checkpoint(place / f"{name}.t", seed=3, **RANDOM[name][0])
            draft = eagle_checkpoint(place / f"{name}.d", target=target, seed=4, **RANDOM[name][1])
            pairs[name] = pair_of(place / name, target, draft)
        return pairs[name]

    return get


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    place, pairs = tmp_path_factory.mktemp("partial"), dict[str, Pair]()

    def get(name: str) -> Pair:
        if name not in pairs:
            (make_target, of_target), (make_draft, of_draft), _ = PARTIAL[name]
            target = make_target(place / f"{name}.t", max_position_embeddings=1024, **of_target)
            draft = make_draft(place / f"{name}.d", target=target, **of_draft)
            pairs[name] = pair_of(place / name, target, draft, max_batch_size=3, max_model_len=640)
        return pairs[name]

    return get


@pytest.fixture(scope="module")
def measured(random: Pairs) -> dict[str, Built]:
    return {name: Built.of(random(name)) for name in RANDOM}


def right_rows(pair: Pair) -> np.ndarray:
    """The hidden rows of IDS that the head takes, as the oracle computes them."""
    return rows_of_depths(pair)[0][1]


# --------------------------------------------------------------------------- the head as a whole


@pytest.mark.parametrize("name", RANDOM)
def test_every_stage_equals_the_oracle_over_a_whole_sequence(random: Pairs, name: str) -> None:
    pair = random(name)
    assert pair.head.kind == KIND[name]
    hidden = right_rows(pair)
    want = pair.oracle.head(IDS[1:], hidden)
    stages = head_stages(pair, 0, IDS[1:], hidden)
    # EAGLE's attention takes the joined or projected rows as they are, and EAGLE-1 ends without a norm.
    unnamed = {"attention_input"} if KIND[name] == "eagle3" else {"attention_input", "output"}
    assert set(want.stages) - set(stages) == unnamed
    for stage, value in stages.items():
        assert share(value, want.stages[stage]) < TOLERANCE, stage
    outputs, cache = head_run(pair.model, 0, IDS[1:], hidden)
    assert share(outputs[names.HIDDEN_OUT], want.stages["output"]) < TOLERANCE
    assert share(chain_of(outputs), want.out) < TOLERANCE
    assert share(head_logits(pair.model, outputs), want.logits) < TOLERANCE
    key, value = (array[0, :, :22].transpose(1, 0, 2) for array in cache.values())
    assert max(share(key, want.key), share(value, want.value)) < TOLERANCE


@pytest.mark.parametrize("name", RANDOM)
def test_the_built_target_feeds_the_head_and_chains_behind_it(random: Pairs, name: str) -> None:
    """Taps and logits from the built target; then three rows, each from the draft's own before."""
    pair = random(name)
    tap, _ = target_run(pair.model, IDS, [8, 1, 5, 9])
    want = pair.oracle.head(IDS[1:], right_rows(pair))
    assert share(tap[:-1], right_rows(pair)) < TOLERANCE
    outputs, cache = head_run(pair.model, 0, IDS[1:], tap[:-1])
    assert share(head_logits(pair.model, outputs), want.logits) < TOLERANCE
    assert drafted_ids(pair.model, IDS[1:], tap[:-1]) == [pair.oracle.token(row) for row in want.logits]
    for j, token in enumerate((7, 40, 3)):
        position = len(IDS) - 1 + j
        want = pair.oracle.head([token], want.out[-1:], want.cache, position)
        outputs, cache = head_run(pair.model, 0, [token], chain_of(outputs)[-1:], cache, position, chained=True)
        assert share(head_logits(pair.model, outputs), want.logits) < TOLERANCE


# Faults of the oracle for which no draft of the kind has a subject: EAGLE-1 has no tap but the one after the norm.
WITHOUT_SUBJECT = {("eagle", "post_norm_hidden")}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_broken_convention_is_noticed(
    random: Pairs, measured: dict[str, Built], fault: str, kind: str
) -> None:
    """Every fault that the oracle knows for the kind, on every draft that has what it is about."""
    found = {name: moved(random(name), measured[name], fault) for name in RANDOM if KIND[name] == kind}
    seen = {name: share for name, share in found.items() if share is not None}
    assert bool(seen) == (kind in FAULT_KINDS[fault] and (kind, fault) not in WITHOUT_SUBJECT)
    assert all(share > VISIBLE for share in seen.values()), f"{seen}: this test cannot see that {FAULTS[fault]}"


# -------------------------------------------------------------------------------- generations


@pytest.mark.parametrize("draft_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_generations_draft_and_accept_what_the_oracle_does(partial: Pairs, name: str, draft_tokens: int) -> None:
    pair = partial(name)
    assert agrees(pair, PROMPT, 48, draft_tokens) == set(range(draft_tokens + 1)), "not every accepted count occurs"


@pytest.mark.parametrize(
    ("name", "limit"),
    [("eagle3, 44 of 64 tokens", 48), ("eagle3, narrower, 4 of 5 tokens", 30), ("eagle3, other taps", 48)],
)
def test_drafts_of_another_vocabulary_width_and_other_taps(partial: Pairs, name: str, limit: int) -> None:
    for draft_tokens in (0, 1, 2, 4, 3):
        counts = agrees(partial(name), PARTIAL[name][2], limit if draft_tokens == 3 else 12, draft_tokens)
    assert counts == {0, 1, 2, 3}, "not every accepted count occurs"


class Now:
    """K by the number of the cycle."""

    counts = (0, 3, 1, 0, 0, 0, 0, 4, 4, 0, 1, 2, 1, 1, 3)

    def choose(self, cycle: int) -> int:
        return self.counts[cycle % len(self.counts)]

    def observe(self, drafted: int, accepted: int) -> None:
        pass


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_cycles_without_drafts_leave_the_head_as_it_should_be(partial: Pairs, name: str) -> None:
    """Waiting rows of the target and chained rows of the draft are told apart, whatever their number."""
    pair = partial(name)
    for prompt in ([50], PROMPT):
        run, drafted = generated(pair, prompt, 40, Now())
        assert run.ids == pair.greedy(prompt, 40)
        assert drafted[: len(Now.counts)] == list(Now.counts)
        assert len(set(run.accepted)) > 2


def test_prompts_of_one_token_and_of_two_chunks(partial: Pairs) -> None:
    for name in ("eagle", "eagle3"):
        assert agrees(partial(name), [5], 16, 3) > {0}
    agrees(partial("eagle3"), np.random.default_rng(4).integers(0, 64, 259).tolist(), 5, 3)


@pytest.mark.parametrize("version", [1, 3])
def test_it_is_lossless_with_every_forced_draft(tmp_path: Path, version: int) -> None:
    target = partial_plain_checkpoint(tmp_path / "t")
    draft = partial_eagle_checkpoint(tmp_path / "d", target=target, version=version)
    model = pair_of(tmp_path / "b", target, draft, draft_tokens=2, max_model_len=64).model
    lines = list(checks(model, 10, 16))
    assert [line.text for line in lines if not line.holds] == []
    assert any("own head" in line.text for line in lines)


@pytest.mark.parametrize("name", ["eagle", "eagle3, 44 of 64 tokens"])
def test_every_sequence_of_a_batch_is_its_solo_run(partial: Pairs, name: str) -> None:
    """Prompts that end at different calls, and cycles that keep different numbers of rows."""
    pair, most = partial(name), 3
    prompts, limits = ([5], [6, 20, 9, 8, 7, 30, 31], [1, 2, 3, 4]), (30, 17, 24)

    def together(mix_up: bool = False) -> list[Slot]:
        slots = [Slot(list(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        decode_together(pair.model.engine.sequences(3), slots, most, mix_up)
        return slots

    slots = together()
    for slot in slots:
        want = pair.speculate(slot.prompt, slot.limit, most)
        assert (slot.ids, slot.accepted, slot.drafts) == (want.ids, want.accepted, want.drafts)
    assert len({tuple(slot.accepted[:8]) for slot in slots}) == 3, "all sequences accept alike"
    mixed = together(mix_up=True)
    assert [slot.ids for slot in mixed] == [slot.ids for slot in slots]
    assert [slot.drafts for slot in mixed] != [slot.drafts for slot in slots], "control: a mix-up is not seen"


# -------------------------------------------------------------- which layers EAGLE-3 reads, and how


def test_tapped_layers_count_from_where_they_are_named(partial: Pairs, tmp_path: Path) -> None:
    """Nested k is the output of layer k, on top k is the input of layer k; both may agree."""
    nested, prompt = partial("eagle3, other taps"), PARTIAL["eagle3, other taps"][2]
    taps = {}
    for label, fields in (
        ("top", {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 5, 7]}),
        ("both", {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}),
        ("shifted", {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
        ("last", {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 4, 8]}),
        ("silent", {"eagle_config": None}),
    ):
        draft = _copy_with(nested.draft, tmp_path / label, fields)
        head = prepare(Ingredients(str(nested.target), draft_model=str(draft))).spec.mtp
        assert head is not None
        taps[label] = head.taps
    assert nested.head.taps == taps["top"] == taps["both"] == (2, 5, 7)
    assert (taps["shifted"], taps["last"], taps["silent"]) == ((1, 4, 6), (0, 4, 8), (2, 4, 5))
    # The control: read as the other numbering means it, the same draft says other tokens.
    shifted = pair_of(tmp_path / "b", nested.target, tmp_path / "shifted", max_model_len=64)
    agrees(shifted, prompt, 24, 3)
    assert shifted.speculate(prompt, 24, 3).drafts != nested.speculate(prompt, 24, 3).drafts


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, ("names the taps twice", "(1, 4, 6)", "(2, 5, 7)")),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, ("[2, 5, 9]", "layers 0 to 7")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, ("[1, 4, 8]", "layers 0 to 7")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, ("eagle_aux_hidden_state_layer_ids = []",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "4"]}}, ("[1, '4']",)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, ("'fc.weight'", "[56, 168]", "[56, 112]")),
        ({"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}}, ("norm_before_residual",)),
        ({"target_hidden_size": 72}, ("targets of hidden size 72", "the target has 56")),
        ({"num_hidden_layers": 2}, ("num_hidden_layers = 2",)),
        ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_draft_that_contradicts_itself_or_its_target_is_refused(
    partial: Pairs, tmp_path: Path, fields: Options, parts: tuple[str, ...]
) -> None:
    pair = partial("eagle3, other taps")
    _copy_with(pair.draft, tmp_path / "d", fields)
    build_refused(pair.target, tmp_path / "out", *parts, draft_model=str(tmp_path / "d"))


VARIANTS = ("norm_before_fc", "next_layer_regular", "fc_norm", "norm_output", "eh_proj_before_attn", "use_aux_norm")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_variant_that_the_graphs_do_not_compute_is_refused(
    random: Pairs, tmp_path: Path, name: str, nested: bool
) -> None:
    """A flag that changes the equations is never passed over."""
    pair = random("eagle3")
    draft = _copy_with(pair.draft, tmp_path / "d", {"eagle_config": {name: True}} if nested else {name: True})
    with refused(name):
        prepare(Ingredients(str(pair.target), draft_model=str(draft)))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["sliding_attention"]},
        {"use_sliding_window": True},
        {"mlp_bias": True},
        {"num_hidden_layers": 2},
    ],
    ids=str,
)
def test_a_layer_that_the_graphs_do_not_compute_is_refused(
    random: Pairs, tmp_path: Path, name: str, fields: Options
) -> None:
    """The layer of a draft is read as strictly as those of a target."""
    pair = random(name)
    draft = _copy_with(pair.draft, tmp_path / "d", fields)
    with refused(next(iter(fields))):
        prepare(Ingredients(str(pair.target), draft_model=str(draft)))


def test_the_two_norms_of_an_eagle_1_variant_are_refused(random: Pairs, tmp_path: Path) -> None:
    pair = random("eagle")
    draft = _copy_with(pair.draft, tmp_path / "d", {"add_para_norm": True})
    with refused("add_para_norm"):
        prepare(Ingredients(str(pair.target), draft_model=str(draft)))


def test_taps_that_are_switched_off_are_refused(random: Pairs, tmp_path: Path) -> None:
    pair = random("eagle3")
    draft = _copy_with(pair.draft, tmp_path / "d", {"eagle_config": {"use_aux_hidden_state": False}})
    with refused("use_aux_hidden_state"):
        prepare(Ingredients(str(pair.target), draft_model=str(draft)))


def test_variants_that_are_denied_say_nothing(random: Pairs, tmp_path: Path) -> None:
    pair = random("eagle3")
    fields = {**dict.fromkeys(VARIANTS, False), "eagle_config": {"use_aux_hidden_state": True, "fc_norm": False}}
    draft = _copy_with(pair.draft, tmp_path / "d", fields)
    assert prepare(Ingredients(str(pair.target), draft_model=str(draft))).spec.mtp == pair.head


def test_a_chain_of_normed_rows_is_what_its_field_asks_for(random: Pairs, tmp_path: Path) -> None:
    """return_hidden_post_norm: the oracle's fault of that name is then the right model."""
    pair = random("eagle3")
    _copy_with(pair.draft, tmp_path / "d", {"eagle_config": {"return_hidden_post_norm": True}})
    model = pair_of(tmp_path / "b", pair.target, tmp_path / "d").model
    post = pair.broken("chain_post_norm")
    run = head_run(model, 0, IDS[1:], right_rows(pair))
    assert set(run[0]) == {names.HIDDEN_OUT}
    row, _ = head_run(model, 0, [7], chain_of(run[0])[-1:], run[1], len(IDS) - 1, chained=True)
    got = head_logits(model, row)
    cache = post.head(IDS[1:], right_rows(pair)).cache
    wants = [
        one.head([7], one.head(IDS[1:], right_rows(pair)).out[-1:], cache, len(IDS) - 1) for one in (post, pair.oracle)
    ]
    assert share(got, wants[0].logits) < TOLERANCE
    assert share(got, wants[1].logits) > VISIBLE, "control"


def _copy_with(draft: Path | None, out: Path, fields: Options) -> Path:
    """A copy of a draft whose configuration has other fields; None removes one."""
    assert draft is not None
    out.mkdir()
    for path in draft.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    merged = {**json.loads((draft / "config.json").read_text()), **fields}
    (out / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return out


# ------------------------------------------------------------------- LD-32: a smaller vocabulary

ODD = range(1, 64, 2)


def two_on(token: int) -> int:
    return (token + 2) % 64


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain t + 2, which never leaves the odd ids."""
    return plain_markov_checkpoint(tmp_path_factory.mktemp("odd") / "t", target=two_on)


def drafting(odd: Path, place: Path, **options: Any) -> Path:
    return eagle_markov_checkpoint(place, target=odd, version=3, target_map=two_on, **options)


@pytest.mark.parametrize("case", ["a", "c", "d"])
def test_a_table_of_offsets_a_whole_vocabulary_and_a_table_too_few(odd: Path, tmp_path: Path, case: str) -> None:
    """LD-32: (a) row r means id 2r + 1, (c) all rows and no table, (d) t2d absent: all drafts are right."""
    options: Options = {"a": {"draft_ids": ODD}, "c": {}, "d": {"draft_ids": ODD, "t2d": False}}[case]
    draft = drafting(odd, tmp_path / "d", **options)
    bundle = build_bundle(odd, tmp_path / "b", draft_model=str(draft))
    done = generate(bundle, [5], 20, 1)
    assert list(done.token_ids) == list(range(7, 47, 2))
    assert done.stats.accepted == done.stats.drafted >= 9
    head = load_model(bundle).manifest.model.mtp
    assert head is not None
    assert head.draft_vocab_size == (None if case == "c" else 32)


def test_a_smaller_vocabulary_without_its_table_is_refused(odd: Path, tmp_path: Path) -> None:
    """LD-32: (b), with both sizes; assumed to be the identity, it would never be right."""
    draft = drafting(odd, tmp_path / "d", draft_ids=ODD, d2t=False)
    build_refused(odd, tmp_path / "out", "'d2t'", "32 of 64 tokens", draft_model=str(draft))
    add_tensor(draft, "d2t", np.zeros(32, np.int64))
    out = build_bundle(odd, tmp_path / "out", draft_model=str(draft))
    assert generate(out, [5], 20, 1).stats.accepted == 0, "control"


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (np.arange(31) + 1, ("'d2t'", "[31]", "[32]")),
        ((np.arange(32) + 1).astype(np.float32), ("'d2t'", "F32", "I64")),
        (np.full(32, 40), ("'d2t'", "row 24", "the token 64", "0 to 63")),
        (np.full(32, -1), ("'d2t'", "row 0", "the token -1")),
    ],
    ids=["too short", "floats", "ids above the vocabulary", "ids below zero"],
)
def test_a_table_that_names_no_ids_is_refused(
    odd: Path, tmp_path: Path, table: np.ndarray, parts: tuple[str, ...]
) -> None:
    """LD-32: a table whose ids the target does not have would end a generation in the middle."""
    draft = drafting(odd, tmp_path / "d", draft_ids=ODD)
    add_tensor(draft, "d2t", table)
    build_refused(odd, tmp_path / "out", *parts, draft_model=str(draft))


def test_a_table_of_32_bits_is_as_good(odd: Path, tmp_path: Path) -> None:
    draft = drafting(odd, tmp_path / "d", draft_ids=ODD)
    add_tensor(draft, "d2t", read_tensors(draft)["d2t"].astype(np.int32))
    done = generate(build_bundle(odd, tmp_path / "b", draft_model=str(draft)), [5], 20, 1)
    assert done.stats.accepted == done.stats.drafted > 0


# -------------------------------------------------------------------- LD-34: another vocabulary

PIECES = [chr(ord("A") + i) for i in range(58)]
SWAPPED = [*PIECES[:7], PIECES[19], *PIECES[8:19], PIECES[7], *PIECES[20:]]


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """LD-34: sizes 48 and 64 with both; swapped strings with the first differing id and both strings."""
    target = plain_markov_checkpoint(tmp_path / "t", tokenizer=tinytext_tokenizer(PIECES))
    smaller = eagle_markov_checkpoint(tmp_path / "smaller", target=plain_markov_checkpoint(tmp_path / "o"))
    edit_config(smaller, lambda config: {**config, "vocab_size": 48})
    build_refused(target, tmp_path / "out", "48", "64", str(smaller), draft_model=str(smaller))
    for version in (1, 3):
        draft = eagle_markov_checkpoint(
            tmp_path / f"swapped {version}", target=target, version=version, tokenizer=tinytext_tokenizer(SWAPPED)
        )
        parts = ("oken id 7 is 'T'", f"in {draft}", f"'H' in {target}")
        build_refused(target, tmp_path / "out", *parts, draft_model=str(draft))


def test_a_draft_of_the_same_vocabulary_builds_without_a_word(tmp_path: Path) -> None:
    """LD-34: with an identical tokenizer nothing is said; without one, that strings were not compared."""
    tokenizer = tinytext_tokenizer(PIECES)
    target = plain_markov_checkpoint(tmp_path / "t", tokenizer=tokenizer)
    for label, options in (("same", {"tokenizer": tokenizer}), ("silent", {})):
        draft = eagle_markov_checkpoint(tmp_path / label, target=target, scale=8.0, **options)
        notes: list[str] = []
        out = build_bundle(target, tmp_path / f"{label}.b", draft_model=str(draft), notes=notes)
        said = [note for note in notes if "not their strings" in note]
        assert len(said) == (label == "silent")
        assert all(str(draft) in note for note in said)
        done = generate(out, [5], 20, 3)
        assert done.stats.accepted == done.stats.drafted > 0
        assert load_model(out).complete(prompt="F", max_new_tokens=4).text == "GHIJ"


# ------------------------------------------------------- drafts that do not fit, and wrong places


def test_a_draft_for_another_width_is_refused(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "t", seed=1)
    other = plain_checkpoint(tmp_path / "o", seed=1, hidden_size=72)
    for version in (1, 3):
        draft = eagle_checkpoint(tmp_path / f"d{version}", target=other, seed=2, version=version)
        parts = (str(draft), "targets of hidden size 72", "the target has 56")
        build_refused(target, tmp_path / "out", *parts, draft_model=str(draft))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_narrower_draft_that_lacks_what_it_needs_of_its_own_is_refused(
    random: Pairs, tmp_path: Path, name: str
) -> None:
    pair = random("eagle3, narrower, four taps, for qwen2")
    draft = _copy_with(pair.draft, tmp_path / "d", {})
    drop_tensors(draft, lambda other: other == name)
    build_refused(pair.target, tmp_path / "out", f"no {name}", "hidden size 40", draft_model=str(draft))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_draft_that_lacks_one_tensor_is_refused_by_its_name(random: Pairs, tmp_path: Path, name: str) -> None:
    """LD-06: whichever it is, also one that tells what kind of draft it is."""
    pair, said = random(name), {}
    # Shared with the target where they are missing, or not needed.
    spared = ("embed_tokens.weight", "lm_head.weight", "t2d")
    for number, tensor in enumerate(sorted(read_tensors(pair.draft or tmp_path))):
        if tensor not in spared:
            draft = _copy_with(pair.draft, tmp_path / f"{number}", {})
            drop_tensors(draft, lambda other, tensor=tensor: other == tensor)
            with pytest.raises(MtpError) as caught:
                prepare(Ingredients(str(pair.target), draft_model=str(draft)))
            said[tensor] = str(caught.value)
    assert len(said) == {"eagle": 9, "eagle3": 13}[name]
    assert [tensor for tensor, message in said.items() if f"'{tensor}'" not in message] == []


def test_a_smaller_vocabulary_without_its_head_is_refused(random: Pairs, tmp_path: Path) -> None:
    """LD-25: a head of 44 rows that is lost is not the target's head of 64."""
    pair = random("eagle3")
    draft = _copy_with(pair.draft, tmp_path / "d", {})
    drop_tensors(draft, lambda name: name == "lm_head.weight")
    build_refused(pair.target, tmp_path / "out", "lm_head.weight", draft_model=str(draft))


def test_a_tensor_that_no_rule_knows_is_named(random: Pairs, tmp_path: Path) -> None:
    for version, name in (("eagle", "layers.0.mlp.up_proj.bias"), ("eagle3", "midlayer.self_attn.q_norm.weight")):
        pair = random(version)
        _copy_with(pair.draft, tmp_path / version, {})
        add_tensor(tmp_path / version, name, np.ones(16, np.float32))
        build_refused(pair.target, tmp_path / "out", "no rule knows", repr(name), draft_model=str(tmp_path / version))


def test_names_below_model_and_an_input_norm_are_read(random: Pairs, tmp_path: Path) -> None:
    """Loaders prefix `model.`; and a draft that has an input norm uses it."""
    pair = random("eagle")
    draft = _copy_with(pair.draft, tmp_path / "d", {})
    for name in read_tensors(draft):
        rename_tensor(draft, name, f"model.{name}")
    assert prepare(Ingredients(str(pair.target), draft_model=str(draft))).spec.mtp == pair.head
    add_tensor(draft, "model.layers.0.input_layernorm.weight", np.ones(56, np.float32))
    model = pair_of(tmp_path / "b", pair.target, draft).model
    outputs, _ = head_run(model, 0, IDS[1:], right_rows(pair))
    theirs = pair.broken("input_norm_added").head(IDS[1:], right_rows(pair))
    assert share(head_logits(model, outputs), theirs.logits) < TOLERANCE


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    target = mimo_checkpoint(tmp_path / "t", seed=1)
    draft = eagle_checkpoint(tmp_path / "d", target=target, seed=2)
    for option in ({"mtp_from": str(target)}, {"hidden_tap": "pre-norm"}, {"hidden_tap": "post-norm"}):
        name = "--" + next(iter(option)).replace("_", "-")
        build_refused(target, tmp_path / "out", name, draft_model=str(draft), **option)
    build_refused(target, tmp_path / "out", "does not exist", draft_model=str(tmp_path / "nowhere"))
    build_refused(
        target, tmp_path / "out", "holds no .safetensors file", draft_model=str(_only_config(tmp_path, draft))
    )


def _only_config(place: Path, draft: Path) -> Path:
    (place / "empty").mkdir()
    (place / "empty" / "config.json").write_bytes((draft / "config.json").read_bytes())
    return place / "empty"


def test_a_draft_takes_the_place_of_a_head_that_is_there(tmp_path: Path) -> None:
    """MiMo's own head is never right here, the draft always; the target and its tokens are the same."""
    target = mimo_markov_checkpoint(tmp_path / "t", draft="wrong")
    draft = eagle_markov_checkpoint(tmp_path / "d", target=target, scale=8.0)
    notes: list[str] = []
    own = generate(build_bundle(target, tmp_path / "own"), [5], 20, 3)
    other = build_bundle(target, tmp_path / "other", draft_model=str(draft), notes=notes)
    done = generate(other, [5], 20, 3)
    assert done.token_ids == own.token_ids
    assert (own.stats.accepted, done.stats.accepted) == (0, done.stats.drafted)
    assert load_model(other).manifest.model.mtp.kind == "eagle"
    assert any(f"(eagle) is taken from {draft}" in note for note in notes)
    assert any("--no-mtp" in note or "MTP head" in note for note in notes), "the head left out is mentioned"


@pytest.mark.parametrize("version", [1, 3])
def test_copies_of_the_targets_matrices_are_kept_once(tmp_path: Path, version: int) -> None:
    """What only repeats the target is no second matrix of the bundle; what differs in one entry is."""
    target = plain_checkpoint(tmp_path / "t", seed=3)
    options: Options = {"version": version, "own_embedding": "copy", "own_head": "copy"}
    draft = eagle_checkpoint(tmp_path / "d", target=target, seed=4, **options)
    sizes = {}
    for own in (False, True):
        if own:
            for name in ("embed_tokens.weight", "lm_head.weight"):
                edit_tensor(draft, name, lambda array: array + np.eye(*array.shape))
        pair = pair_of(tmp_path / f"{own}", target, draft)
        assert (pair.head.own_embedding, pair.head.own_head) == (own, own)
        want = pair.oracle.head_over(IDS).logits
        outputs, _ = head_run(pair.model, 0, IDS[1:], right_rows(pair))
        assert share(head_logits(pair.model, outputs), want) < TOLERANCE
        sizes[own] = pair.model.bundle.manifest.files[WEIGHTS].size
    assert sizes[True] - sizes[False] == 2 * 64 * 56 * 4


def test_the_head_can_be_asked_for_by_its_kind(partial: Pairs) -> None:
    """The drafter's name is the head's kind; the other kinds are refused."""
    for name, others in (("eagle", ("mtp", "eagle3")), ("eagle3", ("mtp", "eagle"))):
        pair = partial(name)
        done = pair.model.complete(prompt_ids=PROMPT, max_new_tokens=12, draft_tokens=3, drafter=name)
        assert list(done.token_ids) == pair.greedy(PROMPT, 12)
        assert done.stats.drafted > 0
        for other in others:
            with refused(other, name, error=RequestError):
                pair.model.complete(prompt_ids=PROMPT, max_new_tokens=12, draft_tokens=3, drafter=other)


def test_another_draft_is_another_bundle(partial: Pairs, tmp_path: Path) -> None:
    """Built again at the same place: the same draft is used as it is, a changed one is built anew."""
    pair = partial("eagle")
    _copy_with(pair.draft, tmp_path / "d", {})
    options: Options = {"draft_model": str(tmp_path / "d"), "draft_tokens": 3}
    before, again, after = [], [], []
    build_bundle(pair.target, tmp_path / "b", notes=before, **options)
    build_bundle(pair.target, tmp_path / "b", notes=again, **options)
    assert [any("used as it is" in note for note in notes) for notes in (before, again)] == [False, True]
    edit_tensor(tmp_path / "d", "layers.0.mlp.down_proj.weight", lambda array: 2 * array)
    build_bundle(pair.target, tmp_path / "b", notes=after, **options)
    assert not any("used as it is" in note for note in after)
    oracle = open_dense_oracle(pair.target, tmp_path / "d")
    fresh = Pair(pair.target, tmp_path / "d", load_model(tmp_path / "b"))
    assert oracle.speculate(PROMPT, 24, 3).drafts != pair.speculate(PROMPT, 24, 3).drafts, "control"
    agrees(fresh, PROMPT, 24, 3)


def test_the_command_line_builds_with_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = plain_markov_checkpoint(tmp_path / "t")
    draft = eagle_markov_checkpoint(tmp_path / "d", target=target, scale=8.0)
    arguments = ["build", target, "--out", tmp_path / "b", "--max-model-len", "64", "--draft-model", draft]
    group.main(list(map(str, arguments)), standalone_mode=False)
    said = capsys.readouterr()
    assert f"the draft head (eagle) is taken from {draft}" in said.err
    assert "first drafts equal the target's choice" in said.out


def test_a_draft_as_a_target_is_a_checkpoint_error(tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "t", seed=1)
    draft = eagle_checkpoint(tmp_path / "d", target=target, seed=2, version=3)
    with refused("is a separate draft", error=CheckpointError):
        build_bundle(draft, tmp_path / "out")
