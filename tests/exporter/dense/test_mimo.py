"""MiMo heads of one and of several depths: stages, generations, batches, controls and the refusals around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from mtp_engines.contracts import names
from mtp_engines.errors import RequestError
from mtp_exporter.cli import group
from mtp_exporter.inspecting.inspect import inspect_checkpoint
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
from tests.fixtures.checkpoints import drop_tensors, edit_config, edit_tensor
from tests.fixtures.dense_families import mimo_checkpoint, mimo_markov_checkpoint, partial_mimo_checkpoint
from tests.fixtures.dense_tensors import MIMO_PREFIX
from tests.oracles.dense_families import FAULT_KINDS, FAULTS, open_dense_oracle
from tests.support import build_bundle, build_refused, generate, ids_of, load_model, refused

RANDOM: dict[str, dict[str, Any]] = {
    "one depth": {},
    "post-norm": {"tap": "post_norm"},
    "two depths": {"depths": 2},
    "three depths, tied": {"depths": 3, "tied": True},
    "scaled": {"rope_scaling": "llama3"},
}
# Chains with noise; with these every accepted count occurs.
PARTIAL: dict[str, dict[str, Any]] = {
    "one depth": {},
    "post-norm": {"tap": "post_norm"},
    "two depths": {"depths": 2, "seed": 2},
    "three depths": {"depths": 3, "seed": 2},
}
Pairs = Callable[[str], Pair]


def _pairs(place: Path, kinds: dict[str, dict[str, Any]], make: Callable[..., Path], **common: Any) -> Pairs:
    """The checkpoint of a name with its bundle, each made once."""
    pairs: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            options = {**common, **kinds[name]}
            build = {key: options.pop(key) for key in ("tap", "max_batch_size", "max_model_len") if key in options}
            checkpoint = make(place / f"{name}.c", **options)
            pairs[name] = pair_of(place / name, checkpoint, **build)
        return pairs[name]

    return get


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return _pairs(tmp_path_factory.mktemp("random"), RANDOM, mimo_checkpoint, seed=3)


@pytest.fixture(scope="module")
def measured(random: Pairs) -> dict[str, Built]:
    return {name: Built.of(random(name)) for name in RANDOM}


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    options = {"max_batch_size": 3, "max_model_len": 640, "max_position_embeddings": 1024}
    return _pairs(tmp_path_factory.mktemp("partial"), PARTIAL, partial_mimo_checkpoint, **options)


# --------------------------------------------------------------------------- the head as a whole


@pytest.mark.parametrize("name", RANDOM)
def test_every_stage_of_every_depth_equals_the_oracle(random: Pairs, name: str) -> None:
    """Stages of the written graph, and logits of the engine's sessions, over a whole sequence."""
    pair = random(name)
    for depth, (tokens, hidden) in enumerate(rows_of_depths(pair)):
        want = pair.oracle.head(tokens, hidden, depth=depth)
        stages = head_stages(pair, depth, tokens, hidden)
        assert set(stages) == set(want.stages)
        for stage, value in stages.items():
            assert share(value, want.stages[stage]) < TOLERANCE, f"{stage} of depth {depth}"
        outputs, cache = head_run(pair.model, depth, tokens, hidden)
        assert share(outputs[names.HIDDEN_OUT], want.stages["output"]) < TOLERANCE
        assert share(head_logits(pair.model, outputs), want.logits) < TOLERANCE
        key, value = (array[0, :, : len(tokens)].transpose(1, 0, 2) for array in cache.values())
        assert max(share(key, want.key), share(value, want.value)) < TOLERANCE


@pytest.mark.parametrize("name", ["one depth", "post-norm"])
def test_the_head_is_fed_what_its_publisher_fed_it(random: Pairs, name: str) -> None:
    """From the built target to the head's logits: pre-norm unless another tap is asked for."""
    pair = random(name)
    tap, _ = target_run(pair.model, IDS, [23])
    outputs, _ = head_run(pair.model, 0, IDS[1:], tap[:-1])
    assert share(head_logits(pair.model, outputs), pair.oracle.head_over(IDS).logits) < TOLERANCE
    head = inspect_checkpoint(pair.target)["mtp"]
    assert (head["hidden_tap"], head["concat"]) == ("residual 3", "hidden_first")
    assert pair.head.taps == ((3,) if pair.tap is None else ())


