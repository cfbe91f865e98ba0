"""Two trained depths stored behind the trunk: draft j is depth j's, and what is published must be composed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_tools.verify.checks import checks
from tests.fixtures.files import edit_config, read_tensors, write_tensors
from tests.fixtures.moe_families import MAKERS, partial_checkpoint
from tests.oracles.float64 import best
from tests.oracles.moe_families import FamilyOracle, open_oracle
from tests.runtime.parts import recorded
from tests.support import build_bundle, build_refused, generate, load_model, refused

FAMILIES = ("deepseek_v3", "glm4_moe")
FIELD = "num_nextn_predict_layers"


def stacked(first: Path, second: Path) -> Path:
    """`first`, whose head is layer 3, with the head of `second` as layer 4."""
    head = {name: array for name, array in read_tensors(second).items() if name.startswith("model.layers.3.")}
    deeper = {name.replace("layers.3.", "layers.4."): array for name, array in head.items()}
    write_tensors(first, [read_tensors(first) | deeper])
    return says(first, 2)


def says(checkpoint: Path, depths: int | None) -> Path:
    edit_config(checkpoint, lambda config: {**config, FIELD: depths})
    return checkpoint


def chains(place: Path, family: str, first: dict[str, Any], second: dict[str, Any]) -> Path:
    """Two heads over one chain t -> t + 1."""
    made = [
        MAKERS[family](place / name, seed=1, markov=True, **options)
        for name, options in (("first", first), ("second", second))
    ]
    return stacked(*made)


def two_drafts(first: FamilyOracle, second: FamilyOracle, known: list[int]) -> list[int]:
    """Both drafts after `known`, everything computed anew: depth 1 takes the rows that depth 0 gave."""
    row = first.head(known[1:], first.forward(known[:-1]).hidden)
    draft = best(row.logits[-1])
    return [draft, best(second.head([*known[2:], draft], row.out).logits[-1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_is_the_one_of_its_depth(tmp_path: Path, family: str) -> None:
    other = partial_checkpoint(family, tmp_path / "other", seed=3 if family == "deepseek_v3" else 2)
    second = open_oracle(other)
    checkpoint = stacked(partial_checkpoint(family, tmp_path / "c"), other)
    first = open_oracle(checkpoint)
    model = load_model(build_bundle(checkpoint, tmp_path / "b"))
    assert model.manifest.limits.max_draft_tokens == 2
    reached: set[int] = set()
    for prompt in ([5, 6, 20], [7], [9, 3]):
        run, recorder = recorded(model, prompt, 30, draft_tokens=2)
        assert run.ids == first.greedy(prompt, 30)
        known = [*prompt, *run.blocks[0]]
        for block, drafts in zip(run.blocks[1:], recorder.drafts, strict=False):
            assert drafts == two_drafts(first, second, known)[: len(drafts)]
            known += block
        reached |= set(run.accepted)
    assert reached == {0, 1, 2}
    assert [line.text for line in checks(model, 8, 12) if not line.holds] == []


def test_the_second_draft_is_the_second_depths(tmp_path: Path) -> None:
    """Depth 0 is always right and depth 1 never, so one of two drafts is accepted in every cycle."""
    checkpoint = chains(tmp_path, "deepseek_v3", {}, {"draft": "wrong"})
    model = load_model(build_bundle(checkpoint, tmp_path / "b"))
    stats = [generate(model, [5], 22, k).stats for k in (1, 2)]
    assert [(s.drafted, s.accepted) for s in stats] == [(10, 10), (20, 10)]
    with refused("draft_tokens is 3", "0 to 2"):
        generate(model, [5], 22, 3)
    build_refused(checkpoint, tmp_path / "three", "--draft-tokens is 3", "2 trained depths", draft_tokens=3)


def test_depths_that_are_published_and_not_there_are_refused(tmp_path: Path) -> None:
    checkpoint = chains(tmp_path, "deepseek_v3", {}, {})
    build_refused(says(checkpoint, 1), tmp_path / "b", f"{FIELD} = 1", "2 trained depths", "--no-mtp")
    build_refused(says(checkpoint, 0), tmp_path / "b", f"{FIELD} = 0", "--no-mtp")
    build_refused(says(checkpoint, 3), tmp_path / "b", "declares 3 MTP layers", "'model.layers.5.enorm.weight'")
    build_refused(says(checkpoint, 9), tmp_path / "b", f"{FIELD} = 9", "at most 8", "--no-mtp")
    single = MAKERS["deepseek_v3"](tmp_path / "single", seed=1, markov=True)
    build_refused(says(single, 2), tmp_path / "b", "declares 2 MTP layers", "'model.layers.4.enorm.weight'")


def test_an_output_head_of_one_depth_is_no_others(tmp_path: Path) -> None:
    """LD-25: where depth 0 scores with the target's output head, that of depth 1 alone would make its drafts wrong."""
    both = chains(tmp_path / "both", "deepseek_v3", {"own_head": "different"}, {"own_head": "different"})
    build_refused(both, tmp_path / "b", "'model.layers.3.shared_head.head.weight'", "'model.layers.4.shared_head.head")
    one = chains(tmp_path / "one", "deepseek_v3", {}, {"own_head": "different"})
    build_refused(one, tmp_path / "b", "'model.layers.4.shared_head.head.weight'")