def test_chained_rows_equal_the_oracle(random: Pairs) -> None:
    """Three more rows of a single depth, each from the output of the one before."""
    pair = random("one depth")
    ((tokens, hidden),) = rows_of_depths(pair)
    outputs, cache = head_run(pair.model, 0, tokens, hidden)
    want = pair.oracle.head(tokens, hidden)
    for j, token in enumerate((7, 40, 3)):
        position = len(tokens) + j
        want = pair.oracle.head([token], want.out[-1:], want.cache, position)
        outputs, cache = head_run(pair.model, 0, [token], chain_of(outputs)[-1:], cache, position, chained=True)
        assert share(head_logits(pair.model, outputs), want.logits) < TOLERANCE


# Faults of the oracle for which no MiMo checkpoint has a subject: there are no norms of query and key.
WITHOUT_SUBJECT = {"query_norms_ignored"}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "mimo" in FAULT_KINDS[fault]])
def test_control_a_broken_convention_is_noticed(random: Pairs, measured: dict[str, Built], fault: str) -> None:
    """Every fault that the oracle knows for MiMo, on every checkpoint that has what it is about."""
    found = {name: moved(random(name), measured[name], fault) for name in RANDOM}
    seen = {name: share for name, share in found.items() if share is not None}
    assert bool(seen) == (fault not in WITHOUT_SUBJECT)
    assert all(share > VISIBLE for share in seen.values()), f"{seen}: this test cannot see that {FAULTS[fault]}"


def test_control_the_right_oracle_is_far_below_that(random: Pairs, measured: dict[str, Built]) -> None:
    assert VISIBLE >= 100 * TOLERANCE
    for name in RANDOM:
        pair, built = random(name), measured[name]
        assert share(built.target, pair.oracle.forward(IDS).logits) < TOLERANCE
        assert share(built.head, pair.oracle.head_over(IDS).logits) < TOLERANCE
        assert built.ids == [pair.oracle.token(row) for row in pair.oracle.head_over(IDS).logits]


# -------------------------------------------------------------------------------- generations


@pytest.mark.parametrize(
    ("name", "draft_tokens"), [*(("one depth", k) for k in range(5)), *(("post-norm", k) for k in (0, 1, 3))]
)
def test_generations_draft_and_accept_what_the_oracle_does(partial: Pairs, name: str, draft_tokens: int) -> None:
    pair = partial(name)
    counts = agrees(pair, PROMPT, 48, draft_tokens)
    if draft_tokens <= 3:
        assert counts == set(range(draft_tokens + 1)), "not every accepted count occurs"


def test_control_the_two_taps_draft_differently(partial: Pairs) -> None:
    found = [partial(name).speculate(PROMPT, 48, 3) for name in ("one depth", "post-norm")]
    assert found[0].ids == found[1].ids
    assert found[0].drafts != found[1].drafts


@pytest.mark.parametrize(("name", "draft_tokens"), [("two depths", k) for k in (0, 1, 2)] + [("three depths", 3)])
def test_every_depth_drafts_one_token(partial: Pairs, name: str, draft_tokens: int) -> None:
    pair = partial(name)
    assert agrees(pair, PROMPT, 48, draft_tokens) == set(range(draft_tokens + 1)), "not every accepted count occurs"


@pytest.mark.parametrize(("name", "length"), [("two depths", 519), ("three depths", 257)])
def test_prompts_of_one_token_and_of_several_chunks(partial: Pairs, name: str, length: int) -> None:
    """One token leaves the later depths without rows; 519 go through the head in three calls, 257 leave one over."""
    pair = partial(name)
    most = pair.model.manifest.limits.max_draft_tokens
    agrees(pair, np.random.default_rng(4).integers(0, 64, length).tolist(), 4, most)
    for prompt in ([6, 7], [5]):
        assert agrees(pair, prompt, 16, most) > {0}


class Now:
    """K by the number of the cycle."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def choose(self, cycle: int) -> int:
        return self._counts[cycle % len(self._counts)]

    def observe(self, drafted: int, accepted: int) -> None:
        pass


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("prompt", [[50], PROMPT], ids=["one token", "three tokens"])
def test_cycles_without_drafts_and_with_fewer_leave_the_head_as_it_should_be(
    partial: Pairs, name: str, prompt: list[int]
) -> None:
    """Rows wait while nothing is drafted; with fewer drafts than depths, the later depths still keep up."""
    pair = partial(name)
    most = pair.oracle.depths if pair.oracle.depths > 1 else 3
    counts = [0, most, 1, 0, 0, 0, 0, most, most, 0, 1, 2, 1, 1, most]
    run, drafted = generated(pair, prompt, 48, Now(counts))
    assert run.ids == pair.greedy(prompt, 48)
    assert drafted[: len(counts)] == counts
    assert len(set(run.accepted)) > 2


def test_sequences_that_were_reset_draft_as_new_ones(partial: Pairs) -> None:
    """The rows that trail between depths are forgotten too."""
    pair = partial("three depths")
    sequences = pair.model.engine.sequences()
    runs = []
    for prompt in (PROMPT, [40, 2, 9, 9, 1], PROMPT):
        slot = Slot(prompt, 20)
        decode_together(sequences, [slot], 3)
        runs.append(slot)
        sequences.reset()
    assert runs[0] == runs[2]
    fresh = Slot([40, 2, 9, 9, 1], 20)
    decode_together(pair.model.engine.sequences(), [fresh], 3)
    assert runs[1] == fresh


@pytest.mark.parametrize("name", ["one depth", "two depths"])
def test_it_is_lossless_with_every_forced_draft(partial: Pairs, tmp_path: Path, name: str) -> None:
    options = {"depths": 2, "seed": 2} if name == "two depths" else {}
    model = load_model(build_bundle(partial_mimo_checkpoint(tmp_path / "c", **options), tmp_path / "b", draft_tokens=2))
    lines = list(checks(model, 10, 16))
    assert [line.text for line in lines if not line.holds] == []
    assert any("own head" in line.text for line in lines)


# ------------------------------------------------------------------------------------- batches

PROMPTS = ([5], [6, 20, 9, 8, 7, 30, 31], [1, 2, 3, 4])
LIMITS = (30, 17, 24)


@pytest.mark.parametrize("name", ["one depth", "two depths", "three depths"])
def test_every_sequence_of_a_batch_is_its_solo_run(partial: Pairs, name: str) -> None:
    """Prompts that end at different calls, and cycles that keep different numbers of rows."""
    pair = partial(name)
    most = pair.oracle.depths if pair.oracle.depths > 1 else 3
    slots = [Slot(list(prompt), limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    decode_together(pair.model.engine.sequences(3), slots, most)
    for slot in slots:
        want = pair.speculate(slot.prompt, slot.limit, most)
        assert (slot.ids, slot.accepted, slot.drafts) == (want.ids, want.accepted, want.drafts)
    assert len({tuple(slot.accepted[:8]) for slot in slots}) == 3, "all sequences accept alike"
    # The control: the ids alone would not show a head that reads its neighbour's rows.
    mixed = [Slot(list(prompt), limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    decode_together(pair.model.engine.sequences(3), mixed, most, mix_up=True)
    assert [slot.ids for slot in mixed] == [slot.ids for slot in slots]
    assert [slot.drafts for slot in mixed] != [slot.drafts for slot in slots]


def test_the_other_order_of_a_batch_gives_the_same(partial: Pairs) -> None:
    pair = partial("two depths")
    slots = [Slot(list(prompt), limit) for prompt, limit in zip(PROMPTS[::-1], LIMITS[::-1], strict=True)]
    decode_together(pair.model.engine.sequences(3), slots, 2)
    for slot in slots:
        want = pair.speculate(slot.prompt, slot.limit, 2)
        assert (slot.ids, slot.drafts) == (want.ids, want.drafts)


# ------------------------------------------------------- LD-17, LD-36: order of the halves, and K


def test_the_projection_takes_the_hidden_state_first(tmp_path: Path) -> None:
    """LD-17: perfect at every K; with its halves swapped on disk the same head is never right."""
    checkpoint = mimo_markov_checkpoint(tmp_path / "c")
    right, swapped = build_bundle(checkpoint, tmp_path / "right", draft_tokens=4), tmp_path / "swapped"
    edit_tensor(checkpoint, f"{MIMO_PREFIX}0.input_proj.weight", lambda array: np.roll(array, 64, axis=1))
    models = [load_model(right), load_model(build_bundle(checkpoint, swapped, draft_tokens=4))]
    for draft_tokens in (1, 2, 3, 4):
        done = [generate(model, [5], 22, draft_tokens) for model in models]
        assert all(list(each.token_ids) == list(range(6, 28)) for each in done)
        assert done[0].stats.accepted == done[0].stats.drafted >= 8
        assert done[1].stats.accepted == 0


def test_one_published_depth_is_used_again(tmp_path: Path) -> None:
    """LD-36: the manifest records one depth, K up to the limit equals plain decoding, all else is refused."""
    model = load_model(build_bundle(mimo_markov_checkpoint(tmp_path / "c"), tmp_path / "b", draft_tokens=4))
    assert model.manifest.model.mtp is not None
    assert (model.manifest.model.mtp.depth, model.manifest.limits.max_draft_tokens) == (1, 4)
    for draft_tokens in range(5):
        done = generate(model, [5], 21, draft_tokens)
        assert list(done.token_ids) == list(range(6, 27))
        assert max(done.stats.emitted_histogram) == draft_tokens + 1
    for draft_tokens in (-1, 5, 99):
        with refused(f"draft_tokens is {draft_tokens}", "0 to 4", error=RequestError):
            generate(model, [5], 4, draft_tokens)
    with refused("draft_tokens = 2.5"):
        generate(model, [5], 4, 2.5)  # type: ignore[arg-type]


def test_with_several_depths_draft_i_comes_from_depth_i(tmp_path: Path) -> None:
    """LD-36: of three depths only the last is wrong; a depth used twice would be right three times."""
    checkpoint = mimo_markov_checkpoint(tmp_path / "c", depths=3, draft=["perfect", "perfect", "wrong"])
    model = load_model(build_bundle(checkpoint, tmp_path / "b", draft_tokens=None))
    assert (model.manifest.model.mtp.depth, model.manifest.limits.max_draft_tokens) == (3, 3)
    done = generate(model, [5], 22, 3)
    assert list(done.token_ids) == list(range(6, 28))
    assert done.stats.emitted_histogram.keys() - {1, 2} == {3}
    reused = open_dense_oracle(checkpoint, broken="depth_reused").speculate([5], 22, 3)
    assert 3 in reused.accepted, "control: this test cannot see a depth that is used again"
    for draft_tokens in (-1, 4):
        with refused(f"draft_tokens is {draft_tokens}", "0 to 3", error=RequestError):
            generate(model, [5], 4, draft_tokens)


def test_more_draft_tokens_than_depths_are_refused_at_the_build(tmp_path: Path) -> None:
    """LD-36: no depth proposes twice, so a limit above their number promises what cannot be kept."""
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1, depths=2)
    for draft_tokens in (3, 5):
        parts = (f"--draft-tokens is {draft_tokens}", "2 trained depths", "at most 2")
        build_refused(checkpoint, tmp_path / "out", *parts, draft_tokens=draft_tokens)
    one = build_bundle(checkpoint, tmp_path / "one", draft_tokens=1)
    with refused("0 to 1", error=RequestError):
        generate(one, [5], 4, 2)


# ------------------------------------------------------------- LD-06: depths declared and published


def without_depths(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the field that announces depths."""
    return {name: value for name, value in config.items() if name != "num_nextn_predict_layers"}


def test_an_announced_head_without_tensors_is_refused(tmp_path: Path) -> None:
    """LD-06: the field says one depth, the files hold none."""
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1, depths=0, declared=1)
    first = f"first missing: '{MIMO_PREFIX}0."
    build_refused(checkpoint, tmp_path / "out", "declares 1 MTP layer", "0 of 16 tensors", first, "--no-mtp")
    report = inspect_checkpoint(checkpoint)
    assert report["can_build"] is False
    assert (report["mtp"]["tensors_found"], report["mtp"]["tensors_expected"]) == (0, 16)
    out = build_bundle(checkpoint, tmp_path / "plain", mtp=False)
    assert ids_of(out, PROMPT, 8) == open_dense_oracle(checkpoint).greedy(PROMPT, 8)


@pytest.mark.parametrize("declared", [1, None])
@pytest.mark.parametrize("name", ["input_proj.weight", "token_layernorm.weight", "self_attn.k_proj.bias"])
def test_a_head_that_lacks_one_tensor_is_refused_by_its_name(tmp_path: Path, name: str, declared: int | None) -> None:
    """LD-06: 15 of 16, whether the field announces a depth or is not there."""
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1, declared=declared)
    if declared is None:
        edit_config(checkpoint, without_depths)
    drop_tensors(checkpoint, lambda other: other == f"{MIMO_PREFIX}0.{name}")
    build_refused(checkpoint, tmp_path / "out", "15 of 16 tensors", f"'{MIMO_PREFIX}0.{name}'")


def test_a_field_that_says_nothing_leaves_it_to_the_tensors(tmp_path: Path) -> None:
    for depths in (0, 1, 2):
        checkpoint = mimo_checkpoint(tmp_path / f"{depths}", seed=1, depths=depths)
        edit_config(checkpoint, without_depths)
        found = prepare(Ingredients(str(checkpoint))).spec.mtp
        assert (found.depth if found else 0) == depths


def test_another_number_of_depths_than_declared_is_refused(tmp_path: Path) -> None:
    """LD-36: the published two-depth heads beside a field that still says one, and the reverse."""
    two = mimo_checkpoint(tmp_path / "two", seed=1, depths=2, declared=1)
    parts = ("num_nextn_predict_layers = 1", "tensors of 2 trained depths", "--no-mtp")
    build_refused(two, tmp_path / "out", *parts)
    assert inspect_checkpoint(two)["problems"][0].startswith("config.json has num_nextn_predict_layers = 1")
    one = mimo_checkpoint(tmp_path / "one", seed=1, depths=1, declared=2)
    missing = f"first missing: '{MIMO_PREFIX}1."
    build_refused(one, tmp_path / "out", "declares 2 MTP layers", "16 of 32 tensors", missing)
    none = mimo_checkpoint(tmp_path / "none", seed=1, depths=1, declared=0)
    build_refused(none, tmp_path / "out", "num_nextn_predict_layers = 0", "16 of the head's 16")
    # Left out on purpose, each builds, and its target is the same.
    want = ids_of(build_bundle(two, tmp_path / "a", mtp=False), PROMPT, 8)
    assert ids_of(build_bundle(one, tmp_path / "b", mtp=False), PROMPT, 8) == want


def test_a_gap_between_depths_is_refused(tmp_path: Path) -> None:
    """Depths 0 and 2 without 1: the tensors of depth 2 belong to nothing."""
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1, depths=3)
    drop_tensors(checkpoint, lambda name: name.startswith(f"{MIMO_PREFIX}1."))
    build_refused(checkpoint, tmp_path / "out", f"'{MIMO_PREFIX}1.")
    edit_config(checkpoint, lambda config: {**config, "num_nextn_predict_layers": 1})
    build_refused(checkpoint, tmp_path / "out", f"'{MIMO_PREFIX}2.")


def test_a_lost_head_is_taken_from_the_base_model(tmp_path: Path) -> None:
    """LD-06: with --mtp-from, every depth of it; the tap is the one that was asked for."""
    base = partial_mimo_checkpoint(tmp_path / "base", depths=2, seed=2)
    tuned = partial_mimo_checkpoint(tmp_path / "tuned", depths=2, seed=2)
    drop_tensors(tuned, lambda name: name.startswith(MIMO_PREFIX))
    own = pair_of(tmp_path / "own", base, tap="post_norm")
    taken = pair_of(tmp_path / "out", tuned, tap="post_norm", mtp_from=str(base))
    pair = Pair(base, None, taken.model, "post_norm")
    assert pair.model.manifest.model == own.model.manifest.model
    assert agrees(pair, PROMPT, 24, 2) == {0, 1, 2}


# ------------------------------------------------------------------------------------ the tap


def test_a_tap_without_a_head_is_refused(tmp_path: Path) -> None:
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1, depths=0)
    build_refused(checkpoint, tmp_path / "out", "--hidden-tap post-norm is for an MTP head", hidden_tap="post-norm")
    whole = mimo_checkpoint(tmp_path / "whole", seed=1)
    build_refused(whole, tmp_path / "out", "--hidden-tap", hidden_tap="pre-norm", mtp=False)


def test_the_command_line_takes_the_tap_by_name(tmp_path: Path) -> None:
    checkpoint = mimo_checkpoint(tmp_path / "c", seed=1)
    arguments = ["build", str(checkpoint), "--out", str(tmp_path / "out"), "--max-model-len", "64", "--hidden-tap"]
    with pytest.raises(click.BadParameter, match=r"'raw' is not one of 'post-norm', 'pre-norm'"):
        group.main([*arguments, "raw"], standalone_mode=False)
    group.main([*arguments, "post-norm"], standalone_mode=False)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["model"]["mtp"]["taps"] == []
